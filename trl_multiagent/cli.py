"""
The command `trl-multiagent`: `env` for bug reports, `push` to the Hub, `train` to launch a recipe without a script, `collect` to
collect preferences.

Slow libraries are imported where they are needed, so that help, versions and errors appear at once.
"""

import argparse
import subprocess
import sys
from collections.abc import Sequence

import trl_multiagent
from trl_multiagent.recipe.algorithms import ALGORITHMS


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
    train = commands.add_parser(
        "train",
        help="Train a team on code generation through `accelerate launch`.",
        description="Trains a team on code generation through `accelerate launch`. All other arguments go to the "
        "recipe: `trl-multiagent train magrpo --help` lists them.",
        usage="%(prog)s ALGORITHM [--accelerate_config FILE] [--num_processes N] --config FILE [recipe arguments]",
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
    for command in (train, collect):
        command.add_argument("--accelerate_config", metavar="FILE", help="Configuration for `accelerate launch`.")
        command.add_argument("--num_processes", metavar="N", help="Number of processes, for `accelerate launch`.")
    run = commands.add_parser(
        "run", help="What `train` launches in every process.", allow_abbrev=False, add_help=False
    )
    for command in (train, run):
        command.add_argument("algorithm", metavar="ALGORITHM", choices=ALGORITHMS, help=", ".join(ALGORITHMS))
    return parser, train


def launch(
    command: Sequence[str], accelerate_config: str | None, num_processes: str | None, argv: Sequence[str]
) -> None:
    """Starts a command of `trl-multiagent` in the given number of processes."""
    from accelerate.commands.launch import launch_command, launch_command_parser

    options = []
    if accelerate_config is not None:
        options += ["--config_file", accelerate_config]
    if num_processes is not None:
        options += ["--num_processes", num_processes]
    target = ["--module", "trl_multiagent.cli", *command, *argv]
    try:
        launch_command(launch_command_parser().parse_args(options + target))
    except subprocess.CalledProcessError as error:
        sys.exit(error.returncode)  # the process has printed its error


def run(algorithm: str, argv: Sequence[str]) -> None:
    """Trains in this process, as the scripts in recipes/code_generation do."""
    from trl_multiagent.demo.task import TASK
    from trl_multiagent.recipe.run import run_recipe

    run_recipe(algorithm, TASK, argv, prog=f"trl-multiagent train {algorithm}")


def collect(argv: Sequence[str]) -> None:
    """Collects preferences in this process, as the script in recipes/code_generation does."""
    from trl_multiagent.demo.task import TASK
    from trl_multiagent.recipe.collection import run_collection

    run_collection(TASK, argv, prog="trl-multiagent collect")


def main(argv: Sequence[str] | None = None) -> None:
    argv = sys.argv[1:] if argv is None else list(argv)
    parser, train = make_parsers()
    if argv in (["train", "-h"], ["train", "--help"]):
        return train.print_help()
    arguments, rest = parser.parse_known_args(argv)
    if arguments.command in ("env", "push") and rest:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    elif arguments.command == "push":
        from trl_multiagent.preferences.sources import is_collection, push_preferences
        from trl_multiagent.team.files import push_folder

        options = vars(arguments)
        options.pop("command")
        push = push_preferences if is_collection(arguments.folder) else push_folder
        try:
            print(push(**options).commit_url)
        except (ValueError, RuntimeError) as error:
            sys.exit(f"trl-multiagent push: error: {error}")
    elif arguments.command == "env":
        from trl.scripts.env import print_env

        print(f"trl-multiagent {trl_multiagent.__version__}")
        print_env()
    elif arguments.command == "collect" and not (arguments.accelerate_config or arguments.num_processes):
        collect(rest)
    elif arguments.command == "collect":
        launch(["collect"], arguments.accelerate_config, arguments.num_processes, rest)
    elif arguments.command == "run" or {"-h", "--help"} & set(rest):
        run(arguments.algorithm, rest)
    else:
        launch(["run", arguments.algorithm], arguments.accelerate_config, arguments.num_processes, rest)


if __name__ == "__main__":
    main()
