"""Makes what plays the roles that are not trained, as the section `seats` says."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers.integrations import is_deepspeed_zero3_enabled

from trl_multiagent.endpoints.client import EndpointClient
from trl_multiagent.endpoints.endpoint import make_endpoint
from trl_multiagent.environments.base import Environment
from trl_multiagent.environments.imports import import_function
from trl_multiagent.environments.task_errors import UnavailableError
from trl_multiagent.folders import TEAM_FILE
from trl_multiagent.limits import check_value
from trl_multiagent.recipe.models import make_loader
from trl_multiagent.rollout.sampler import TeamSampler, TransformersGenerator, sampling_arguments
from trl_multiagent.rollout.seats import EndpointSeat, FunctionSeat, Population, Seat, SeatedEnvironment, TeamSeat
from trl_multiagent.settings.derive import Settings, check_names
from trl_multiagent.settings.read import ConfigError
from trl_multiagent.settings.schema import SeatSettings, keys_of
from trl_multiagent.team.load import LoadError
from trl_multiagent.trainers.base.checkpoint_files import step_of


START = "start"  # the name of the models from which the run starts, in the population of its own checkpoints


@dataclass
class Run:
    """The run whose checkpoints are the population `self`."""

    folder: Path
    start: (
        str | list[str] | None
    )  # the models from which it started, as in `Settings.model_names`; `None` if not known


def seated(settings: Settings, environment: Environment, folder: Path, run: Run) -> Environment:
    """
    Returns a task as its trained agents see it: without the roles in `seats`. Answers of endpoints are kept in `folder`. Raises `ConfigError` if
    a seat cannot be made.
    """
    if not settings.seats:
        return environment
    try:
        trained = [role for role in environment.roles if role not in settings.seats]
        seats = {role: make_seat(settings, role, x, folder, run, trained) for role, x in settings.seats.items()}
        return SeatedEnvironment(environment, seats)
    except ValueError as error:
        raise ConfigError(str(error)) from error


def make_seat(settings: Settings, role: str, section: Any, folder: Path, run: Run, trained: Sequence[str]) -> Seat:
    """Makes the seat of a role, see [`seated`]. `trained` are the roles of the team."""
    own, seed = read_section(f"seats.{role}", section), settings.arguments.get("seed", 0)
    if own.function is not None:
        return FunctionSeat(import_function(f"seats.{role}.function", own.function))
    if own.endpoint is not None:
        try:
            endpoint = make_endpoint(**{"max_tokens": own.max_completion_length, **own.endpoint})
        except TypeError as error:  # an unknown or a missing field
            problem = str(error).replace("make_endpoint() ", "").replace("Endpoint.__init__() ", "")
            raise ValueError(f"`seats.{role}.endpoint`: {problem}.") from error
        return EndpointSeat(EndpointClient(endpoint, folder / "seats" / role), seed)
    if is_deepspeed_zero3_enabled():
        raise ValueError(f"`seats.{role}`: under ZeRO-3, a team cannot play a role. Use ZeRO-2, or an endpoint.")
    check_names(own.population if isinstance(own.population, list) else own.team or [], f"seats.{role}")

    def seat(names: str | list[str]) -> TeamSeat:
        return TeamSeat(lambda: load_sampler(settings, own, role, names), str(names), own.agent)

    if own.team is not None:
        return seat(own.team)
    if own.population != "self":
        members = {name: seat(name) for name in own.population or ()}
        return Population(lambda step: members, list(members), seed)
    agent, start, made = own.agent or role, run.start, dict[str, Seat]()
    if agent not in trained:
        raise ValueError(f"`seats.{role}.agent` is {agent!r}, but this run trains {', '.join(trained)}.")
    if start is not None:
        made[START] = seat(start if isinstance(start, str) else start[trained.index(agent)])

    def checkpoints(step: int | None) -> dict[str, Seat]:
        """Returns the models from which the run starts, and its checkpoints that are no later than a step."""
        found = {step_of(path): path for path in run.folder.glob("checkpoint-*") if (path / TEAM_FILE).is_file()}
        saved = [found[number] for number in sorted(found) if step is None or number <= step]
        members = {name: made[name] for name in made if name == START}
        members |= {path.name: made.setdefault(path.name, seat(str(path))) for path in saved}
        if not members:
            raise UnavailableError(f"`seats.{role}.population` is 'self', but {run.folder} holds no checkpoints.")
        return members

    return Population(checkpoints, "self", seed)


def read_section(path: str, section: Any) -> SeatSettings:
    """Checks the settings of a seat. Raises `ValueError` if one is unknown or has a wrong type."""
    keys = keys_of(SeatSettings)
    if not isinstance(section, Mapping):
        raise ValueError(f"`{path}` must be a section with one of function, team, population and endpoint.")
    for name, value in section.items():
        if name not in keys:
            raise ValueError(f"`{path}.{name}` is not a known setting; it has {', '.join(keys)}.")
        try:
            check_value(value, keys[name].hint, keys[name].limits)
        except ValueError as error:
            raise ValueError(f"`{path}.{name}` {error}") from error
    try:
        return SeatSettings(**section)
    except ValueError as error:
        raise ValueError(f"`{path}`: {error}") from error


def load_sampler(settings: Settings, own: SeatSettings, role: str, names: str | list[str]) -> TeamSampler:
    """Loads a team that plays a role, and makes its sampler. Raises `UnavailableError` if it cannot be loaded, or has no such agent."""
    agent = role if own.agent is None else own.agent
    try:
        team = make_loader(settings).load_player(names, [agent])
    except LoadError as error:
        raise UnavailableError(f"`seats.{role}`: {error}") from error
    if agent not in team.roles:
        roles = ", ".join(team.roles)
        raise UnavailableError(f"`seats.{role}`: {names} has the roles {roles}, not {agent!r}: set `agent`.")
    team.requires_grad_(False).eval()
    arguments = sampling_arguments({"max_new_tokens": own.max_completion_length, "temperature": own.temperature})
    budget, seed = settings.arguments.get("generation_token_budget"), settings.arguments.get("seed", 0)
    return TeamSampler(team, TransformersGenerator(team, arguments, budget, seed=seed))
