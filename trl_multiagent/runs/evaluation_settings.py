"""
The settings of `trl-multiagent evaluate` and `cross-play`, and the teams that they name: folders of runs, of saved
teams and of checkpoints, and ids on the Hub.
"""

import argparse
import itertools
import os
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from trl_multiagent.environments.imports import TASKS
from trl_multiagent.environments.prompt_files import PromptFiles, is_template
from trl_multiagent.environments.task import Task
from trl_multiagent.evaluation.config import BASELINES, SAMPLING_FIELDS, EvaluationConfig
from trl_multiagent.folders import RECIPE_FILE, TEAM_FILE, holds_model
from trl_multiagent.limits import read_number, short
from trl_multiagent.models.packaged import PACKAGED
from trl_multiagent.runs.run import algorithm_of, choose_task, settings_of
from trl_multiagent.settings.derive import Settings, check_models
from trl_multiagent.settings.read import (
    RECIPES,
    ConfigError,
    config_errors,
    config_file,
    parse_overrides,
    parse_value,
    pop_path,
    read_yaml,
    renamed,
    resolve,
    suggestion,
)
from trl_multiagent.settings.schema import algorithm_keys, known_settings


DEFAULT_ALGORITHM = "magrpo"  # its defaults apply without a file
# A stranger may have written the `config.yaml` of a team. Unless --config names the file, it may only contain numbers,
# truth values, the choices of a setting, and texts in these sections and settings
TEXTS = (
    "dataset peft agents functions.prompts functions.order block_building.palettes "
    "agent_model.name agent_model.revision agent_model.adapter_roles agent_model.chat_template_kwargs "
    "agent_model.bnb_4bit_quant_storage "
    "agent_model.lora_target_modules agent_model.lora_target_parameters agent_model.lora_modules_to_save "
    "evaluation.baseline_model evaluation.control_model evaluation.pass_metric "
    "evaluation.stop_strings evaluation.chat_template_kwargs "
    "{algorithm}.stop_strings {algorithm}.chat_template_kwargs {algorithm}.frozen_agents"
)
# Values that run code, send requests or weaken the sandbox; `None`: any value
UNSAFE: dict[str, tuple[Any, ...] | None] = {
    "agent_model.trust_remote_code": (True,),
    "agent_model.model_init_kwargs": None,
    "seats": None,
    "external.mode": ("expert_edits", "expert", "edits"),
    "sandbox.min_tier": ("rlimits",),
}
# Settings that are left out, because neither an evaluation nor the training of a control uses them
LEFT_OUT = (
    "output wandb critic_model critics tokenizer external.expert_ "
    "{algorithm}.output_dir {algorithm}.report_to {algorithm}.run_name {algorithm}.logging_dir "
    "{algorithm}.push_to_hub {algorithm}.hub_ {algorithm}.metric_for_best_model {algorithm}.critic_models "
    "{algorithm}.comparator_ {algorithm}.agent_devices {algorithm}.critic_devices {algorithm}.reference_devices "
    "{algorithm}.parallel_training"
)
ATTENTION = ("eager", "sdpa", "flash_attention_2", "flash_attention_3")  # other names are code on the Hub
REFERENCE = re.compile(r"(?<!\\)(\\\\)*\$\{")  # to another setting or to an environment variable
# Settings of an algorithm that an evaluation uses
USED = {
    *SAMPLING_FIELDS,
    *"chat_template_kwargs discount reward_none num_agents collaboration_mode generation_token_budget".split(),
}


@dataclass(frozen=True)
class TeamSource:
    """A team to evaluate."""

    name: str  # in the report
    location: str  # folder or Hub id of a saved team, or of a model that every agent starts from
    roles: tuple[str, ...] | None  # of a saved team; `None` for a model
    run_config: str | None = None  # file with the settings of its run


@dataclass
class Evaluation:
    """The checked settings of an evaluation."""

    settings: Settings
    config: EvaluationConfig  # the section `evaluation`, complete
    teams: list[TeamSource]
    base: str | list[str] | None  # the models from which the agents of the training started, if known
    arguments: argparse.Namespace  # the command line

    @property
    def output_dir(self) -> Path:
        return Path(str(self.config.output_dir))

    @property
    def max_completion_length(self) -> int:
        """Largest number of tokens of a completion of a team's agent."""
        assert self.config.max_completion_length is not None
        return self.config.max_completion_length


# Settings


def make_evaluation_parser(prog: str, cross_play: bool) -> argparse.ArgumentParser:
    """Makes the command line of an evaluation. Every setting of the section `evaluation` is a flag."""
    parser = argparse.ArgumentParser(
        prog=prog,
        usage="%(prog)s TEAM [TEAM ...] [--config FILE | --dataset NAME] [--override KEY=VALUE ...] [--dry_run] "
        "[--SETTING VALUE ...] [--num_processes N] [--accelerate_config FILE]",
        description="Plays the agents of several runs with each other." if cross_play else "Evaluates saved teams.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add(
        "teams",
        metavar="TEAM",
        nargs="+",
        help=(
            "Folder of a saved team, of a run or of a checkpoint, or the Hub id of a team. Also a model, for an "
            "untrained team."
        ),
    )
    add("--config", metavar="FILE", help="YAML file of a training; by default the first run's.")
    add("--override", metavar="KEY=VALUE", nargs="+", action="extend", default=[], help="Settings.")
    add("--task", metavar="TASK", help="The task, as in `trl-multiagent train`.")
    add("--dataset", metavar="NAME", help="Short for --override dataset.name=NAME.")
    add("--split", metavar="SPLIT", help="The rows to evaluate on, such as 'test[:50]'.")
    add("--dry_run", action="store_true", help="Check everything, print the cost, stop.")
    group = parser.add_argument_group(
        "settings, also keys of the section 'evaluation'", "By default, sampling is as in the training."
    )
    for field in fields(EvaluationConfig):
        if not (cross_play and field.name.startswith(("baseline", "control", "contributions", "ablate"))):
            text = f"{field.metadata['help']} (default: {field.default})".replace("%", "%%")
            group.add_argument(f"--{field.name}", nargs="*", metavar="VALUE", default=argparse.SUPPRESS, help=text)
    return parser


def flag_values(arguments: argparse.Namespace) -> dict[str, Any]:
    """Returns the flags of an evaluation as values of the section `evaluation`."""
    values = {}
    for field in fields(EvaluationConfig):
        if field.name in arguments:
            texts: list[str] = getattr(arguments, field.name) or ["true"]  # a flag without a value means true
            is_list = str(field.type).startswith("list")
            if is_list:
                texts = re.findall(r"[^\s,\[\]]+", " ".join(texts))
            parsed = [parse_value(text) for text in texts]
            values[field.name] = parsed if is_list or len(parsed) > 1 else parsed[0]
    return values


def parse_evaluation(task: Task | None, argv: Sequence[str] | None, prog: str, cross_play: bool = False) -> Evaluation:
    """
    Reads and checks the settings of an evaluation, without loading a model or data; see
    [`~runs.evaluation.run_evaluation`].
    """
    parser = make_evaluation_parser(prog, cross_play)
    arguments, unknown = parser.parse_known_args(argv)
    if unknown:
        raise ConfigError(f"unknown argument {unknown[0]!r}{suggestion(unknown[0], parser._option_string_actions)}")
    if cross_play and len(arguments.teams) < 2:
        raise ConfigError("A cross-play needs at least two runs, so that their agents can play with each other.")
    locations = [find_team(text) for text in arguments.teams]
    configs = [find_config(text) or find_config(x) for text, x in zip(arguments.teams, locations, strict=True)]
    arguments.config = arguments.config and config_file("--config", arguments.config, RECIPES)
    config = arguments.config or next(filter(None, configs), None)
    if config is None and not (task is not None or arguments.dataset or arguments.override or arguments.task):
        raise ConfigError(
            f"{arguments.teams[0]!r} is no folder of a run that tells the task: give the file of a training with "
            "--config, or the data with --dataset."
        )
    written, given = read_yaml(config), parse_overrides(arguments.override)
    algorithm = algorithm_of(written) or DEFAULT_ALGORITHM
    if config and not arguments.config:
        written = safe_settings(algorithm, task, config, arguments, USED)
    training = renamed(algorithm, [written, given])
    model = training.get("agent_model")
    base = training.get("agents") or (model.get("name") if isinstance(model, dict) else None)
    own: dict[str, Any] = {"agents": None, "agent_model": {"name": locations[0]}, "evaluation": flag_values(arguments)}
    if holds_model(Path(locations[0])):
        own["agent_model"]["gguf_file"] = None  # of the model that the training started from
    splits = {"train_split": arguments.split, "eval_split": arguments.split}
    if arguments.dataset:
        own["dataset"] = {"name": arguments.dataset, **splits, **({} if arguments.split else {"eval_size": None})}
    elif arguments.split:
        own["dataset"] = splits
    if arguments.task:
        own["task"] = arguments.task
    settings = settings_of(algorithm, task, [training, own], prog, arguments.config)
    settings.notes = [  # the others are about a training
        f"the settings come from {config}; the section `dataset` of {text} differs."
        for text, other in zip(arguments.teams, configs, strict=True)
        if not arguments.config and other and read_yaml(other).get("dataset") != read_yaml(config).get("dataset")
    ]
    teams = name_teams(arguments.teams, locations, configs, settings.task)
    return Evaluation(settings, complete_config(settings, teams, cross_play), teams, base, arguments)


def complete_config(settings: Settings, teams: Sequence[TeamSource], cross_play: bool) -> EvaluationConfig:
    """Completes the settings of the evaluation from the algorithm's section, or its defaults."""
    config: EvaluationConfig = settings.sections["evaluation"]
    for name in ("baselines", "control", "contributions", "ablate"):
        if cross_play and getattr(config, name):
            raise ConfigError(f"`evaluation.{name}` has no place in a cross-play: remove it, or use `evaluate`.")
    # The section of a reward model has no settings of sampling
    keys = algorithm_keys(DEFAULT_ALGORITHM) | algorithm_keys(settings.algorithm)
    changes = {
        name: settings.arguments.get(name, keys[name].default)
        for name in (*SAMPLING_FIELDS, "discount", "reward_none")
        if getattr(config, name) is None
    }
    if config.output_dir is None:
        more = f"_and_{len(teams) - 1}_more" if len(teams) > 1 else ""
        changes["output_dir"] = str(Path(settings.output.base_dir) / "evaluation" / f"{teams[0].name}{more}")
    with config_errors("section `evaluation`: "):
        return replace(config, **changes)


def safe_settings(
    algorithm: str,
    own: Task | None,
    config: str,
    arguments: argparse.Namespace,
    used: Collection[str] | None = None,
) -> dict[str, Any]:
    """
    Reads the settings in a team's `config.yaml` that an evaluation uses. Unless the file of --config has the same
    values, they run no code, and name no folder, host or environment variable.

    Args:
        algorithm (`str`): The algorithm of the run.
        own (`Task`, *optional*): The program's task.
        config (`str`): Path of the team's file.
        arguments (`argparse.Namespace`): The command line.
        used (`Collection[str]`, *optional*): Settings in the algorithm's section that count; by default all.

    Raises:
        ConfigError: the file asks for something else.
    """
    layer, trusted = (renamed(algorithm, [read_yaml(path)]) for path in (config, arguments.config))
    task = layer.pop("task", None)
    is_known = str(task) in TASKS or str(task).startswith("trl_multiagent.")
    kept = {} if task is None else {"task": task}
    if arguments.task:
        kept["task"] = arguments.task
    elif task is not None and not is_known and trusted.get("task") != task:
        raise ConfigError(consent("task", task, config))
    sections = known_settings(algorithm, choose_task(own, {**layer, **kept}, arguments.config))
    texts, left_out = (names.format(algorithm=algorithm).split() for names in (TEXTS, LEFT_OUT))
    for section, body in layer.items():
        has_keys = isinstance(body, dict) and section not in UNSAFE
        if body == {} and section not in left_out:
            kept[section] = {}  # `peft: {}` takes the defaults
        for key, value in body.items() if has_keys else [("", body)]:
            path = f"{section}.{key}" if has_keys else section
            is_used = used is None or section != algorithm or key in used
            if section in left_out or not is_used or any("." in x and path.startswith(x) for x in left_out):
                continue
            known = sections.get(section, {}).get(key)
            is_safe = check_safe(path, value, section in texts or path in texts, known.choices if known else ())
            if not is_safe and pop_path(trusted, path) != value:
                raise ConfigError(consent(path, value, config))
            if has_keys:
                kept.setdefault(section, {})[key] = value
            else:
                kept[section] = value
    return kept


def consent(path: str, value: Any, config: str) -> str:
    """Describes a setting that needs the user's consent."""
    return f"the team's config.yaml asks for `{path}: {short(value)}`; pass `--config {config}` if you trust it."


def check_safe(path: str, value: Any, takes_texts: bool, choices: Sequence[Any]) -> bool:
    """Returns whether a value in a team's `config.yaml` can be used without the user's consent."""
    unsafe = UNSAFE.get(path, ())
    if value in unsafe if unsafe is not None else value not in (None, {}):
        return False
    if takes_texts or (path.startswith(f"{PromptFiles.section}.") and is_template(str(value))):
        return not any(REFERENCE.search(text) for text in texts_in(value))
    choices = ATTENTION if path == "agent_model.attn_implementation" else choices
    # YAML reads 1e-5 as text. Other numbers in quotes may be the name of a file, or the address of a host
    return all(text in choices or not isinstance(read_number(text), str) for text in texts_in(value))


def texts_in(value: Any) -> Iterator[str]:
    """Yields the texts in nested lists and mappings."""
    if isinstance(value, list | dict):
        for part in value.values() if isinstance(value, dict) else value:
            yield from texts_in(part)
    elif isinstance(value, str):
        yield value


# Teams


def find_team(text: str) -> str:
    """
    Returns the folder of the team that an argument names, or a Hub id unchanged. Raises `ConfigError` if the folder
    holds no team.
    """
    path = Path(text)
    if not path.is_dir():
        check_models("TEAM", text)
        return text
    if holds_model(path):
        return text
    written = read_yaml(find_config(text))
    saved = os.path.expanduser(str(resolve(written, "output.save_path") or os.devnull))  # in which no team is
    is_saved = (Path(saved) / TEAM_FILE).is_file()
    if is_saved and ((config := find_config(saved)) is None or read_yaml(config) == written):
        return saved
    checkpoints = [x.parent for x in path.glob(f"checkpoint-*/{TEAM_FILE}") if x.parent.name[11:].isdecimal()]
    if checkpoints:
        return str(max(checkpoints, key=lambda x: int(x.name[11:])))
    if is_saved:
        raise ConfigError(f"{text} saved its team in {saved}, where another team is now: give that folder to take it.")
    raise ConfigError(f"{text} holds no {TEAM_FILE}: give the folder of a team, or of a run that saved one.")


def find_config(text: str) -> str | None:
    """Returns the file with the settings of the run that wrote a folder, a checkpoint or a repository."""
    path = Path(text)
    if path.is_dir():
        folders = [path, path.absolute().parent] if path.name.startswith("checkpoint-") else [path]
        return next((str(x / RECIPE_FILE) for x in folders if (x / RECIPE_FILE).is_file()), None)
    is_repository = "/" in text and text not in PACKAGED and not path.is_file()
    return find_in_repository(text, RECIPE_FILE) if is_repository else None


def find_in_repository(name: str, file: str) -> str | None:
    """
    Returns the local copy of a file on the Hub; `None` if the repository lacks it. Raises `ConfigError` if it cannot
    be read.
    """
    from trl_multiagent.models.pretrained import find_file

    with config_errors(f"TEAM {name!r} is neither a folder nor a repository that can be read: ", (OSError,)):
        return find_file(name, file)


def name_teams(
    texts: Sequence[str], locations: Sequence[str], configs: Sequence[str | None], task: Task
) -> list[TeamSource]:
    """
    Gives every team a name, which is also used for a folder, and reads its roles. Raises `ConfigError` if a team is
    given twice.
    """
    from trl_multiagent.team.files import read_team_file

    same = {str(Path(x).resolve()) if Path(x).is_dir() else x for x in locations}
    if len(same) < len(locations):
        raise ConfigError(f"The teams {', '.join(texts)} contain one of them twice.")
    names = [*BASELINES]  # they have folders, too
    teams = []
    for text, location, config in zip(texts, locations, configs, strict=True):
        is_model = location in (*task.models, *PACKAGED) or location.endswith(".gguf")
        file = None if is_model else find_in_repository(location, TEAM_FILE)
        with config_errors(f"{file} cannot be read: ", (ValueError, KeyError, TypeError)):
            roles = None if file is None else read_team_file(file).roles
        parts = Path(os.path.abspath(text)).parts[1:] if Path(text).is_dir() else Path(text).parts
        longer = ("_".join(parts[-k:]) for k in range(1, len(parts) + 1))
        numbered = (f"{parts[-1]}_{k}" for k in itertools.count(2))
        names.append(next(x for x in itertools.chain(longer, numbered) if x not in names))
        teams.append(TeamSource(names[-1], location, roles, config))
    return teams
