"""
The memory of a training on rollouts, and what follows from it: how many rows are in a forward of the update, and
whether it checkpoints activations. `trl-multiagent plan` computes with the same formulas.
"""

import copy
import math
import os
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import torch
from accelerate.utils import gather_object
from peft import PeftModel
from transformers.utils import logging
from trl.data_utils import common_prefix_length

from trl_multiagent.environments.task_errors import describe
from trl_multiagent.models.packing import can_pack, divide
from trl_multiagent.models.pretrained import adapter_parameters
from trl_multiagent.rollout.tree import acting
from trl_multiagent.team.agent_team import AgentTeam
from trl_multiagent.trainers.base.checkpoints import other_adapters


logger = logging.get_logger(__name__)


MAX_LIVE, MAX_AHEAD = 1e9, 5e7  # parameters that DeepSpeed gathers at a time, and those that it fetches ahead
FREE = 0.2  # share of the memory that a choice leaves free
# Parameters of a layer times tokens of a forward, from which on a GPU limits the speed, and not its host, which needs
# about 10 ms for the launches of a layer
WORK = 6e11
CGROUP = Path("/sys/fs/cgroup")
CHUNK_TOKENS, CHUNK_WORDS, CHUNK_COPIES = 4096, 32768, 4  # TRL computes log-probabilities in chunks of this size


@dataclass(frozen=True)
class Size:
    """The numbers that decide the memory of a team: its parameters, and the tokens of a prompt."""

    trained: int  # of agents and critics
    frozen: int  # of agents that are not trained, and of reference policies
    base: int  # of bases with adapters
    base_bytes: float  # of a parameter of a base
    largest: int  # of one agent, with its base
    dimensions: Any  # the text configuration of the largest agent
    prompt: int  # tokens of the longest first prompt
    common: int  # tokens with which all first prompts of its agent begin
    agents: int  # number of agents
    acting: int  # number of agents that act in the first turn
    joint: int = 1  # number of agents that sample in one call
    adapters: int = 0  # parameters of adapters of agents
    packs: bool = True  # whether rows of the update share their prompts
    critics: int = 0  # number of critics
    models: int = 1  # number of different models and bases of agents

    @property
    def text(self) -> Any:
        """The dimensions of a layer. Layers of Gemma 4 differ, and the last is of the larger kind."""
        return self.dimensions.per_layer_config[-1]

    @property
    def inner(self) -> int:
        return getattr(self.text, "intermediate_size", None) or 4 * self.text.hidden_size  # GPT-2 names none

    def last_prompt(self, args: Any) -> int:
        """Returns the tokens of the longest prompt of the last turn, with the history."""
        return self.prompt + (args.num_turns - 1) * args.max_completion_length


def memory_parts(args: Any, size: Size, stage: int, processes: int) -> dict[str, dict[str, float]]:
    """
    Returns the bytes of each part: of the memory that is `held` between steps, and of the additional memory of
    `sampling` and `update`.

    Args:
        args ([`RolloutConfig`]): The configuration of the trainer.
        size ([`Size`]): The numbers of parameters.
        stage (`int`): The stage of ZeRO, 0 without DeepSpeed.
        processes (`int`): Number of devices.
    """
    half = bool(args.bf16 or args.fp16)
    number = 2.0 if half else 4.0  # bytes of an activation
    mixed = half and stage > 0  # DeepSpeed computes with 16-bit weights, and its optimizer has float32 copies
    weight = 2.0 if mixed or args.rounds_stochastically else 4.0
    moments = 2.0 if args.rounds_stochastically else 8.0  # of Adam, two for each weight; torchao's have 8 bits
    base = min(size.base_bytes, 2.0) if mixed else size.base_bytes
    # ZeRO-1 divides the optimizer's state among the processes, ZeRO-2 also gradients, and ZeRO-3 also weights
    of_state, of_gradients, of_weights = (processes if stage >= first else 1 for first in (1, 2, 3))
    own, gradients = size.trained + size.frozen, weight * size.trained / of_gradients
    held = {
        "weights": (weight * own + base * size.base) / of_weights,
        "float32 copies": 4.0 * size.trained / of_state if stage > 0 else 0.0,  # of trained weights, in DeepSpeed
        "optimizer": moments * size.trained / of_state,
        "gradients": gradients if stage == 3 else 0.0,
        "buckets of DDP": 4.0 * size.trained if stage == 0 and processes > 1 else 0.0,
    }
    copies = number * own if half and weight == 4.0 else 0.0  # made by autocast, which keeps none of frozen weights
    copied = number * size.largest if stage == 3 or (copies and not size.base) else 0.0
    # The engines of vLLM have their own memory
    sampling = {} if args.use_vllm else sampling_parts(args, size, number, copied)
    if copies and size.base_bytes == 4.0:
        # Autocast also copies a base for the backward pass; with gradient checkpointing, one layer at a time
        shown = 1 / size.text.num_hidden_layers if args.gradient_checkpointing else size.agents + size.critics
        copies += number * size.base * shown
    live = min(own + size.base, MAX_LIVE)
    # ZeRO splits the gradient of a matrix when it is whole. ZeRO-2 copies its parts when the optimizer steps
    whole = weight * min(size.trained, size.text.hidden_size * max(size.text.vocab_size, size.inner))
    update = {
        "gradients": 0.0 if stage == 3 else gradients,
        **activation_parts(args, size, number),
        "stacked adapters": number * size.adapters if size.joint > 1 and not copies else 0.0,
        # DeepSpeed fetches several weights as one tensor and copies them from it
        "weights to compute with": number * (live + min(live, MAX_AHEAD)) if stage == 3 else copies,
        "gradients not yet split": max(whole, gradients * (stage == 2)) if stage >= 2 else 0.0,
        "gradients in float32": 4.0 * size.trained / processes if mixed and stage < 3 else 0.0,
    }
    return {"held": held, "sampling": sampling, "update": update}


def sampling_parts(args: Any, size: Size, number: float, copied: float) -> dict[str, float]:
    """
    Returns the bytes of sampling in the last turn. `number`: bytes of an activation. `copied`: bytes of weights that
    are made for it.
    """
    text, prompt = size.text, size.last_prompt(args)
    longest = prompt + args.max_completion_length
    rows = size.joint * args.items_per_device * args.nodes_per_turn[-1] * args.completions_per_node
    if args.generation_token_budget is not None:
        rows = max(1, min(rows, args.generation_token_budget // longest))
    all_heads = getattr(text, "num_attention_heads", None) or 0  # those of Mamba and RWKV keep no keys
    head = getattr(text, "head_dim", None) or text.hidden_size // max(1, all_heads)
    heads = getattr(text, "num_key_value_heads", None) or all_heads
    token = 2 * number * text.num_hidden_layers * heads * head  # keys and values
    cache, probabilities = token * rows * longest, 3 * 4.0 * rows * text.vocab_size
    # Before, the prompts are read, each once. Adapters add their result to the base's
    reading = math.ceil(rows / args.completions_per_node) * prompt
    reading *= token + 16 * text.hidden_size + number * (4 if size.base else 3) * size.inner
    return {
        "key-value cache": cache,
        "probabilities": probabilities,
        "stacked adapters": number * size.adapters if size.joint > 1 else 0.0,
        "weights of an agent": copied,
        "prompts": max(0.0, reading - cache - probabilities),
    }


def activation_parts(args: Any, size: Size, number: float) -> dict[str, float]:
    """Returns the bytes of an update's forward and of its log-probabilities. `number`: bytes of an activation."""
    text, prompt, completions = size.text, size.last_prompt(args), args.completions_per_node
    longest = prompt + args.max_completion_length
    rows_of_step = args.rows_per_device
    rows = min(size.agents * args.rows_per_forward, size.acting * rows_of_step)  # of all agents
    tokens = size.agents * tokens_of(size, math.ceil(rows / size.agents), longest, prompt, completions)
    with_critics = tokens
    if size.critics:  # one backward for agents and critics; a central critic reads the prompts of all agents
        is_q = args.critic_type == "q"
        texts = rows_of_step if is_q else args.items_per_device * sum(args.nodes_per_turn)
        texts = math.ceil(texts / math.ceil(rows_of_step / args.rows_per_forward))
        length, alike = (longest, completions) if is_q else (prompt, 1)
        with_critics += size.agents * tokens_of(size, texts, length, prompt, alike)
    # Of each token. Under autocast, what stands between products is in float32. Frozen norms keep no inputs
    frozen, trained = (14, 17) if number == 2.0 else (8, 10)
    states = frozen if size.base else trained
    layer = number * (states * text.hidden_size + 4 * size.inner)
    layers = text.num_hidden_layers
    kept = layers * with_critics * number * text.hidden_size
    # Of the agents that share a forward
    scored = size.joint * min(args.rows_per_forward, rows_of_step) * args.max_completion_length
    return {
        "activations": kept + tokens * layer if args.gradient_checkpointing else layers * with_critics * layer,
        "log-probabilities": 4.0 * CHUNK_COPIES * min(scored, CHUNK_TOKENS) * min(text.vocab_size, CHUNK_WORDS),
    }


def tokens_of(size: Size, sequences: int, length: int, prompt: int, completions: int) -> int:
    """
    Counts the tokens of a forward. The completions of a prompt share it, and an agent's prompts what they begin with,
    if they are in one row.
    """
    shared = [0] * sequences
    for k in range(1, sequences if size.packs else 0):
        shared[k] = prompt if k % completions else size.common
    firsts = divide([length] * sequences, shared, size.dimensions.hidden_size)
    packed = [(end - k) * length - sum(shared[k + 1 : end]) for k, end in pairwise([*firsts, sequences])]
    return len(packed) * max(packed)


def size_of(
    team: AgentTeam,
    reference: torch.nn.Module | None,
    prompts: Iterable[list[list[int]]],
    longest: int,
    packs: bool,
) -> Size:
    """
    Returns the numbers of a team, possibly with critics and without weights, and of prompts.

    Args:
        team ([`AgentTeam`]): The team.
        reference (`torch.nn.Module`, *optional*): The reference policy, if it is a model of its own.
        prompts (`Iterable[list[list[int]]]`): Of each agent, the token ids of its first prompts, possibly none.
        longest (`int`): Number of tokens of the longest sequence.
        packs (`bool`): Whether rows may share their prompts, as far as the models allow it.
    """
    policies = team.policies
    models = torch.nn.ModuleList(filter(None, (team, reference)))
    with_adapters = [x for x in models.modules() if isinstance(x, PeftModel)]
    of_adapters = {id(x) for model in with_adapters for x in other_adapters(model, ())}
    base = [x for model in with_adapters for x in model.parameters() if id(x) not in of_adapters]
    numbers = {role: count(policy.parameters()) for role, policy in policies.items()}
    largest = max(numbers, key=numbers.__getitem__)
    trained = count(x for x in team.parameters() if x.requires_grad)
    own = [*filter(None, prompts)] or [[[]]]
    of_longest = max(own, key=lambda of_agent: max(map(len, of_agent)))
    return Size(
        trained=trained,
        frozen=count(models.parameters()) - trained - count(base),
        base=count(base),
        base_bytes=sum(x.nbytes for x in base) / max(1, sum(x.numel() for x in base)),
        largest=numbers[largest],
        dimensions=team.agents[largest].config.get_text_config(),
        prompt=max(map(len, of_longest)),
        common=common_prefix_length(min(of_longest), max(of_longest)),
        agents=len(team.roles),
        acting=len(own),
        joint=min(len(own), max(Counter(policies.values()).values())),
        adapters=sum(count(adapter_parameters(policies[role], role)) for role in team.adapted_roles),
        packs=packs and all(can_pack(agent, longest) for agent in team.agents.values()),
        critics=0 if team.critics is None else len(team.critics.names),
        models=len(team.models),
    )


def count(parameters: Iterable[torch.nn.Parameter]) -> int:
    """Counts numbers, also of parameters that ZeRO-3 has divided."""
    return sum(getattr(parameter, "ds_numel", parameter.numel()) for parameter in parameters)


def free_memory(device: torch.device) -> float:
    """Returns the bytes that a process can still have on its device."""
    if device.type == "cpu":
        free = psutil.virtual_memory().available
        limit = CGROUP / "memory.max"
        if limit.is_file() and limit.read_text().strip() != "max":
            stat = dict(line.split() for line in (CGROUP / "memory.stat").read_text().splitlines())
            used = int((CGROUP / "memory.current").read_text()) - int(stat["inactive_file"])  # without cached files
            free = min(free, int(limit.read_text()) - used)
        return free / int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + cached


def choose_rows(
    args: Any, size: Size, stage: int, processes: int, memory: float, on_gpu: bool = True
) -> tuple[int, bool]:
    """
    Chooses what the user has left open: the rows of a forward of the update, and whether it checkpoints activations.
    It is the most rows that fit into the memory and leave a fifth of it free, and no checkpointing if as many rows
    fit without it, or, on a GPU, enough for it to be busy.

    Args:
        args ([`RolloutConfig`]): The configuration of the trainer.
        size ([`Size`]): The numbers that decide the memory.
        stage (`int`): The stage of ZeRO, 0 without DeepSpeed.
        processes (`int`): Number of devices.
        memory (`float`): Bytes of memory of a device.
        on_gpu (`bool`, *optional*, defaults to `True`): Whether the device is a GPU. Its host may be slower than it.

    Returns:
        `tuple[int, bool]`: The rows, and whether to checkpoint.
    """
    trial = copy.copy(args)
    sizes = [args.rows_per_device if args.chooses_rows else args.rows_per_forward]
    while args.chooses_rows and sizes[-1] > 1:
        sizes.append(math.ceil(sizes[-1] / 2))

    def most(checkpoints: bool) -> int:
        """Returns the most rows that fit, or 0."""
        trial.gradient_checkpointing = checkpoints
        for trial.per_device_train_batch_size in sizes:
            parts = memory_parts(trial, size, stage, processes)
            if sum(parts["held"].values()) + sum(parts["update"].values()) <= (1 - FREE) * memory:
                return trial.rows_per_forward
        return 0

    if not args.chooses_checkpointing:
        return most(args.gradient_checkpointing) or sizes[-1], args.gradient_checkpointing
    rows, whole = most(True), most(False)
    tokens = whole * size.agents * (size.prompt + args.max_completion_length)
    work = tokens * size.largest / size.dimensions.num_hidden_layers
    is_busy = not on_gpu or (work >= WORK and stage < 2)  # from there on, every forward or backward communicates
    return (whole, False) if whole and (whole >= rows or is_busy) else (rows or sizes[-1], True)


def describe_rows(args: Any) -> str:
    """Describes how the update is computed."""
    return (
        f"{args.rows_per_forward} rows in a forward{'' if args.chooses_rows else ', as given'}, "
        f"{'with' if args.gradient_checkpointing else 'without'} activation checkpointing"
    )


# Of a trainer, a [`RolloutTrainer`], in its first step, and in one for which the memory does not suffice


def choose_for(trainer: Any) -> None:
    """Chooses the rows of a forward and checkpointing for the run of a trainer, alike on all processes."""
    args, accelerator, turns = trainer.args, trainer.accelerator, trainer._turns
    stage, processes = args.zero_stage, accelerator.num_processes
    samples = [x for nodes in turns for node in nodes for x in node.samples.values()]
    longest = max(len(x.prompt_ids) + max(map(len, x.completion_ids)) for x in samples)
    first = [[node.samples[role].prompt_ids for node in acting(role, turns[0])] for role in trainer.team.roles]
    size = size_of(trainer.team, trainer.ref_model, first, longest, not trainer._router_loss_coefs)
    sizes = gather_object([(free_memory(accelerator.device), size)])
    free, size = min(x[0] for x in sizes), max((x[1] for x in sizes), key=lambda x: x.prompt)
    # What is held between steps is there already, but for Adam's moments, which the first step makes
    held = memory_parts(args, size, stage, processes)["held"]
    memory = free + sum(held.values()) - held["optimizer"]
    trainer._set_rows(*choose_rows(args, size, stage, processes, memory, accelerator.device.type != "cpu"))
    if accelerator.is_main_process:
        logger.info(f"The update has {describe_rows(args)}.")


def check_out_of_memory(trainer: Any, error: Exception) -> None:
    """
    Raises an error again, unless it is about memory and all processes can run the step again: none waits for another
    one in a backward, and the old log-probabilities of the batch can be computed again.
    """
    is_alone = trainer.accelerator.num_processes == 1
    can_wait = not trainer.is_deepspeed_enabled and (is_alone or not trainer._is_in_backward)
    can_repeat = can_wait and trainer._is_between_batches() and trainer.args.chooses_rows
    if "OutOfMemoryError" not in describe(error) or not can_repeat or most_rows(trainer) == 1:
        raise error


def most_rows(trainer: Any) -> int:
    """Returns the most rows of a micro-batch of any process."""
    return trainer._most(
        max(
            len(tensors)
            for batch in trainer._buffered_inputs
            for tensors in (*batch.agents.values(), *batch.critics.values())
        )
    )


def halve_rows(trainer: Any) -> None:
    """Undoes the unfinished step of a trainer, and splits its rows into smaller micro-batches, also of later steps."""
    args, rows = trainer.args, most_rows(trainer)
    args.per_device_train_batch_size = math.ceil(rows / 2)
    if trainer.accelerator.is_main_process:
        logger.warning(
            f"Out of memory with {rows} rows in a forward: step {trainer.state.global_step + 1} runs again with "
            f"{args.rows_per_forward}."
        )
    trainer._buffered_inputs = []
    trainer.observer.sums.clear()
    trainer.team.zero_grad()  # the optimizer's own method does nothing before the last micro-batch
    if torch.accelerator.is_available():
        torch.accelerator.empty_cache()
    trainer._buffered_inputs = trainer._make_batches(trainer._step_rows)
