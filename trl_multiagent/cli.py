"""
The command `trl-multiagent`: `train` launches a recipe without a script, `evaluate` and `cross-play` evaluate saved
teams, `play` lets a person play with one, `collect` collects preferences, `reproduce` runs named experiments, `plan`
prints what a training needs, `report` makes the page of a run, `init` writes a small task to start from, `push`
uploads to the Hub, `env` is for bug reports.

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
from trl_multiagent.jobs.signals import COMMAND_VARIABLE, end_with_parent, leaving_signals_to_children
from trl_multiagent.settings.algorithms import ALGORITHMS


# `accelerate launch` waits so long after Ctrl-C or SIGTERM for several processes to end their step
SECONDS_TO_END = "3600"

# From Python 3.11 on, processes started with `python -m` and this variable do not look for modules in the working
# directory, which may hold a stranger's files
SAFE_PATH = ("PYTHONSAFEPATH", "trl-multiagent")

# The commands, with their help
COMMANDS = {
    "env": "Print the versions that a bug report needs.",
    "push": "Upload a saved team, the team of a run, or collected preferences to the Hub.",
    "init": "Write a small task of your own to start from, which trains as it is, without downloads.",
    "report": (
        "Make the page of a run or an evaluation, or compare runs. Runs that differ in their seeds form a group."
    ),
    "reproduce": "Train a team for several seeds and its control, evaluate them, and show the published numbers.",
    "plan": "Print the plan of a training: steps, calls, and the memory of each GPU. All other arguments are "
    "settings, as in `train`; the algorithm is the section of the file, and --num_gpus the number of processes.",
    "train": "Train a team through `accelerate launch`. All other arguments go to the recipe: "
    "`trl-multiagent train magrpo --help` lists them.",
    "collect": "Collect joint preferences, to train on them later.",
    "evaluate": "Evaluate saved teams: pass@k, every part of the reward, cost, baselines.",
    "cross-play": "Play the agents of several runs with each other.",
    "play": "Play a task in the terminal, with the agents of a saved team. Takes the arguments of `evaluate`.",
    "run": "What `train` launches in every process.",
}
LAUNCHED = ("train", "collect", "evaluate", "cross-play")  # they run in one or several processes
WITH_HELP = (*LAUNCHED, "run")  # their help is a recipe's help
GPUS = "T4 4090 L40S A100-40 A100 H100 H200".split()
USAGE = (
    "%(prog)s ALGORITHM [--accelerate_config FILE] [--num_processes N] [--seeds LIST [--jobs N]] [--task TASK] "
    "--config FILE [recipe arguments]"
)


def make_parsers() -> tuple[argparse.ArgumentParser, argparse.ArgumentParser]:
    """
    Returns the parser of all commands and the parser of `train`. The latter's help is shown by `train --help` without
    an algorithm.
    """
    parser = argparse.ArgumentParser(prog="trl-multiagent", allow_abbrev=False)
    parser.add_argument("--version", action="version", version=trl_multiagent.__version__)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    parsers = {
        name: commands.add_parser(
            name, help=text, description=text, allow_abbrev=False, add_help=name not in WITH_HELP
        )
        for name, text in COMMANDS.items()
    }
    push = parsers["push"].add_argument  # its arguments have the names in `push_folder`
    push("folder", metavar="FOLDER", help="Folder of a saved team, of a run, or of collected preferences.")
    push("repo_id", metavar="REPO_ID", help="Repository, created if it does not exist.")
    push("--private", action="store_true", default=None, help="Make the repository private if it is created.")
    push("--token", help="Token with write access; by default from `hf auth login` or HF_TOKEN.")
    push("--revision", metavar="BRANCH", help="Branch, created if it does not exist; by default main.")
    push("--commit_message", metavar="TEXT", default=argparse.SUPPRESS, help="Message of the commit.")
    push("--create_pr", action="store_true", help="Open a pull request instead.")
    parsers["init"].add_argument("folder", nargs="?", default=".", help="By default the working directory.")
    report = parsers["report"].add_argument
    report("folders", metavar="RUN", nargs="+", help="Output folder of a run or an evaluation, or of several runs.")
    report("--output", metavar="FILE", help="The page; by default report.html in the folder, or comparison.html here.")
    play = parsers["play"].add_argument
    play("team", metavar="RUN", help="Folder of a run or of a saved team, or the Hub id of a team.")
    play(
        "--seat",
        metavar="ROLE=PLAYER",
        action="append",
        default=[],
        help="Player of a role: human, random, or a saved team. By default, a person and the team.",
    )
    reproduce = parsers["reproduce"].add_argument
    reproduce("name", metavar="NAME", nargs="?", help="The experiment; without it, all are listed.")
    reproduce("--output_dir", metavar="FOLDER", type=Path, help="By default outputs/reproduce/NAME.")
    plan = parsers["plan"].add_argument
    plan("--config", metavar="FILE", required=True, help="YAML file of a training, or its name in the package.")
    plan("--gpu", default="H100", choices=GPUS, help=f"One of {', '.join(GPUS)}; H100 by default.")
    plan("--num_gpus", metavar="N", type=positive, default=1, help="Number of GPUs, 1 by default.")
    plan("--zero", type=int, choices=range(4), default=0, help="Stage of ZeRO; 0, the default, for none.")
    for name in LAUNCHED:
        add = parsers[name].add_argument
        add("--accelerate_config", metavar="FILE", help="For `accelerate launch`: a file, or a name such as zero3.")
        add("--num_processes", metavar="N", type=positive, help="Number of processes, for `accelerate launch`.")
    for name in ("train", "reproduce"):
        add = parsers[name].add_argument
        seeds_help = "Train once per seed, such as 0,1,2, each in its own folder. Repeat it to train missing ones."
        add("--seeds", metavar="LIST", type=several_seeds, help=seeds_help)
        add("--jobs", metavar="N", type=positive, default=1, help="Seeds at the same time, 1 by default.")
    for name in ("train", "run"):
        parsers[name].add_argument(
            "algorithm", metavar="ALGORITHM", type=str.lower, choices=ALGORITHMS, help=", ".join(ALGORITHMS)
        )
    parsers["train"].usage = USAGE
    return parser, parsers["train"]


def positive(text: str) -> int:
    """Reads a number of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least 1.")
    return int(text)


def several_seeds(text: str) -> list[int]:
    """Reads seeds that are separated by commas."""
    parts = text.split(",")
    if not all(part.isdecimal() and int(part) < 2**32 for part in parts) or len(set(map(int, parts))) < len(parts):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of distinct seeds, such as 0,1,2.")
    return [int(part) for part in parts]


def launch(command: Sequence[str], check: Callable[[], object], prog: str, options: argparse.Namespace) -> None:
    """
    Starts a command of `trl-multiagent` with `options.accelerate_config` and `options.num_processes`. Before that,
    `check` reads the settings. If one is wrong, the program `prog` ends with one line.
    """
    from trl_multiagent.runs.run import end_on_wrong_input
    from trl_multiagent.settings.read import ACCELERATE, config_file

    file, number = options.accelerate_config, options.num_processes
    with end_on_wrong_input(prog):
        file = file and config_file("--accelerate_config", file, ACCELERATE)
        check()

    from accelerate.commands.config.config_args import default_config_file
    from accelerate.commands.launch import launch_command, launch_command_parser
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    if file is None and number not in (None, 1) and not Path(default_config_file).is_file():
        # Without a configuration, accelerate starts a single process where there is no GPU
        file = config_file("--accelerate_config", "ddp", ACCELERATE)
    arguments = launch_command_parser().parse_args(["--module", "trl_multiagent.cli", *command])
    arguments.config_file, arguments.num_processes = file, number
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", SECONDS_TO_END)
    os.environ.setdefault(*SAFE_PATH)
    try:
        with leaving_signals_to_children():
            launch_command(arguments)
    except subprocess.CalledProcessError as error:
        if error.returncode >= 0:
            sys.exit(error.returncode)  # the process has printed its error
        print(f"{prog}: ended by {signal.Signals(-error.returncode).name}.", file=sys.stderr)
        sys.exit(128 - error.returncode)
    except SignalException as error:  # raised if several processes run
        sys.exit(128 + error.sigval)
    except ChildFailedError as error:
        sys.exit(error.get_first_failure()[1].exitcode)


def env() -> None:
    """Prints the versions that a bug report needs."""
    from trl.scripts.env import print_env

    print(f"trl-multiagent {trl_multiagent.__version__}")
    print_env()


def init(folder: str) -> None:
    """Writes a task to start from, and says how to train it."""
    from trl_multiagent.new_task import write_task

    for path in write_task(folder):
        print(f"Wrote {path}")
    change = "" if folder == "." else f"cd {shlex.quote(folder)} && "
    print(f"Train it with: {change}trl-multiagent train magrpo --config config.yaml")


def report(folders: Sequence[str], output: str | None) -> None:
    """Makes the page of a run or an evaluation, or of a comparison, and prints its path."""
    from trl_multiagent.runs.seeds import make_report

    print(f"Report           {make_report(folders, output)}")


def push(folder: str, **arguments: Any) -> None:
    """Uploads a team or preferences, and prints the commit's address."""
    upload: Callable[..., Any]
    if is_collection(folder):
        from trl_multiagent.preferences.collection import push_preferences as upload
    else:
        from trl_multiagent.hub import push_folder as upload
    print(upload(folder=folder, **arguments).commit_url)


def plan(config: str, gpu: str, num_gpus: int, zero: int, rest: Sequence[str]) -> None:
    """Prints the plan of a training with its memory."""
    from trl_multiagent.runs.run import end_on_wrong_input, read_plan

    prog = "trl-multiagent plan"
    with end_on_wrong_input(prog):
        settings = read_plan(config, rest, prog)
    from trl_multiagent.runs.plan import print_memory_plan

    print_memory_plan(settings, zero, num_gpus, gpu)


def reproduce(
    name: str | None, output_dir: Path | None, seeds: list[int] | None, jobs: int, rest: Sequence[str]
) -> None:
    """Reproduces an experiment, or lists all of them."""
    from trl_multiagent.runs.seeds import run_experiment

    os.environ.setdefault(*SAFE_PATH)
    sys.exit(run_experiment(name, seeds or [0, 1, 2], jobs, output_dir, rest))


def train(algorithm: str, argv: Sequence[str], options: argparse.Namespace | None) -> None:
    """Trains in processes that `options` describe, or in this one."""
    from trl_multiagent.runs.run import read_settings, run_recipe
    from trl_multiagent.settings.read import fail

    prog = f"trl-multiagent train {algorithm}"
    if options is None:
        return run_recipe(algorithm, None, argv, prog=prog)
    if options.jobs > 1 and not options.seeds:
        fail(prog, "--jobs is the number of runs at the same time: give --seeds, too.")
    if options.seeds:
        from trl_multiagent.runs.seeds import print_results, train_with_seeds

        names = ("accelerate_config", "num_processes")
        flags = [f"--{name}={value}" for name in names if (value := getattr(options, name))]
        os.environ.setdefault(*SAFE_PATH)
        status, runs = train_with_seeds(algorithm, argv, prog, options.seeds, options.jobs, flags)
        if status or "--dry_run" in argv:
            sys.exit(status)
        return print_results(runs)
    launch(["run", algorithm, *argv], partial(read_settings, algorithm, None, argv, prog), prog, options)


def collect(argv: Sequence[str], options: argparse.Namespace | None) -> None:
    """Collects preferences in processes that `options` describe, or in this one."""
    from trl_multiagent.runs.collection import run_collection
    from trl_multiagent.runs.run import read_settings

    prog = "trl-multiagent collect"
    if options is None:
        return run_collection(None, argv, prog=prog)
    launch(["collect", *argv], partial(read_settings, "madpo", None, argv, prog), prog, options)


def evaluate(command: str, argv: Sequence[str], options: argparse.Namespace | None, seats: Sequence[str] = ()) -> None:
    """Evaluates in processes that `options` describe, or in this one; or plays with a person and `seats`."""
    from trl_multiagent.runs.evaluation_settings import parse_evaluation
    from trl_multiagent.runs.run import end_on_wrong_input

    prog, cross_play = f"trl-multiagent {command}", command == "cross-play"
    check = partial(parse_evaluation, None, argv, prog, cross_play)
    if options:
        return launch([command, *argv], check, prog, options)
    with end_on_wrong_input(prog):
        check()
    if command == "play":
        from trl_multiagent.runs.person import run_play

        return run_play(argv, seats)
    from trl_multiagent.runs.evaluation import run_evaluation

    run_evaluation(None, argv, prog, cross_play)


def main(argv: Sequence[str] | None = None) -> None:
    """Runs a command. Ctrl-C ends it with one line, also while libraries load."""
    try:
        run_command(argv)
    except KeyboardInterrupt:
        print("trl-multiagent: ended by Ctrl-C.", file=sys.stderr)
        sys.exit(130)


def run_command(argv: Sequence[str] | None = None) -> None:
    if os.environ.get(SAFE_PATH[0]) == SAFE_PATH[1]:
        del os.environ[SAFE_PATH[0]]  # programs that the user's code starts are as usual
    argv = sys.argv[1:] if argv is None else list(argv)
    parser, parser_of_train = make_parsers()
    if argv in (["train", "-h"], ["train", "--help"]):
        return parser_of_train.print_help()
    arguments, rest = parser.parse_known_args(argv)
    own = vars(arguments)
    command = own.pop("command")
    if command == "run":  # it inherits the variable from the command that launched it
        end_with_parent()
    else:
        os.environ[COMMAND_VARIABLE] = shlex.join(["trl-multiagent", *argv])
    if command in WITH_HELP:
        asks_for_help = bool({"-h", "--help"} & set(rest))
        is_launched = own.get("accelerate_config") or own.get("num_processes")
        options = arguments if (command == "train" and not asks_for_help) or is_launched else None
        if command in ("train", "run"):
            return train(arguments.algorithm, rest, options)
        return collect(rest, options) if command == "collect" else evaluate(command, rest, options)

    if command == "play":
        return evaluate(command, [own["team"], *rest], None, own["seat"])
    if command == "plan":
        return plan(**own, rest=rest)
    if command == "reproduce":
        return reproduce(**own, rest=rest)
    if rest:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    from trl_multiagent.settings.read import fail

    try:
        {"env": env, "init": init, "push": push, "report": report}[command](**own)  # type: ignore[operator]
    except (ValueError, RuntimeError, OSError) as error:
        fail(f"trl-multiagent {command}", error)


if __name__ == "__main__":
    main()
