"""
The report of a run: its facts, its log, a few of its trees, and the page made of them, which is refreshed during the
run.
"""

import contextlib
import dataclasses
import json
import os
import platform
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from transformers import TrainerCallback, TrainerState, TrainingArguments
from transformers.utils import logging

from trl_multiagent.environments.base import Environment, item_id
from trl_multiagent.folders import LOG_FILE, RUN_FILE, TEAM_FILE, last_checkpoint, read_json, write_json, write_lines
from trl_multiagent.jobs.fingerprint import describe_dataset
from trl_multiagent.jobs.signals import COMMAND_VARIABLE
from trl_multiagent.report.alarms import Alarms
from trl_multiagent.report.html import REPORT_FILE, write_page
from trl_multiagent.report.run_page import Tree, choose_trees, masked, read_run, run_page, same_item, trees_of
from trl_multiagent.report.terminal import ShowCompletions, before_and_after, show_one_bar
from trl_multiagent.report.trace_files import TRACE_FOLDER, Trace, remove_after, trace_files, write_rows
from trl_multiagent.rollout.trace import TraceRow
from trl_multiagent.rollout.tree import RolloutCallback, Trees
from trl_multiagent.team.card import facts_of


logger = logging.get_logger(__name__)

TREES_FOLDER = "trees"
KEPT_STEPS = 20  # a run without a trace keeps some trees of some steps
SECONDS_BETWEEN = 10.0  # least time between refreshes
SHARE_OF_TIME = 0.02  # largest share of the time that refreshes take
MAX_FILES = 40  # files of a trace that a page shows
PACKAGES = "trl-multiagent trl transformers torch accelerate datasets peft".split()
# Settings that do not affect the training
UNSHOWN = """
    output_dir logging_dir run_name report_to hub_model_id hub_token disable_tqdm use_cpu debug accelerator_config
    ddp_find_unused_parameters generation_batch_size steps_per_generation include_for_metrics pad_to_multiple_of
""".split()


class RunReport(RolloutCallback):
    """
    Writes `run.json`, `log.jsonl`, `report.html` and, without a trace, a few trees in the output folder.
    `trainer.remove_callback(RunReport)` leaves all of them out. A problem with them, such as a full disk, is a warning
    and never ends a training.

    Args:
        algorithm (`str`): Name of the algorithm.
        describe (`Callable[[], Mapping[str, Any]]`): Returns descriptions of the `environment`, the `agents` and the
            `dataset`.
    """

    def __init__(self, algorithm: str, describe: Callable[[], Mapping[str, Any]]):
        self.algorithm, self.describe = algorithm, describe
        self.has_begun = self.is_running = False
        # An item of the first of them, and its latest tree: the report shows what was learnt about the same item
        self.followed: str | None = None
        self.latest: list[TraceRow] = []
        self.evaluated: dict[str, list[TraceRow]] = {}  # the latest tree of the first item of each evaluation set

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: Any, **kwargs: Any) -> None:
        folder = Path(args.output_dir)
        if state.global_step == 0 and not self.has_begun:
            check_unused(folder)
            last = last_checkpoint(folder)
            if last and COMMAND_VARIABLE not in os.environ and state.is_world_process_zero:  # a command says it itself
                logger.warning(
                    f"{last} is of an earlier run, and this one will replace it: choose another `output_dir`, or call "
                    "`train(resume_from_checkpoint=True)` to go on."
                )
        self.has_begun = True
        self.is_running = state.is_world_process_zero
        if not self.is_running:
            return
        self.next_refresh = time.monotonic() + SECONDS_BETWEEN
        self.next_kept = 0  # trees are kept at this step next
        with harmless(folder):
            folder.mkdir(parents=True, exist_ok=True)
            remove_after(folder / TREES_FOLDER, state.global_step or -1)
            write_json(folder / RUN_FILE, {**run_facts(self.algorithm, args, state), **self.describe()})
            # A resumed run repeats the entries after its checkpoint
            write_lines(folder / LOG_FILE, state.log_history)

    def on_rollout(self, args: Any, state: Any, split: str, turns: Trees, rows: Callable[[], list[TraceRow]]) -> None:
        if not self.is_running or args.trace_steps is not None:  # a trace has all trees
            return
        if split != "train":
            if turns[0] and turns[0][0].tree == 0:
                tree = [row for row in rows() if row["tree"] == 0]
                if split not in self.evaluated:  # the first is kept at once, and the last at the end
                    self.keep(args, tree)
                    tree = []
                self.evaluated[split] = tree
            return
        step = state.global_step + 1
        if any(item_id(node.item) == self.followed for node in turns[0]):
            self.latest = [row for row in rows() if row["item"] == self.followed]
        if step < self.next_kept or not rows():
            return
        self.next_kept = step + -(-state.max_steps // KEPT_STEPS)
        if self.latest and self.latest[0]["step"] < step:
            self.keep(args, self.latest)
        kept = [row for tree in choose_trees(trees_of(rows()), step) for row in tree]
        self.followed, self.latest = self.followed or kept[-1]["item"], []
        self.keep(args, kept)

    def keep(self, args: Any, rows: list[TraceRow]) -> None:
        """Writes trees that the page shows."""
        with harmless(folder := Path(args.output_dir)):
            write_rows(folder / TREES_FOLDER, args, rows)

    def on_log(self, args: TrainingArguments, state: TrainerState, control: Any, **kwargs: Any) -> None:
        if not self.is_running:
            return
        folder, log = Path(args.output_dir), state.log_history[-1]
        with harmless(folder), (folder / LOG_FILE).open("a") as file:
            file.write(f"{json.dumps(log)}\n")
        if "total_flos" in log:  # the last log
            self.is_running = False
            for tree in self.evaluated.values():
                self.keep(args, tree)
            with harmless(folder):
                write_json(folder / RUN_FILE, {**read_json(folder / RUN_FILE), "finished": True})
        if not self.is_running or time.monotonic() >= self.next_refresh:
            self.refresh(folder)

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: Any, **kwargs: Any) -> None:
        folder = Path(args.output_dir)
        if state.is_world_process_zero and (folder / REPORT_FILE).is_file():
            with harmless(folder):
                learnt = before_and_after(same_item(chosen_trees(folder)))
                print(*learnt, f"Report           {folder / REPORT_FILE}", sep="\n", flush=True)

    def on_exit(self, args: Any) -> None:
        if self.is_running:  # the training has not ended by itself
            self.refresh(Path(args.output_dir))

    def refresh(self, folder: Path) -> None:
        """Writes the page."""
        start = time.monotonic()
        with harmless(folder):
            write_page(run_report(folder), folder / REPORT_FILE)
        end = time.monotonic()
        self.next_refresh = end + max(SECONDS_BETWEEN, (end - start) / SHARE_OF_TIME)


def check_unused(folder: Path) -> None:
    """Raises a `ValueError` if a folder has the team of an earlier run, which another run would replace."""
    if (folder / TEAM_FILE).is_file():
        raise ValueError(
            f"{folder} has the team and the report of an earlier run, which this one would replace: choose another "
            "`output_dir`, remove that folder, or set `resume_from_checkpoint` to go on."
        )


@contextlib.contextmanager
def harmless(folder: Path) -> Iterator[None]:
    """Turns errors within the block into a warning, because a problem with the report must not end a training."""
    try:
        yield
    except Exception as error:
        logger.warning(
            f"The report of this run could not be written ({type(error).__name__}: {error}). The training goes on. "
            f"`trl-multiagent report {folder}` makes the report again."
        )


def run_report(folder: Path) -> dict[str, Any]:
    """Returns the page of a run from the files in its folder."""
    return run_page(read_run(folder), chosen_trees(folder))


def chosen_trees(folder: Path) -> list[Tree]:
    """
    Returns the trees that a page shows: a few trees from evenly spaced files of the trace, or of the trees that every
    run keeps.
    """
    files = trace_files(folder / TRACE_FOLDER) or trace_files(folder / TREES_FOLDER)
    spaced = [files[k * (len(files) - 1) // MAX_FILES] for k in range(MAX_FILES + 1) if files]
    trees = []
    for path in dict.fromkeys(spaced):
        for _, rows in pd.read_parquet(path).groupby("split"):
            step = int(rows["step"].max())
            trees += choose_trees(trees_of(rows[rows["step"] == step].to_dict("records")), step)
    return trees


def watchers(environment: Environment, args: Any) -> list[TrainerCallback]:
    """Returns the callbacks that raise alarms, and that write and show rollouts if the arguments ask for it."""
    callbacks: list[TrainerCallback] = [Alarms(environment.roles, environment.unwrapped.watched_metrics)]
    if args.trace_steps is not None:
        callbacks.append(Trace(args))
    if args.log_completions:
        callbacks.append(ShowCompletions())
    return callbacks


def report_run(trainer: Any) -> None:
    """Adds the callbacks that show and report the training of a team."""
    watched = () if trainer.environment is None else trainer.environment.unwrapped.watched_metrics
    show_one_bar(trainer, watched)  # first, so that it has ended when the report shows what was learnt

    def facts() -> dict[str, Any]:
        return {
            "environment": environment_name(trainer.environment),
            "agents": {agent["role"]: agent["base"] or "" for agent in facts_of(trainer.team)},
            "dataset": describe_dataset(trainer.train_dataset),
        }

    trainer.add_callback(RunReport(trainer._name, facts))


def environment_name(environment: object) -> str:
    """
    Returns the `repr` of an environment, or the name of its class if the class defines no `__repr__`; an empty text
    for `None`.
    """
    if environment is None:
        return ""
    cls = type(environment)
    return cls.__qualname__ if cls.__repr__ is object.__repr__ else repr(environment)


def run_facts(algorithm: str, args: TrainingArguments, state: TrainerState) -> dict[str, Any]:
    """Returns the facts about a run, as plain values."""
    values = args.to_dict()
    # A field with a default that is made for each object counts as given
    given = {
        field.name: values[field.name]
        for field in dataclasses.fields(args)
        if field.init and field.name not in UNSHOWN and values.get(field.name) != field.default
    }
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or platform.machine()
    return {
        "algorithm": algorithm,
        "seed": args.seed,
        "settings": masked(json.loads(json.dumps(given, default=str))),
        "max_steps": state.max_steps,
        "started": datetime.now().astimezone().isoformat(timespec="seconds"),
        "finished": False,
        "command": masked(os.environ.get(COMMAND_VARIABLE) or shlex.join(["python", *sys.argv])),
        "machine": f"{args.world_size} process{'es' * (args.world_size > 1)} on {device}",
        "versions": {"python": platform.python_version(), **{name: metadata.version(name) for name in PACKAGES}},
    }
