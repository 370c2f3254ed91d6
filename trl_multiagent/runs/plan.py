"""
The plan of a training on rollouts, which `--dry_run` and `trl-multiagent plan` print. No model is loaded.

The memory that is held between steps (weights, gradients, the optimizer's state) is exact for Adam; see
docs/memory.md for the formulas. The memory of sampling and of the update is an estimate: the key-value cache of
the longest turn, the activations of a micro-batch, and the log-probabilities.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

from accelerate import PartialState

from trl_multiagent.console import printable
from trl_multiagent.environments.base import Environment
from trl_multiagent.environments.dataset_rows import Datasets
from trl_multiagent.rollout.sampler import TeamSampler
from trl_multiagent.rollout.tree import acting, first_nodes
from trl_multiagent.runs.prepared import PreparedRun, prepare_training
from trl_multiagent.runs.run import end_on_wrong_input
from trl_multiagent.settings.derive import Settings
from trl_multiagent.team.agent_team import AgentTeam
from trl_multiagent.trainers.base.actor_critic_config import ActorCriticConfig
from trl_multiagent.trainers.base.memory import Size, choose_rows, describe_rows, memory_parts, size_of
from trl_multiagent.trainers.base.rollout_config import RolloutConfig
from trl_multiagent.trainers.base.team_trainer import eval_datasets, router_loss_coefs
from trl_multiagent.trainers.magrpo_config import MAGRPOConfig


HEADING = "Dry run: no model was loaded, nothing was written."


def print_plan(lines: Mapping[str, Any], heading: str = HEADING) -> None:
    """Prints the lines of a plan, each with its name, below a heading, in the main process."""
    if PartialState().is_main_process:
        print(heading, *(f"  {name:<15}  {printable(str(text))}" for name, text in lines.items()), sep="\n")


def rollout_lines(
    run: PreparedRun, environment: Environment, datasets: Datasets | None = None, team: AgentTeam | None = None
) -> dict[str, Any]:
    """
    Returns the plan of a training on rollouts, made without loading a model. The environment may add lines. Without
    `datasets`, the function loads the recipe's. `team`: the team without weights, if it is known.
    """
    args = run.training_args
    num_train = num_eval = None
    items: Sequence[dict] = ()
    try:
        train_dataset, eval_dataset = run.load_datasets() if datasets is None else datasets
        num_train, num_eval = len(train_dataset), sum(map(len, eval_datasets(eval_dataset)))
        items = cast(Sequence[dict], train_dataset)
    except ConnectionError as error:
        print(f"The dataset could not be reached, so its size is unknown. {error}")
    if team is not None and items:
        first_prompts(args, team, environment, [items[0]])  # raises what a chat template refuses

    nodes = sum(args.nodes_per_turn)
    joint_actions = nodes * args.joint_actions_per_node  # each is one env step
    env_steps = run.items_per_step * joint_actions  # of one optimizer step
    is_open = args.num_episodes and not args.has_num_turns  # the workflow decides when it ends
    may_end = is_open or args.early_termination_threshold is not None
    or_fewer = " at most" if may_end and args.num_turns > 1 else ""
    if args.max_steps > 0:
        steps, length = args.max_steps, "max_steps"
    else:
        length = f"{args.num_train_epochs:g} epochs of the training items"
        steps = None if num_train is None else math.ceil(args.num_train_epochs * args.steps_per_epoch(num_train))
    when = {"steps": f"every {args.eval_steps or 0:g} steps", "epoch": "after every epoch"}.get(
        args.eval_strategy.value, "at the start" if args.eval_on_start else None
    )
    batches = None if steps is None else -(-steps // args.num_iterations)
    lines = {
        "algorithm": f"{run.algorithm}, {baseline(args)}",
        **collaboration(run),
        "agents": f"{agents(run.model_names, environment.roles, args.frozen_agents or ())} ({run.form_in_words})",
        "training": f"{count(num_train, 'item')} of {run.dataset.name or 'the task'}, "
        f"split {run.dataset.train_split or 'whole'}",
        "evaluation": (
            f"{count(num_eval, 'item')} of split {run.dataset.eval_split or 'whole'}, {when}" if when else "none"
        ),
        "rollouts": rollouts(args),
        "tree of an item": f"{count(nodes, 'node')}, {joint_actions} joint actions = env steps, "
        f"{args.rows_per_item} rows{or_fewer}",
        "optimizer step": f"{count(args.items_per_device, 'item')} x "
        f"{count(args.world_size, 'process')}, "
        f"{env_steps} env steps{or_fewer}{f', {args.num_iterations} steps on each batch' * (args.num_iterations > 1)}",
        "optimizer steps": f"{'unknown' if steps is None else steps} ({length})",
        "env steps": f"{batches * env_steps}{or_fewer}" if batches else "unknown",
        "output folder": run.run_folder,
    }
    if steps and batches:
        asked = batches * run.items_per_step * later_prompts(args)
        if args.eval_strategy.value != "no" and num_eval:
            asked += num_evaluations(args, steps) * num_eval * (args.num_turns - 1)
        lines |= environment.plan(items, asked, args.max_completion_length)
    return lines


def first_prompts(
    args: Any, team: AgentTeam, environment: Environment, items: Sequence[dict]
) -> list[list[list[int]]]:
    """
    Returns the token ids of each agent's first prompts for some items. Raises `UnavailableError` if a chat template
    refuses one.
    """
    sampler = TeamSampler(team, cast(Any, None), args.use_chat_template, args)
    nodes = first_nodes(items, environment)
    return [[prompt.ids for prompt in sampler.prompts(role, acting(role, nodes))] for role in team.roles]


def baseline(args: RolloutConfig) -> str:
    """Describes the baseline of a completion."""
    if not isinstance(args, ActorCriticConfig):
        return f"advantage_mode {cast(MAGRPOConfig, args).advantage_mode}"
    models = [args.critic_models] if isinstance(args.critic_models, str) else args.critic_models or []
    sources = f" from {', '.join(models)}" * bool(models)
    return f"critic_type {args.critic_type}, critic_form {args.critic_form}{sources}"


def rollouts(args: RolloutConfig) -> str:
    """Describes the rollouts of an item."""
    turns = count(args.num_turns, "turn")
    if args.num_episodes:
        return f"{args.num_episodes} episodes per item, {'' if args.has_num_turns else 'at most '}{turns} each"
    return (
        f"{turns}, joint_mode {args.joint_mode}, handoff {args.handoff}, {args.num_generations} completions "
        "per agent and node"
    )


def collaboration(run: PreparedRun) -> dict[str, str]:
    """Returns the line of a plan about `collaboration_mode`, if one agent answers for all roles."""
    if not run.is_centralized:
        return {}
    length = run.arguments.get("max_completion_length", run.training_args.max_completion_length)
    return {"collaboration": f"centralized: one agent answers for all {run.num_agents} roles, in {length} tokens"}


def agents(names: str | list[str], roles: Sequence[str], frozen: Sequence[str] = ()) -> str:
    """Names the model of each agent."""
    names = names if isinstance(names, list) else [names] * len(roles)
    return ", ".join(f"{role}: {name}{', frozen' * (role in frozen)}" for role, name in zip(roles, names, strict=True))


def later_prompts(args: RolloutConfig) -> int:
    """Counts the later-turn prompts that an item's full tree requests."""
    nodes = args.nodes_per_turn
    if args.handoff and isinstance(args, ActorCriticConfig):  # critics also value joint actions that end
        return sum(nodes[:-1]) * args.joint_actions_per_node
    return sum(nodes[1:])


def num_evaluations(args: RolloutConfig, steps: int) -> int:
    """Counts the evaluations in a number of optimizer steps."""
    if args.eval_strategy.value == "epoch":
        return math.ceil(args.num_train_epochs)
    every = args.eval_steps or 1  # below 1, a share of the steps
    return bool(args.eval_on_start) + steps // max(1, math.ceil(every * steps if every < 1 else every))


def count(number: int | None, one: str) -> str:
    """Formats a number with its noun: `1 item`, `2 items`."""
    many = f"{one}es" if one.endswith("s") else f"{one}s"
    return f"unknown number of {many}" if number is None else f"{number} {one if number == 1 else many}"


# Memory

GB = 1e9
# Gigabytes of memory, as published
GPUS = {"T4": 16, "4090": 24, "L40S": 48, "A100-40": 40, "A100": 80, "H100": 80, "H200": 141}
USABLE = 0.95  # share of a GPU's memory; the driver and fragmentation take the rest
LEAST_ROOM = 1.2  # of an engine, over its weights: for activations and a cache
MEASURED_ITEMS = 64  # the first prompts of at most this many items are measured


def print_memory_plan(settings: Settings, stage: int, processes: int, gpu: str) -> None:
    """
    Prints the plan of a run with its memory. Wrong settings end the program.

    Args:
        settings ([`~settings.derive.Settings`]): The settings of the run, see [`~runs.run.read_plan`].
        stage (`int`): The stage of ZeRO, 0 without DeepSpeed.
        processes (`int`): Number of GPUs.
        gpu (`str`): A key of `GPUS`.
    """
    run = prepare_training(settings)
    with end_on_wrong_input(run.prog):
        environment = run.make_environment()
        datasets = run.load_datasets()
        print_plan(rollout_lines(run, environment, datasets), "Plan: no weights were loaded, no run was begun.")
        if not {"bf16", "fp16", "use_cpu"} & run.arguments.keys():  # the default of a trainer depends on its machine
            run.training_args.bf16 = gpu != "T4"
        devices = "On one GPU" if processes == 1 else f"Each of {processes} GPUs"
        print(f"\n{devices}{f', ZeRO-{stage}' * (stage > 0)}, computing in {run.compute_dtype}:")
        try:
            size = plan_size(run, environment, datasets[0])
        except OSError as error:
            return print(f"  unknown, because a model cannot be read. {' '.join(str(error).split())}")
    print(*(f"  {line}" for line in memory_lines(run, size, stage, processes, gpu)), sep="\n")


def plan_size(run: PreparedRun, environment: Environment, items: Sequence[dict]) -> Size:
    """
    Builds the team to train without weights, with its critics and reference policies, and counts its parameters and
    the tokens of first prompts. It reads configurations and tokenizers, also from the Hub.
    """
    args = run.training_args
    team = run.loader.outline(environment.roles, run.dtype)
    team.freeze(args.frozen_agents or ())
    has_reference = vars(args).get("beta", 0.0) != 0.0
    reference = team.frozen_copy() if has_reference and team.form != "lora" else None
    if isinstance(args, ActorCriticConfig):
        from trl_multiagent.trainers.base.actor_critic_trainer import add_critics

        add_critics(team, args)
    prompts = first_prompts(args, team, environment, [*itertools.islice(items, MEASURED_ITEMS)])
    longest = max((len(ids) for of_role in prompts for ids in of_role), default=0)
    longest += args.num_turns * args.max_completion_length
    size = size_of(team, reference, prompts, longest, not router_loss_coefs(team, args))
    base_bytes = 4.0 if run.loader.base_dtype(run.compute_dtype) == "float32" else 2.0
    if run.agent_model.is_quantized:
        base_bytes = 0.5 if run.agent_model.load_in_4bit else 1.0
    copies = size.adapters if has_reference and reference is None else 0
    return dataclasses.replace(size, frozen=size.frozen + copies, base_bytes=base_bytes)


def memory_lines(run: PreparedRun, size: Size, stage: int, processes: int, gpu: str) -> Iterator[str]:
    """Yields the lines of a plan about the memory of each of several GPUs, under a stage of ZeRO (0 for none)."""
    args, card = run.training_args, GB * GPUS[gpu]
    engines = args.vllm_gpu_memory_utilization * card if args.use_vllm and args.vllm_mode == "colocate" else 0.0
    stays = 0.0 if args.vllm_enable_sleep_mode else engines
    args.set_rows(*choose_rows(args, size, stage, processes, USABLE * card - stays))
    yield f"{'update':<9} {describe_rows(args)}"
    parts = memory_parts(args, size, stage, processes)
    parts["held"]["engines of vLLM"], parts["sampling"]["engine of vLLM"] = stays, engines - stays
    for phase, numbers in parts.items():
        for name, number in numbers.items():
            if number:
                yield f"{phase:<9} {name:<24}{number / GB:9.3f} GB"
    sums = {phase: sum(numbers.values()) for phase, numbers in parts.items()}
    peak = sums["held"] + max(sums["sampling"], sums["update"])
    advice = engine_advice(args, size, card, processes) if engines else ""
    if peak > USABLE * card and not advice:
        advice = "see docs/out_of_memory.md"
    fits = f"it does not fit: {advice}" if advice else "it fits"
    yield f"{'peak':<34}{peak / GB:9.3f} GB of {GPUS[gpu]} GB ({gpu}): {fits}"


def engine_advice(args: RolloutConfig, size: Size, card: float, processes: int) -> str:
    """
    Returns what is needed if vLLM refuses the engines, or the part of one does not hold the weights of its model, else
    an empty text.
    """
    parallel = args.vllm_tensor_parallel_size
    if processes % parallel:
        return f"`vllm_tensor_parallel_size` is {parallel}, which does not divide the number of GPUs"
    if args.vllm_enable_sleep_mode and size.models > 1:
        return f"vLLM lets one engine of a process sleep, not {size.models}: remove `vllm_enable_sleep_mode`"
    weights = (2.0 if args.bf16 or args.fp16 else 4.0) * size.largest / parallel
    room = args.vllm_gpu_memory_utilization * card / size.models
    if room >= LEAST_ROOM * weights:
        return ""
    return (
        f"{weights / GB:.1f} GB of weights in an engine of {room / GB:.1f} GB: raise `vllm_gpu_memory_utilization` or "
        "`vllm_tensor_parallel_size`, or use servers (`vllm_mode: server`)"
    )
