"""
Reproduces named experiments: trains a team and its control for several seeds, and compares them with the published
numbers.
"""

import os
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml

from trl_multiagent.jobs.signals import COMMAND_VARIABLE, NAMES, REQUEST, leaving_signals_to_children
from trl_multiagent.report.tables import text_table


def experiments() -> dict[str, dict[str, Any]]:
    """
    Returns the experiments by name: `about`, `train` and `evaluate`, the arguments of these commands, and `published`,
    rows of a table.
    """
    return yaml.safe_load((files("trl_multiagent") / "data" / "experiments.yaml").read_text(encoding="utf-8"))


def reproduce(
    name: str, tasks: Mapping[str, str], seeds: Sequence[int], num_jobs: int, folder: Path, more: Sequence[str]
) -> int:
    """
    Trains the team of an experiment for each seed, evaluates all teams and their controls together, and prints the
    results, the published numbers and the path of the report. An interrupted call can be repeated, and resumes.

    Args:
        name (`str`): A key of [`experiments`].
        tasks (`Mapping[str, str]`): The named tasks.
        seeds (`Sequence[int]`): The seeds.
        num_jobs (`int`): Trainings at the same time.
        folder (`Path`): Folder of the results.
        more (`Sequence[str]`): More arguments of the trainings, such as `--dry_run` or `--max_steps 5`.

    Returns:
        `int`: The exit status: 0, or that of the training or evaluation that failed.
    """
    from trl_multiagent.runs.seeds import train_with_seeds

    experiment = experiments()[name]
    algorithm, *argv = shlex.split(experiment["train"])
    prog = f"trl-multiagent reproduce {name}"
    argv = [*argv, *more, "--output_dir", str(folder)]
    with leaving_signals_to_children():
        status, runs = train_with_seeds(algorithm, tasks, argv, prog, seeds, num_jobs)
        evaluation = [*shlex.split(experiment["evaluate"]), "--output_dir", str(folder / "evaluation")]
        command = ["evaluate", *map(str, runs), *evaluation]
        if status == 0 and "--dry_run" in more:
            print(f"Then: trl-multiagent {shlex.join(command)}")
        elif status == 0:
            status = run_command(command, prog)
        if status == 0 and "published" in experiment:
            print("\n".join(["", "Published:", *text_table(experiment["published"]), ""]), flush=True)
        if status == 0 and "--dry_run" not in more:
            status = run_command(["report", str(folder)], prog)
    return status


def run_command(arguments: Sequence[str], prog: str) -> int:
    """
    Runs a command of `trl-multiagent`, unless a signal has asked the program `prog` to end. Returns its exit status.
    """
    if REQUEST.signal is None:
        return subprocess.run([sys.executable, "-m", "trl_multiagent.cli", *arguments]).returncode
    command = os.environ.get(COMMAND_VARIABLE, "the same command")
    print(f"{prog}: ended by {NAMES[REQUEST.signal]}. Go on with: {command}", file=sys.stderr)
    return 128 + REQUEST.signal
