"""Watches the reward of a model and that of the task while a team is trained with the model's."""

import logging
import math
from pathlib import Path
from statistics import fmean, variance
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from trl_multiagent.environments.model_reward import CORRELATION, MODEL, SCALED, TASK


logger = logging.getLogger(__name__)

PICTURE_FILE = "model_and_task_reward.png"
FIRST_TURN = "turn_1/"
MIN_LOGS = 20  # log entries before the first warning
WINDOW = 0.25  # share of the log entries at the beginning and at the end that are compared


class RewardWatch(TrainerCallback):
    """
    Warns once if the reward of the model rises and that of the task does not, and draws both at the end of the training.

    It needs the metrics of a [`~environments.model_reward.ModelRewardEnvironment`].
    """

    def __init__(self) -> None:
        self.has_warned = False

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self.has_warned or not state.is_world_process_zero:
            return
        logs = both_rewards(state.log_history)
        if not is_over_optimized([log[FIRST_TURN + MODEL] for log in logs], [log[FIRST_TURN + TASK] for log in logs]):
            return
        self.has_warned = True
        ends = [fmean(log[FIRST_TURN + name] for log in part) for name in (MODEL, TASK) for part in windows(logs)]
        logger.warning(
            "Until step %d, the reward of the model has risen from %.3g to %.3g, but that of the task has gone from %.3g to %.3g: "
            "the team exploits errors of the model. Stop here, collect more preferences with the trained team, lower "
            "`learning_rate`, or set `beta`.",
            state.global_step,
            *ends,
        )

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        logs = both_rewards(state.log_history)
        if state.is_world_process_zero and logs:
            draw_rewards(logs, Path(args.output_dir) / PICTURE_FILE)


def both_rewards(log_history: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The log entries of the training that have both rewards."""
    return [log for log in log_history if {FIRST_TURN + MODEL, FIRST_TURN + TASK} <= log.keys()]


def windows(values: list) -> tuple[list, list]:
    """The values at the beginning and at the end that are compared."""
    size = max(2, round(WINDOW * len(values)))
    return values[:size], values[-size:]


def is_over_optimized(model: list[float], task: list[float]) -> bool:
    """
    Whether the model's reward has risen by more than three standard errors, and the task's by none at all.

    Args:
        model, task (`list[float]`): The mean rewards of each log entry, oldest first.
    """
    if len(model) < MIN_LOGS:
        return False
    first, last = windows(model)
    error = math.sqrt(variance(first) / len(first) + variance(last) / len(last))
    rise = fmean(last) - fmean(first)
    first, last = windows(task)
    return rise > 3 * error and fmean(last) <= fmean(first)


def draw_rewards(logs: list[dict[str, Any]], path: Path) -> None:
    """
    Draws both rewards on the axis of the task's reward, and their correlation.

    Args:
        logs (`list[dict]`): The log entries, see [`both_rewards`].
        path (`Path`): The PNG file to write.
    """
    from matplotlib.figure import Figure  # takes long to import

    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    shown = SCALED if FIRST_TURN + SCALED in logs[0] else MODEL
    for name, color, label in ((shown, "tab:orange", "model"), (TASK, "tab:blue", "task")):
        draw_smoothed(left, logs, FIRST_TURN + name, color, label)
    scaled = ", both on the axis of the task's" if shown == SCALED else ""
    left.set(title=f"Rewards of training batches{scaled}", xlabel="optimizer step", ylabel="mean reward")
    left.legend(loc="lower right", frameon=False)
    draw_smoothed(right, [log for log in logs if CORRELATION in log], CORRELATION, "tab:green", "correlation")
    right.set(title="Correlation of both over a batch", xlabel="optimizer step", ylim=(-1.05, 1.05))
    for axes in (left, right):
        axes.grid(alpha=0.2)
        axes.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def draw_smoothed(axes: Any, logs: list[dict[str, Any]], key: str, color: str, label: str) -> None:
    """Draws a metric as it was logged, and its moving average."""
    steps, values = [log["step"] for log in logs], [log[key] for log in logs]
    half = max(1, len(values) // 20)
    smooth = [fmean(values[max(0, k - half) : k + half + 1]) for k in range(len(values))]
    axes.plot(steps, values, color=color, alpha=0.25)
    axes.plot(steps, smooth, color=color, linewidth=2, label=label)
