"""Finds the task that the settings of a run name."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trl_multiagent.environments.base import Environment
from trl_multiagent.environments.centralized import CentralizedEnvironment
from trl_multiagent.environments.imports import import_object
from trl_multiagent.environments.task import Task
from trl_multiagent.settings.algorithms import ALGORITHMS, PREFERENCE_ALGORITHMS
from trl_multiagent.settings.comlrl import UNAVAILABLE
from trl_multiagent.settings.derive import Settings, task_settings
from trl_multiagent.settings.read import ConfigError, config_errors
from trl_multiagent.settings.schema import SHARED_SECTIONS, TopLevel, keys_of


def choose_task(tasks: Task | Mapping[str, str], merged: Mapping[str, Any], config: str | None = None) -> Task:
    """
    Finds the task of a run: `tasks` itself if it is one; else the task of the setting `task`, whose module may lie
    beside the file `config`; else a task whose section is given; else the first of `tasks`. Raises `ConfigError` if
    there is no such task, or its sections are wrong.
    """
    if isinstance(tasks, Task):
        return checked(tasks)
    name = merged.get("task")
    if name is None:
        name = next((name for name in tasks if name in merged), next(iter(tasks)))
    if not isinstance(name, str) or (name not in tasks and not {":", "."} & set(name)):
        advice = "a task of your own has the form module:NAME"
        raise ConfigError(f"`task` is {name!r}, which is none of {', '.join(tasks)}; {advice}.")
    with config_errors():
        task = import_object("task", tasks.get(name, name), config)
    if not isinstance(task, Task):
        type_name = type(task).__name__
        raise ConfigError(f"`task` names {name!r}, which is of type {type_name}, not a `trl_multiagent.Task`.")
    return checked(task)


def checked(task: Task) -> Task:
    """
    Returns the task. Raises `ConfigError` if one of its sections is not a dataclass, or has the name of another
    section.
    """
    taken = {*SHARED_SECTIONS, *keys_of(TopLevel), *ALGORITHMS, *UNAVAILABLE, "peft"} - {"dataset"}
    for name, section in task.settings.items():
        if name in taken:
            raise ConfigError(f"The task's section `{name}` has a name that every recipe uses; choose another one.")
        if not (isinstance(section, type) and dataclasses.is_dataclass(section)):
            raise ConfigError(f"The task's section `{name}` is {section!r}; it must be a dataclass.")
    return task


def make_environment(settings: Settings, run_folder: Path) -> Environment:
    """
    Makes the environment of a run in a folder. Raises `ConfigError` if its roles, or their order, do not fit the
    algorithm.
    """
    from trl_multiagent.runs.seats import Run, seated  # imports transformers

    environment = settings.task.environment(task_settings(settings, run_folder))
    environment = seated(settings, environment, run_folder, Run(run_folder, settings.model_names))
    order = environment.order or (environment.roles,)
    if settings.algorithm in PREFERENCE_ALGORITHMS and order != (environment.roles,):
        raise ConfigError(
            f"`{settings.algorithm}` learns from one turn in which all roles answer, but in this task they act "
            "one after the "
            "other: train it with an algorithm such as magrpo."
        )
    roles = environment.task.roles if isinstance(environment, CentralizedEnvironment) else environment.roles
    if len(roles) != settings.num_agents:
        problem = f"but the task has {len(roles)} roles: {', '.join(roles)}. Set it to {len(roles)}."
        raise ConfigError(f"`{settings.algorithm}.num_agents` is {settings.num_agents}, {problem}")
    return environment
