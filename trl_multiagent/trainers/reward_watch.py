"""Compares the learned reward with the task's reward during a training, and warns about over-optimization."""

import logging
import math
from statistics import fmean, variance
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from trl_multiagent.environments.model_reward import MODEL, TASK


logger = logging.getLogger(__name__)

FIRST_TURN = "turn_1/"
MIN_LOGS = 20  # log entries before the first warning
WINDOW = 0.25  # share of the log entries at the beginning and at the end that are compared


class RewardWatch(TrainerCallback):
    """
    Warns once if the reward of the model rises and that of the task does not.

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
