"""
The plan of a training on rollouts with its memory and time per device, computed without weights and without a GPU.

The memory that is held between steps (weights, gradients, the optimizer's state) is exact for Adam; see
docs/distributed.md for the formulas. The memory of sampling and of the update is an estimate: the key-value cache of
the longest level, the activations of a micro-batch, and the log-probabilities.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from trl_multiagent.environments.base import Environment
from trl_multiagent.folders import ADAPTER_CONFIG
from trl_multiagent.models.packing import can_pack
from trl_multiagent.models.pretrained import find_file
from trl_multiagent.rollout.tree import root_nodes
from trl_multiagent.runs.plan import print_plan, rollout_lines
from trl_multiagent.runs.prepared import PreparedRun
from trl_multiagent.runs.run import end_on_wrong_input, settings_of
from trl_multiagent.runs.training import prepare_training
from trl_multiagent.settings.algorithms import ALGORITHMS, ROLLOUTS
from trl_multiagent.settings.command_line import make_parser, read_layers
from trl_multiagent.settings.read import ConfigError
from trl_multiagent.team.files import AgentSource, find_sources
from trl_multiagent.team.load import TeamLoader, build
from trl_multiagent.trainers.base.actor_critic_config import ActorCriticConfig


GB = 1e9
# Gigabytes of memory, terabytes per second, and teraflops of dense matrix products in bfloat16, as published
GPUS = {
    "T4": (16, 0.32, 65),
    "4090": (24, 1.01, 165),
    "L40S": (48, 0.86, 362),
    "A100-40": (40, 1.56, 312),
    "A100": (80, 2.04, 312),
    "H100": (80, 3.35, 990),
    "H200": (141, 4.8, 990),
}
USABLE = 0.95  # share of a GPU's memory; the driver and fragmentation take the rest
WIDTH = 40  # characters of a bar that is as long as the memory of the GPU
ADVICE = {
    "held": (
        "use ZeRO (`--accelerate_config zero3`), LoRA (`peft: {r: 16}`), one model for all "
        "(`agent_model.share_weights`) or smaller models."
    ),
    "sampling": "lower `generation_token_budget`, `max_completion_length` or `items_per_device`.",
    "update": "lower `per_device_train_batch_size` or `max_completion_length`, or set `gradient_checkpointing: true`.",
}
# Parameters that DeepSpeed gathers at a time, and gradients that it collects before it splits them
MAX_LIVE, MAX_BUCKET = 1e9, 5e8
CHUNK_TOKENS, CHUNK_WORDS, CHUNK_COPIES = 4096, 32768, 4  # TRL computes log-probabilities in chunks of this size
MEASURED_ITEMS = 64  # number of items whose first prompts are measured


def print_memory_plan(
    tasks: Mapping[str, str], argv: Sequence[str], prog: str, stage: int, processes: int, gpu: str
) -> None:
    """
    Prints the plan of a run, with the memory and the shortest possible time of a step. Wrong settings end the program.

    Args:
        tasks (`Mapping[str, str]`): The named tasks.
        argv (`Sequence[str]`): The arguments of a training, with `--config`. The file has a section for the algorithm.
        prog (`str`): Name of the program in messages.
        stage (`int`): The stage of ZeRO, 0 without DeepSpeed.
        processes (`int`): Number of GPUs.
        gpu (`str`): A key of `GPUS`.
    """
    with end_on_wrong_input(prog):
        arguments, rest = make_parser("magrpo", prog).parse_known_args(argv)
        written = read_layers("magrpo", arguments, [])[0]
        algorithm = next((name for name in written if name in ALGORITHMS), "magrpo")
        if ALGORITHMS[algorithm].run != ROLLOUTS:
            raise ConfigError(
                f"the plan is for algorithms that learn from rollouts, not for {algorithm}: use --dry_run."
            )
        settings = settings_of(algorithm, tasks, read_layers(algorithm, arguments, rest), prog, arguments.config)
        settings.dry_run = True
    run = prepare_training(settings)
    with end_on_wrong_input(prog):
        environment = run.make_environment()
        datasets = run.load_datasets()
        size = size_of(run, environment, datasets[0])
        lines = rollout_lines(run, environment.roles, environment, datasets)
    built = any(name in run.builders for name in run.model_list)
    but = " but the base model of the task, in the cache" if built else ""
    print_plan(lines, f"Plan: no model was loaded, nothing was written{but}.")
    devices = "On one GPU" if processes == 1 else f"Each of {processes} GPUs"
    print(f"\n{devices}{f', ZeRO-{stage}' * (stage > 0)}:")
    for line in (*memory_lines(run, size, stage, processes, gpu), *time_lines(run, size, gpu)):
        print(f"  {line}")


@dataclass(frozen=True)
class Size:
    """The numbers that decide the memory of a team: its parameters, and the tokens of a prompt."""

    trained: int  # of agents and critics
    frozen: int  # of agents that are not trained
    base: int  # of bases with adapters
    base_bytes: float  # of a parameter of a base
    reference: int  # of the reference policies, if they have weights of their own
    largest: int  # of one agent, with its base
    dimensions: Any  # the text configuration of the largest agent
    prompt: int  # tokens of the longest first prompt
    agents: int  # number of agents
    packs: bool = False  # whether the completions of a node share their prompt in the update


def size_of(run: PreparedRun, environment: Environment, items: Sequence[dict]) -> Size:
    """
    Builds the models without weights, and counts. It reads only configurations and tokenizers, also from the Hub.
    """
    args, loader, roles = run.training_args, run.loader, environment.roles
    sources, form = find_sources(build(loader.models, loader.builders), roles, {})
    agents = {role: count(source, loader, role) for role, source in sources.items()}
    bases = {x.name: x.base for x in agents.values() if x.base}
    frozen_roles = args.frozen_agents or ()
    shares = (run.agent_model.share_weights or form == "shared") and not bases
    counted = dict(list(agents.items())[:1]) if shares else agents
    trained = sum(x.own for role, x in counted.items() if role not in frozen_roles)
    is_lora = loader.peft_config is not None and all(x.base for x in agents.values())
    refers = vars(args).get("beta", 0.0) != 0.0 and not is_lora
    reference = trained if refers else 0
    first = agents[roles[0]].model.config.get_text_config()
    trained += critic_parameters(run, [role for role in roles if role not in frozen_roles], first)
    frozen = sum(x.own for role, x in counted.items() if role in frozen_roles)
    largest = max(agents.values(), key=lambda x: x.own + x.base)
    prompt = longest_prompt({role: x.name for role, x in agents.items()}, environment, items)
    base_bytes = 4.0 if loader.base_dtype == "float32" else 2.0
    if run.agent_model.is_quantized:
        base_bytes = 0.5 if run.agent_model.load_in_4bit else 1.0
    dimensions = largest.model.config.get_text_config()
    packs = all(can_pack(x.model, prompt + args.num_turns * args.max_completion_length) for x in agents.values())
    whole, num_agents = largest.own + largest.base, len(roles)
    return Size(
        trained, frozen, sum(bases.values()), base_bytes, reference, whole, dimensions, prompt, num_agents, packs
    )


@dataclass(frozen=True)
class Count:
    """The model of an agent and its numbers of parameters."""

    name: AgentSource  # its model; for an adapter, the base
    model: PreTrainedModel  # without weights
    own: int  # parameters, without those of a base that it may share
    base: int = 0  # parameters of the base of its adapter


def count(source: AgentSource, loader: TeamLoader, role: str) -> Count:
    """Builds the model of an agent without weights, and its adapter."""
    name = base_of(source)
    with torch.device("meta"):
        config = AutoConfig.from_pretrained(name.name, **name.arguments, **loader.arguments)
        model = AutoModelForCausalLM.from_config(config)
        number = model.num_parameters()
        fresh = loader.peft_config if role in (loader.adapter_roles or [role]) else None
        adapter = fresh if name == source else LoraConfig.from_pretrained(source.name)
        if adapter is None:
            return Count(name, model, number)
        adapter.inference_mode = False  # saved adapters have True
        return Count(name, model, trainable(get_peft_model(model, adapter)), number)


def base_of(source: AgentSource) -> AgentSource:
    """Returns the model of an agent, or the base of an adapter."""
    file = find_file(f"{source.name}/{source.subfolder}" if source.subfolder else source.name, ADAPTER_CONFIG)
    return (
        source if file is None else AgentSource(str(LoraConfig.from_pretrained(source.name).base_model_name_or_path))
    )


def trainable(model: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


def critic_parameters(run: PreparedRun, trained_roles: Sequence[str], config: Any) -> int:
    """
    Returns the number of trained parameters of all critics. A critic without a model of its own has the size of the
    first agent's.
    """
    args = run.training_args
    if not isinstance(args, ActorCriticConfig) or args.critic_form == "head":
        return 0
    names = args.critic_names(trained_roles)
    models = [args.critic_models] * len(names) if isinstance(args.critic_models, str) else args.critic_models
    total = 0
    for k in range(len(names)):
        own = config if models is None else AutoConfig.from_pretrained(build(models[k], run.builders))
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(own)
            if args.critic_form == "adapter":
                total += trainable(
                    get_peft_model(model, LoraConfig(r=args.critic_lora_r, target_modules="all-linear"))
                )
            else:
                total += model.num_parameters()
    return total


def longest_prompt(names: Mapping[str, AgentSource], environment: Environment, items: Sequence[dict]) -> int:
    """
    Returns the number of tokens of the longest first prompt among the first items; 0 without items. `names`: the model
    of each role.
    """
    nodes = root_nodes([items[k] for k in range(min(len(items), MEASURED_ITEMS))], environment)
    longest = 0
    for name in set(names.values()):
        tokenizer = AutoTokenizer.from_pretrained(name.name, **name.arguments)
        prompts = [x.prompts[role] for x in nodes for role in x.prompts if names[role] == name]
        texts = [x if isinstance(x, str) else "\n".join(str(message["content"]) for message in x) for x in prompts]
        longest = max([longest, *(len(tokenizer(text)["input_ids"]) for text in texts)])
    return longest


def memory_lines(run: PreparedRun, size: Size, stage: int, processes: int, gpu: str) -> Iterator[str]:
    """
    Yields the lines of a plan about the memory of each of several GPUs, under a stage of ZeRO (0 for none), with bars.
    """
    parts, capacity = memory_parts(run.training_args, size, stage, processes), GPUS[gpu][0]
    sums = {phase: sum(numbers.values()) for phase, numbers in parts.items()}
    peak = sums["held"] + max(sums["sampling"], sums["update"])
    for phase, numbers in parts.items():
        for name, number in numbers.items():
            if number:
                bar = "#" * round(WIDTH * min(number / GB / capacity, 1.5))
                yield f"{phase:<9} {name:<24}{number / GB:9.3f} GB  {bar}".rstrip()
    fits = peak / GB <= USABLE * capacity
    yield f"{'peak':<34}{peak / GB:9.3f} GB of {capacity} GB ({gpu}): it {'fits' if fits else 'does not fit'}"
    if not fits:
        phase = max(("sampling", "update"), key=lambda name: sums[name])
        largest = "held" if sums["held"] > sums[phase] else phase
        yield f"To change     {ADVICE[largest]}"


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
    # Adam has two moments, and DeepSpeed a float32 copy of the weights, too. torchao's moments have 8 bits
    state = 2.0 if args.rounds_stochastically else 12.0 if stage > 0 else 8.0
    weight_shards = processes if stage == 3 else 1
    base = min(size.base_bytes, 2.0) if mixed else size.base_bytes
    gradients = weight * size.trained / (processes if stage >= 2 else 1)
    held = {
        "weights": (weight * (size.trained + size.frozen) + base * size.base) / weight_shards,
        "reference policies": weight * size.reference / weight_shards,
        "optimizer": state * size.trained / (processes if stage > 0 else 1),
        "gradients": gradients if stage == 3 else 0.0,
        "buckets of DDP": 4.0 * size.trained if stage == 0 and processes > 1 else 0.0,
    }
    text, longest = size.dimensions, size.prompt + args.num_turns * args.max_completion_length
    rows = args.items_per_device * args.nodes_per_turn[-1] * args.completions_per_node
    if args.generation_token_budget is not None:
        rows = max(1, min(rows, args.generation_token_budget // longest))
    head = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    copies = number * (size.trained + size.frozen) if half and weight == 4.0 else 0.0  # made by autocast
    sampling = {
        "key-value cache": 2 * number * text.num_hidden_layers * heads * head * rows * longest,
        "probabilities": 3 * 4.0 * rows * text.vocab_size,
        "weights of an agent": number * size.largest if stage == 3 or copies else 0.0,
    }
    rows, layers = args.per_device_train_batch_size, text.num_hidden_layers
    shared = longest - args.max_completion_length  # by the completions of a node
    prompts = -(-rows // args.completions_per_node) if size.packs else rows
    tokens = prompts * shared + rows * args.max_completion_length
    layer = tokens * number * (16 * text.hidden_size + 4 * text.intermediate_size)
    kept = size.agents * layers * tokens * number * text.hidden_size
    unsplit = size.trained - size.trained / processes if stage == 2 else size.trained if stage == 3 else 0.0
    if copies and size.base_bytes == 4.0:
        # Autocast also copies a base for the backward pass; with gradient checkpointing, one layer at a time
        copies += number * size.base * (1 / layers if args.gradient_checkpointing else size.agents)
    live = min(size.trained + size.frozen + size.base, MAX_LIVE)
    update = {
        "gradients": 0.0 if stage == 3 else gradients,
        "activations": kept + layer if args.gradient_checkpointing else size.agents * layers * layer,
        "log-probabilities": 4.0 * CHUNK_COPIES * min(tokens, CHUNK_TOKENS) * min(text.vocab_size, CHUNK_WORDS),
        "weights to compute with": number * live if stage == 3 else copies,
        "gradients not yet split": weight * min(unsplit, MAX_LIVE if stage == 3 else MAX_BUCKET),
        "gradients in float32": 4.0 * size.trained / processes if mixed and stage < 3 else 0.0,
    }
    return {"held": held, "sampling": sampling, "update": update}


def time_lines(run: PreparedRun, size: Size, gpu: str) -> Iterator[str]:
    """
    Yields the lines of a plan about the shortest possible time of an optimizer step: reading the weights once per
    sampled token of a level, and the matrix products of the update, at the full speed of the GPU. Sampling with
    transformers takes several times as long, because it launches many small kernels.
    """
    args, (_, bandwidth, flops) = run.training_args, GPUS[gpu]
    agents, length = size.agents, args.max_completion_length
    read = 2.0 * size.largest * agents * args.num_turns * length
    # The rows of a tree share their first prompt
    tokens = args.items_per_device * (size.prompt + args.rows_per_item * length) * agents
    operations = 4 if size.base else 6  # per parameter and token; frozen weights need no gradient
    computed = (operations + 2 * args.gradient_checkpointing) * size.largest * tokens
    yield (
        f"step, at least: sampling {read / bandwidth / 1e12:.3g} s, update {computed / flops / 1e12:.3g} s (the "
        f"speed of {gpu} as published)"
    )
