"""
The function behind every recipe script and `trl-multiagent train`. TRL is imported after the command line is read, so
that help is quick.
"""

import contextlib
import dataclasses
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from trl_multiagent.console import printable
from trl_multiagent.environments.base import Environment
from trl_multiagent.environments.imports import import_object
from trl_multiagent.environments.task import Task
from trl_multiagent.environments.task_errors import TaskError, UnavailableError
from trl_multiagent.environments.yaml_task import task_of
from trl_multiagent.folders import is_disk_full
from trl_multiagent.settings.algorithms import ALGORITHMS, import_class
from trl_multiagent.settings.comlrl import UNAVAILABLE
from trl_multiagent.settings.command_line import make_parser, print_help, read_layers
from trl_multiagent.settings.derive import Settings, check_settings
from trl_multiagent.settings.read import ConfigError, config_errors, fail, renamed
from trl_multiagent.settings.schema import SHARED_SECTIONS, TopLevel, keys_of


def run_recipe(
    algorithm: str, task: Task | Mapping[str, str], argv: Sequence[str] | None = None, prog: str | None = None
) -> None:
    """
    Trains a team, or a reward model, on a task, or prints the plan of the run if `--dry_run` is given. Wrong settings
    end the program.

    If a run in phases is started again with the same folder, it skips complete phases and resumes the interrupted one.

    Args:
        algorithm (`str`): Name of the algorithm's section, a key of
            [`~trl_multiagent.settings.algorithms.ALGORITHMS`].
        task ([`~trl_multiagent.environments.task.Task`] or `Mapping[str, str]`): The task; or, if the user chooses it,
        the named tasks, see
            [`choose_task`].
        argv (`list[str]`, *optional*): Arguments; by default those of the command line.
        prog (`str`, *optional*): Name of the program in messages; by default that of the script.
    """
    prog = prog or Path(sys.argv[0]).name
    with end_on_wrong_input(prog):
        settings = read_settings(algorithm, task, argv, prog)
        run = import_class(ALGORITHMS[algorithm].run)
    run(settings)


@contextlib.contextmanager
def end_on_wrong_input(prog: str) -> Iterator[None]:
    """
    Ends the program with one line and exit status 2 on wrong input. Errors in the code of a task are bugs, and keep
    their traceback.
    """
    try:
        yield
    except UnavailableError as error:
        fail(prog, error)
    except TaskError:
        raise
    except ImportError as error:
        fail(prog, f"A library is missing: {error}. Install it, or correct the import.")
    except (ValueError, OSError) as error:
        fail(prog, error)


@contextlib.contextmanager
def end_with_one_line(prog: str) -> Iterator[None]:
    """
    Ends the program with one line on failures that are not bugs, such as a full disk, and on failures of another
    process.
    """
    from trl_multiagent.jobs.distributed import OtherProcessError
    from trl_multiagent.models.pretrained import TooLongError
    from trl_multiagent.trainers.base.checkpoints import CheckpointError, WriteError

    try:
        yield
    except (UnavailableError, TooLongError, CheckpointError, WriteError) as error:
        fail(prog, error)
    except ImportError as error:
        fail(prog, f"A library is missing: {error}. Install it, or correct the import.")
    except OSError as error:
        if not is_disk_full(error):
            raise
        fail(prog, error)
    except OtherProcessError as error:
        print(f"{prog}: error: {printable(' '.join(str(error).split()))}", file=sys.stderr)
        sys.exit(1)


def read_settings(algorithm: str, task: Task | Mapping[str, str], argv: Sequence[str] | None, prog: str) -> Settings:
    """
    Reads and checks the settings of a run, see [`run_recipe`]. With `--help`, prints the help and ends the program.
    """
    parser = make_parser(algorithm, prog)
    arguments, rest = parser.parse_known_args(argv)
    layers = read_layers(algorithm, arguments, rest)
    if arguments.help:
        chosen = choose_task(task, renamed(algorithm, layers), arguments.config)
        print_help(parser, algorithm, chosen, full=arguments.help == "all")
        sys.exit(0)
    settings = settings_of(algorithm, task, layers, prog, arguments.config)
    settings.dry_run = arguments.dry_run
    return settings


def settings_of(
    algorithm: str,
    task: Task | Mapping[str, str],
    layers: Sequence[dict[str, Any]],
    prog: str,
    config: str | None = None,
) -> Settings:
    """
    Merges and checks layers of settings, see [`read_settings`]. Later layers win. `config`: the file of the first
    layer.
    """
    merged = renamed(algorithm, layers)
    settings = check_settings(algorithm, choose_task(task, merged, config), merged)
    settings.prog = prog
    name = settings.values[""].get("task")
    if isinstance(task, Task) and name is not None:
        advice = f"Remove it, or start `trl-multiagent train {algorithm}`"
        raise ConfigError(f"`task` is {name!r}, but {prog} trains on a task of its own. {advice}.")
    return settings


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
    if isinstance(task, Environment):
        task = task_of(task)
    if not isinstance(task, Task):
        type_name = type(task).__name__
        raise ConfigError(
            f"`task` names {name!r}, which is of type {type_name}, neither a `trl_multiagent.Task` nor an environment."
        )
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
