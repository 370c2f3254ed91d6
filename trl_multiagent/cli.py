"""
The command `trl-multiagent`: `train` launches a recipe without a script, `evaluate` and `cross-play` evaluate saved
teams, `collect` collects preferences, `reproduce` runs named experiments, `plan` prints what a training needs,
`report` makes the page of a run, `init` writes a small task to start from, `push` uploads to the Hub, `env` is for bug
reports.

Slow libraries are imported where they are needed, so that help, versions and errors appear at once.
"""

import argparse
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import trl_multiagent
from trl_multiagent.folders import is_collection
from trl_multiagent.jobs.signals import (
    COMMAND_VARIABLE,
    end_on_signal,
    end_with_parent,
    leaving_signals_to_children,
)
from trl_multiagent.settings.algorithms import ALGORITHMS


# The named tasks; the first is the default. The user gives any other task as `package.module:NAME`
TASKS = {
    "code_generation": "trl_multiagent.demo.task:TASK",
    "bug_fixing": "trl_multiagent.tasks.bug_fixing:TASK",
    "block_building": "trl_multiagent.tasks.block_building:TASK",
    "class_completion": "trl_multiagent.tasks.class_completion:TASK",
    "writing": "trl_multiagent.tasks.writing:TASK",
    "needed": "trl_multiagent.tasks.needed:TASK",
    "functions": "trl_multiagent.environments.yaml_task:TASK",
}

# `accelerate launch` waits so long after Ctrl-C or SIGTERM for several processes to end their step
SECONDS_TO_END = "3600"


def make_parsers() -> tuple[argparse.ArgumentParser, argparse.ArgumentParser]:
    """
    Returns the parser of all commands and the parser of `train`, whose help is for `train --help` without an
    algorithm.
    """
    parser = argparse.ArgumentParser(prog="trl-multiagent", allow_abbrev=False)
    parser.add_argument("--version", action="version", version=trl_multiagent.__version__)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    commands.add_parser("env", help="Print the versions that a bug report needs.")
    add_push(commands)
    init = commands.add_parser(
        "init",
        help="Write a small task of your own to start from.",
        description="Writes task.py and config.yaml: a task that trains as it is, on any machine and without downloads.",
        allow_abbrev=False,
    )
    init.add_argument("folder", metavar="FOLDER", nargs="?", default=".", help="By default the working directory.")

    add_results(commands)

    # The other arguments of these commands are those of a recipe or an evaluation, which have help of their own
    rest: dict[str, Any] = {"allow_abbrev": False, "add_help": False}
    train = commands.add_parser(
        "train",
        help="Train a team through `accelerate launch`, on code generation or on a task of your own.",
        description="Trains a team through `accelerate launch`, on code generation or on the task that --task names. All "
        "other arguments go to the recipe: `trl-multiagent train magrpo --help` lists them.",
        usage="%(prog)s ALGORITHM [--accelerate_config FILE] [--num_processes N] [--seeds LIST [--jobs N]] [--task TASK] --config FILE "
        "[recipe arguments]",
        **rest,
    )
    helps = {
        "collect": "Collect joint preferences, to train on them later.",
        "evaluate": "Evaluate saved teams: pass@k, every part of the reward, cost, baselines.",
        "cross-play": "Play the agents of several runs with each other.",
    }
    accelerate_help = "Configuration for `accelerate launch`: a file, or a name in the package, such as zero3."
    processes_help = "Number of processes, for `accelerate launch`."
    for command in (train, *(commands.add_parser(name, help=text, **rest) for name, text in helps.items())):
        command.add_argument("--accelerate_config", metavar="FILE", help=accelerate_help)
        command.add_argument("--num_processes", metavar="N", type=positive, help=processes_help)
    add_seeds(train, None)
    for command in (train, commands.add_parser("run", help="What `train` launches in every process.", **rest)):
        command.add_argument("algorithm", metavar="ALGORITHM", choices=ALGORITHMS, help=", ".join(ALGORITHMS))
    return parser, train


def add_results(commands: Any) -> None:
    """Adds the commands `report`, `reproduce` and `plan`."""
    report = commands.add_parser(
        "report",
        help="Make the page of a run or an evaluation, or compare runs.",
        description="Makes report.html in the folder of a run or an evaluation, or compares several runs. Runs that differ "
        "only in their seeds form a group, which has means and bands.",
        allow_abbrev=False,
    )
    folders_help = "Output folder of a run or an evaluation, or a folder of several runs."
    report.add_argument("folders", metavar="RUN", nargs="+", help=folders_help)
    page_help = "The page to write; by default report.html in the folder, or comparison.html here for several folders."
    report.add_argument("--output", metavar="FILE", help=page_help)

    about = "Train a team for several seeds and its control, evaluate them, and show the published numbers."
    reproduce = commands.add_parser(
        "reproduce", help=about, description=f"{about} Other arguments go to the trainings."
    )
    reproduce.add_argument("name", metavar="NAME", nargs="?", help="The experiment; without it, all are listed.")
    add_seeds(reproduce, [0, 1, 2])
    reproduce.add_argument("--output_dir", metavar="FOLDER", type=Path, help="By default outputs/reproduce/NAME.")

    about = "Print the plan of a training: steps, calls, memory of each GPU by part, and the shortest time of a step."
    plan = commands.add_parser("plan", help=about, description=about + " Other arguments are those of `train`.")
    plan.add_argument(
        "config", metavar="CONFIG", nargs="?", help="YAML file of a training, or its name in the package."
    )
    plan.add_argument("--config", metavar="CONFIG", dest="config_flag", help="The same, as for `train`.")
    plan.add_argument(
        "--gpu", default="H100", help="Kind of GPU: T4, 4090, L40S, A100-40, A100, H100 (default) or H200."
    )
    plan.add_argument("--num_gpus", metavar="N", type=positive, default=1, help="Number of GPUs, 1 by default.")
    plan.add_argument("--zero", type=int, choices=range(4), default=0, help="Stage of ZeRO; 0, the default, for none.")


def add_push(commands: Any) -> None:
    """Adds the command `push`. The names of its arguments are those of [`push_folder`]."""
    push = commands.add_parser(
        "push",
        help="Upload a saved team, or the folder of a run, to the Hugging Face Hub.",
        description="Uploads a saved team, or the folder of a run without its checkpoints, to the Hugging Face Hub. Files "
        "that the repository already has are not sent again.",
        allow_abbrev=False,
    )
    folder_help = "Folder of a saved team, of a run, or of collected preferences."
    push.add_argument("folder", metavar="FOLDER", help=folder_help)
    push.add_argument("repo_id", metavar="REPO_ID", help="Repository, created if it does not exist.")
    private_help = "Make the repository private if it is created."
    push.add_argument("--private", action="store_true", default=None, help=private_help)
    push.add_argument("--token", help="Token with write access; by default that of `hf auth login` or HF_TOKEN.")
    push.add_argument("--revision", metavar="BRANCH", help="Branch, created if it does not exist; by default main.")
    push.add_argument("--commit_message", metavar="TEXT", default="Upload team", help="Message of the commit.")
    push.add_argument("--create_pr", action="store_true", help="Open a pull request instead.")


def positive(text: str) -> int:
    """Reads a number of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least 1.")
    return int(text)


def add_seeds(parser: argparse.ArgumentParser, default: list[int] | None) -> None:
    """Adds the flags for several seeds."""
    seeds_help = "Train once per seed, such as 0,1,2, each in its own folder. Repeat it to train missing ones."
    parser.add_argument("--seeds", metavar="LIST", type=several_seeds, default=default, help=seeds_help)
    parser.add_argument("--jobs", metavar="N", type=positive, default=1, help="Seeds at the same time, 1 by default.")


def several_seeds(text: str) -> list[int]:
    """Reads seeds that are separated by commas."""
    parts = text.split(",")
    if not all(part.isdecimal() and int(part) < 2**32 for part in parts) or len(set(parts)) < len(parts):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of distinct seeds, such as 0,1,2.")
    return [int(part) for part in parts]


def launch(command: Sequence[str], check: Callable[[], object], prog: str, options: argparse.Namespace) -> None:
    """
    Starts a command of `trl-multiagent` with `options.accelerate_config` and `options.num_processes`. Before that,
    `check` reads the settings. If one is wrong, `check` raises `ConfigError`, which ends the program `prog` with one
    line.
    """
    from trl_multiagent.settings.read import ACCELERATE, ConfigError, config_file, fail

    flags = []
    try:
        if options.accelerate_config is not None:
            file = config_file("--accelerate_config", options.accelerate_config, ACCELERATE)
            flags += ["--config_file", file]
        check()
        if options.accelerate_config is not None:
            check_accelerate_config(file)  # last, because accelerate takes seconds to import
    except ConfigError as error:
        fail(prog, error)
    if options.num_processes is not None:
        flags += ["--num_processes", str(options.num_processes)]

    from accelerate.commands.config.config_args import default_config_file
    from accelerate.commands.launch import launch_command, launch_command_parser
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    is_configured = options.accelerate_config is not None or Path(default_config_file).is_file()
    if options.num_processes not in (None, 1) and not is_configured:
        # Without a configuration, accelerate starts a single process where there is no GPU
        flags += ["--config_file", config_file("--accelerate_config", "ddp", ACCELERATE)]
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", SECONDS_TO_END)
    try:
        with leaving_signals_to_children():
            launch_command(launch_command_parser().parse_args([*flags, "--module", "trl_multiagent.cli", *command]))
    except subprocess.CalledProcessError as error:
        if error.returncode >= 0:
            sys.exit(error.returncode)  # the process has printed its error
        print(f"{prog}: ended by {signal.Signals(-error.returncode).name}.", file=sys.stderr)
        sys.exit(128 - error.returncode)
    except SignalException as error:  # raised if several processes run
        sys.exit(128 + error.sigval)
    except ChildFailedError as error:
        sys.exit(error.get_first_failure()[1].exitcode)


def check_accelerate_config(file: str) -> None:
    """
    Raises `ConfigError` if `accelerate launch` cannot read the file, or if it needs a package that is not installed.
    """
    from accelerate.commands.config.config_args import load_config_from_file
    from accelerate.utils import DistributedType, is_deepspeed_available
    from yaml import YAMLError

    from trl_multiagent.settings.read import ConfigError

    try:
        config = load_config_from_file(file)
    except (YAMLError, OSError, ValueError, TypeError, AttributeError, KeyError) as error:
        problem = " ".join(str(error).split())
        raise ConfigError(f"--accelerate_config {file} is not a configuration of accelerate: {problem}") from error
    if config.distributed_type == DistributedType.DEEPSPEED and not is_deepspeed_available():
        raise ConfigError(f"--accelerate_config {file} needs DeepSpeed: pip install 'trl-multiagent[deepspeed]'.")


def init(folder: str) -> None:
    """Writes a task to start from, and says how to train it."""
    from trl_multiagent.new_task import write_task
    from trl_multiagent.settings.read import fail

    try:
        for path in write_task(folder):
            print(f"Wrote {path}")
    except ValueError as error:
        fail("trl-multiagent init", error)
    change = "" if folder == "." else f"cd {shlex.quote(folder)} && "
    print(f"Train it with: {change}trl-multiagent train magrpo --config config.yaml")


def report(folders: Sequence[str], output: str | None) -> None:
    """Makes the page of a run or an evaluation, or of a comparison, and prints its path."""
    from trl_multiagent.runs.report import make_report
    from trl_multiagent.settings.read import fail

    try:
        print(f"Report           {make_report(folders, output)}")
    except (ValueError, OSError) as error:
        fail("trl-multiagent report", error)


def push(arguments: argparse.Namespace) -> None:
    """Uploads a team or preferences, and prints the commit's address."""
    from trl_multiagent.settings.read import fail

    upload: Callable[..., Any]
    if is_collection(arguments.folder):
        from trl_multiagent.preferences.collection import push_preferences as upload
    else:
        from trl_multiagent.hub import push_folder as upload
    try:
        print(upload(**{name: value for name, value in vars(arguments).items() if name != "command"}).commit_url)
    except (ValueError, RuntimeError, OSError) as error:
        fail("trl-multiagent push", error)


def train(algorithm: str, argv: Sequence[str], options: argparse.Namespace | None) -> None:
    """Trains in several processes, or in this one without `options`."""
    from trl_multiagent.runs.run import read_settings, run_recipe

    prog = f"trl-multiagent train {algorithm}"
    if options is None:
        return run_recipe(algorithm, TASKS, argv, prog=prog)
    if options.seeds is not None:
        from trl_multiagent.runs.seeds import print_results, train_with_seeds

        launch_flags = []
        for name in ("accelerate_config", "num_processes"):
            if (value := vars(options)[name]) is not None:
                launch_flags += [f"--{name}", str(value)]
        status, runs = train_with_seeds(algorithm, TASKS, argv, prog, options.seeds, options.jobs, launch_flags)
        if status or "--dry_run" in argv:
            sys.exit(status)
        return print_results(runs)
    launch(["run", algorithm, *argv], partial(read_settings, algorithm, TASKS, argv, prog), prog, options)


def reproduce(arguments: argparse.Namespace, rest: Sequence[str], parser: argparse.ArgumentParser) -> None:
    """Reproduces an experiment, or lists all of them."""
    from trl_multiagent.runs import reproduce

    experiments, name = reproduce.experiments(), arguments.name
    if name is None:
        return print("\n".join(f"{key:<10}{experiment['about']}" for key, experiment in experiments.items()))
    if name not in experiments:
        parser.error(f"there is no experiment {name!r}: choose one of {', '.join(experiments)}.")
    folder = arguments.output_dir or Path("outputs") / "reproduce" / name
    sys.exit(reproduce.reproduce(name, TASKS, arguments.seeds, arguments.jobs, folder, rest))


def collect(argv: Sequence[str], options: argparse.Namespace | None) -> None:
    """Collects preferences in several processes, or in this one without `options`."""
    from trl_multiagent.runs.collection import run_collection
    from trl_multiagent.runs.run import read_settings

    prog = "trl-multiagent collect"
    if options is None:
        return run_collection(TASKS, argv, prog=prog)
    launch(["collect", *argv], partial(read_settings, "madpo", TASKS, argv, prog), prog, options)


def evaluate(command: str, argv: Sequence[str], options: argparse.Namespace | None) -> None:
    """Evaluates in several processes, or in this one without `options`."""
    from trl_multiagent.runs.evaluation import parse_evaluation, run_evaluation

    prog, cross_play = f"trl-multiagent {command}", command == "cross-play"
    if options is None:
        return run_evaluation(TASKS, argv, prog, cross_play)
    launch([command, *argv], partial(parse_evaluation, TASKS, argv, prog, cross_play), prog, options)


def main(argv: Sequence[str] | None = None) -> None:
    with end_on_signal("trl-multiagent", list):  # for the time of imports; a run handles signals itself
        run_command(argv)


def run_command(argv: Sequence[str] | None) -> None:
    argv = sys.argv[1:] if argv is None else list(argv)
    parser, parser_of_train = make_parsers()
    if argv in (["train", "-h"], ["train", "--help"]):
        return parser_of_train.print_help()
    arguments, rest = parser.parse_known_args(argv)
    command = arguments.command
    if command in ("env", "init", "push", "report") and rest:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if command == "run":  # it inherits the variable from the command that launched it
        end_with_parent()
    else:
        os.environ[COMMAND_VARIABLE] = shlex.join(["trl-multiagent", *argv])
    if command == "env":
        from trl.scripts.env import print_env

        print(f"trl-multiagent {trl_multiagent.__version__}")
        print_env()
    elif command == "init":
        init(arguments.folder)
    elif command == "push":
        push(arguments)
    elif command == "report":
        report(arguments.folders, arguments.output)
    elif command == "reproduce":
        reproduce(arguments, rest, parser)
    elif command == "plan":
        from trl_multiagent.runs.plan import GPUS, print_memory_plan

        if arguments.gpu not in GPUS:
            parser.error(f"--gpu {arguments.gpu!r} is not known: choose one of {', '.join(GPUS)}.")
        config = arguments.config or arguments.config_flag
        argv = [*(["--config", config] if config else []), *rest]
        print_memory_plan(TASKS, argv, "trl-multiagent plan", arguments.zero, arguments.num_gpus, arguments.gpu)
    elif command == "run" or (command == "train" and {"-h", "--help"} & set(rest)):
        train(arguments.algorithm, rest, None)
    elif command == "train":
        train(arguments.algorithm, rest, arguments)
    else:
        is_launched = arguments.accelerate_config is not None or arguments.num_processes is not None
        options = arguments if is_launched else None
        collect(rest, options) if command == "collect" else evaluate(command, rest, options)


if __name__ == "__main__":
    main()
