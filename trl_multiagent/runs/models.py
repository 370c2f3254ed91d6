"""
The models of a run: checks of their names, the adapters of the agents, and the loader of the team; and its
environment, with the players of the roles that are not trained (the section `seats`).
"""

import difflib
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from peft import LoraConfig
from transformers.integrations import is_deepspeed_zero3_enabled
from trl import ModelConfig, get_peft_config

from trl_multiagent.endpoints import EndpointClient, EndpointSettings, make_endpoint
from trl_multiagent.environments.base import Environment
from trl_multiagent.environments.centralized import CentralizedEnvironment
from trl_multiagent.environments.imports import import_function
from trl_multiagent.environments.task_errors import UnavailableError
from trl_multiagent.folders import TEAM_FILE
from trl_multiagent.limits import MAX_NAMES, check_value, keys_of
from trl_multiagent.models.adapter_config import check_adapter_config
from trl_multiagent.rollout.seats import EndpointSeat, FunctionSeat, Population, Seat, SeatedEnvironment
from trl_multiagent.settings.algorithms import PREFERENCE_ALGORITHMS
from trl_multiagent.settings.derive import Settings, check_models
from trl_multiagent.settings.read import ConfigError, config_errors
from trl_multiagent.settings.schema import PEFT_DEFAULTS, AgentModel, SeatSettings
from trl_multiagent.team.files import read_team_file
from trl_multiagent.team.load import TeamLoader
from trl_multiagent.team.seat import TeamSeat
from trl_multiagent.trainers.base.checkpoints import step_of


START = "start"  # the name of the models from which the run starts, in the population of its own checkpoints


def make_peft_config(settings: Settings) -> LoraConfig | None:
    """
    Makes the adapter of every agent from the section `peft` or, with TRL, from `agent_model`. Raises `ConfigError` if
    a value is wrong.
    """
    model = settings.agent_model
    with config_errors(
        f"section `{'peft' if settings.has_peft_section else 'agent_model'}`: ", (ValueError, TypeError)
    ):
        if settings.has_peft_section:
            config = LoraConfig(**{**PEFT_DEFAULTS, **settings.values["peft"]})
        else:
            config = get_peft_config(ModelConfig(use_peft=model.use_peft, **model.lora_arguments))
            names = model.lora_target_modules or []
            if config and len(names) == 1 and names[0].isidentifier():
                # TRL passes a single name as text, which PEFT would compare with whole paths of modules
                config.target_modules = {*names}
        if config:
            check_adapter_config("every agent", config)
    return config


def loading_arguments(model: AgentModel) -> dict[str, Any]:
    """Returns the arguments of `AutoModelForCausalLM.from_pretrained` that the user gave."""
    given = model.given("revision", "gguf_file", "attn_implementation", "trust_remote_code")
    return given | (model.model_init_kwargs or {})


def make_loader(settings: Settings, peft_config: LoraConfig | None = None) -> TeamLoader:
    """Makes the loader of the teams of a run. `peft_config`: the adapter of every agent, from [`make_peft_config`]."""
    model = settings.agent_model
    return TeamLoader(
        models=settings.model_names,
        builders=settings.builders,
        peft_config=peft_config,
        adapter_roles=model.adapter_roles,
        share_weights=model.share_weights,
        torch_dtype=model.torch_dtype,
        quantization=model.quantization_arguments,
        arguments={
            **loading_arguments(model),
            "tokenizer_kwargs": model.tokenizer_kwargs,  # null is the default of these
            "reasoning": model.reasoning,
            "chat_template_kwargs": settings.arguments.get("chat_template_kwargs", model.chat_template_kwargs),
        },
    )


# The environment, and the players of roles that are not trained


@dataclass
class Run:
    """The run that gives the population `self` its checkpoints."""

    folder: Path
    start: str | list[str] | None  # the models from which it started, as in `Settings.model_names`; `None` if unknown


def make_environment(settings: Settings, run_folder: Path) -> Environment:
    """
    Makes the environment of a run in a folder. Raises `ConfigError` if its roles, or their order, do not fit the
    algorithm.
    """
    environment = settings.task.environment(settings.for_task(run_folder))
    environment = seated(settings, environment, run_folder, Run(run_folder, settings.model_names))
    order = environment.order or (environment.roles,)
    if settings.algorithm in PREFERENCE_ALGORITHMS and order != (environment.roles,):
        raise ConfigError(
            f"`{settings.algorithm}` learns from one turn in which all roles answer, but in this task they act "
            "one after the other: train it with an algorithm such as magrpo."
        )
    roles = environment.task.roles if isinstance(environment, CentralizedEnvironment) else environment.roles
    if len(roles) != settings.num_agents:
        raise ConfigError(
            f"`{settings.algorithm}.num_agents` is {settings.num_agents}, but the task has {len(roles)} roles: "
            f"{', '.join(roles)}. Set it to {len(roles)}."
        )
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
        seats = {role: make_seat(settings, role, folder, run, trained) for role in settings.seats}
        if settings.dry_run:  # asks nobody
            seats = dict.fromkeys(seats, FunctionSeat(lambda *_: ""))
        return SeatedEnvironment(environment, seats)


def make_seat(settings: Settings, role: str, folder: Path, run: Run, trained: Sequence[str]) -> Seat:
    """Makes the seat of a role, see [`seated`]. `trained` are the roles of the team."""
    path, seed = f"seats.{role}", settings.arguments.get("seed", 0)
    own: SeatSettings = read_section(path, settings.seats[role], SeatSettings)
    if own.function:
        return FunctionSeat(import_function(f"{path}.function", own.function, "item", "prompt", "history"))
    if own.endpoint:
        given = {"max_tokens": own.max_completion_length, **own.endpoint}
        endpoint: EndpointSettings = read_section(f"{path}.endpoint", given, EndpointSettings)
        if endpoint.model is None:
            raise ValueError(f"`{path}.endpoint.model` is missing: the model's name, as the endpoint knows it.")
        endpoint = make_endpoint(**vars(endpoint), called=lambda field: f"{path}.endpoint.{field}")
        return EndpointSeat(EndpointClient(endpoint, folder / "seats" / role), seed)
    if is_deepspeed_zero3_enabled():
        raise ValueError(f"`{path}`: under ZeRO-3, a team cannot play a role. Use ZeRO-2, or an endpoint.")

    @functools.cache
    def seat(name: str) -> TeamSeat:
        loader = make_loader(settings)
        if name not in (run.start, *(run.start or ())):  # these are for the run's models
            loader = replace(loader, arguments={**loader.arguments, "revision": None, "gguf_file": None})
        return TeamSeat(
            name,
            agent=own.agent,
            loader=loader,
            token_budget=settings.arguments.get("generation_token_budget"),
            seed=seed,
            use_chat_template=own.use_chat_template,
            max_new_tokens=own.max_completion_length,
            temperature=own.temperature,
        )

    agent = own.agent or role
    if own.population == "self":  # earlier versions of an agent of this run: its initial model, and its checkpoints
        if agent not in trained:
            raise ValueError(
                f"`{path}.agent` is {agent!r}, but this run trains "
                f"{', '.join(trained) or 'no role: leave one out of `seats`'}."
            )
        start = run.start[trained.index(agent)] if isinstance(run.start, list) else run.start
        first = {} if start is None else {START: seat(start)}

        def versions(step: int | None) -> Mapping[str, Seat]:
            saved = sorted((x.parent for x in run.folder.glob(f"checkpoint-*/{TEAM_FILE}")), key=step_of)
            found = first | {x.name: seat(str(x)) for x in saved if step is None or step_of(x) <= step}
            if not found:
                raise UnavailableError(f"`{path}.population` is 'self', but {run.folder} holds no checkpoints.")
            return found

        return Population(versions, "self", seed)
    names: Any = own.population or [own.team]
    check_models(path, names, settings.task.models)
    for name in names:  # weights are loaded when the seat first plays
        if (file := Path(name) / TEAM_FILE).is_file() and agent not in (roles := read_team_file(file).roles):
            raise ValueError(f"`{path}`: {name} has the roles {', '.join(roles)}, not {agent!r}.")
    members: dict[str, Seat] = {name: seat(name) for name in names}
    return members[own.team] if own.team else Population(lambda step: members, list(members), seed)


def read_section(path: str, section: Any, cls: type) -> Any:
    """
    Makes an instance of a dataclass from a section of the settings. Raises `ValueError` if a key is unknown or a value
    is wrong.
    """
    values = read_values(path, section, cls)
    with config_errors(f"`{path}`: ", (ValueError, TypeError)):
        return cls(**values)


def read_values(path: str, section: Any, cls: type) -> dict[str, Any]:
    """
    Checks the values of a section that has the fields of a dataclass as keys. Raises `ValueError` if a key is unknown
    or a value is wrong.
    """
    keys = keys_of(cls)
    if not isinstance(section, Mapping):
        raise ValueError(f"`{path}` must be a section with some of {', '.join(keys)}.")
    for name in section:
        if name not in keys:
            raise ValueError(
                f"`{path}.{name}` is not a known setting; it has "
                f"{', '.join(difflib.get_close_matches(str(name), keys, n=MAX_NAMES, cutoff=0.0))}."
            )
    return {name: check_value(f"{path}.{name}", value, keys[name]) for name, value in section.items()}
