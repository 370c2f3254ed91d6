"""Reads and checks the settings of an evaluation, and makes what it plays: environments, items, and policies."""

from __future__ import annotations

import argparse
import copy
import dataclasses
import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trl_multiagent.environments.task import Task, TaskSettings
from trl_multiagent.evaluation.config import SAMPLING_FIELDS, EvaluationConfig
from trl_multiagent.recipe.evaluated_teams import TeamSource, find_config, find_team, name_teams
from trl_multiagent.recipe.run import settings_of
from trl_multiagent.recipe.tasks import task_settings
from trl_multiagent.settings.algorithms import ALGORITHMS
from trl_multiagent.settings.derive import Settings, check_names
from trl_multiagent.settings.read import (
    RECIPES,
    ConfigError,
    config_file,
    parse_overrides,
    parse_value,
    read_yaml,
    suggestion,
)
from trl_multiagent.settings.schema import algorithm_keys, keys_of


if TYPE_CHECKING:
    from datasets import Dataset

    from trl_multiagent.environments.base import Environment
    from trl_multiagent.evaluation.policies import LoadedTeam, Policy
    from trl_multiagent.recipe.control import Control


SECTION = "evaluation"
DEFAULT_ALGORITHM = "magrpo"  # whose defaults apply without a file


@dataclasses.dataclass
class Evaluation:
    """
    The checked settings of an evaluation.

    Args:
        settings ([`~trl_multiagent.settings.derive.Settings`]): All settings.
        config ([`~trl_multiagent.evaluation.config.EvaluationConfig`]): Those of the evaluation, complete.
        teams (`list[TeamSource]`): The teams.
        base (`str`, `list[str]` or `None`): The model from which the agents of the training started, as far as it is known.
        uses_all_rows (`bool`): Whether a dataset was given without a split, so that all of its rows are items.
        has_split (`bool`): Whether `--split` was given, so that the task has to read `dataset.eval_split`.
        cross_play (`bool`): Whether the agents of the teams play with each other.
        controls (`dict[str, Control]`): The trained control of each team, by the team's name.
        dry_run (`bool`): Whether to print the cost and stop.
        prog (`str`): Name of the program in messages.
        notes (`list[str]`): Messages to the user about the settings.
    """

    settings: Settings
    config: EvaluationConfig
    teams: list[TeamSource]
    base: str | list[str] | None
    uses_all_rows: bool
    has_split: bool
    cross_play: bool
    controls: dict[str, Control]
    dry_run: bool
    prog: str
    notes: list[str]

    @property
    def task(self) -> Task:
        return self.settings.task

    @property
    def output_dir(self) -> Path:
        assert self.config.output_dir is not None
        return Path(self.config.output_dir)

    def task_settings(self, **changes: Any) -> TaskSettings:
        return dataclasses.replace(task_settings(self.settings, self.output_dir), **changes)

    def make_environment(self) -> Environment:
        """
        Makes the task's environment, and compares its roles with those of the teams.

        Raises:
            ConfigError: the roles do not match, or the environment cannot play so many turns.
        """
        environment = self.task.environment(self.task_settings())
        for team in self.teams:
            if team.roles is not None and team.roles != tuple(environment.roles):
                raise ConfigError(
                    f"The team in {team.location} has the roles {', '.join(team.roles)}, but the task has "
                    f"{', '.join(environment.roles)}: choose the config of its training, or set "
                    f"{self.settings.algorithm}.num_agents."
                )
        assert self.config.num_turns is not None
        try:
            environment.check_turns(self.config.num_turns)
        except ValueError as error:
            raise ConfigError(error) from error
        return environment

    def make_single_environment(self, purpose: str) -> Environment:
        """
        Makes the task's environment for one agent.

        Args:
            purpose (`str`): What needs it, for messages.

        Raises:
            ConfigError: the task has no form for one agent.
        """
        try:
            environment = self.task.environment(self.task_settings(num_agents=1, is_centralized=False))
        except ValueError as error:
            raise ConfigError(f"The {purpose} needs the task for one agent. {error}") from error
        if len(environment.roles) != 1:
            raise ConfigError(
                f"The {purpose} needs the task for one agent, but it always has the roles {', '.join(environment.roles)}: leave it out."
            )
        return environment

    def make_control_environment(self) -> Environment:
        """
        Makes the environment of the controls.

        Raises:
            ConfigError: the task has no form for one agent.
        """
        if self.config.control == "single_agent":
            return self.make_single_environment("control")
        return self.task.environment(self.task_settings(is_centralized=True))

    def load_items(self) -> Dataset:
        """
        Loads the items: the evaluation set, or its first `dataset.eval_size` rows.

        Raises:
            ConfigError: there are no rows, or `--split` was given and the task does not read it.
        """
        from trl_multiagent.recipe.recipe import first_rows

        settings = self.task_settings()
        read: set[str] = set()
        settings.sections["dataset"] = watched(settings.dataset, read)
        train, evaluation = self.task.load_datasets(settings)
        if self.has_split and not {"train_split", "eval_split"} & read:
            raise ConfigError(
                "--split has no effect: the task loads its own data and does not read `dataset.eval_split`. Leave it out; "
                "`dataset.eval_size` takes the first rows of the evaluation set."
            )
        items = train if self.uses_all_rows else evaluation
        if items is not None and len(items) == 0:
            raise ConfigError("There are no items to evaluate on: the evaluation set is empty.")
        if items is None:
            raise ConfigError(
                "There are no items to evaluate on: set `dataset.eval_split` or --split, such as --split 'test[:50]', or give "
                "--dataset, all of whose rows are played. A task with data of its own has to return an evaluation set."
            )
        return first_rows(items, self.settings.sections["dataset"].eval_size)

    def load(self, names: str | list[str], roles: Sequence[str]) -> LoadedTeam:
        """Loads a team on the device of this process, see [`~team.load.load_player`]."""
        from trl_multiagent.evaluation.policies import LoadedTeam, describe_team
        from trl_multiagent.recipe.models import make_loader

        team = make_loader(self.settings).load_player(names, roles)
        return LoadedTeam(team, describe_team(team))

    # Policies

    def make_policies(self, environment: Environment) -> list[Policy]:
        """The teams, in order, and what they are compared with."""
        policies = [
            *(self.team_policy(team, environment) for team in self.teams),
            *self.baseline_policies(environment),
        ]
        if self.controls:
            policies += self.control_policies()
        if self.config.contributions:
            policies += self.ablated_policies(environment)
        return policies

    def team_policy(self, source: TeamSource, environment: Environment) -> Policy:
        from trl_multiagent.evaluation.policies import Policy

        load = functools.partial(self.load, source.location, environment.roles)
        return Policy(source.name, "team", environment, load, self.max_completion_length, source.location)

    @property
    def max_completion_length(self) -> int:
        assert self.config.max_completion_length is not None
        return self.config.max_completion_length

    def baseline_policies(self, environment: Environment) -> list[Policy]:
        """
        The baselines that the settings ask for.

        Raises:
            ConfigError: their model is not known, or the task has no form for one agent.
        """
        from trl_multiagent.evaluation.baselines import DiscussionEnvironment, answer_limit
        from trl_multiagent.evaluation.policies import Policy

        policies = []
        num_agents = len(environment.roles)
        for name in self.config.baselines or ():
            names = self.baseline_model()
            own = environment
            if name == "raw_single_agent":
                own = self.make_single_environment("baseline raw_single_agent")
                if isinstance(names, list):
                    (role,) = own.roles
                    names = names[environment.roles.index(role) if role in environment.roles else 0]
            elif name == "discussion":
                own = DiscussionEnvironment(environment)
            limit = answer_limit(name, num_agents, self.max_completion_length, self.config.baseline_budget)
            source = names if isinstance(names, str) else ", ".join(names)
            policies.append(
                Policy(
                    name,
                    "baseline",
                    own,
                    functools.partial(self.load, names, own.roles),
                    limit,
                    source,
                    is_pipeline=name == "pipeline",
                    rounds=2 if name == "discussion" else 1,
                )
            )
        return policies

    def baseline_model(self) -> str | list[str]:
        """
        The model of the baselines.

        Raises:
            ConfigError: it is not known, or does not exist.
        """
        names = self.config.baseline_model or self.base
        if names is None:
            raise ConfigError("The model of the baselines is not known: give `--baseline_model`.")
        own = [name for name in ([names] if isinstance(names, str) else names) if name not in self.task.models]
        check_names(own, "baseline_model")
        return names

    def control_policies(self) -> list[Policy]:
        """The trained controls, one per team."""
        from trl_multiagent.evaluation.policies import Policy

        environment = self.make_control_environment()
        return [
            Policy(
                f"{source}_control",
                "control",
                environment,
                functools.partial(self.load, str(control.folder), environment.roles),
                control.num_agents * self.max_completion_length,
                str(control.folder),
                compared_with=source,
            )
            for source, control in self.controls.items()
        ]

    def ablated_policies(self, environment: Environment) -> list[Policy]:
        """The teams with one agent replaced: by nothing, by its untrained self, and by that of the next team."""
        from trl_multiagent.evaluation.policies import NOTHING, OTHER_TEAM, UNTRAINED, Policy, Replaced, mix

        names, roles = self.baseline_model(), environment.roles
        short_names = {NOTHING: "silent", UNTRAINED: "untrained", OTHER_TEAM: "other"}
        loaded = functools.cache(lambda source: self.load(source.location, roles))
        untrained = functools.cache(lambda: self.load(names, roles))

        def load(own: TeamSource, role: str, by: str, other_team: TeamSource) -> LoadedTeam:
            parts = {each: loaded(own) for each in roles}
            if by != NOTHING:  # otherwise the sampler silences the team's own agent
                parts[role] = untrained() if by == UNTRAINED else loaded(other_team)
            return mix(parts)

        replacements = (NOTHING, UNTRAINED, OTHER_TEAM) if len(self.teams) > 1 else (NOTHING, UNTRAINED)
        return [
            Policy(
                f"{source.name}_{role}_{short_names[by]}",
                "ablation",
                environment,
                functools.partial(load, source, role, by, self.teams[(k + 1) % len(self.teams)]),
                self.max_completion_length,
                source.location,
                compared_with=source.name,
                replaced=Replaced(role, by),
            )
            for k, source in enumerate(self.teams)
            for role in roles
            for by in replacements
        ]

    def mixed_policies(self, environment: Environment) -> dict[tuple[int, ...], Policy]:
        """The teams of a cross-play. Every agent is loaded once."""
        from trl_multiagent.evaluation.cross_play import mixes
        from trl_multiagent.evaluation.policies import Policy, mix

        roles = environment.roles
        loaded = functools.cache(lambda run: self.load(self.teams[run].location, roles))

        def load(runs: tuple[int, ...]) -> LoadedTeam:
            return mix({role: loaded(run) for role, run in zip(roles, runs, strict=True)})

        policies = {}
        for runs in mixes(len(self.teams), roles):
            trained_together = len(set(runs)) == 1
            name = self.teams[runs[0]].name if trained_together else "mix_" + "_".join(map(str, runs))
            source = " + ".join(self.teams[run].location for run in dict.fromkeys(runs))
            kind = "team" if trained_together else "pair"
            policies[runs] = Policy(
                name, kind, environment, functools.partial(load, runs), self.max_completion_length, source
            )
        return policies


def watched(section: Any, read: set[str]) -> Any:
    """A copy of a section that adds the names of the settings that are read to a set."""

    class Watched(type(section)):  # type: ignore[misc]
        def __getattribute__(self, name: str) -> Any:
            read.add(name)
            return super().__getattribute__(name)

    copied = copy.copy(section)
    copied.__class__ = Watched
    return copied


# Arguments


def make_evaluation_parser(prog: str, cross_play: bool) -> argparse.ArgumentParser:
    """The command line of an evaluation. Every setting of the section `evaluation` is a flag."""
    parser = argparse.ArgumentParser(
        prog=prog,
        usage="%(prog)s TEAM [TEAM ...] [--config FILE | --dataset NAME] [--override KEY=VALUE ...] [--dry_run] "
        "[--SETTING VALUE ...] [--num_processes N] [--accelerate_config FILE]",
        description="Plays the agents of several runs with each other." if cross_play else "Evaluates saved teams.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "teams",
        metavar="TEAM",
        nargs="+",
        help="Folder of a saved team, of a run or of a checkpoint, or the Hub id of a team. Also a model, for an untrained team.",
    )
    parser.add_argument("--config", metavar="FILE", help="YAML file of a training; by default that of the first run.")
    parser.add_argument("--override", metavar="KEY=VALUE", nargs="+", action="extend", default=[], help="Settings.")
    parser.add_argument("--task", metavar="TASK", help="The task, as in `trl-multiagent train`.")
    parser.add_argument("--dataset", metavar="NAME", help="Short for --override dataset.name=NAME.")
    parser.add_argument("--split", metavar="SPLIT", help="The rows to evaluate on, such as 'test[:50]'.")
    parser.add_argument("--dry_run", action="store_true", help="Check everything, print the cost, stop.")
    group = parser.add_argument_group("settings, also keys of the section 'evaluation'")
    for field in dataclasses.fields(EvaluationConfig):
        if not (cross_play and field.name.startswith(("baseline", "control", "contributions"))):
            text = f"{field.metadata['help']} (default: {field.default})".replace("%", "%%")
            group.add_argument(f"--{field.name}", nargs="*", metavar="VALUE", default=argparse.SUPPRESS, help=text)
    return parser


def flag_values(arguments: argparse.Namespace) -> dict[str, Any]:
    """The flags of an evaluation as values of the section `evaluation`."""
    values: dict[str, Any] = {}
    for name, key in keys_of(EvaluationConfig).items():
        if name not in arguments:
            continue
        texts: list[str] = getattr(arguments, name) or ["true"]  # a flag without a value means true
        if "list" in str(key.hint):
            parts = [part.strip() for text in texts for part in text.strip("[]").split(",")]
            values[name] = [parse_value(part) for part in parts if part]
        elif len(texts) > 1:
            raise ConfigError(f"--{name} takes one value, not {len(texts)}: {' '.join(texts)}.")
        else:
            is_text = "str" in str(key.hint) and texts[0].lower() not in ("none", "null")
            values[name] = texts[0] if is_text else parse_value(texts[0])
    return values


def parse_evaluation(
    task: Task | Mapping[str, str], argv: Sequence[str] | None, prog: str, cross_play: bool = False
) -> Evaluation:
    """
    Reads and checks the settings of an evaluation, without loading a model or data.

    Args:
        task ([`~trl_multiagent.environments.task.Task`] or `Mapping[str, str]`): See [`run_evaluation`].
        argv (`list[str]` or `None`): Arguments; by default those of the command line.
        prog (`str`): Name of the program in messages.
        cross_play (`bool`, *optional*, defaults to `False`): Whether the agents of several teams play with each other.

    Raises:
        ConfigError: a setting is wrong.
    """
    parser = make_evaluation_parser(prog, cross_play)
    arguments, unknown = parser.parse_known_args(argv)
    if unknown:
        flags = [flag for action in parser._actions for flag in action.option_strings]
        raise ConfigError(f"unknown argument {unknown[0]!r}{suggestion(unknown[0], flags)}")
    if cross_play and len(arguments.teams) < 2:
        raise ConfigError("A cross-play needs at least two runs, whose agents play with each other.")
    locations = [find_team(text) for text in arguments.teams]
    config = arguments.config and config_file("--config", arguments.config, RECIPES)
    notes = []
    if config is None:
        found = {text: find_config(text) or find_config(x) for text, x in zip(arguments.teams, locations, strict=True)}
        config = next(filter(None, found.values()), None)
        for text, other in found.items():
            if other is not None and read_yaml(other).get("dataset") != read_yaml(config).get("dataset"):
                notes.append(f"the settings are those of {config}; the section `dataset` of {text} is another one.")
    written = read_yaml(config)
    algorithm = next((name for name in written if name in ALGORITHMS), DEFAULT_ALGORITHM)
    given = parse_overrides(arguments.override)
    own: dict[str, Any] = {"agents": None, "agent_model": {"name": locations[0]}, SECTION: flag_values(arguments)}
    if arguments.dataset is not None or arguments.split is not None:
        own["dataset"] = {"train_split": arguments.split, "eval_split": arguments.split}
    if arguments.dataset is not None:
        own["dataset"]["name"] = arguments.dataset
    if arguments.task is not None:
        own["task"] = arguments.task
    base = {**written, **given}.get("agents") or {**section(written), **section(given)}.get("name")
    settings = settings_of(algorithm, task, [written, given, own], prog, config)
    uses_all_rows = arguments.dataset is not None and arguments.split is None
    teams = name_teams(arguments.teams, locations, settings.task)
    complete = complete_config(settings, teams, cross_play)
    return Evaluation(
        settings,
        complete,
        teams,
        base,
        uses_all_rows,
        arguments.split is not None,
        cross_play,
        make_controls(complete, settings, arguments, teams, base, task, prog),
        arguments.dry_run,
        prog,
        notes,
    )


def make_controls(
    config: EvaluationConfig,
    settings: Settings,
    arguments: argparse.Namespace,
    teams: Sequence[TeamSource],
    base: str | list[str] | None,
    task: Task | Mapping[str, str],
    prog: str,
) -> dict[str, Control]:
    """
    The controls of the teams, if the settings ask for them.

    Raises:
        ConfigError: a team is not that of a run, or the run cannot have a control.
    """
    if config.control is None:
        return {}
    if settings.is_centralized or settings.num_agents == 1:
        raise ConfigError("`evaluation.control` is for teams, but this run has one agent: leave it out.")
    from trl_multiagent.recipe.control import Control

    assert config.output_dir is not None
    model = config.control_model or (base if isinstance(base, str) else base[-1] if base else None)
    if model is None:
        raise ConfigError("The model that the control starts from is not known: give `--control_model`.")
    if model not in settings.task.models:
        check_names(model, "control_model")
    controls = {}
    for text, team in zip(arguments.teams, teams, strict=True):
        run = find_config(text) or find_config(team.location)
        if run is None:
            raise ConfigError(f"The control of {text} needs the folder of a run, with its config.yaml.")
        folder = Path(config.output_dir) / "controls" / team.name
        num_agents = len(team.roles or ()) or settings.num_agents
        controls[team.name] = Control(config.control, run, folder, model, num_agents, task, arguments.task, prog)
    for control in controls.values():
        control.check()
    return controls


def section(layer: dict[str, Any]) -> dict[str, Any]:
    """The section about the agents' model, in one of the two spellings."""
    body = layer.get("agent_model")
    if not isinstance(body, dict):
        return {}
    return {"name": body["model_name_or_path"]} if "model_name_or_path" in body else body


def complete_config(settings: Settings, teams: Sequence[TeamSource], cross_play: bool) -> EvaluationConfig:
    """
    The settings of the evaluation. Those that were not given are those of the algorithm's section, or its defaults.

    Raises:
        ConfigError: they contradict each other.
    """
    config: EvaluationConfig = settings.sections[SECTION]
    # A reward model samples nothing
    keys = algorithm_keys(DEFAULT_ALGORITHM) | algorithm_keys(settings.algorithm)
    changes: dict[str, Any] = {}
    for name in (*SAMPLING_FIELDS, "discount"):
        if getattr(config, name) is None:
            changes[name] = settings.arguments.get(name, keys[name].default)
    if config.output_dir is None:
        more = f"_and_{len(teams) - 1}_more" if len(teams) > 1 else ""
        changes["output_dir"] = str(
            Path(settings.sections["output"].base_dir) / "evaluation" / f"{teams[0].name}{more}"
        )
    for name in ("baselines", "control", "contributions"):
        if cross_play and getattr(config, name):
            raise ConfigError(f"`evaluation.{name}` has no place in a cross-play: remove it, or use `evaluate`.")
    try:
        return dataclasses.replace(config, **changes)
    except ValueError as error:
        raise ConfigError(f"section `{SECTION}`: {error}") from error
