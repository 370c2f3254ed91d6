"""
The command `trl-multiagent`: `train` launches a recipe without a script, `evaluate` and `cross-play` evaluate saved teams, `collect`
collects preferences, `init` writes a small task to start from, `push` uploads to the Hub, `env` is for bug reports.

Slow libraries are imported where they are needed, so that help, versions and errors appear at once.
"""

import argparse
import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import trl_multiagent
from trl_multiagent.folders import is_collection
from trl_multiagent.jobs.stopping import COMMAND_VARIABLE, leaving_signals_to_children
from trl_multiagent.settings.algorithms import ALGORITHMS


# The tasks that have a name; the first is the default. Any other one is given as `package.module:NAME`
TASKS = {"code_generation": "trl_multiagent.demo.task:TASK", "functions": "trl_multiagent.environments.functions:TASK"}

# For which `accelerate launch` waits after Ctrl-C and SIGTERM until several processes have ended their step
SECONDS_TO_END = "3600"


def make_parsers() -> tuple[argparse.ArgumentParser, argparse.ArgumentParser]:
    """The parser of the command, and that of `train`. With an algorithm, `train ALGORITHM --help` prints the recipe's help."""
    parser = argparse.ArgumentParser(prog="trl-multiagent", allow_abbrev=False)
    parser.add_argument("--version", action="version", version=trl_multiagent.__version__)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    commands.add_parser("env", help="Print the versions that a bug report needs.")
    push = commands.add_parser(
        "push",
        help="Upload a saved team, or the folder of a run, to the Hugging Face Hub.",
        description="Uploads a saved team, or the folder of a run without its checkpoints, to the Hugging Face Hub. Files "
        "that are there already are not sent again.",
        allow_abbrev=False,
    )
    push.add_argument(
        "folder", metavar="FOLDER", help="Folder that a team or a trainer saved, or of collected preferences."
    )
    push.add_argument("repo_id", metavar="REPO_ID", help="Repository, created if it does not exist.")
    push.add_argument(
        "--private", action="store_true", default=None, help="Make a repository that is created private."
    )
    push.add_argument("--token", help="Token with write access; by default that of `hf auth login` or HF_TOKEN.")
    push.add_argument("--revision", metavar="BRANCH", help="Branch, created if it does not exist; by default main.")
    push.add_argument("--commit_message", metavar="TEXT", default="Upload team", help="Message of the commit.")
    push.add_argument("--create_pr", action="store_true", help="Open a pull request instead.")
    init = commands.add_parser(
        "init",
        help="Write a small task of your own to start from.",
        description="Writes task.py and config.yaml: a task that trains as it is, on any machine and without downloads.",
        allow_abbrev=False,
    )
    init.add_argument(
        "folder", metavar="FOLDER", nargs="?", default=".", help="Where to write it; by default the working directory."
    )
    train = commands.add_parser(
        "train",
        help="Train a team through `accelerate launch`, on code generation or on a task of your own.",
        description="Trains a team through `accelerate launch`, on code generation or on the task that --task names. All "
        "other arguments go to the recipe: `trl-multiagent train magrpo --help` lists them.",
        usage="%(prog)s ALGORITHM [--accelerate_config FILE] [--num_processes N] [--task TASK] --config FILE "
        "[recipe arguments]",
        allow_abbrev=False,
        add_help=False,
    )
    collect = commands.add_parser(
        "collect",
        help="Collect joint preferences, to train on them later.",
        description="Collects joint preferences of a team. All other arguments go to the recipe: `trl-multiagent collect --help` "
        "lists them.",
        allow_abbrev=False,
        add_help=False,
    )
    evaluate = commands.add_parser(
        "evaluate",
        help="Evaluate saved teams: pass@k, every part of the reward, cost, baselines.",
        allow_abbrev=False,
        add_help=False,
    )
    cross_play = commands.add_parser(
        "cross-play", help="Play the agents of several runs with each other.", allow_abbrev=False, add_help=False
    )
    for command in (train, collect, evaluate, cross_play):
        command.add_argument(
            "--accelerate_config",
            metavar="FILE",
            help="Configuration for `accelerate launch`: a file, or the name of one of this package, such as ddp or zero3.",
        )
        command.add_argument(
            "--num_processes", metavar="N", type=positive, help="Number of processes, for `accelerate launch`."
        )
    run = commands.add_parser(
        "run", help="What `train` launches in every process.", allow_abbrev=False, add_help=False
    )
    for command in (train, run):
        command.add_argument("algorithm", metavar="ALGORITHM", choices=ALGORITHMS, help=", ".join(ALGORITHMS))
    return parser, train


def positive(text: str) -> int:
    """Reads a number of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least 1.")
    return int(text)


def launch(
    command: Sequence[str],
    check: Callable[[], object],
    prog: str,
    accelerate_config: str | None,
    num_processes: int | None,
    argv: Sequence[str],
) -> None:
    """
    Starts a command of `trl-multiagent` in the given number of processes. Before that, `check` reads the settings. It raises `ConfigError`
    if one is wrong.
    """
    from trl_multiagent.settings.read import ACCELERATE, ConfigError, config_file, fail

    options = []
    try:
        if accelerate_config is not None:
            file = config_file("--accelerate_config", accelerate_config, ACCELERATE)
            options += ["--config_file", file]
        check()
        if accelerate_config is not None:
            check_accelerate_config(file)  # last, because accelerate takes seconds to import
    except ConfigError as error:
        fail(prog, error)
    if num_processes is not None:
        options += ["--num_processes", str(num_processes)]

    import psutil
    from accelerate.commands.config.config_args import default_config_file
    from accelerate.commands.launch import launch_command, launch_command_parser
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    if num_processes not in (None, 1) and accelerate_config is None and not Path(default_config_file).is_file():
        # Without a configuration, accelerate starts a single process where there is no GPU
        options += ["--config_file", config_file("--accelerate_config", "ddp", ACCELERATE)]
    target = ["--module", "trl_multiagent.cli", *command, *argv]
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", SECONDS_TO_END)
    try:
        with leaving_signals_to_children():
            launch_command(launch_command_parser().parse_args(options + target))
    except subprocess.CalledProcessError as error:
        sys.exit(error.returncode)  # the process has printed its error
    except SignalException as error:  # of several processes
        for process in psutil.Process().children(recursive=True):  # after a second Ctrl-C
            process.kill()
        sys.exit(128 + error.sigval)
    except ChildFailedError as error:
        sys.exit(error.get_first_failure()[1].exitcode)


def check_accelerate_config(file: str) -> None:
    """Refuses a file that `accelerate launch` cannot read, or that needs a package which is not installed."""
    from accelerate.commands.config.config_args import load_config_from_file
    from accelerate.utils import DistributedType, is_deepspeed_available
    from yaml import YAMLError

    from trl_multiagent.settings.read import ConfigError

    try:
        config = load_config_from_file(file)
    except (
        YAMLError,
        OSError,
        ValueError,
        TypeError,
        AttributeError,
        KeyError,
    ) as error:  # depending on what is wrong in the file
        problem = " ".join(str(error).split())
        raise ConfigError(f"--accelerate_config {file} is not a configuration of accelerate: {problem}") from error
    if config.distributed_type == DistributedType.DEEPSPEED and not is_deepspeed_available():
        raise ConfigError(
            f"--accelerate_config {file} needs DeepSpeed, which is not installed: pip install 'trl-multiagent[deepspeed]'."
        )


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


def run(algorithm: str, argv: Sequence[str]) -> None:
    """Trains in this process."""
    from trl_multiagent.recipe.run import run_recipe

    run_recipe(algorithm, TASKS, argv, prog=f"trl-multiagent train {algorithm}")


def collect(argv: Sequence[str]) -> None:
    """Collects preferences in this process."""
    from trl_multiagent.recipe.collection import run_collection

    run_collection(TASKS, argv, prog="trl-multiagent collect")


def evaluate(command: str, accelerate_config: str | None, num_processes: int | None, argv: Sequence[str]) -> None:
    """Evaluates in this process or, if the arguments ask for that, in several."""
    from trl_multiagent.recipe.evaluation import parse_evaluation, run_evaluation

    prog, cross_play = f"trl-multiagent {command}", command == "cross-play"
    if accelerate_config is None and num_processes is None:
        return run_evaluation(TASKS, argv, prog, cross_play)
    check = partial(parse_evaluation, TASKS, argv, prog, cross_play)
    launch([command], check, prog, accelerate_config, num_processes, argv)


def check_settings(section: str, argv: Sequence[str], prog: str) -> None:
    """Reads the settings of a recipe. Raises `ConfigError` if one is wrong."""
    from trl_multiagent.recipe.run import read_settings

    read_settings(section, TASKS, argv, prog)


def main(argv: Sequence[str] | None = None) -> None:
    argv = sys.argv[1:] if argv is None else list(argv)
    parser, train = make_parsers()
    if argv in (["train", "-h"], ["train", "--help"]):
        return train.print_help()
    arguments, rest = parser.parse_known_args(argv)
    if arguments.command in ("env", "init", "push") and rest:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if arguments.command != "run":  # which has the command that launched it
        os.environ[COMMAND_VARIABLE] = shlex.join(["trl-multiagent", *argv])
    if arguments.command == "init":
        init(arguments.folder)
    elif arguments.command == "push":
        from trl_multiagent.settings.read import fail

        push: Callable[..., Any]
        if is_collection(arguments.folder):
            from trl_multiagent.preferences.sources import push_preferences as push
        else:
            from trl_multiagent.hub.push import push_folder as push
        options = vars(arguments)
        options.pop("command")
        try:
            print(push(**options).commit_url)
        except (ValueError, RuntimeError, OSError) as error:
            fail("trl-multiagent push", error)
    elif arguments.command == "env":
        from trl.scripts.env import print_env

        print(f"trl-multiagent {trl_multiagent.__version__}")
        print_env()
    elif arguments.command == "collect":
        if arguments.accelerate_config is None and arguments.num_processes is None:
            return collect(rest)
        prog = "trl-multiagent collect"
        check = partial(check_settings, "madpo", rest, prog)
        launch(["collect"], check, prog, arguments.accelerate_config, arguments.num_processes, rest)
    elif arguments.command in ("evaluate", "cross-play"):
        evaluate(arguments.command, arguments.accelerate_config, arguments.num_processes, rest)
    elif arguments.command == "run" or {"-h", "--help"} & set(rest):
        run(arguments.algorithm, rest)
    else:
        algorithm = arguments.algorithm
        prog = f"trl-multiagent train {algorithm}"
        command = ["run", algorithm]
        check = partial(check_settings, algorithm, rest, prog)
        launch(command, check, prog, arguments.accelerate_config, arguments.num_processes, rest)


if __name__ == "__main__":
    main()
