"""
The plan of a training on rollouts, which `--dry_run` and `trl-multiagent plan` print. No model is loaded.

The memory that is held between steps (weights, gradients, the optimizer's state) is exact for Adam; see
docs/memory.md for the formulas. The memory of sampling and of the update is an estimate: the key-value cache of
the longest turn, the activations of a micro-batch, and the log-probabilities.
"""

import copy
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from accelerate import PartialState
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig

from trl_multiagent.console import printable
from trl_multiagent.environments.base import Environment
from trl_multiagent.folders import ADAPTER_CONFIG
from trl_multiagent.models.adapter_config import read_adapter_config
from trl_multiagent.models.gguf import converted
from trl_multiagent.models.packaged import packaged
from trl_multiagent.models.packing import can_pack
from trl_multiagent.models.pretrained import (
    find_file,
    has_routers,
    hub_arguments,
    outside_of_text,
    router_loss_coef,
    text_parameters,
    without_weights,
)
from trl_multiagent.models.reasoning import template_kwargs
from trl_multiagent.rollout.history import uses_chat_template, whole_prompt
from trl_multiagent.rollout.sampler import tokenize_prompts
from trl_multiagent.rollout.tree import acting, first_nodes
from trl_multiagent.runs.prepared import PreparedRun, check_templates, prepare_training
from trl_multiagent.runs.run import end_on_wrong_input
from trl_multiagent.settings.derive import Settings
from trl_multiagent.team.agent_team import AgentTeam
from trl_multiagent.team.critics import model_names
from trl_multiagent.team.files import TeamFile, find_sources, load_tokenizer
from trl_multiagent.team.load import build
from trl_multiagent.trainers.base.actor_critic_config import ActorCriticConfig
from trl_multiagent.trainers.base.memory import Size, choose_rows, describe_rows, measure_prompts, memory_parts
from trl_multiagent.trainers.base.rollout_config import RolloutConfig
from trl_multiagent.trainers.magrpo_config import MAGRPOConfig


HEADING = "Dry run: no model was loaded, nothing was written."


def print_plan(lines: Mapping[str, Any], heading: str = HEADING) -> None:
    """Prints the lines of a plan, each with its name, below a heading, in the main process."""
    if PartialState().is_main_process:
        print(heading, *(f"  {name:<15}  {printable(str(text))}" for name, text in lines.items()), sep="\n")


def rollout_lines(
    run: PreparedRun,
    roles: Sequence[str],
    environment: Environment | None = None,
    datasets: tuple[Dataset, Dataset | None] | None = None,
    team: AgentTeam | None = None,
) -> dict[str, Any]:
    """
    Returns the plan of a training on rollouts, made without loading a model. The environment may add lines. Without
    `datasets`, the function loads the recipe's. `team`: the team without weights, if it is known.
    """
    args, dataset = run.training_args, run.dataset
    num_train = num_eval = None
    items: Sequence[dict] = ()
    try:
        train_dataset, eval_dataset = run.load_datasets() if datasets is None else datasets
        num_train, num_eval = len(train_dataset), len(eval_dataset or ())
        items = cast(Sequence[dict], train_dataset)
    except ConnectionError as error:
        print(f"The dataset could not be reached, so its size is unknown. {error}")
    if team is not None and environment is not None and len(items) > 0:
        check_templates(run, team, environment, items)

    nodes = sum(args.nodes_per_turn)
    joint_actions = nodes * args.joint_actions_per_node  # each is one env step
    env_steps = run.items_per_step * joint_actions  # of one optimizer step
    is_open = args.num_episodes is not None and not args.has_num_turns  # the workflow decides when it ends
    may_end = is_open or args.early_termination_threshold is not None
    or_fewer = " at most" if may_end and args.num_turns > 1 else ""
    if args.max_steps > 0:
        steps, length = args.max_steps, "max_steps"
    else:
        length = f"{args.num_train_epochs:g} epochs of the training items"
        steps = None if num_train is None else math.ceil(args.num_train_epochs * args.steps_per_epoch(num_train))
    when = {"steps": f"every {args.eval_steps} steps", "epoch": "after every epoch"}.get(args.eval_strategy.value)
    batches = None if steps is None else -(-steps // args.num_iterations)
    lines = {
        "algorithm": f"{run.algorithm}, {baseline(args)}",
        **collaboration(run),
        "agents": f"{agents(run.model_names, roles, args.frozen_agents or ())} ({run.form_in_words})",
        "training": (
            f"{count(num_train, 'item')} of {dataset.name or 'the task'}, split {dataset.train_split or 'whole'}"
        ),
        "evaluation": f"{count(num_eval, 'item')} of split {dataset.eval_split}, {when}" if when else "none",
        "rollouts": rollouts(args),
        "tree of an item": f"{count(nodes, 'node')}, {joint_actions} joint actions = env steps, "
        f"{args.rows_per_item} rows{or_fewer}",
        "optimizer step": f"{count(args.items_per_device, 'item')} x "
        f"{count(args.world_size, 'process', 'processes')}, "
        f"{env_steps} env steps{or_fewer}{f', {args.num_iterations} steps on each batch' * (args.num_iterations > 1)}",
        "optimizer steps": f"{'unknown' if steps is None else steps} ({length})",
        "env steps": "unknown" if batches is None else f"{batches * env_steps}{or_fewer}",
        "output folder": run.run_folder,
    }
    if environment is not None and steps is not None and batches is not None:
        asked = batches * run.items_per_step * later_prompts(args)
        if args.eval_strategy.value != "no" and num_eval is not None:
            asked += num_evaluations(args, steps) * num_eval * (args.num_turns - 1)
        lines |= environment.plan(items, asked, args.max_completion_length)
    return lines


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
    if args.num_episodes is not None:
        at_most = "" if args.has_num_turns else "at most "
        return f"{args.num_episodes} episodes per item, {at_most}{turns} each"
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
    if args.handoff is not None and isinstance(args, ActorCriticConfig):  # critics also value joint actions that end
        return sum(nodes[:-1]) * args.joint_actions_per_node
    return sum(nodes[1:])


def num_evaluations(args: RolloutConfig, steps: int) -> int:
    """Counts the evaluations in a number of optimizer steps."""
    if args.eval_strategy.value == "epoch":
        return math.ceil(args.num_train_epochs)
    return bool(args.eval_on_start) + steps // max(1, int(args.eval_steps or 1))


def count(number: int | None, one: str, many: str | None = None) -> str:
    """Formats a number with its noun: `1 item`, `2 items`."""
    if number is None:
        return f"unknown number of {many or one + 's'}"
    return f"{number} {one if number == 1 else many or one + 's'}"


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
        lines = rollout_lines(run, environment.roles, environment, datasets)
        print_plan(lines, "Plan: no weights were loaded, nothing was written.")
        if not {"bf16", "fp16", "use_cpu"} & run.arguments.keys():  # the default of a trainer depends on its machine
            run.training_args.bf16 = gpu != "T4"
        devices = "On one GPU" if processes == 1 else f"Each of {processes} GPUs"
        number = "in bfloat16" if run.training_args.bf16 else "in float16" if run.training_args.fp16 else "in float32"
        print(f"\n{devices}{f', ZeRO-{stage}' * (stage > 0)}, computing {number}:")
        try:
            size = size_of(run, environment, datasets[0])
        except OSError as error:
            return print(f"  unknown, because a model cannot be read. {' '.join(str(error).split())}")
    print(*(f"  {line}" for line in memory_lines(run, size, stage, processes, gpu)), sep="\n")


def size_of(run: PreparedRun, environment: Environment, items: Sequence[dict]) -> Size:
    """Counts the parameters of models without weights. It reads configurations and tokenizers, also from the Hub."""
    args, loader, roles = run.training_args, run.loader, environment.roles
    sources, saved_team = find_sources(build(loader.models, loader.builders), roles, {})
    arguments = dict(loader.arguments)
    gguf_file = arguments.pop("gguf_file", "")
    names = {}  # what the model of each role is read from; for an adapter, its base
    configs = {}
    own, base, rest = {}, {}, {}
    for role, source in sources.items():
        saved = read_adapter_config(source) if find_file(source, ADAPTER_CONFIG) is not None else None
        start = str(Path(source) / gguf_file) if saved is None and saved_team is None else source
        base_name = start if saved is None else packaged(str(saved.base_model_name_or_path))
        names[role] = converted(base_name, **hub_arguments(arguments), weights=False)
        fresh = loader.peft_config if role in (loader.adapter_roles or roles) else None
        configs[role] = AutoConfig.from_pretrained(names[role], **arguments)
        own[role], base[role], rest[role] = count_parameters(configs[role], saved or fresh)
    bases = {names[role]: number for role, number in base.items() if number}
    on_base = Counter(names[role] for role, number in base.items() if number)
    largest = max(roles, key=lambda role: own[role] + base[role] + rest[role])
    size_of_largest = own[largest] + base[largest] + rest[largest]
    if (run.agent_model.share_weights or (saved_team is not None and saved_team.form == "shared")) and not bases:
        own = {role: own[role] for role in roles[:1]}
    learning = [role for role in roles if role not in (args.frozen_agents or ())]
    trained = sum(number for role, number in own.items() if role in learning)
    outside = sum(rest[role] for role in own)
    frozen = sum(own.values()) - trained + outside
    if vars(args).get("beta", 0.0) != 0.0:
        frozen += trained + outside  # of reference policies
    critics = args.critic_names(learning)
    if isinstance(args, ActorCriticConfig) and args.critic_form != "head":
        adapter = LoraConfig(r=args.critic_lora_r, target_modules="all-linear")
        for name in model_names(args.critic_models, critics).values():
            config = (
                configs[roles[0]]
                if name is None
                else AutoConfig.from_pretrained(build(name, run.builders), trust_remote_code=False)
            )
            trained += count_parameters(config, adapter if args.critic_form == "adapter" else None)[0]
    base_bytes = 4.0 if loader.base_dtype(run.compute_dtype) == "float32" else 2.0
    if run.agent_model.is_quantized:
        base_bytes = 0.5 if run.agent_model.load_in_4bit else 1.0
    prompts = measure_prompts(first_prompts(run, names, saved_team, environment, items))
    text = configs[largest].get_text_config()
    model = without_weights(configs[largest])
    has_router_loss = has_routers(model) and router_loss_coef(text, args.router_aux_loss_coef) != 0.0
    longest = prompts["prompt"] + args.num_turns * args.max_completion_length
    return Size(
        trained=trained,
        frozen=frozen,
        base=sum(bases.values()),
        base_bytes=base_bytes,
        largest=size_of_largest,
        dimensions=text,
        **prompts,
        agents=len(roles),
        joint=min(prompts["acting"], len(roles) if len(own) < len(roles) else max(on_base.values(), default=1)),
        adapters=sum(own[role] for role, number in base.items() if number),
        packs=not has_router_loss and can_pack(model, longest),
        critics=len(critics),
        models=len({names[role] if base[role] else role for role in own}),
    )


def count_parameters(config: Any, adapter: LoraConfig | None) -> tuple[int, int, int]:
    """
    Counts parameters. Without an adapter, returns the model's parameters that texts reach, 0 and its other ones; with
    one, the adapter's, its base's and 0.
    """
    model = without_weights(config)
    number = model.num_parameters()
    if adapter is None:
        of_text = sum(parameter.numel() for parameter in text_parameters(model))
        return of_text, 0, number - of_text
    adapter = copy.deepcopy(adapter)
    adapter.inference_mode = False  # saved adapters have True
    adapter.exclude_modules = adapter.exclude_modules or outside_of_text(model)
    with torch.device("meta"):
        return get_peft_model(model, adapter).get_nb_trainable_parameters()[0], number, 0


def first_prompts(
    run: PreparedRun,
    sources: Mapping[str, str],
    saved_team: TeamFile | None,
    environment: Environment,
    items: Sequence[dict],
) -> list[list[list[int]]]:
    """
    Returns the token ids of the first prompts of the first items, of each agent that acts.
    `sources`: the model of each role. `saved_team`: the team that is loaded, if it is a saved one.
    """
    args, own = run.training_args, []
    given = run.loader.arguments  # which replace what a saved team has
    nodes = first_nodes([items[k] for k in range(min(len(items), MEASURED_ITEMS))], environment)
    for role, source in sources.items():
        tokenizer = load_tokenizer(source, given.get("tokenizer_kwargs", {}))
        as_chat = uses_chat_template(tokenizer, args.use_chat_template)
        reasoning = given.get("reasoning", saved_team and saved_team.reasoning[role])
        own_kwargs = saved_team.chat_template_kwargs[role] if saved_team else {}
        kwargs = template_kwargs(reasoning, given.get("chat_template_kwargs", own_kwargs))
        prompts = [whole_prompt(role, (), node.prompts[role], as_chat) for node in acting(role, nodes)]
        if prompts:
            own.append(tokenize_prompts(tokenizer, prompts, **kwargs))
    return own or [[[]] for _ in sources]


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
    advice = engine_advice(args, size, processes, card, peak) if engines else ""
    if peak > USABLE * card and not advice:
        advice = "see docs/out_of_memory.md"
    fits = f"it does not fit: {advice}" if advice else "it fits"
    yield f"{'peak':<34}{peak / GB:9.3f} GB of {GPUS[gpu]} GB ({gpu}): {fits}"


def engine_advice(args: RolloutConfig, size: Size, processes: int, card: float, peak: float) -> str:
    """
    Returns what is needed if the part of an engine does not hold the weights of its model, else an empty text. `peak`:
    bytes that a process needs in all.
    """
    given, number = args.vllm_gpu_memory_utilization, 2.0 if args.bf16 or args.fp16 else 4.0
    weights = number * size.largest
    parallel = [n for n in range(args.vllm_tensor_parallel_size, processes + 1) if processes % n == 0]
    shares = {n: LEAST_ROOM * weights / n * size.models / card for n in parallel}
    if given >= shares[parallel[0]]:
        return ""
    problem = (
        f"{weights / parallel[0] / GB:.1f} GB of weights in an engine of {given * card / size.models / GB:.1f} GB: "
    )
    for n in sorted(parallel, key=lambda n: given < shares[n]):
        share = max(given, math.ceil(20 * shares[n]) / 20)
        if peak + (share - given) * card <= USABLE * card:
            changes = {"vllm_tensor_parallel_size": n} if n > parallel[0] else {}
            changes |= {"vllm_gpu_memory_utilization": share} if share > given else {}
            return problem + "set " + ", ".join(f"`{name}: {value}`" for name, value in changes.items())
    return f"{problem}use servers (`vllm_mode: server`) or more GPUs"
