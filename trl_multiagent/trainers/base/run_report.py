"""
What a run shows of itself: the files of its report (facts, log and the page, which is refreshed during the run),
completions and a progress bar in the terminal, and a group of metrics per agent in trackers.
"""

import contextlib
import dataclasses
import functools
import json
import math
import os
import platform
import random
import re
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from transformers import ProgressCallback, Trainer, TrainerCallback, TrainerState, TrainingArguments
from transformers.integrations.integration_utils import rewrite_logs
from transformers.utils import logging
from trl.trainer.utils import print_prompt_completions_sample

from trl_multiagent.console import printable
from trl_multiagent.folders import LOG_FILE, RUN_FILE, read_json, write_json, write_text
from trl_multiagent.jobs.signals import COMMAND_VARIABLE
from trl_multiagent.report.html import REPORT_FILE, write_page
from trl_multiagent.report.run_page import Row, choose_trees, masked, read_run, run_page, trees_of, without_secrets
from trl_multiagent.rollout.trace import TraceRow, roles_of
from trl_multiagent.trainers.base.trace_files import trace_files


logger = logging.get_logger(__name__)

TRACE_FOLDER, TREES_FOLDER = "trace", "trees"  # of all rollouts, if the run has a trace, and of a few trees
SECONDS_BETWEEN = 10.0  # least time between refreshes
SHARE_OF_TIME = 0.02  # largest share of the time that refreshes take
MAX_FILES = 40  # files of a trace whose trees a page shows
PACKAGES = ("trl-multiagent", "trl", "transformers", "torch", "accelerate", "datasets", "peft")
# Settings that do not affect the training
UNSHOWN = """
    output_dir logging_dir run_name report_to hub_model_id hub_token disable_tqdm use_cpu debug accelerator_config
    ddp_find_unused_parameters generation_batch_size steps_per_generation include_for_metrics pad_to_multiple_of
""".split()
NUM_PRINTED = 3  # joint actions
OF_AGENT = re.compile(r"((?:train|eval|test)/.*?)agents/([^/]+)/")
# The metrics that the bar shows if they are logged, and their names in the bar
SHOWN = {
    "reward": "reward",
    "return": "return",
    "turn_1/test_pass_rate": "tests passed",
    "turn_1/passed": "solved",
    "eval_reward": "eval reward",
    "rewards/accuracies": "accuracy",
    "accuracy": "accuracy",  # of a reward model
}


class RunReport(TrainerCallback):
    """
    Writes `run.json`, `log.jsonl` and `report.html` in the output folder. `trainer.remove_callback(RunReport)` leaves
    all three out. A problem with them, such as a full disk, is a warning and never ends a training.

    Args:
        algorithm (`str`): Name of the algorithm.
        describe (`Callable[[], Mapping[str, Any]]`): Returns descriptions of the `environment`, the `agents` and the
            `dataset`.
    """

    def __init__(self, algorithm: str, describe: Callable[[], Mapping[str, Any]]):
        self.algorithm, self.describe = algorithm, describe
        self.is_running = False
        self.next_refresh = 0.0

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: Any, **kwargs: Any) -> None:
        self.is_running = state.is_world_process_zero
        if not self.is_running:
            return
        folder = Path(args.output_dir)
        self.next_refresh = time.monotonic() + SECONDS_BETWEEN
        with harmless(folder):
            folder.mkdir(parents=True, exist_ok=True)
            write_json(folder / RUN_FILE, {**run_facts(self.algorithm, args, state), **self.describe()})
            # A resumed run repeats the entries after its checkpoint
            write_text(folder / LOG_FILE, "".join(f"{json.dumps(log)}\n" for log in state.log_history))

    def on_log(self, args: TrainingArguments, state: TrainerState, control: Any, **kwargs: Any) -> None:
        if not self.is_running:
            return
        folder, log = Path(args.output_dir), state.log_history[-1]
        with harmless(folder), (folder / LOG_FILE).open("a") as file:
            file.write(f"{json.dumps(log)}\n")
        if "train_runtime" not in log:
            return self.refresh(args, state)
        self.is_running = False  # the last log
        with harmless(folder):
            write_json(folder / RUN_FILE, {**read_json(folder / RUN_FILE), "finished": True})
            self.refresh(args, state, now=True)

    def refresh(self, args: TrainingArguments, state: TrainerState, now: bool = False) -> None:
        """Writes the page, unless it was written a short time ago."""
        start = time.monotonic()
        if start < self.next_refresh and not now:
            return
        with harmless(folder := Path(args.output_dir)):
            write_page(run_report(folder, state.log_history), folder / REPORT_FILE)
        end = time.monotonic()
        self.next_refresh = end + max(SECONDS_BETWEEN, (end - start) / SHARE_OF_TIME)


@contextlib.contextmanager
def harmless(folder: Path) -> Iterator[None]:
    """Turns errors within the block into a warning, because a problem with the report must not end a training."""
    try:
        yield
    except Exception as error:
        advice = f"The training goes on. `trl-multiagent report {folder}` makes the report again."
        logger.warning(f"The report of this run could not be written ({type(error).__name__}: {error}). {advice}")


def run_report(folder: Path, logs: list[dict[str, Any]] | None = None) -> dict[str, Any]:
    """
    Returns the page of a run from the files in its folder. `logs`: the entries of the log, if they are in memory.
    """
    return run_page(read_run(folder, logs), chosen_trees(folder))


def chosen_trees(folder: Path) -> list[list[Row]]:
    """
    Returns the trees that a page shows: a few trees from evenly spaced files of the trace, or of the trees that every
    run keeps.
    """
    files = trace_files(folder / TRACE_FOLDER) or trace_files(folder / TREES_FOLDER)
    spaced = [files[k * (len(files) - 1) // MAX_FILES] for k in range(MAX_FILES + 1)] if files else []
    trees = []
    for path in dict.fromkeys(spaced):
        for _, rows in pd.read_parquet(path).groupby("split"):
            step = int(rows["step"].max())
            batch = trees_of(rows[rows["step"] == step].to_dict("records"))
            trees += [tree for _, tree in choose_trees(batch, 3, step)]
    return trees


@functools.cache
def versions() -> dict[str, str]:
    """Returns the versions of Python and of the main packages."""
    return {"python": platform.python_version(), **{name: metadata.version(name) for name in PACKAGES}}


def run_facts(algorithm: str, args: TrainingArguments, state: TrainerState) -> dict[str, Any]:
    """Returns the facts about a run, as plain values."""
    values = args.to_dict()
    # A field whose default is made for each object counts as given
    given = {
        field.name: values[field.name]
        for field in dataclasses.fields(args)
        if field.init and field.name not in UNSHOWN and values.get(field.name) != field.default
    }
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or platform.machine()
    several = "es" if args.world_size > 1 else ""
    return {
        "algorithm": algorithm,
        "seed": args.seed,
        "settings": masked(json.loads(json.dumps(given, default=str))),
        "max_steps": state.max_steps,
        "started": datetime.now().astimezone().isoformat(timespec="seconds"),
        "finished": False,
        "command": without_secrets(os.environ.get(COMMAND_VARIABLE) or shlex.join(["python", *sys.argv])),
        "machine": f"{args.world_size} process{several} on {device}",
        "versions": versions(),
    }


def tracker_names(logs: dict[str, Any]) -> dict[str, Any]:
    """
    Returns logs with their names for trackers. Trackers group metrics by the first part of their names. In
    transformers, it is `train`, `eval` or `test`. Here, it is the role for the metrics of an agent: `agents/aux/loss`
    becomes `aux/train/loss`.
    """
    return {OF_AGENT.sub(r"\2/\1", name): value for name, value in rewrite_logs(logs).items()}


def print_completions(rows: list[TraceRow], number: int | None) -> None:
    """Prints random joint actions as TRL prints completions, with a line per agent."""
    # Not the global generator, which the rollouts use
    chosen = random.Random(rows[0]["step"]).sample(rows, min(len(rows), NUM_PRINTED if number is None else number))
    lines = [(row, role) for row in chosen for role in roles_of(rows) if row[f"completion/{role}"] is not None]
    advantages = [row[f"advantage/{role}"] for row, role in lines]
    if lines:
        print_prompt_completions_sample(
            *([printable(row[f"{name}/{role}"]) for row, role in lines] for name in ("prompt", "completion")),
            {name.title(): [row[name] for row, _ in lines] for name in ("reward", "return")},
            None if {*advantages} == {None} else [math.nan if x is None else x for x in advantages],
            rows[0]["step"],
            extra={"Agent": [role for _, role in lines], "Turn": [row["turn"] for row, _ in lines]},
        )


class RewardProgressCallback(ProgressCallback):
    """Shows the latest reward, return and pass rate in the progress bar. `names`: what is shown, by metric."""

    def __init__(self, names: Mapping[str, str]):
        super().__init__()
        self.names, self.latest = names, dict[str, str]()

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        super().on_train_begin(*args, **kwargs)
        if self.training_bar is not None:
            self.training_bar.set_description("Training")

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **kwargs: Any) -> None:
        self.latest |= {shown: f"{logs[name]:.2f}" for name, shown in self.names.items() if name in logs}
        if self.training_bar is not None:
            self.training_bar.set_postfix_str(", ".join(map(" ".join, self.latest.items())), refresh=False)


class RewardLines(TrainerCallback):
    """Prints the same in a line per log. All other metrics are in the log of the run."""

    def __init__(self, names: Mapping[str, str]):
        self.names = names

    def on_log(self, args: Any, state: TrainerState, control: Any, logs: dict[str, float], **kwargs: Any) -> None:
        found = [f"{shown} {logs[name]:.2f}" for name, shown in self.names.items() if name in logs]
        if found and state.is_world_process_zero:
            print(f"step {state.global_step} of {state.max_steps}: {', '.join(found)}", flush=True)


def show_one_bar(trainer: Trainer, watched: Sequence[str] = ()) -> None:
    """
    Replaces the dictionaries that a trainer prints at every log, unless `disable_tqdm` is set or in a notebook: by a
    progress bar, or, if there is no terminal, by a line. `watched`: metrics that are shown besides the reward.
    """
    if trainer.pop_callback(ProgressCallback) is not None:
        names = {**SHOWN, **{f"turn_1/{name}": name for name in watched}}
        trainer.add_callback((RewardProgressCallback if sys.stderr.isatty() else RewardLines)(names))
