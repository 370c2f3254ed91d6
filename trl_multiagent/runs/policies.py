"""Makes the environments, items and policies of an evaluation."""

import copy
import dataclasses
import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from datasets import Dataset

from trl_multiagent.environments.base import Environment
from trl_multiagent.environments.task import TaskSettings
from trl_multiagent.evaluation.players import (
    CUT,
    SHUFFLED,
    DiscussionEnvironment,
    LoadedTeam,
    MessageAblation,
    MixedTeam,
    Policy,
    answer_limit,
)
from trl_multiagent.jobs.fingerprint import checksum_of_weights, describe_agent
from trl_multiagent.jobs.stage import chunks_of
from trl_multiagent.report.evaluation import Mix, mixes
from trl_multiagent.rollout.sampler import check_stop_strings
from trl_multiagent.runs.evaluation_settings import Evaluation, TeamSource
from trl_multiagent.runs.models import make_loader
from trl_multiagent.settings.derive import check_names, task_settings
from trl_multiagent.settings.read import ConfigError, config_errors


if TYPE_CHECKING:
    from trl_multiagent.runs.matched_baseline import Control

# What an ablation puts in place of an agent, with short names
NOTHING, UNTRAINED, OTHER_TEAM = "nothing", "the untrained agent", "another team's agent"
SHORT_NAMES = {NOTHING: "silent", UNTRAINED: "untrained", OTHER_TEAM: "other"}


def settings_for_task(evaluation: Evaluation, **changes: Any) -> TaskSettings:
    return dataclasses.replace(task_settings(evaluation.settings, evaluation.output_dir), **changes)


def make_environment(evaluation: Evaluation) -> Environment:
    """
    Makes the task's environment. Raises `ConfigError` if a team has other roles, or it cannot play so many turns.
    """
    environment = evaluation.settings.task.environment(settings_for_task(evaluation))
    if evaluation.settings.seats:
        from trl_multiagent.runs.seats import Run, seated

        run = Run(Path(evaluation.teams[0].location), evaluation.base)
        arguments = {**evaluation.settings.arguments, "seed": evaluation.config.seed}  # not the seed of the training
        settings = dataclasses.replace(evaluation.settings, arguments=arguments)
        environment = seated(settings, environment, evaluation.output_dir, run)
    for team in evaluation.teams:
        if team.roles is not None and team.roles != tuple(environment.roles):
            raise ConfigError(
                f"The team in {team.location} has the roles {', '.join(team.roles)}, but the task has "
                f"{', '.join(environment.roles)}: choose the config of its training, or set "
                f"{evaluation.settings.algorithm}.num_agents."
            )
    assert evaluation.config.num_turns is not None
    with config_errors():
        check_stop_strings(evaluation.config.stop_strings, environment.roles)
        environment.check_turns(evaluation.config.num_turns)
    return environment


def make_single_environment(evaluation: Evaluation, purpose: str) -> Environment:
    """
    Makes the task's environment for one agent. `purpose`: what needs it, for the message if the task has no such form.
    """
    problem = f"The {purpose} needs the task for one agent"
    with config_errors(f"{problem}. "):
        settings = settings_for_task(evaluation, num_agents=1, is_centralized=False)
        environment = evaluation.settings.task.environment(settings)
    if len(environment.roles) != 1:
        raise ConfigError(f"{problem}, but it always has the roles {', '.join(environment.roles)}: leave it out.")
    return environment


def load_items(evaluation: Evaluation) -> Dataset:
    """
    Loads the items: the evaluation set, or its first `dataset.eval_size` rows. Raises `ConfigError` if there are none
    to play.
    """
    settings = settings_for_task(evaluation)
    read: set[str] = set()
    settings.sections["dataset"] = watched(settings.dataset, read)
    train, items = evaluation.settings.task.load_datasets(settings)
    split = evaluation.arguments.split
    if split is not None and not {"train_split", "eval_split"} & read:
        raise ConfigError(
            "--split has no effect: the task loads its own data and does not read `dataset.eval_split`. Leave it out; "
            "`dataset.eval_size` takes the first rows of the evaluation set."
        )
    if evaluation.arguments.dataset is not None and split is None:
        items = train
    if items is None:
        raise ConfigError(
            "There are no items to evaluate on: set `dataset.eval_split` or --split, such as --split 'test[:50]', "
            "or give "
            "--dataset, all of whose rows are played. A task with data of its own has to return an evaluation set."
        )
    if len(items) == 0:
        raise ConfigError("There are no items to evaluate on: the evaluation set is empty.")
    items = items.select(range(min(len(items), evaluation.settings.sections["dataset"].eval_size or len(items))))
    smallest = min(map(len, chunks_of(len(items), evaluation.config.items_per_batch)))
    if evaluation.config.ablate and smallest == 1:
        raise ConfigError(
            "`evaluation.ablate` exchanges messages between the items of a batch, but one batch has a single item: "
            "choose another `evaluation.items_per_batch`."
        )
    return items


def watched(section: Any, read: set[str]) -> Any:
    """Returns a copy of a section that adds the name of each setting that is read to the set `read`."""

    class Watched(type(section)):  # type: ignore[misc]
        def __getattribute__(self, name: str) -> Any:
            read.add(name)
            return super().__getattribute__(name)

    copied = copy.copy(section)
    copied.__class__ = Watched
    return copied


def load_team(evaluation: Evaluation, names: str | list[str], roles: Sequence[str]) -> LoadedTeam:
    """Loads a team on the device of this process, see [`~team.load.load_player`]."""
    team = make_loader(evaluation.settings).load_player(names, roles)
    models = {id(model): model for model in team.policies.values()}
    checksums = {key: checksum_of_weights(model.parameters()) for key, model in models.items()}
    description = {
        f"agent {role}": f"{describe_agent(team.agents[role])}, weights {checksums[id(team.policies[role])]}"
        for role in team.roles
    }
    return LoadedTeam(team, description)


# Policies


def make_policies(evaluation: Evaluation, environment: Environment, controls: "Mapping[str, Control]") -> list[Policy]:
    """
    Makes the policies to play: the teams, in order, then the policies to compare them with. Raises `ConfigError` if
    one is impossible.
    """
    policies = [make_policy(evaluation, team.name, "team", environment, team.location) for team in evaluation.teams]
    policies += baseline_policies(evaluation, environment)
    policies += control_policies(evaluation, controls) if controls else []
    policies += ablated_policies(evaluation, environment) if evaluation.config.contributions else []
    policies += message_policies(evaluation, environment) if evaluation.config.ablate else []
    names = [policy.name for policy in policies]
    for name in names:
        if names.count(name) > 1:  # they would share a folder of transcripts
            raise ConfigError(f"Two of the policies to evaluate are called {name!r}: rename the folder of this team.")
    return policies


def make_policy(
    evaluation: Evaluation,
    name: str,
    kind: str,
    environment: Environment,
    models: str | list[str],
    length: int | None = None,
    **others: Any,
) -> Policy:
    """
    Makes the policy of a saved team or of models. `length`: tokens of a completion; `others`: more arguments of
    [`Policy`].
    """
    load = functools.partial(load_team, evaluation, models, environment.roles)
    source = models if isinstance(models, str) else ", ".join(models)
    return Policy(name, kind, environment, load, length or evaluation.max_completion_length, source, **others)


def baseline_model(evaluation: Evaluation) -> str | list[str]:
    """Returns the model of the baselines. Raises `ConfigError` if it is not known, or does not exist."""
    names = evaluation.config.baseline_model or evaluation.base
    if names is None:
        raise ConfigError("The model of the baselines is not known: give `--baseline_model`.")
    check_names(names, "baseline_model")
    return names


def baseline_policies(evaluation: Evaluation, environment: Environment) -> list[Policy]:
    """Makes the baselines that the settings ask for."""
    policies = []
    for name in evaluation.config.baselines or ():
        names, own = baseline_model(evaluation), environment
        if name == "raw_single_agent":
            own = make_single_environment(evaluation, "baseline raw_single_agent")
            if isinstance(names, list):
                (role,) = own.roles
                names = names[environment.roles.index(role) if role in environment.roles else 0]
        elif name == "discussion":
            own = DiscussionEnvironment(environment)
        budget = evaluation.config.baseline_budget
        limit = answer_limit(name, len(environment.roles), evaluation.max_completion_length, budget)
        form = {"is_pipeline": name == "pipeline", "rounds": 2 if name == "discussion" else 1}
        policies.append(make_policy(evaluation, name, "baseline", own, names, limit, **form))
    return policies


def control_policies(evaluation: Evaluation, controls: "Mapping[str, Control]") -> list[Policy]:
    """Makes the policies of the trained controls, one per team."""
    if evaluation.config.control == "single_agent":
        environment = make_single_environment(evaluation, "control")
    else:
        environment = evaluation.settings.task.environment(settings_for_task(evaluation, is_centralized=True))
    policies = []
    for team, control in controls.items():
        name, folder = f"{team}_control", str(control.folder)
        length = control.num_agents * evaluation.max_completion_length
        compared = {"compared_with": team, "row": str(evaluation.config.control)}
        policies.append(make_policy(evaluation, name, "control", environment, folder, length, **compared))
    return policies


def ablated_policies(evaluation: Evaluation, environment: Environment) -> list[Policy]:
    """Makes the teams with one agent replaced: by nothing, by the untrained agent, and by the next team's agent."""
    teams, roles, base = evaluation.teams, environment.roles, baseline_model(evaluation)
    loaded = functools.cache(lambda location: load_team(evaluation, location, roles))
    untrained = functools.cache(lambda: load_team(evaluation, base, roles))

    def load(own: TeamSource, role: str, by: str, other_team: TeamSource) -> LoadedTeam:
        parts = {name: loaded(own.location) for name in roles}
        if by != NOTHING:  # otherwise the generator silences the team's own agent
            parts[role] = untrained() if by == UNTRAINED else loaded(other_team.location)
        return mix(parts)

    return [
        Policy(
            f"{team.name}_{role}_{SHORT_NAMES[by]}",
            "ablation",
            environment,
            functools.partial(load, team, role, by, teams[(k + 1) % len(teams)]),
            evaluation.max_completion_length,
            team.location,
            compared_with=team.name,
            row=f"{role} replaced by {by}",
            is_shown=False,
            silent_role=role if by == NOTHING else None,
        )
        for k, team in enumerate(teams)
        for role in roles
        for by in ((NOTHING, UNTRAINED, OTHER_TEAM) if len(teams) > 1 else (NOTHING, UNTRAINED))
    ]


def message_policies(evaluation: Evaluation, environment: Environment) -> list[Policy]:
    """
    Makes the teams whose agents do not read each other's answers. Raises `ConfigError` if the task has no messages.
    """
    if len(environment.roles) == 1 or evaluation.config.num_turns == 1:
        raise ConfigError("`evaluation.ablate: messages` is for several agents and turns: leave it out.")
    if evaluation.settings.seats:  # a seated environment keeps the messages of an episode itself
        raise ConfigError("`evaluation.ablate: messages` does not go with `seats`: leave one of them out.")
    return [
        make_policy(
            evaluation,
            f"{team.name}_messages_{how}",
            "ablation",
            MessageAblation(environment, how),
            team.location,
            compared_with=team.name,
            row=f"messages {how}",
        )
        for team in evaluation.teams
        for how in (CUT, SHUFFLED)
    ]


def mix(parts: Mapping[str, LoadedTeam]) -> LoadedTeam:
    """
    Makes a team of agents that come from several teams. `parts`: the team of each role's agent, in the order of the
    roles.
    """
    description = {f"agent {role}": part.description[f"agent {role}"] for role, part in parts.items()}
    return LoadedTeam(MixedTeam({role: part.team for role, part in parts.items()}), description)


def mixed_policies(evaluation: Evaluation, environment: Environment) -> list[Policy]:
    """Makes the teams of a cross-play. Every agent is loaded once."""
    teams, roles = evaluation.teams, environment.roles
    loaded = functools.cache(lambda run: load_team(evaluation, teams[run].location, roles))

    def load(runs: Mix) -> LoadedTeam:
        return mix({role: loaded(run) for role, run in zip(roles, runs, strict=True)})

    policies = []
    for runs in mixes(len(teams), roles):
        trained_together = len(set(runs)) == 1
        name = teams[runs[0]].name if trained_together else "mix_" + "_".join(map(str, runs))
        source = " + ".join(teams[run].location for run in dict.fromkeys(runs))
        kind, length = "team" if trained_together else "pair", evaluation.max_completion_length
        policies.append(Policy(name, kind, environment, functools.partial(load, runs), length, source, mix=runs))
    return policies
