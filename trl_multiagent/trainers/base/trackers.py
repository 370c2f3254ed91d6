"""
Shows completions and the progress in the terminal, and completions and the report in trackers, which get a group of
metrics per agent.
"""

import importlib
import math
import random
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import ProgressCallback, Trainer, TrainerState, TrainingArguments
from transformers.integrations.integration_utils import rewrite_logs
from trl import GRPOConfig
from trl.trainer.utils import print_prompt_completions_sample

from trl_multiagent.console import printable
from trl_multiagent.folders import naming
from trl_multiagent.rollout.trace import TraceRow, roles_of
from trl_multiagent.trainers.base.trace_files import as_frame


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


def tracker_names(logs: dict[str, Any]) -> dict[str, Any]:
    """
    Returns logs with their names for trackers. Trackers group metrics by the first part of their names. In
    transformers, it is `train`, `eval` or `test`. Here, it is the role for the metrics of an agent: `agents/aux/loss`
    becomes `aux/train/loss`.
    """
    return {OF_AGENT.sub(r"\2/\1", name): value for name, value in rewrite_logs(logs).items()}


def trackers_with_tables(args: TrainingArguments) -> list[Any]:
    """Returns those of the modules `wandb` and `trackio` that the run reports to."""
    modules = [importlib.import_module(name) for name in ("wandb", "trackio") if name in args.report_to]
    return [module for module in modules if module.__name__ == "trackio" or module.run is not None]


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


def log_completion_tables(rows: list[TraceRow], args: GRPOConfig, unique_prompts: bool = False) -> None:
    """
    Writes the rows to `completions/` in the output folder, and to the table `completions` of Weights & Biases and of
    Trackio if they are used, as GRPOTrainer does.

    With `unique_prompts`, the trackers get one row per prompt only.
    """
    frame = as_frame(rows)
    step, split = rows[0]["step"], rows[0]["split"]
    folder = Path(args.output_dir) / "completions"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"completions_{step:05d}{'' if split == 'train' else '_' + split}.parquet"
    with naming(path):
        frame.to_parquet(path, index=False)
    if unique_prompts:
        frame = frame.drop_duplicates([f"prompt/{role}" for role in roles_of(rows)])
    frame = frame.astype(object).where(frame.notna(), None)  # a missing text must not be NaN
    for tracker in trackers_with_tables(args):
        tracker.log({"completions": tracker.Table(dataframe=frame)})


def log_report(path: Path, args: TrainingArguments) -> None:
    """
    Writes the page of a run to Weights & Biases and to Trackio if completions are logged, because the page has
    completions, too.
    """
    if vars(args).get("log_completions"):  # not every trainer has this argument
        for tracker in trackers_with_tables(args):
            tracker.log({"report": tracker.Html(str(path))})


class RewardProgressCallback(ProgressCallback):
    """
    Shows the latest reward, return and pass rate in the progress bar, and the metrics that the environment watches.
    """

    def __init__(self, watched: Sequence[str] = ()):
        super().__init__()
        self.names = {**SHOWN, **{f"turn_1/{name}": name for name in watched}}
        self.latest: dict[str, str] = {}

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        super().on_train_begin(*args, **kwargs)
        if self.training_bar is not None:
            self.training_bar.set_description("Training")

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: Any, logs: dict[str, float], **kwargs: Any
    ) -> None:
        if not state.is_world_process_zero or self.training_bar is None:
            return
        self.latest |= {shown: f"{logs[name]:.2f}" for name, shown in self.names.items() if name in logs}
        self.training_bar.set_postfix_str(", ".join(map(" ".join, self.latest.items())), refresh=False)


def show_one_bar(trainer: Trainer, watched: Sequence[str] = ()) -> None:
    """Replaces the lines that a trainer prints at every log by one progress bar, unless `disable_tqdm` is set."""
    if not trainer.args.disable_tqdm:
        trainer.remove_callback(ProgressCallback)
        trainer.add_callback(RewardProgressCallback(watched))
