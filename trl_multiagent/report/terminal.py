"""What a training shows in the terminal: completions, and a progress bar or a line per log."""

import itertools
import math
import random
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from accelerate.utils import gather_object
from transformers import ProgressCallback, Trainer, TrainerCallback, TrainerState
from trl.trainer.utils import print_prompt_completions_sample

from trl_multiagent.console import one_line, printable
from trl_multiagent.rollout.trace import TraceRow, roles_of
from trl_multiagent.rollout.tree import RolloutCallback, Trees


NUM_PRINTED = 3  # joint actions
MAX_SHOWN = 100  # characters of an answer before or after the training
# The metrics that the bar shows if they are logged, and their names in the bar
SHOWN = {
    "reward": "reward",
    "return": "return",
    "turn_1/test_pass_rate": "tests passed",
    "turn_1/passed": "solved",
    "eval_return": "held-out return",
    "rewards/accuracies": "accuracy",
    "accuracy": "accuracy",  # of a reward model
}


class ShowCompletions(RolloutCallback):
    """Prints some of the latest completions of all processes with every log."""

    rows: list[TraceRow] | None = None  # of this process; `None` once they were shown

    def on_rollout(self, args: Any, state: Any, split: str, turns: Trees, rows: Callable[[], list[TraceRow]]) -> None:
        self.rows = rows()

    def on_log(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        if self.rows is None:
            return
        rows, self.rows = gather_object(self.rows), None
        if rows and state.is_world_process_zero:
            print_completions(rows, args.num_completions_to_print)


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


def before_and_after(trees: Sequence[Sequence[TraceRow]]) -> list[str]:
    """
    Returns what a typical joint answer was in the first and in the last of these trees, line by line, as the report
    shows it.
    """
    lines = []
    for tree in trees:
        branch = typical_branch(tree)
        lines += ["", f"Step {branch[0]['step']}, return {branch[0]['return']:.2f}:"]
        for row, role in itertools.product(branch, roles_of(branch)):
            text = row[f"completion/{role}"]
            if isinstance(text, str):  # files may have NaN where a role did not act
                lines.append(f"  {role:<10} {one_line(text)[:MAX_SHOWN]}")
    return [*lines, ""] if lines else []


def typical_branch(tree: Sequence[TraceRow]) -> list[TraceRow]:
    """Returns the joint action of middling return with which a tree begins, and those that follow it."""
    branch: list[TraceRow] = []
    rows = [row for row in tree if row["turn"] == 1]
    while rows:
        scored = [row for row in rows if not math.isnan(row["return"])] or rows
        last = sorted(scored, key=lambda row: row["return"])[len(scored) // 2]
        branch.append(last)
        # In a file with trees and episodes, a tree's column `episode` is NaN, which equals nothing
        child, episode = f"{last['node'].rstrip('/')}/{last['action']}", str(last.get("episode"))
        rows = [row for row in tree if row["node"] == child and str(row.get("episode")) == episode]
    return branch


def shown_values(logs: Mapping[str, float], watched: Collection[str]) -> dict[str, str]:
    """
    Returns the numbers of a log that are shown, by their names there. `watched`: the metrics that the task watches;
    without them, all metrics of its episodes are shown.
    """
    names = SHOWN | {f"turn_1/{name}": name for name in watched}
    if not watched:
        names |= {name: name.removeprefix("episode/") for name in logs if name.startswith("episode/")}
    return {shown: f"{logs[name]:.2f}" for name, shown in names.items() if name in logs}


class RewardProgressCallback(ProgressCallback):
    """Shows the latest reward, return and pass rate in the progress bar. `watched`: see [`shown_values`]."""

    def __init__(self, watched: Collection[str]):
        super().__init__()
        self.watched, self.latest = watched, dict[str, str]()

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        super().on_train_begin(*args, **kwargs)
        if self.training_bar is not None:
            self.training_bar.set_description("Training")

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **kwargs: Any) -> None:
        self.latest |= shown_values(logs, self.watched)
        if self.training_bar is not None:
            self.training_bar.set_postfix_str(", ".join(map(" ".join, self.latest.items())), refresh=False)


@dataclass(eq=False)
class RewardLines(TrainerCallback):
    """Prints the same in a line per log. All other metrics are in the log of the run."""

    watched: Collection[str]

    def on_log(self, args: Any, state: TrainerState, control: Any, logs: dict[str, float], **kwargs: Any) -> None:
        found = shown_values(logs, self.watched)
        if found and state.is_world_process_zero:
            print(
                f"step {state.global_step} of {state.max_steps}: {', '.join(map(' '.join, found.items()))}", flush=True
            )


def show_one_bar(trainer: Trainer, watched: Collection[str] = ()) -> None:
    """
    Replaces the dictionaries that a trainer prints at every log, unless `disable_tqdm` is set or in a notebook: by a
    progress bar, or, if there is no terminal, by a line. `watched`: see [`shown_values`].
    """
    if trainer.pop_callback(ProgressCallback) is not None:
        trainer.add_callback((RewardProgressCallback if sys.stderr.isatty() else RewardLines)(watched))
