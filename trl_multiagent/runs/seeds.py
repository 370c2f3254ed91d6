"""
Trains a team with several seeds, each run in a process and a folder of its own; makes the reports of runs; and
reproduces named experiments: the team for several seeds, its evaluation beside a control, and the published numbers.

Libraries that take seconds to load are imported once the names of folders and experiments are known to be right.
"""

import contextlib
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import yaml

from trl_multiagent.console import text_table
from trl_multiagent.environments.dataset_rows import read_data
from trl_multiagent.folders import RECIPE_FILE, RUN_FILE, read_json
from trl_multiagent.jobs.signals import NAMES, REQUEST, end_with_parent, leaving_signals_to_children
from trl_multiagent.report.html import REPORT_FILE, write_page
from trl_multiagent.runs.run import end_on_wrong_input, make_parser, read_settings
from trl_multiagent.settings.read import ConfigError, fail, pop_path


EVALUATION_FILES = ("evaluation.json", "cross_play.json")
COMPARISON_FILE = "comparison.html"
PROGRAM = ["-m", "trl_multiagent.cli"]
# Flags that this program sets itself
OWN_FLAGS = {"--seed": "give the seeds with --seeds", "--resume_from_checkpoint": "the same command goes on by itself"}


def train_with_seeds(
    algorithm: str,
    argv: Sequence[str],
    prog: str,
    seeds: Sequence[int],
    num_jobs: int = 1,
    launch_flags: Sequence[str] = (),
) -> tuple[int, list[Path]]:
    """
    Trains once per seed. A second call with the same settings skips complete runs, and resumes those that have a
    checkpoint.

    Args:
        algorithm (`str`), argv (`Sequence[str]`), prog (`str`): See [`~trl_multiagent.runs.run.run_recipe`].
        seeds (`Sequence[int]`): The seeds. More can be added later.
        num_jobs (`int`, *optional*, defaults to `1`): Runs at the same time. The visible GPUs are divided among them.
        launch_flags (`Sequence[str]`, *optional*): Flags of `trl-multiagent train` about its processes.

    Returns:
        `tuple[int, list[Path]]`: The exit status of the first run that failed, or 0, and the folders of the runs.
        After a failure, no other run starts.
    """
    with end_on_wrong_input(prog):
        for flag, advice in OWN_FLAGS.items():
            if any(text.partition("=")[0] == flag for text in argv):
                raise ConfigError(f"{flag} cannot be combined with --seeds: {advice}.")
        settings = read_settings(algorithm, None, argv, prog)
        config = make_parser(algorithm).parse_known_args(argv)[0].config
        name = algorithm if config is None else Path(config).stem.removesuffix("_config")
        folder = Path(settings.arguments.get("output_dir") or Path(settings.output.base_dir) / f"{name}_seeds")
        command = [sys.executable, *PROGRAM, "train", algorithm, *launch_flags, *argv]
        command += ["--resume_from_checkpoint", "auto"]
        if settings.output.save_path:  # each team is saved in the folder of its run
            command += ["--output.save_path", "null"]
        if "policy_checkpoint_dir" in settings.arguments:
            command += ["--policy_checkpoint_dir", "null"]
        runs = [folder / f"seed_{seed}" for seed in seeds]
        commands = {
            run.name: [*command, "--seed", str(seed), "--output_dir", str(run)]  # the last folder counts
            for seed, run in zip(seeds, runs, strict=True)
        }
        if settings.dry_run:
            print(f"{len(runs)} runs, in {', '.join(map(str, runs))}. The plan of the first one:", flush=True)
            return subprocess.run(commands[runs[0].name]).returncode, runs
        from accelerate import PartialState
        from transformers.utils import flatten_dict

        from trl_multiagent.jobs.stage import Stage

        pop_path(settings.merged, f"{algorithm}.hub_token")  # which is not written down
        stage = Stage(
            folder,
            "training with several seeds",
            flatten_dict(settings.merged),
            PartialState(),
            free=(f"{algorithm}.output_dir", "output.base_dir"),
            advice="choose another --output_dir",
        )
        with stage.open():
            missing = {name: command for name, command in commands.items() if not stage.has(f"{name}.json")}
            status = run_all(missing, num_jobs, lambda name: stage.save(f"{name}.json", []), folder)
    if status:
        print(f"{prog}: a run {ending(status)}. The same command goes on with what is missing.", file=sys.stderr)
    return (128 - status if status < 0 else status), runs


def ending(status: int) -> str:
    """Describes how a process ended."""
    if status == 0:
        return "complete"
    return f"ended by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"


def print_results(runs: Sequence[Path]) -> None:
    """Prints the last values of runs that differ in their seeds, and makes their report."""
    from trl_multiagent.report.curves import group_table, series_of
    from trl_multiagent.report.run_page import read_run

    last = [max(runs_in(run), key=lambda path: (len(path.name), path.name)) for run in runs]  # of rounds
    results = [series_of(read_run(run).logs) for run in last]
    print("", *text_table(group_table({"mean of the seeds": results})), "", sep="\n")
    print(f"Report           {make_report([str(runs[0].parent)])}")
    command = shlex.join(["evaluate", *map(str, runs), "--config", str(runs[0] / RECIPE_FILE)])
    print(f"Evaluate them together: trl-multiagent {command}", flush=True)


def run_all(commands: Mapping[str, Sequence[str]], num_jobs: int, done: Callable[[str], None], folder: Path) -> int:
    """
    Runs commands, `num_jobs` at a time, and calls `done` with the name of each command that succeeds. If several run
    at a time, their output goes to `<name>.log` in `folder`. After a failure or a signal, no other command starts.
    Returns the exit status of the first failure, or 0.
    """
    slots, status = [*range(num_jobs)], 0

    def run(name: str) -> None:
        nonlocal status
        if REQUEST.signal:  # the run before may have ended with status 0, but no other may start
            status = status or -REQUEST.signal
        if status:
            return
        slot, output = slots.pop(), None
        if num_jobs > 1:
            output = stack.enter_context((folder / f"{name}.log").open("a"))
            print(f"{name}: started, its output goes to {output.name}", flush=True)
        ended = subprocess.run(
            commands[name],
            stdout=output,
            stderr=output,
            env=os.environ | visible_devices(slot, num_jobs),
            preexec_fn=end_with_parent,  # a run without the program that started it would lock its folder
        )
        slots.append(slot)
        status = status or ended.returncode
        print(f"{name}: {ending(ended.returncode)}", flush=True)
        if ended.returncode == 0:
            done(name)

    with leaving_signals_to_children(), contextlib.ExitStack() as stack, ThreadPoolExecutor(num_jobs) as pool:
        list(pool.map(run, commands))
    return status


def visible_devices(slot: int, num_jobs: int) -> dict[str, str]:
    """
    Returns the environment variable that gives one of several parallel runs its share of the GPUs, if there are
    enough.
    """
    import torch

    devices = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(torch.cuda.device_count())))).split(",")
    return {"CUDA_VISIBLE_DEVICES": ",".join(devices[slot::num_jobs])} if len(devices) >= num_jobs > 1 else {}


# Reports


def make_report(folders: Sequence[str], output: str | None = None) -> Path:
    """
    Makes the report of a run, of an evaluation, or of a comparison of several runs. Returns the path of the page: in
    the folder, or in the working directory if there are several folders.

    Args:
        folders (`Sequence[str]`): Folders of runs or of one evaluation. A folder of several runs stands for all of
            them, and for their evaluation in it.
        output (`str`, *optional*): Path of the page.

    Raises:
        ValueError: A folder holds neither a run nor an evaluation.
    """
    first = Path(folders[0])
    target = Path(output) if output else first / REPORT_FILE if len(folders) == 1 else Path(COMPARISON_FILE)
    evaluation = evaluation_in(first) if len(folders) == 1 else None
    if evaluation:
        page = {"title": f"Evaluation: {'/'.join(first.absolute().parts[-2:])}", "evaluation": evaluation}
    else:
        runs = list({run.resolve(): run for folder in folders for run in runs_in(Path(folder))}.values())
        evaluations = [x for path in first.glob("*/") if (x := evaluation_in(path))]
        evaluation = evaluations[0] if len(evaluations) == len(folders) == 1 else None
        from trl_multiagent.report.run_page import comparison_page, read_run
        from trl_multiagent.report.run_report import run_report

        page = run_report(runs[0]) if len(runs) == 1 else comparison_page([read_run(run) for run in runs], evaluation)
    write_page(page, target)
    return target


def evaluation_in(folder: Path) -> dict[str, Any] | None:
    """Returns the JSON file of the evaluation in a folder, if there is one."""
    files = [folder / name for name in EVALUATION_FILES if (folder / name).is_file()]
    return read_json(files[0]) if files else None


def runs_in(folder: Path) -> list[Path]:
    """Returns the folder itself if it is a run's, or else the folders of the runs in it."""
    if (folder / RUN_FILE).is_file():
        return [folder]
    # The controls of an evaluation in the folder are runs, too, and so are the rounds of a run
    runs = [
        path.parent
        for pattern in ("*", "*/controls/*", "_rounds/*", "*/_rounds/*")
        for path in sorted(folder.glob(f"{pattern}/{RUN_FILE}"))
    ]
    if not runs:
        raise ValueError(
            f"{folder} holds none of {', '.join((RUN_FILE, *EVALUATION_FILES))}: give the output folder of a run or "
            "an evaluation."
        )
    return runs


# Named experiments


def experiments() -> dict[str, dict[str, Any]]:
    """
    Returns the experiments by name: `about`, `train` and `evaluate`, the arguments of these commands, and `published`,
    rows of a table.
    """
    return yaml.safe_load(read_data("experiments.yaml"))


def run_experiment(
    name: str | None,
    seeds: Sequence[int],
    num_jobs: int,
    folder: Path | None,
    more: Sequence[str],
) -> int:
    """
    Trains the team of an experiment for each seed, evaluates all teams and their controls together, and prints the
    results, the published numbers and the path of the report. An interrupted call can be repeated, and resumes.

    Args:
        name (`str`, *optional*): A key of [`experiments`]. Without it, the experiments are listed.
        seeds (`Sequence[int]`): The seeds.
        num_jobs (`int`): Trainings at the same time.
        folder (`Path`, *optional*): Folder of the results; by default one in `outputs/reproduce`.
        more (`Sequence[str]`): More arguments of the trainings, such as `--dry_run` or `--max_steps 5`.

    Returns:
        `int`: The exit status: 0, or the status of the training or evaluation that failed.
    """
    known, prog = experiments(), "trl-multiagent reproduce"
    if name is None:
        print("\n".join(f"{key:<10}{experiment['about']}" for key, experiment in known.items()))
        return 0
    if name not in known:
        fail(prog, f"there is no experiment {name!r}: choose one of {', '.join(known)}.")
    experiment, folder, prog = known[name], folder or Path("outputs") / "reproduce" / name, f"{prog} {name}"
    algorithm, *argv = shlex.split(experiment["train"])
    argv = [*argv, *more, "--output_dir", str(folder)]
    with leaving_signals_to_children():
        status, runs = train_with_seeds(algorithm, argv, prog, seeds, num_jobs)
        if status:
            return status
        evaluation = [*shlex.split(experiment["evaluate"]), "--output_dir", str(folder / "evaluation")]
        command = ["evaluate", *map(str, runs), *evaluation]
        if "--dry_run" in more:
            print(f"Then: trl-multiagent {shlex.join(command)}")
        elif REQUEST.signal:
            print(f"{prog}: ended by {NAMES[REQUEST.signal]}. The same command goes on.", file=sys.stderr)
            status = 128 + REQUEST.signal
        else:
            status = subprocess.run([sys.executable, *PROGRAM, *command]).returncode
            if status == 0:
                with end_on_wrong_input(prog):
                    print(f"Report           {make_report([str(folder)])}")
        if status == 0 and "published" in experiment:
            print("\n".join(["", "Published:", *text_table(experiment["published"])]), flush=True)
    return status
