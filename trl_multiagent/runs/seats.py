"""Makes the environment of a run, with the players of the roles that are not trained (the section `seats`)."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers.integrations import is_deepspeed_zero3_enabled

from trl_multiagent.endpoints import EndpointClient, EndpointSettings, make_endpoint
from trl_multiagent.environments.base import Environment
from trl_multiagent.environments.centralized import CentralizedEnvironment
from trl_multiagent.environments.imports import import_function
from trl_multiagent.environments.task_errors import UnavailableError
from trl_multiagent.folders import TEAM_FILE
from trl_multiagent.rollout.seats import EndpointSeat, FunctionSeat, Population, Seat, SeatedEnvironment
from trl_multiagent.runs.models import check_models, make_loader
from trl_multiagent.settings.algorithms import PREFERENCE_ALGORITHMS
from trl_multiagent.settings.derive import Settings, task_settings
from trl_multiagent.settings.read import ConfigError, checked, config_errors
from trl_multiagent.settings.schema import SeatSettings, keys_of
from trl_multiagent.team.seat import TeamSeat
from trl_multiagent.trainers.base.checkpoints import step_of


START = "start"  # the name of the models from which the run starts, in the population of its own checkpoints


@dataclass
class Run:
    """The run whose checkpoints are the population `self`."""

    folder: Path
    start: str | list[str] | None  # the models from which it started, as in `Settings.model_names`; `None` if unknown


def make_environment(settings: Settings, run_folder: Path) -> Environment:
    """
    Makes the environment of a run in a folder. Raises `ConfigError` if its roles, or their order, do not fit the
    algorithm.
    """
    environment = settings.task.environment(task_settings(settings, run_folder))
    environment = seated(settings, environment, run_folder, Run(run_folder, settings.model_names))
    order = environment.order or (environment.roles,)
    if settings.algorithm in PREFERENCE_ALGORITHMS and order != (environment.roles,):
        raise ConfigError(
            f"`{settings.algorithm}` learns from one turn in which all roles answer, but in this task they act "
            "one after the other: train it with an algorithm such as magrpo."
        )
    roles = environment.task.roles if isinstance(environment, CentralizedEnvironment) else environment.roles
    if len(roles) != settings.num_agents:
        problem = f"but the task has {len(roles)} roles: {', '.join(roles)}. Set it to {len(roles)}."
        raise ConfigError(f"`{settings.algorithm}.num_agents` is {settings.num_agents}, {problem}")
    return environment


def seated(settings: Settings, environment: Environment, folder: Path, run: Run) -> Environment:
    """
    Returns a task without the roles in `seats`, as its trained agents see it. Answers of endpoints are kept in
    `folder`. Raises `ConfigError` if a seat cannot be made.
    """
    if not settings.seats:
        return environment
    with config_errors():
        trained = [role for role in environment.roles if role not in settings.seats]
        seats = {role: make_seat(settings, role, x, folder, run, trained) for role, x in settings.seats.items()}
        return SeatedEnvironment(environment, seats)


def make_seat(settings: Settings, role: str, section: Any, folder: Path, run: Run, trained: Sequence[str]) -> Seat:
    """Makes the seat of a role, see [`seated`]. `trained` are the roles of the team."""
    path, seed = f"seats.{role}", settings.arguments.get("seed", 0)
    own: SeatSettings = read_section(path, section, SeatSettings)
    if own.function is not None:
        return FunctionSeat(import_function(f"{path}.function", own.function))
    if own.endpoint is not None:
        given = {"max_tokens": own.max_completion_length, **own.endpoint}
        endpoint: EndpointSettings = read_section(f"{path}.endpoint", given, EndpointSettings)
        if endpoint.model is None:
            raise ValueError(f"`{path}.endpoint.model` is missing: the model's name, as the endpoint knows it.")
        endpoint = make_endpoint(**vars(endpoint), called=lambda field: f"{path}.endpoint.{field}")
        return EndpointSeat(EndpointClient(endpoint, folder / "seats" / role), seed)
    if is_deepspeed_zero3_enabled():
        raise ValueError(f"`{path}`: under ZeRO-3, a team cannot play a role. Use ZeRO-2, or an endpoint.")

    def seat(name: str) -> TeamSeat:
        return TeamSeat(
            name,
            agent=own.agent,
            loader=make_loader(settings),
            token_budget=settings.arguments.get("generation_token_budget"),
            seed=seed,
            max_new_tokens=own.max_completion_length,
            temperature=own.temperature,
        )

    names = [own.team] if own.team is not None else own.population if isinstance(own.population, list) else []
    check_models(path, names, settings.task)
    if own.team is not None:
        return seat(own.team)
    if isinstance(own.population, list):
        members = {name: seat(name) for name in own.population}
        return Population(lambda step: members, list(members), seed)
    return self_play(path, own.agent or role, run, trained, seat, seed)


def self_play(
    path: str, agent: str, run: Run, trained: Sequence[str], seat: Callable[[str], TeamSeat], seed: int
) -> Population:
    """
    Makes a population of earlier versions of an agent of this run: its initial model, and its checkpoints so far.
    """
    if agent not in trained:
        raise ValueError(f"`{path}.agent` is {agent!r}, but this run trains {', '.join(trained)}.")
    start = run.start[trained.index(agent)] if isinstance(run.start, list) else run.start
    first = {} if start is None else {START: seat(start)}
    made: dict[str, TeamSeat] = {}

    def members(step: int | None) -> Mapping[str, Seat]:
        by_step = {step_of(x): x for x in run.folder.glob("checkpoint-*") if (x / TEAM_FILE).is_file()}
        saved = [by_step[number] for number in sorted(by_step) if step is None or number <= step]
        members = {**first, **{x.name: made.setdefault(x.name, seat(str(x))) for x in saved}}
        if not members:
            raise UnavailableError(f"`{path}.population` is 'self', but {run.folder} holds no checkpoints.")
        return members

    return Population(members, "self", seed)


def read_section(path: str, section: Any, cls: type) -> Any:
    """
    Makes an instance of a dataclass from a section of the settings. Raises `ValueError` if a key is unknown or a value
    is wrong.
    """
    keys = keys_of(cls)
    if not isinstance(section, Mapping):
        raise ValueError(f"`{path}` must be a section with some of {', '.join(keys)}.")
    for name, value in section.items():
        if name not in keys:
            raise ValueError(f"`{path}.{name}` is not a known setting; it has {', '.join(keys)}.")
        checked(f"{path}.{name}", value, keys[name])
    with config_errors(f"`{path}`: "):
        return cls(**section)
