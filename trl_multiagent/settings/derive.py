"""Checks the merged settings as a whole, and derives the arguments of the trainer from them."""

import dataclasses
import importlib.util
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from trl_multiagent.environments.prompt_files import PromptFiles
from trl_multiagent.environments.task import DatasetSource, Task
from trl_multiagent.environments.task_errors import describe
from trl_multiagent.limits import short
from trl_multiagent.settings.algorithms import (
    ACTOR_CRITICS,
    ALGORITHMS,
    ITERATIVE,
    PREFERENCE_ALGORITHMS,
    SINGLE_AGENT,
)
from trl_multiagent.settings.comlrl import HISTORY
from trl_multiagent.settings.read import ConfigError, check
from trl_multiagent.settings.schema import (
    AgentModel,
    AlgorithmExtras,
    CriticExtras,
    RewardProcessor,
    algorithm_keys,
    extras_of,
    sections_of,
)


Part = TypeVar("Part")
DEFAULT_KL_COEF = 0.1
ARGUMENTS_OF_FORMS = {  # the `critic_form` in which an argument has an effect
    "critic_lora_r": "adapter",
    "critic_lora_alpha": "adapter",
    "critic_trains_trunk": "head",
}


@dataclass
class Settings:
    """
    The checked settings of a run.

    Args:
        algorithm (`str`): Name of the algorithm's section.
        task ([`~trl_multiagent.environments.task.Task`]): What the run trains on.
        model_names (`str` or `list[str]`): The model id or folder from which all agents start, or one per agent.
        merged (`dict`): All settings that were given, under the names of this release.
        values (`dict[str, dict[str, Any]]`): The checked settings by section, with top-level settings under `""`.
        sections (`dict[str, Any]`): For each section, an instance of its dataclass with these values and the defaults.
        extras ([`AlgorithmExtras`]): The settings in the algorithm's section that are not arguments of the trainer.
        arguments (`dict[str, Any]`): The other settings in it, with the defaults of the section: arguments of the trainer and, for some
            algorithms, of the collection of preferences.
        notes (`list[str]`): Messages to the user about the settings.
    """

    algorithm: str
    task: Task
    model_names: str | list[str]
    merged: dict[str, Any]
    values: dict[str, dict[str, Any]]
    sections: dict[str, Any]
    extras: AlgorithmExtras
    arguments: dict[str, Any]
    notes: list[str]

    @property
    def agents(self) -> list[str] | None:
        return self.values[""].get("agents")

    @property
    def num_agents(self) -> int:
        return self.arguments["num_agents"]

    @property
    def is_centralized(self) -> bool:
        """Whether one agent answers for all roles of the task."""
        return self.extras.collaboration_mode == "centralized"

    @property
    def num_policies(self) -> int:
        """Number of agents of the team: that of the roles, or one that answers for all of them."""
        return 1 if self.is_centralized else self.num_agents

    def part(self, cls: type[Part], **changes: Any) -> Part:
        """
        The settings in the algorithm's section that are fields of a dataclass, as an instance of it.

        Args:
            cls (`type`): The dataclass.
            **changes: Values that replace those of the settings.

        Raises:
            ConfigError: they contradict each other.
        """
        names = {field.name for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
        values = {name: value for name, value in self.arguments.items() if name in names}
        try:
            return cls(**{**values, **changes})
        except ValueError as error:
            raise ConfigError(f"section `{self.algorithm}`: {error}") from error

    @property
    def has_peft_section(self) -> bool:
        return self.merged.get("peft") is not None


def check_settings(algorithm: str, task: Task, merged: dict[str, Any]) -> Settings:
    """
    Checks the merged settings.

    Raises:
        ConfigError: a setting is unknown, has the wrong type, or contradicts another one.
    """
    values, without_effect = check(algorithm, task, merged)
    try:
        sections = {name: cls(**values[name]) for name, cls in sections_of(task).items()}
    except ValueError as error:
        raise ConfigError(str(error)) from error
    without_effect += typing.cast(DatasetSource, sections["dataset"]).without_effect
    for name, section in sections.items():
        if isinstance(section, PromptFiles) and section.prompts:  # the files may change later
            merged[name] = section.saved()
    model, agents = sections["agent_model"], values[""].get("agents")
    model_names = agents if agents is not None else model.name
    if model_names is None:
        raise ConfigError("`agent_model.name` is missing: a model id or folder that every agent starts from.")
    check_names(model_names, agents)
    for name in ("baseline_model", "control_model"):
        played = getattr(sections["evaluation"], name)
        if played is not None and played not in task.models:
            check_names(played, None, f"evaluation.{name}")
    check_team_form(model, agents, merged.get("peft") is not None)
    given = {**ALGORITHMS[algorithm].defaults, **values[algorithm]}
    extras = [field.name for field in dataclasses.fields(extras_of(algorithm))]
    settings = Settings(
        algorithm=algorithm,
        task=task,
        model_names=model_names,
        merged=merged,
        values=values,
        sections=sections,
        extras=extras_of(algorithm)(**{k: v for k, v in given.items() if k in extras}),
        arguments={k: v for k, v in given.items() if k not in extras},
        notes=[],
    )
    complete_arguments(settings)
    if algorithm in ACTOR_CRITICS:
        complete_critics(settings)
    without_effect += settings_without_effect(settings)
    if without_effect:
        settings.notes.append(f"these settings have no effect here: {', '.join(without_effect)}.")
    if settings.is_centralized and settings.num_agents == 1:
        raise ConfigError(
            f"`{algorithm}.collaboration_mode: centralized` has one agent answer for several roles, but there is one role: remove it."
        )
    if settings.agents is not None and len(settings.agents) != settings.num_policies:
        reason = "`collaboration_mode: centralized`" if settings.is_centralized else "`num_agents`"
        raise ConfigError(
            f"`agents` has {len(settings.agents)} entries for {settings.num_policies} agents ({reason})."
        )
    return settings


def check_team_form(model: AgentModel, agents: list[str] | None, has_peft_section: bool) -> None:
    """
    Refuses settings from which no team can be made.

    Raises:
        ConfigError: settings exclude each other, or bitsandbytes is missing.
    """
    if has_peft_section and model.use_peft:
        raise ConfigError("`peft` and `agent_model.use_peft` both make the agents LoRA adapters; give one of them.")
    if model.lora_arguments and not model.use_peft:
        name = next(iter(model.lora_arguments))
        raise ConfigError(f"`agent_model.{name}` has no effect without `agent_model.use_peft: true`; or use `peft`.")
    has_adapters = has_peft_section or model.use_peft
    if model.share_weights and has_adapters:
        raise ConfigError(
            "`agent_model.share_weights` makes all agents one model, but `peft` or `agent_model.use_peft` gives every "
            "agent an adapter; choose one."
        )
    if model.share_weights and agents is not None and len(set(agents)) > 1:
        raise ConfigError("`agent_model.share_weights` makes all agents one model, but `agents` lists several.")
    own = {
        "dtype",
        "torch_dtype",
        "revision",
        "attn_implementation",
        "trust_remote_code",
        "quantization_config",
        "device_map",
    }
    twice = sorted(own & (model.model_init_kwargs or {}).keys())
    if twice:
        raise ConfigError(
            f"`agent_model.model_init_kwargs` (or `model_kwargs`) must not have {twice[0]!r}, which is set elsewhere."
        )
    if not model.is_quantized:
        if model.quantization_arguments:
            name = next(iter(model.quantization_arguments))
            raise ConfigError(f"`agent_model.{name}` has no effect without `agent_model.load_in_4bit: true`.")
        return
    if model.load_in_4bit and model.load_in_8bit:
        raise ConfigError("`agent_model.load_in_4bit` and `load_in_8bit` are both true; choose one.")
    if not has_adapters:
        raise ConfigError(
            "Quantized weights cannot be trained: with `load_in_4bit` or `load_in_8bit`, set `peft` or `agent_model.use_peft`."
        )
    if importlib.util.find_spec("bitsandbytes") is None:
        raise ConfigError(
            "`load_in_4bit` and `load_in_8bit` need bitsandbytes: pip install trl-multiagent[quantization]."
        )


def check_names(names: str | list[str], agents: list[str] | None, setting: str | None = None) -> None:
    """
    Refuses models that cannot exist: paths without a folder, and texts that are no id.

    Raises:
        ConfigError: there is no such folder, or a name is blank.
    """
    setting = setting or ("agent_model.name" if agents is None else "agents")
    for name in [names] if isinstance(names, str) else names:
        is_path = name.startswith(("/", "./", "../", "~")) or name.count("/") > 1
        if is_path and not Path(name).is_dir():
            advice = " `~` is not expanded." if name.startswith("~") else ""
            raise ConfigError(f"`{setting}` is {name!r}, but there is no such folder.{advice}")


def settings_without_effect(settings: Settings) -> Iterator[str]:
    """The paths of the given settings that other ones make useless, each with the reason."""
    algorithm, arguments, given = settings.algorithm, settings.arguments, settings.values[settings.algorithm]
    keys = algorithm_keys(algorithm)

    def value(name: str) -> Any:
        return arguments.get(name, keys[name].default if name in keys else None)

    if settings.agents is not None and settings.sections["agent_model"].name is not None:
        yield "agent_model.name (`agents` is used)"
    reasons: dict[str, Any] = {}
    if value("num_turns") in (None, 1):
        reasons |= dict.fromkeys((*HISTORY, "max_history_length"), "one turn has no past")
        reasons |= dict.fromkeys(("handoff", "discount"), "there is one turn")
    elif value("handoff") is not None and algorithm not in ACTOR_CRITICS:
        reasons["discount"] = "the return of a chain's joint action is its reward"
    if algorithm in ITERATIVE or value("num_iterations") in (None, 1):
        ratio = "with one step per batch the probability ratio is 1"
        reasons |= dict.fromkeys(("epsilon", "epsilon_high", "delta", "importance_ratio"), ratio)
        reasons["value_clip_range"] = "with one step per batch the value is the old one"
    if not value("use_vllm"):
        reasons |= dict.fromkeys((name for name in keys if name.startswith("vllm_")), "`use_vllm` is off")
    if not value("beta"):
        reasons |= dict.fromkeys(("sync_ref_model", "use_bias_correction_kl"), "`beta` is off")
    if not value("sync_ref_model"):
        reasons |= dict.fromkeys(("ref_model_mixup_alpha", "ref_model_sync_steps"), "`sync_ref_model` is off")
    if algorithm in ACTOR_CRITICS:
        form = value("critic_form")
        reasons |= {name: f"`critic_form` is {form!r}" for name, own in ARGUMENTS_OF_FORMS.items() if form != own}
    if algorithm == "reward_model":
        reasons |= dict.fromkeys(
            (x.name for x in dataclasses.fields(AlgorithmExtras)), "a reward model plays no items"
        )
    for name, reason in reasons.items():
        if name in given and given[name] is not None and given[name] != keys[name].default:
            yield f"{algorithm}.{name} ({reason})"


def complete_arguments(settings: Settings) -> None:
    """Derives trainer's arguments and notes from the other settings, and adds them to `settings`."""
    algorithm, values, extras = settings.algorithm, settings.values, settings.extras
    arguments, notes = settings.arguments, settings.notes

    def set_once(name: str, value: Any, source: str) -> None:
        if name in arguments and arguments[name] != value:
            raise ConfigError(
                f"`{source}` sets `{algorithm}.{name}` to {value}, which is {arguments[name]}; give one."
            )
        arguments[name] = value

    if values[""].get("seed") is not None:
        arguments["seed"] = values[""]["seed"]
    roles = settings.task.roles
    if roles is None:
        arguments.setdefault("num_agents", 1 if algorithm in SINGLE_AGENT else 2)
    else:
        arguments.setdefault("num_agents", len(roles(settings.sections) if callable(roles) else roles))
    if algorithm in SINGLE_AGENT and arguments["num_agents"] != 1:
        raise ConfigError(
            f"`{algorithm}.num_agents` is {arguments['num_agents']}: {algorithm.upper()} trains one agent; "
            f"{SINGLE_AGENT[algorithm]} trains several."
        )
    if arguments.get("report_to", "none") is None:
        arguments["report_to"] = "none"  # TRL's way to say null
    if "handoff" not in arguments and set(arguments.get("turn_gradient_weights") or [1.0]) != {1.0}:
        arguments["handoff"] = "random"
        notes.append(f"`{algorithm}.turn_gradient_weights` weigh a chain of turns: `{algorithm}.handoff` is 'random'.")
    learns_from_pairs = algorithm in PREFERENCE_ALGORITHMS
    if learns_from_pairs and (extras.reference_kl_enabled or extras.reference_kl_coef is not None):
        notes.append(f"`{algorithm}.reference_kl_*` have no effect: the loss has a reference policy, see `beta`.")
    elif extras.reference_kl_enabled:
        coefficient = DEFAULT_KL_COEF if extras.reference_kl_coef is None else extras.reference_kl_coef
        set_once("beta", coefficient, f"{algorithm}.reference_kl_coef")

    processor: RewardProcessor = settings.sections["reward_processor"]
    for name, argument in {"scale_factor": "reward_scale", "shift": "reward_shift"}.items():
        value = getattr(processor, name)
        if processor.enabled and value is not None and arguments.setdefault(argument, value) != value:
            notes.append(
                f"`reward_processor.{name}: {value:g}` is not used, because `{algorithm}.{argument}` is {arguments[argument]:g}."
            )
    model: AgentModel = settings.sections["agent_model"]
    if model.trust_remote_code:
        arguments["trust_remote_code"] = True  # for vLLM
    precision = {"bfloat16": "bf16", "float16": "fp16"}.get(model.torch_dtype or "")
    if precision in algorithm_keys(algorithm) and not {"bf16", "fp16"} & arguments.keys():
        arguments[precision] = True
        notes.append(
            f"`agent_model.torch_dtype: {model.torch_dtype}` is the data type to compute in (`{algorithm}.{precision}: true`); the "
            "weights that are trained are float32."
        )
    if settings.sections["output"].verbose:
        arguments.setdefault("log_completions", True)
    if settings.sections["wandb"].project is not None:
        arguments.setdefault("report_to", ["wandb"])
        arguments.setdefault("run_name", settings.sections["wandb"].name)

    if extras.rollout_buffer_size is not None and "items_per_device" in arguments:
        raise ConfigError(f"`{algorithm}.rollout_buffer_size` sets `{algorithm}.items_per_device`; give one of them.")
    if extras.train_batch_size not in (None, extras.rollout_buffer_size) and not learns_from_pairs:
        notes.append(f"`{algorithm}.train_batch_size` has no effect: every optimizer step uses the whole batch.")
    if extras.eval_interval is not None and ("eval_strategy" in arguments or "eval_steps" in arguments):
        raise ConfigError(f"`{algorithm}.eval_interval` sets `eval_strategy` and `eval_steps`; give one or the other.")
    evaluates = (
        "eval_interval"
        if extras.eval_interval
        else "eval_strategy"
        if arguments.get("eval_strategy", "no") != "no"
        else None
    )
    plays_items = algorithm != "reward_model"  # which is evaluated on the pairs that it holds out
    if evaluates is not None and plays_items and settings.sections["dataset"].eval_split is None:
        raise ConfigError(
            f"`{algorithm}.{evaluates}` enables evaluation, but there is no evaluation set: set `dataset.eval_split`, or remove it."
        )
    one_row = "gradient_accumulation_steps" not in arguments and arguments.get("per_device_train_batch_size", 1) == 1
    if one_row and not learns_from_pairs:
        # With critics, an item has one row by default, and advantages are standardized over the batch
        arguments.setdefault("items_per_device", 8 if algorithm in ACTOR_CRITICS else 1)


def complete_critics(settings: Settings) -> None:
    """
    Derives the trainer's arguments about critics from the sections about them, and from the peer's names.

    Raises:
        ConfigError: settings contradict each other.
    """
    algorithm, arguments, notes = settings.algorithm, settings.arguments, settings.notes
    extras = typing.cast(CriticExtras, settings.extras)
    section = settings.sections["critic_model"].name or None
    given = arguments.get("critic_models")
    models = settings.values[""].get("critics") or section or given
    if extras.use_separate_critic is False:
        if arguments.setdefault("critic_form", "head") != "head":
            raise ConfigError(
                f"`{algorithm}.use_separate_critic` is False, but `{algorithm}.critic_form` is "
                f"{arguments['critic_form']!r}; give one of them."
            )
        if algorithm == "maac":
            arguments.setdefault("critic_trains_trunk", False)
    elif extras.use_separate_critic and arguments.get("critic_form") == "head":
        raise ConfigError(
            f"`{algorithm}.use_separate_critic` is True, but `{algorithm}.critic_form` is 'head'; give one of them."
        )
    has_head = arguments.get("critic_form") == "head"
    if extras.value_head_hidden_dim is not None:
        if has_head:
            arguments.setdefault("critic_value_head_hidden_dim", extras.value_head_hidden_dim)
        else:
            notes.append(f"`{algorithm}.value_head_hidden_dim` has no effect: the critic is separate from the agent.")
    if given == []:
        raise ConfigError(f"`{algorithm}.critic_models` is an empty list: name a model, or leave it out.")
    if models is None:
        return
    if given is not None and given != models:
        raise ConfigError(
            f"`{algorithm}.critic_models` is {given!r}, but the critics are {models!r}; give one of them."
        )
    if has_head and given is None:
        notes.append("`critic_model` and `critics` have no effect: the value head is on the agent's own model.")
        return
    arguments.pop("critic_models", None)
    if models not in (settings.model_names, [settings.model_names]):  # those are the default
        setting = "critics" if isinstance(models, list) else "critic_model.name"
        setting = setting if given is None else f"{algorithm}.critic_models"
        check_names(models, None, setting)
        built = [name for name in ([models] if isinstance(models, str) else models) if name in settings.task.models]
        if built:
            raise ConfigError(
                f"`{setting}` names {built[0]!r}, which the task builds. It can be a critic only where all agents start from it, "
                "and is then the default. Leave it out, or give a folder."
            )
        arguments["critic_models"] = models


def make_training_args(settings: Settings, config_class: type | None = None) -> Any:
    """
    Makes the trainer's arguments. This imports TRL, which takes seconds.

    Args:
        settings ([`Settings`]): The settings.
        config_class (`type`, *optional*): The class of the arguments; by default that of the algorithm.

    Raises:
        ConfigError: the configuration class refuses a value.
    """
    algorithm, extras, arguments = settings.algorithm, settings.extras, dict(settings.arguments)
    if "num_agents" in arguments:
        arguments["num_agents"] = settings.num_policies
    config_class = config_class or ALGORITHMS[algorithm].config_class()
    if algorithm in PREFERENCE_ALGORITHMS:  # the section is also about the collection
        names = {field.name for field in dataclasses.fields(config_class)}
        arguments = {name: value for name, value in arguments.items() if name in names}
    try:
        args = config_class(**arguments)  # computes the size of a tree and the number of processes
        if algorithm in PREFERENCE_ALGORITHMS:
            changes = pair_arguments(extras, args, "per_device_train_batch_size" in arguments)
        else:
            changes = item_arguments(extras, args)
        return config_class(**arguments | changes) if changes else args
    except (
        *(ValueError, ImportError, AttributeError, LookupError, ArithmeticError),
        *(NotImplementedError, OSError, RuntimeError, TypeError),
    ) as error:
        problem = str(error) if isinstance(error, ValueError | ImportError) else describe(error)
        raise ConfigError(f"section {where(algorithm, config_class, arguments, str(error))}: {problem}") from error


def where(algorithm: str, config_class: type, arguments: Mapping[str, Any], message: str) -> str:
    """
    The place of an error of the configuration class: the section and, if the message names no argument, those without which there would
    be no error.
    """
    names: list[str] = []
    if not any(f"`{name}" in message for name in arguments):
        for name in arguments:
            try:
                config_class(**{k: v for k, v in arguments.items() if k != name})
                names.append(f"`{name}: {short(arguments[name])}`")
            except Exception:  # the argument is not to blame
                continue
    return f"`{algorithm}`{', ' * bool(names)}{' or '.join(names)}"


def item_arguments(extras: AlgorithmExtras, args: Any) -> dict[str, Any]:
    """The trainer's arguments for two settings of CoMLRL, in a training on items: nodes per update, and items between evaluations."""
    arguments: dict[str, Any] = {}
    if extras.rollout_buffer_size is not None:
        arguments["items_per_device"] = max(1, extras.rollout_buffer_size // sum(args.nodes_per_turn))
    if extras.eval_interval is not None:
        items_per_step = arguments.get("items_per_device", args.items_per_device) * args.world_size
        arguments["eval_strategy"] = "steps" if extras.eval_interval > 0 else "no"
        arguments["eval_steps"] = max(1, extras.eval_interval * args.num_iterations // items_per_step)
    return arguments


def pair_arguments(extras: AlgorithmExtras, args: Any, has_batch_size: bool) -> dict[str, Any]:
    """The trainer's arguments, in a training on pairs, for two settings of CoMLRL: pairs per step, and steps between evaluations."""
    arguments: dict[str, Any] = {}
    pairs = extras.train_batch_size or extras.rollout_buffer_size
    if pairs is not None and not has_batch_size:
        arguments["per_device_train_batch_size"] = max(
            1, pairs // (args.world_size * args.gradient_accumulation_steps)
        )
    if extras.eval_interval is not None:
        arguments["eval_strategy"] = "steps" if extras.eval_interval > 0 else "no"
        arguments["eval_steps"] = max(1, extras.eval_interval)
    return arguments
