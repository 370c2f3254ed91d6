"""Checks the merged settings as a whole, and derives the arguments of the trainer from them."""

import contextlib
import importlib.util
import os
from collections.abc import Callable, Collection, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

from huggingface_hub.utils import validate_repo_id

from trl_multiagent.console import install_command
from trl_multiagent.environments.prompt_files import PromptFiles
from trl_multiagent.environments.task import DatasetSource, ModelBuilder, Task, TaskSettings
from trl_multiagent.environments.task_errors import UnavailableError, describe
from trl_multiagent.folders import MODEL_FILES, holds_model
from trl_multiagent.limits import short
from trl_multiagent.models.packaged import PACKAGED
from trl_multiagent.settings.algorithms import (
    ACTOR_CRITICS,
    ALGORITHMS,
    ITERATIVE,
    PREFERENCE_ALGORITHMS,
    SINGLE_AGENT,
    import_class,
)
from trl_multiagent.settings.read import HISTORY, ConfigError, Layer, check, config_errors
from trl_multiagent.settings.schema import (
    AgentModel,
    AlgorithmExtras,
    CriticExtras,
    Output,
    Wandb,
    algorithm_keys,
    extras_of,
    sections_of,
)


Part = TypeVar("Part")
DEFAULT_KL_COEF = 0.1
# Arguments of `from_pretrained` that other settings decide
SET_ELSEWHERE = "attn_implementation device_map dtype quantization_config revision torch_dtype".split()
# Settings that trainings of teams alone have
NOT_OF_REWARD_MODELS = """
    rollout_buffer_size eval_interval eval_num_samples reference_kl_enabled reference_kl_coef resume_from_checkpoint
""".split()


@dataclass(kw_only=True)
class Settings:
    """The checked settings of a run."""

    algorithm: str  # name of its section
    task: Task  # the task of the run
    merged: Layer  # all settings that were given, under the names of this release: the run's `config.yaml`
    values: dict[str, dict[str, Any]]  # the checked settings by section, with top-level settings under `""`
    sections: dict[str, Any]  # for each section, an instance of its dataclass with these values and the defaults
    extras: AlgorithmExtras  # settings in the algorithm's section that are not arguments of the trainer
    # The others, with the section's defaults: of the trainer, or the collection of preferences
    arguments: dict[str, Any]
    notes: list[str]  # messages to the user about the settings
    prog: str = "recipe"  # name of the program in messages
    dry_run: bool = False  # whether to print the plan and stop

    @property
    def agent_model(self) -> AgentModel:
        return self.sections["agent_model"]

    @property
    def dataset(self) -> DatasetSource:
        return self.sections["dataset"]

    @property
    def output(self) -> Output:
        return self.sections["output"]

    @property
    def wandb(self) -> Wandb:
        return self.sections["wandb"]

    @property
    def seats(self) -> dict[str, Any]:
        """The sections of the roles that are not trained."""
        return self.values[""].get("seats") or {}

    @property
    def builders(self) -> dict[str, Callable[[], str]]:
        """The functions that build the base models of the task, and find those that a package has."""
        own = self.for_task(Path(self.output.base_dir))
        return PACKAGED | {
            name: partial(model.build, own) if isinstance(model, ModelBuilder) else model
            for name, model in self.task.models.items()
        }

    @property
    def agents(self) -> list[str] | None:
        return self.values[""].get("agents")

    @property
    def model_names(self) -> str | list[str]:
        """The model id or folder from which all agents start, or one per agent."""
        names = self.agent_model.name if self.agents is None else self.agents
        assert names is not None  # checked
        return names

    @property
    def model_list(self) -> list[str]:
        return [self.model_names] if isinstance(self.model_names, str) else self.model_names

    @property
    def names_models(self) -> str:
        """The setting that names the models of the agents."""
        return "agent_model.name" if self.agents is None else "agents"

    @property
    def num_agents(self) -> int:
        return self.arguments["num_agents"]

    @property
    def is_centralized(self) -> bool:
        """Whether one agent answers for all roles of the task."""
        return self.extras.collaboration_mode == "centralized"

    @property
    def num_policies(self) -> int:
        """Number of agents of the team: one per role, or one agent for all roles."""
        return 1 if self.is_centralized else self.num_agents

    @property
    def has_peft_section(self) -> bool:
        return self.merged.get("peft") is not None

    @property
    def has_named_folder(self) -> bool:
        """Whether the same command writes to the same folder again."""
        return bool(self.arguments.get("output_dir") or run_id())

    def for_task(self, run_folder: Path) -> TaskSettings:
        """Returns the argument of the task's functions."""
        sections = {name: self.sections[name] for name in ("dataset", *self.task.settings)}
        return TaskSettings(sections, self.num_agents + len(self.seats), run_folder, self.is_centralized)

    def arguments_of(self, cls: type) -> dict[str, Any]:
        """Returns the settings in the algorithm's section that are fields of a dataclass."""
        names = {field.name for field in fields(cls)}
        return {name: value for name, value in self.arguments.items() if name in names}

    def part(self, cls: type[Part], **changes: Any) -> Part:
        """
        Makes an instance of a dataclass from the settings in the algorithm's section that are its fields, and
        `changes`.
        """
        with config_errors(f"section `{self.algorithm}`: "):
            return cls(**{**self.arguments_of(cls), **changes})


def run_id() -> str | None:
    """Returns the id of the run in the environment variables, such as a Slurm job's."""
    return os.environ.get("RUN_ID") or os.environ.get("JOB_ID")


def check_settings(algorithm: str, task: Task, merged: Layer) -> Settings:
    """
    Checks the merged settings. Raises `ConfigError` if one is unknown, has the wrong type, or contradicts another one.
    """
    values, without_effect = check(algorithm, task, merged)
    with config_errors():
        sections = {name: cls(**values[name]) for name, cls in sections_of(task).items()}
    for name, section in sections.items():
        if isinstance(section, PromptFiles) and section.prompts:  # the files may change later
            merged[name] = section.saved()
    given = {**ALGORITHMS[algorithm].defaults, **values[algorithm]}
    extras = extras_of(algorithm)
    own = {field.name: given.pop(field.name) for field in fields(extras) if field.name in given}
    settings = Settings(
        algorithm=algorithm,
        task=task,
        merged=merged,
        values=values,
        sections=sections,
        extras=extras(**own),
        arguments=given,
        notes=[],
    )
    check_team_form(settings)
    check_models(settings.names_models, settings.model_list, task.models, settings.agent_model.gguf_file)
    complete_arguments(settings)
    complete_evaluation(settings)
    if algorithm in ACTOR_CRITICS:
        complete_critics(settings)
    without_effect += settings_without_effect(settings)
    if without_effect:
        settings.notes.append(f"these settings have no effect here: {', '.join(without_effect)}.")
    if settings.is_centralized and settings.num_agents == 1:
        raise ConfigError(f"`{algorithm}.collaboration_mode: centralized` is for several roles, but there is one.")
    if settings.agents is not None and len(settings.agents) != settings.num_policies:
        reason = "`collaboration_mode: centralized`" if settings.is_centralized else "`num_agents`"
        raise ConfigError(
            f"`agents` has {len(settings.agents)} entries for {settings.num_policies} agents ({reason})."
        )
    return settings


def check_team_form(settings: Settings) -> None:
    """
    Raises `ConfigError` if no team can be made: no model is given, settings exclude each other, or bitsandbytes is
    missing.
    """
    model = settings.agent_model
    has_adapters = settings.has_peft_section or model.use_peft
    if model.name is None and settings.agents is None:
        raise ConfigError("`agent_model.name` is missing: a model id or folder that every agent starts from.")
    if settings.has_peft_section and model.use_peft:
        raise ConfigError("`peft` and `agent_model.use_peft` both make the agents LoRA adapters; give one of them.")
    for arguments, is_used, switch in (
        (model.lora_arguments, model.use_peft, "use_peft: true`; or use `peft"),
        (model.quantization_arguments, model.is_quantized, "load_in_4bit: true"),
        (model.given("adapter_roles"), has_adapters, "use_peft: true`; or use `peft"),
    ):
        if arguments and not is_used:
            raise ConfigError(f"`agent_model.{next(iter(arguments))}` has no effect without `agent_model.{switch}`.")
    for name in model.model_init_kwargs or {}:
        if name in SET_ELSEWHERE:
            raise ConfigError(f"`agent_model.model_init_kwargs` must not have {name!r}, which is set elsewhere.")
    if model.is_quantized and not has_adapters:
        raise ConfigError("Quantized weights cannot be trained: set `peft` or `agent_model.use_peft`, too.")
    if model.is_quantized and importlib.util.find_spec("bitsandbytes") is None:
        raise ConfigError(f"Quantized weights need bitsandbytes: {install_command('quantization')}.")


def check_repo_id(setting: str, repo_id: str) -> None:
    """Raises `ConfigError` if a text cannot be the name of a repository on the Hub."""
    with config_errors(f"`{setting}`: {repo_id!r} is not a valid name of a repository. "):
        validate_repo_id(repo_id)


def check_models(
    setting: str, names: str | Sequence[str], known: Container[str] = (), gguf_file: str | None = None
) -> None:
    """
    Raises `ConfigError` if a name is neither among `known`, the models of the task, nor a folder with a model (or
    `gguf_file`), nor a GGUF file, nor a possible Hub id.
    """
    for name in [names] if isinstance(names, str) else names:
        path, is_gguf = Path(name), name.endswith(".gguf")
        if name in known or (is_gguf and path.is_file()):
            continue
        if not path.exists() and (name.startswith(("/", "./", "../", "~")) or name.count("/") > 1):
            raise ConfigError(f"`{setting}` is {name!r}, but there is no such {'file' if is_gguf else 'folder'}.")
        if is_gguf or path.is_file():
            raise ConfigError(f"`{setting}` is {name!r}, which is neither a folder nor a GGUF file.")
        if not path.is_dir():
            check_repo_id(setting, name)
        elif gguf_file and not (path / gguf_file).is_file():
            raise ConfigError(f"`agent_model.gguf_file` is {gguf_file!r}, but there is no such file in {name}.")
        elif not gguf_file and not holds_model(path):
            raise ConfigError(f"`{setting}` is {name!r}, a folder with none of {', '.join(MODEL_FILES)}.")


def settings_without_effect(settings: Settings) -> Iterator[str]:
    """Yields the paths of given settings that have no effect because of others, each with the reason."""
    algorithm, given = settings.algorithm, settings.values[settings.algorithm]
    keys = algorithm_keys(algorithm)

    def value(name: str) -> Any:
        return settings.arguments.get(name, keys[name].default if name in keys else None)

    if settings.agents is not None and settings.agent_model.name is not None:
        yield "agent_model.name (`agents` is used)"
    reasons: dict[str, str] = {}
    if value("num_turns") in (None, 1) and value("branching") != "episodes":
        reasons |= dict.fromkeys((*HISTORY, "max_history_length", "handoff", "discount"), "there is one turn")
    if value("handoff"):
        reasons["discount"] = "in a chain, a return is the reward of its turn"
    if not value("beta"):
        reasons["use_bias_correction_kl"] = "`beta` is off"
    if algorithm in ACTOR_CRITICS and value("critic_form") != "adapter":
        reasons["critic_lora_r"] = f"`critic_form` is {value('critic_form')!r}"
    if algorithm in PREFERENCE_ALGORITHMS:
        reasons |= dict.fromkeys(("reference_kl_enabled", "reference_kl_coef"), "the reference policy has `beta`")
    if trained_with := value("rl_algorithm"):
        of_some = algorithm_keys("magrpo").keys() ^ algorithm_keys("iac").keys()
        reasons |= dict.fromkeys(of_some - algorithm_keys(trained_with).keys(), f"`rl_algorithm` is {trained_with!r}")
    if algorithm == "reward_model":
        reasons |= dict.fromkeys(NOT_OF_REWARD_MODELS, "a reward model has none, and resumes on its own")
        if settings.output.save_path:
            yield "output.save_path (the model is in the folder of its training)"
    for name in given:
        if name in reasons and given[name] is not None and given[name] != keys[name].default:
            yield f"{algorithm}.{name} ({reasons[name]})"


def complete_arguments(settings: Settings) -> None:
    """
    Derives arguments of the trainer and notes from the other settings. Raises `ConfigError` if they contradict each
    other.
    """
    algorithm, sections, extras = settings.algorithm, settings.sections, settings.extras
    arguments, notes, model = settings.arguments, settings.notes, settings.agent_model
    seed = settings.values[""].get("seed")
    if seed is not None:
        arguments["seed"] = seed
    roles = settings.task.roles
    own_roles = roles(sections) if callable(roles) else roles
    default = 1 if algorithm in SINGLE_AGENT else 2
    number = default if own_roles is None else max(1, len(own_roles) - len(settings.seats))
    arguments.setdefault("num_agents", number)
    if algorithm in SINGLE_AGENT and arguments["num_agents"] != 1:
        raise ConfigError(
            f"`{algorithm}.num_agents`: {algorithm} trains one agent; {SINGLE_AGENT[algorithm]} trains several."
        )
    if arguments.get("report_to", "none") is None:
        arguments["report_to"] = "none"  # TRL's way to say null
    if "handoff" not in arguments and set(arguments.get("turn_gradient_weights") or [1.0]) != {1.0}:
        arguments["handoff"] = "random"
        notes.append(f"`{algorithm}.turn_gradient_weights` weigh a chain of turns: `{algorithm}.handoff` is 'random'.")
    if extras.reference_kl_enabled and algorithm not in PREFERENCE_ALGORITHMS:
        beta = DEFAULT_KL_COEF if extras.reference_kl_coef is None else extras.reference_kl_coef
        if arguments.setdefault("beta", beta) != beta:
            raise ConfigError(
                f"`{algorithm}.reference_kl_coef` sets `beta` to {beta}, which is {arguments['beta']}; give one."
            )
    processor = sections["reward_processor"]
    for name, argument in {"scale_factor": "reward_scale", "shift": "reward_shift"}.items():
        value = getattr(processor, name)
        if processor.enabled and value is not None and arguments.setdefault(argument, value) != value:
            notes.append(
                f"`reward_processor.{name}: {value:g}` is not used, because `{algorithm}.{argument}` is "
                f"{arguments[argument]:g}."
            )
    if model.trust_remote_code:
        arguments["trust_remote_code"] = True  # for vLLM
    precision = {"bfloat16": "bf16", "float16": "fp16"}.get(model.torch_dtype or "")
    if precision in algorithm_keys(algorithm) and not {"bf16", "fp16"} & arguments.keys():
        arguments[precision] = True
        notes.append(
            f"`agent_model.torch_dtype: {model.torch_dtype}` is the data type to compute in "
            f"(`{algorithm}.{precision}: true`); trained weights are float32."
        )
    if settings.output.verbose:
        arguments.setdefault("log_completions", True)
    if settings.wandb.project:
        arguments.setdefault("report_to", ["wandb"])
    arguments.setdefault("run_name", settings.wandb.name)


def complete_evaluation(settings: Settings) -> None:
    """Derives `items_per_device`. Raises `ConfigError` if settings of batches or evaluations contradict each other."""
    algorithm, arguments, extras = settings.algorithm, settings.arguments, settings.extras
    learns_from_pairs = algorithm in PREFERENCE_ALGORITHMS
    if extras.rollout_buffer_size and "items_per_device" in arguments:
        raise ConfigError(f"`{algorithm}.rollout_buffer_size` sets `{algorithm}.items_per_device`; give one of them.")
    if extras.train_batch_size not in (None, extras.rollout_buffer_size) and not learns_from_pairs:
        settings.notes.append(
            f"`{algorithm}.train_batch_size` has no effect: every optimizer step uses the whole batch."
        )
    if extras.eval_interval is not None and ("eval_strategy" in arguments or "eval_steps" in arguments):
        raise ConfigError(f"`{algorithm}.eval_interval` sets `eval_strategy` and `eval_steps`; give one or the other.")
    leaves_open = arguments.get("per_device_train_batch_size", 1) in (1, "auto")
    if leaves_open and "gradient_accumulation_steps" not in arguments and not learns_from_pairs:
        # With critics, an item has one row by default, and advantages are standardized over the batch
        arguments.setdefault("items_per_device", 8 if arguments.get("rl_algorithm", algorithm) in ACTOR_CRITICS else 1)


def complete_critics(settings: Settings) -> None:
    """
    Derives the trainer's arguments about critics from their sections and CoMLRL's names, see [`complete_arguments`].
    """
    algorithm, arguments, notes = settings.algorithm, settings.arguments, settings.notes
    extras = cast(CriticExtras, settings.extras)
    separate = extras.use_separate_critic
    if separate is False:
        arguments.setdefault("critic_form", "head")
    form = arguments.get("critic_form")
    if separate is not None and (form == "head") == separate:
        raise ConfigError(f"`{algorithm}.use_separate_critic` is {separate}, but `critic_form` is {form!r}; give one.")
    if extras.value_head_hidden_dim and form == "head":
        arguments.setdefault("critic_value_head_hidden_dim", extras.value_head_hidden_dim)
    elif extras.value_head_hidden_dim:
        notes.append(f"`{algorithm}.value_head_hidden_dim` has no effect: the critic is separate from the agent.")
    given = arguments.pop("critic_models", None)
    models = settings.values[""].get("critics") or settings.sections["critic_model"].name or given
    if given and given != models:
        raise ConfigError(f"`{algorithm}.critic_models` is {given!r}, but the critics are {models!r}; give one.")
    if form == "head" and models and not given:
        notes.append("`critic_model` and `critics` have no effect: the value head is on the agent's own model.")
    elif models and models not in (settings.model_names, [settings.model_names]):  # not the default
        check_models(f"{algorithm}.critic_models", models, settings.task.models)
        built = {*([models] if isinstance(models, str) else models)} & settings.task.models.keys()
        if built:
            raise ConfigError(f"`critic_models` has {min(built)!r}, which the task builds: give a folder or an id.")
        arguments["critic_models"] = models


def make_training_args(settings: Settings, trained_with: str | None = None, **changes: Any) -> Any:
    """
    Makes the arguments of the algorithm's trainer, or of the trainer of the algorithm `trained_with`. Raises
    `ConfigError` if their class refuses a value.
    """
    algorithm = settings.algorithm
    config_class = import_class(ALGORITHMS[trained_with or algorithm].config)
    arguments = settings.arguments_of(config_class) | changes  # the section may be about a collection, too
    if algorithm in ITERATIVE:
        arguments.pop("num_iterations", None)  # the rounds; to a trainer, it is the number of steps on each batch
    if "num_agents" in arguments:
        arguments["num_agents"] = settings.num_policies
    given = {name: value for name, value in settings.values[algorithm].items() if name in arguments}
    with argument_errors(algorithm, given, arguments):
        args = config_class(**arguments)  # computes the size of a tree and the number of processes
        more = batch_arguments(settings, args)
        return config_class(**arguments | more) if more else args


@contextlib.contextmanager
def argument_errors(section: str, given: Mapping[str, Any], arguments: Collection[str]) -> Iterator[None]:
    """
    Turns an error of a configuration class within the block into a [`ConfigError`] that names the section and, if the
    error names none of the `arguments`, those values of the user that may be wrong.
    """
    try:
        yield
    except UnavailableError:
        raise  # the processes cannot be connected, whatever the arguments are
    except Exception as error:  # transformers raises errors of many kinds
        problem = str(error) if isinstance(error, ValueError | ImportError) else describe(error)
        likely = {name: value for name, value in given.items() if name in problem or str(value) in problem} or given
        is_named = any(f"`{name}" in problem for name in arguments)
        texts = [] if is_named else [f"`{name}: {short(value)}`" for name, value in likely.items()]
        raise ConfigError(f"section {', '.join([f'`{section}`', *texts])}: {problem}") from error


def batch_arguments(settings: Settings, args: Any) -> dict[str, Any]:
    """
    Converts CoMLRL's settings of nodes (or pairs) per update and of items (or updates) between evaluations to the
    trainer's arguments.
    """
    extras, steps = settings.extras, settings.extras.eval_interval
    arguments = {}
    if settings.algorithm in PREFERENCE_ALGORITHMS:
        pairs = extras.train_batch_size or extras.rollout_buffer_size
        if pairs and "per_device_train_batch_size" not in settings.arguments:
            at_once = args.world_size * args.gradient_accumulation_steps
            arguments["per_device_train_batch_size"] = max(1, pairs // at_once)
    else:
        if extras.rollout_buffer_size:
            nodes = sum(args.nodes_per_turn) * args.world_size
            arguments["items_per_device"] = max(1, extras.rollout_buffer_size // nodes)
        items_per_step = arguments.get("items_per_device", args.items_per_device) * args.world_size
        steps = steps and steps * args.num_iterations // items_per_step
    if extras.eval_interval is not None:
        arguments |= {"eval_strategy": "steps" if extras.eval_interval else "no", "eval_steps": max(1, steps or 0)}
    return arguments
