"""
The function behind every recipe script and `trl-multiagent train`, its command line and its help. TRL is imported
after the command line is read, so that help is quick.
"""

import argparse
import contextlib
import os
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from trl_multiagent.environments.base import Environment
from trl_multiagent.environments.frames import shows_task
from trl_multiagent.environments.imports import TASKS, import_object
from trl_multiagent.environments.task import Task
from trl_multiagent.environments.task_errors import TaskError, UnavailableError, describe
from trl_multiagent.environments.yaml_task import task_of
from trl_multiagent.folders import is_machine_fault
from trl_multiagent.settings.algorithms import ALGORITHMS, ROLLOUTS, import_class
from trl_multiagent.settings.derive import Settings, check_settings
from trl_multiagent.settings.read import (
    RECIPES,
    ConfigError,
    Layer,
    config_errors,
    config_file,
    fail,
    flag_layer,
    parse_overrides,
    read_yaml,
    renamed,
)
from trl_multiagent.settings.schema import (
    AUTO,
    TRL_FLAGS,
    AgentModel,
    TopLevel,
    algorithm_keys,
    extras_of,
    keys_of,
    sections_of,
)


# The settings that `--help` shows of those that the algorithm has; `--help all` shows all of them
USUAL = {
    "learning_rate": "Learning rate of every agent.",
    "num_train_epochs": "Passes over the training items.",
    "max_steps": "Optimizer steps, instead of num_train_epochs.",
    "num_turns": "Turns of an episode, 1 by default; of a workflow, until it ends.",
    "num_generations": "Completions that each agent samples at a node.",
    "items_per_device": "Items, each with its whole tree, per device and optimizer step.",
    "max_completion_length": "Maximum number of tokens of a completion.",
    "temperature": "Sampling temperature, 1 by default.",
    "beta": "Coefficient of the KL penalty; of the loss, with preferences.",
    "output_dir": "Folder of the run.",
    "report_to": "Where metrics go: none, wandb, tensorboard, ...",
    "resume_from_checkpoint": "Checkpoint to resume from; true for the last one of the folder; auto: if there is one.",
    "preference_num_candidates": "Joint answers that are sampled per item.",
    "preference_pairs_per_sample": "Maximum number of pairs of an item.",
    "pair_selection": "Which pairs of an item are kept: reward_gap, comparator_reward, random or all.",
    "comparator_policy": "Policy that samples the other answer of each pair, such as history or current.",
}

MOST_KEYS = 8  # of a section of the task that `--help` describes


@shows_task
def run_recipe(algorithm: str, task: Task | None, argv: Sequence[str] | None = None, prog: str | None = None) -> None:
    """
    Trains a team, or a reward model, on a task, or prints the plan of the run if `--dry_run` is given. Wrong settings
    end the program.

    If a run in phases is started again with the same folder, it skips complete phases and resumes the interrupted one.

    Args:
        algorithm (`str`): Name of the algorithm's section, a key of
            [`~trl_multiagent.settings.algorithms.ALGORITHMS`].
        task ([`~trl_multiagent.environments.task.Task`] or `None`): The task. With `None`, the settings choose one,
            see [`choose_task`].
        argv (`list[str]`, *optional*): Arguments; by default the command line's.
        prog (`str`, *optional*): Name of the program in messages; by default the script's.
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
    from trl_multiagent.jobs.distributed import OtherProcessError, is_lost_process
    from trl_multiagent.models.pretrained import TooLongError
    from trl_multiagent.trainers.base.checkpoints import CheckpointError, WriteError

    try:
        yield
    except (UnavailableError, TooLongError, CheckpointError, WriteError) as error:
        fail(prog, error)
    except ImportError as error:
        fail(prog, f"A library is missing: {error}. Install it, or correct the import.")
    except OtherProcessError as error:
        fail(prog, error, status=1)
    except Exception as error:  # libraries raise errors of many kinds
        if is_lost_process(error):
            fail(prog, f"Another process has ended, or cannot be reached: {describe(error).partition('. ')[0]}.")
        if not is_machine_fault(error):
            raise
        fail(prog, f"{describe(error)}. Mend the disk or free memory, and start again.")


def read_settings(algorithm: str, task: Task | None, argv: Sequence[str] | None, prog: str) -> Settings:
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
    if settings.arguments.get("output_dir"):
        check_folder(f"`{algorithm}.output_dir`", Path(settings.arguments["output_dir"]))
    resume = settings.extras.resume_from_checkpoint
    if isinstance(resume, str) and resume != AUTO and not Path(resume).is_dir():
        raise ConfigError(f"`resume_from_checkpoint` is {resume!r}, but there is no such folder.")
    return settings


def read_plan(config: str, argv: Sequence[str], prog: str) -> Settings:
    """
    Reads and checks the settings of a plan. `config`: the file, which has a section for the algorithm; `argv`: the
    other arguments of a training.
    """
    algorithm = algorithm_of(read_yaml(config_file("--config", config, RECIPES))) or "magrpo"
    if ALGORITHMS[algorithm].run != ROLLOUTS:
        raise ConfigError(f"the plan is for algorithms that learn from rollouts, not for {algorithm}: use --dry_run.")
    return read_settings(algorithm, None, ["--config", config, *argv, "--dry_run"], prog)


def algorithm_of(written: Mapping[str, Any]) -> str | None:
    """Returns the algorithm that has a section in the settings of a run."""
    return next((name for name in written if name in ALGORITHMS), None)


def settings_of(
    algorithm: str,
    task: Task | None,
    layers: Sequence[Layer],
    prog: str,
    config: str | None,
) -> Settings:
    """
    Merges and checks layers of settings, see [`read_settings`]. Later layers win. `config`: the file of the first
    layer.
    """
    merged = renamed(algorithm, layers)
    settings = check_settings(algorithm, choose_task(task, merged, config), merged)
    settings.prog = prog
    return settings


def choose_task(own: Task | None, merged: Mapping[str, Any], config: str | None = None) -> Task:
    """
    Finds the task of a run: the task of the setting `task` (its module may lie beside the file `config`); else `own`,
    the program's task; else a task with a section in `merged`; else the first of `TASKS`. Raises `ConfigError` if
    there is no such task, or the program has another one.
    """
    name = merged.get("task")
    if name is None:
        if own is not None:
            return own
        name = next((name for name in TASKS if name in merged), next(iter(TASKS)))
    if not isinstance(name, str) or (name not in TASKS and not {":", "."} & set(name)):
        raise ConfigError(
            f"`task` is {name!r}, which is none of {', '.join(TASKS)}; a task of your own has the form module:NAME."
        )
    with config_errors():
        task = import_object("task", TASKS.get(name, name), config)
    if isinstance(task, Environment):
        task = task_of(task)
    if not isinstance(task, Task):
        what = f"of type {type(task).__name__}, neither a `trl_multiagent.Task` nor an environment."
        if isinstance(task, type):
            what = f"a class: name an object of it, such as `{task.__name__.lower()} = {task.__name__}()`."
        raise ConfigError(f"`task` names {name!r}, which is {what}")
    if own not in (None, task):
        raise ConfigError(
            f"`task` is {name!r}, but this program trains on a task of its own. Remove it, or start `trl-multiagent`."
        )
    return task


def check_folder(setting: str, folder: Path) -> None:
    """Raises `ConfigError` if the folder that a setting names is a file, is inside a file, or cannot be written to."""
    existing = next(path for path in (folder, *folder.absolute().parents) if os.path.lexists(path))
    if not existing.is_dir():
        raise ConfigError(f"{setting} names the folder '{folder}', but {existing} is a file or a broken link.")
    try:
        with tempfile.TemporaryDirectory(dir=existing):
            pass
    except OSError as error:  # a file system such as /proc has no permissions that tell it
        raise ConfigError(
            f"{setting} names the folder '{folder}', but nothing can be written to {existing} ({error.strerror})."
        ) from error


# The command line


def make_parser(algorithm: str, prog: str | None = None) -> argparse.ArgumentParser:
    """
    Makes the parser of a recipe. Flags that it does not list are keys of the algorithm's section, or of `agent_model`.
    """
    parser = argparse.ArgumentParser(
        prog=prog,
        usage="%(prog)s --config FILE [--override KEY=VALUE ...] [--dry_run] [--FIELD VALUE ...]",
        description=f"Takes the settings of the section '{algorithm}'. A flag wins over --override, and "
        "--override over the file.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        add_help=False,
    )
    recipe = parser.add_argument_group("recipe")
    recipe.add_argument(
        "-h",
        "--help",
        nargs="?",
        const="usual",
        choices=("usual", "all"),
        metavar="all",
        help="Show the usual settings; with 'all', every one.",
    )
    recipe.add_argument("--config", metavar="FILE", help="YAML file with the sections listed below.")
    recipe.add_argument(
        "--override",
        metavar="KEY=VALUE",
        nargs="+",
        action="extend",
        default=[],
        help=f"Single settings, such as agent_model.name=Qwen/Qwen2.5-0.5B {algorithm}.learning_rate=1e-5.",
    )
    recipe.add_argument("--dry_run", action="store_true", help="Check everything, print the plan, stop.")
    return parser


def read_layers(algorithm: str, arguments: argparse.Namespace, rest: Sequence[str]) -> list[Layer]:
    """
    Reads the layers of the file, the overrides and the flags. `rest`: flags that are not the parser's own, with their
    values.
    """
    flags = {}
    for text in rest:
        if text.startswith("--"):
            name, has_value, value = text[2:].partition("=")
            values = flags[name] = [value] if has_value else []
        elif not flags or (values and re.match(r"[\w.]+=", text)):
            advice = f"give it as --override {text}" if "=" in text else "see --help"
            advice = "a configuration says which algorithm it is for" if text in ALGORITHMS else advice
            raise ConfigError(f"unknown argument {text!r}; {advice}.")
        else:
            values.append(text)
    # A configuration of the package is replaced by its path
    arguments.config = arguments.config and config_file("--config", arguments.config, RECIPES)
    return [read_yaml(arguments.config), parse_overrides(arguments.override), flag_layer(algorithm, flags)]


def print_help(parser: argparse.ArgumentParser, algorithm: str, task: Task, full: bool) -> None:
    """
    Prints the help of a recipe: common settings; with `full`, all of them (imports TRL).
    """
    flags = {flag: f"Short for --override {path}=VALUE." for flag, path in TRL_FLAGS.items()}
    keys = algorithm_keys(algorithm, documented=full)
    usual = {name: text for name, text in USUAL.items() if name in keys}
    if full:
        flags |= {name: key.help for name, key in keys_of(AgentModel).items()}
        usual = {name: f"{key.help} (default: {key.default})" for name, key in keys.items() if name not in flags}
    for title, texts in (
        ("flags for the model and the data, named as in TRL's scripts", flags),
        (f"flags that are also keys of the section '{algorithm}'", usual),
    ):
        group = parser.add_argument_group(title)
        for name, text in texts.items():
            group.add_argument(f"--{name}", metavar="VALUE", help=text.replace("%%", "%").replace("%", "%%"))
    parser.epilog = "\n".join(describe_sections(algorithm, task, full))
    print(parser.format_help(), end="")  # argparse would hide that it cannot be written


def describe_sections(algorithm: str, task: Task, full: bool) -> Iterator[str]:
    """Yields the sections of the YAML file and their keys, line by line. Small sections of the task have help."""
    yield "keys of the YAML file:"
    yield from (f"  {name}: {key.help}" for name, key in keys_of(TopLevel).items())
    yield f"  {algorithm}: every flag of the last group, {', '.join(keys_of(extras_of(algorithm)))}"
    for section, cls in sections_of(task).items():
        keys = keys_of(cls)
        if full or (section in task.settings and len(keys) <= MOST_KEYS):
            yield f"  {section}:"
            yield from (f"    {name}: {key.help}" for name, key in keys.items())
        else:
            yield f"  {section}: {', '.join(keys)}"
    yield "  peft: a LoRA adapter for every agent. Fields of peft.LoraConfig; {} takes the defaults."
    if task.models:
        yield f"agent_model.name also takes models that this task builds: {', '.join(task.models)}."
    if not full:
        yield "Every field of the trainer's configuration class is a flag and a key, too: see --help all."
