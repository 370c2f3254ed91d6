"""Compares the settings of a run with those of the checkpoint from which it resumes."""

import dataclasses
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import PeftModel
from transformers import TrainingArguments

from trl_multiagent.hub import push_command
from trl_multiagent.jobs.fingerprint import (
    DATASET_DIGEST,
    Changes,
    describe_agent,
    describe_dataset,
    digest_of_rows,
    format_value,
)
from trl_multiagent.models.pretrained import adapter_parameters
from trl_multiagent.team.agent_team import AgentTeam
from trl_multiagent.trainers.base.team_config import TeamConfig


# The arguments of `TrainingArguments` that a resumed run must share with its checkpoint
DECISIVE_ARGUMENTS = {"seed", "learning_rate", "lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps", "bf16"}
DECISIVE_ARGUMENTS |= {"optim", "optim_args", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon", "fp16"}
DECISIVE_ARGUMENTS |= {"max_grad_norm"}
# The arguments that decide when all processes evaluate, save and log together. A resumed run may have other values
SCHEDULE = {"max_steps", "num_train_epochs", "load_best_model_at_end", "metric_for_best_model"}
SCHEDULE_PREFIXES = ("eval_", "per_device_eval_", "logging_", "save_")
# Settings that can never change, because the files of the checkpoint depend on them
UNCHANGEABLE_SETTINGS = {"roles", "number of processes", "DeepSpeed ZeRO stage", "optim", "optim_args"}
UNCHANGEABLE_SETTINGS |= {"critics", "critic_form", "critic_value_head_hidden_dim", "critic_lora_r"}
UNCHANGEABLE_PREFIXES = ("agent ", "adapter ")
# Settings that are part of the optimizer's state. If they have changed, the trainer replaces them there
OPTIMIZER_SETTINGS = {"learning_rate", "agent_learning_rates", "critic_learning_rate", "weight_decay"}
OPTIMIZER_SETTINGS |= {"adam_beta1", "adam_beta2", "adam_epsilon"}
# Options that are not compared. The base is compared by its weights; the others depend on how the adapter was loaded
UNCOMPARED_ADAPTER_OPTIONS = {"auto_mapping", "base_model_name_or_path", "inference_mode", "peft_version", "revision"}


def describe_run(
    algorithm: str, roles: Sequence[str], team: AgentTeam | None, train_dataset: Dataset, args: TeamConfig
) -> dict[str, Any]:
    """
    Returns the settings that a checkpoint must match, as plain values; those of agents and adapters only if there is a
    `team`.
    """
    arguments = args.to_dict()
    general = {field.name for field in dataclasses.fields(TrainingArguments)}
    own = [name for name in arguments if name not in general and name not in args.free_on_resume]
    decisive = [name for name in own if not name.startswith(args.free_prefixes_on_resume)]
    plugin = args.deepspeed_plugin
    trained_roles = [role for role in roles if role not in (args.frozen_agents or ())]
    settings: dict[str, Any] = {
        "trainer": algorithm,
        "roles": list(roles),
        "critics": args.critic_names(trained_roles),
    }
    if team is not None:
        settings |= {
            f"agent {role}": describe_agent(agent, critic_parameters(team, role))
            for role, agent in team.agents.items()
        }
        settings |= describe_adapters(team)
    settings |= {
        "train_dataset": describe_dataset(train_dataset),
        DATASET_DIGEST: digest_of_rows(train_dataset),
        "number of processes": args.world_size,
        "DeepSpeed ZeRO stage": None if plugin is None else plugin.zero_stage,
        **{name: value for name, value in arguments.items() if name in DECISIVE_ARGUMENTS or name in decisive},
    }
    return json.loads(json.dumps(settings, default=str))


def describe_schedule(args: TeamConfig, eval_dataset: Any) -> dict[str, Any]:
    """
    Returns the settings that all processes must share but a resumed run may change: the schedule, and the evaluation
    datasets.
    """
    arguments = args.to_dict()
    datasets = eval_dataset if isinstance(eval_dataset, dict) else {"": eval_dataset}
    schedule = {name: x for name, x in arguments.items() if name in SCHEDULE or name.startswith(SCHEDULE_PREFIXES)}
    return schedule | {
        f"eval_dataset {name}".rstrip(): describe_dataset(dataset)
        for name, dataset in datasets.items()
        if isinstance(dataset, Dataset)
    }


def critic_parameters(team: AgentTeam, role: str) -> list[torch.nn.Parameter]:
    """Returns the parameters of the critics' adapters on the model of an agent."""
    model = team.policies[role]
    if team.critics is None or not isinstance(model, PeftModel):
        return []
    adapters = [backbone.adapter for backbone in team.critics.backbones.values() if backbone.adapter is not None]
    return [parameter for adapter in adapters for parameter in adapter_parameters(model, adapter)]


def describe_adapters(team: AgentTeam) -> dict[str, Any]:
    """Returns the options of each agent's LoRA adapter."""
    options = {}
    for role in team.adapted_roles:
        config = team.policies[role].peft_config[role].to_dict()
        for name in config.keys() - UNCOMPARED_ADAPTER_OPTIONS:
            value = config[name]
            options[f"adapter {role} {name}"] = sorted(value) if isinstance(value, set) else value
    return options


def check_changes(folder: str, changes: Changes, args: TeamConfig) -> None:
    """
    Raises a `ValueError` that names every change since a checkpoint in `folder`, unless `resume_changes` allows the
    `changes`.
    """
    if not changes:
        return
    refused = {
        name: (old, new)
        for name, (old, new) in changes.items()
        if name in UNCHANGEABLE_SETTINGS
        or name.startswith(UNCHANGEABLE_PREFIXES)
        or (name in OPTIMIZER_SETTINGS and args.deepspeed_plugin is not None)  # DeepSpeed restores the saved values
        or (name == "agent_learning_rates" and bool(old) != bool(new))  # the parameter groups differ
    }
    if args.resume_changes != "allow":
        allowing = "" if refused else "allow the changes with `resume_changes: allow`, "
        raise ValueError(
            f"{folder} is a checkpoint of another run: {format_changes(changes)}. Give the run the checkpoint's "
            f"settings, {allowing}or start a run from the checkpoint's weights: AgentTeam.from_pretrained({folder!r})."
        )
    if refused:
        raise ValueError(
            f"{folder} cannot be continued with this change, although `resume_changes` is 'allow': "
            f"{format_changes(refused)}. The files of the checkpoint do not fit the changed settings. Start a new run "
            f"from the checkpoint's weights: AgentTeam.from_pretrained({folder!r})."
        )


def format_changes(changes: Changes) -> str:
    """Lists changed settings on one line, with both values."""
    return "; ".join(
        f"{name}: {format_value(old)} in the checkpoint, {format_value(new)} in this run"
        for name, (old, new) in changes.items()
    )


def check_steps(folder: str, global_step: int, num_items: int, args: TeamConfig) -> None:
    """
    Raises `ValueError` if a checkpoint with `global_step` optimizer steps has taken all steps of a run on `num_items`
    items.
    """
    if args.max_steps > 0:
        steps, reason = args.max_steps, f"`max_steps` is {args.max_steps}"
    else:
        steps = math.ceil(args.num_train_epochs * args.steps_per_epoch(num_items))
        reason = f"`num_train_epochs` is {args.num_train_epochs:g}, which makes {steps}"
    if global_step < steps:
        return
    push = ""
    if args.push_to_hub:
        repo_id = args.hub_model_id or Path(args.output_dir).absolute().name
        command = push_command(args.output_dir, repo_id, args.hub_revision)
        push = f" If the run ended while it pushed the team, `{command}` completes the push."
    raise ValueError(
        f"{folder} has taken {global_step} optimizer steps, and {reason}: there is nothing left to train. Raise "
        f"it, or use the team as it is: AgentTeam.from_pretrained({folder!r}).{push}"
    )
