"""What a run must have in common with a checkpoint that it continues: settings that are known before any model is loaded."""

import dataclasses
import hashlib
import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from datasets import Dataset
from transformers import TrainingArguments

from trl_multiagent.environments.base import Environment, ask


# Of the arguments that every trainer has, those that a resumed run must share with its checkpoint
DECISIVE_ARGUMENTS = (
    "seed",
    "learning_rate",
    "lr_scheduler_type",
    "lr_scheduler_kwargs",
    "warmup_steps",
    "optim",
    "optim_args",
    "weight_decay",
    "adam_beta1",
    "adam_beta2",
    "adam_epsilon",
    "max_grad_norm",
    "bf16",
    "fp16",
)
# Of an algorithm's own arguments, those that may differ: they change memory, speed, evaluation or logs
FREE_ARGUMENTS = (
    "cache_implementation",
    "ds3_gather_for_generation",
    "generation_batch_size",
    "generation_token_budget",
    "model_init_kwargs",
    "num_agents",
    "num_completions_to_print",
    "num_generations_eval",
    "resume_changes",
    "steps_per_generation",
    "trust_remote_code",
    "vllm_adapter_dir",
)
FREE_PREFIXES = ("log_", "vllm_enable_", "vllm_g", "vllm_max_", "vllm_mode", "vllm_server_", "vllm_tensor_")
# What cannot change even with `resume_changes="allow"`: the checkpoint's weights and states are made for it, or hold it
FIXED_SETTINGS = (
    "trainer",
    "environment",
    "roles",
    "weights that are not trained",
    "number of processes",
    "DeepSpeed ZeRO stage",
    "learning_rate",
    "agent_learning_rates",
    "frozen_agents",
    "lr_scheduler_type",
    "lr_scheduler_kwargs",
    "warmup_steps",
    "optim",
    "optim_args",
    "weight_decay",
    "adam_beta1",
    "adam_beta2",
    "adam_epsilon",
)
FIXED_PREFIXES = ("agent ", "adapter ")
NUM_PROMPTS = 8  # items whose first prompts are part of the settings


def describe_settings(args: TrainingArguments, environment: Environment, train_dataset: Dataset) -> dict[str, Any]:
    """The settings of a run as far as they are known before its models are loaded, by name, in JSON's types."""
    arguments = args.to_dict()
    general = {field.name for field in dataclasses.fields(TrainingArguments)}
    decisive = [
        name
        for name in arguments
        if (name in DECISIVE_ARGUMENTS if name in general else name not in FREE_ARGUMENTS)
        and not name.startswith(FREE_PREFIXES)
    ]
    settings = {
        "environment": type(environment).__name__,
        "roles": list(environment.roles),
        **{f"environment {name}": value for name, value in environment.settings().items()},
        "first prompts": digest_prompts(environment, train_dataset),
        "training data": describe_dataset(train_dataset),
        "number of processes": args.world_size,
        "DeepSpeed ZeRO stage": None if args.deepspeed_plugin is None else args.deepspeed_plugin.zero_stage,
        **{name: arguments[name] for name in decisive},
    }
    return json.loads(json.dumps(settings, default=str))


def describe_dataset(dataset: Dataset) -> str:
    """Size, columns, and a digest of all rows."""
    digest = hashlib.sha256()
    for batch in dataset.with_format("arrow").iter(batch_size=1000):
        digest.update(json.dumps(batch.to_pylist(), sort_keys=True, default=str).encode())
    return f"{len(dataset)} items with {', '.join(sorted(dataset.column_names))}, digest {digest.hexdigest()[:16]}"


def digest_prompts(environment: Environment, dataset: Dataset) -> str | None:
    """A digest of what agents are first asked about some items; None if that depends on the environment's state."""
    if environment.state_dict():
        return None
    items = dataset.select(range(min(NUM_PROMPTS, len(dataset))))
    prompts = [ask(environment, item, []) for item in items]
    return hashlib.sha256(json.dumps(prompts, sort_keys=True).encode()).hexdigest()[:16]


def num_steps(args: TrainingArguments, num_items: int) -> int:
    """Optimizer steps of a run on a number of items."""
    if args.max_steps > 0:
        return args.max_steps
    return math.ceil(args.num_train_epochs * (num_items // (args.items_per_device * args.world_size)))


def find_changes(saved: dict[str, Any], here: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """The settings that differ: by name, the checkpoint's value and this run's."""
    return {name: (saved[name], here[name]) for name in here if name in saved and saved[name] != here[name]}


def check_changes(folder: str | Path, changes: dict[str, tuple[Any, Any]], resume_changes: str) -> None:
    """
    Refuses changed settings, with `resume_changes="allow"` only those that cannot change.

    Raises:
        ValueError: one line that names each of them with both values.
    """
    fixed = [name for name in changes if name in FIXED_SETTINGS or name.startswith(FIXED_PREFIXES)]
    refused = fixed if resume_changes == "allow" else list(changes)
    if not refused:
        return
    also = "" if fixed else "set `resume_changes` to 'allow', "
    reason = "with settings that cannot change" if resume_changes == "allow" else "of another run"
    raise ValueError(
        f"{folder} is a checkpoint {reason}: {list_changes(changes, refused)}. Give the run the checkpoint's settings, {also}or "
        f"start one from its weights: AgentTeam.from_pretrained({str(folder)!r})."
    )


def list_changes(changes: dict[str, tuple[Any, Any]], names: Iterable[str]) -> str:
    parts = [f"{name} is {_short(changes[name][0])} in it and {_short(changes[name][1])} here" for name in names]
    return "; ".join(parts)


def check_length(folder: str | Path, step: int, total: int) -> None:
    """
    Refuses to continue a checkpoint that is further than the whole run.

    Raises:
        ValueError: it is.
    """
    if step > total:
        raise ValueError(
            f"{folder} is of step {step}, and the run has only {total} steps: raise `max_steps` or `num_train_epochs`."
        )


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:100]}..."
