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
WINDOW = 0.25  # the first and the last log entries that are compared, as a share of all


class RewardWatch(TrainerCallback):
    """
    Warns once if the model's reward in a [`~environments.model_reward.ModelRewardEnvironment`] rises, but the task's
    does not.
    """

    def __init__(self) -> None:
        self.has_warned = False

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self.has_warned or not state.is_world_process_zero:
            return
        logs = [log for log in state.log_history if {FIRST_TURN + MODEL, FIRST_TURN + TASK} <= log.keys()]
        model, task = ([log[FIRST_TURN + name] for log in logs] for name in (MODEL, TASK))
        if is_over_optimized(model, task):
            self.has_warned = True
            ends = [fmean(part) for rewards in (model, task) for part in windows(rewards)]
            logger.warning(
                "Until step %d, the reward of the model has risen from %.3g to %.3g, but that of the task has "
                "gone from %.3g to %.3g: "
                "the team exploits errors of the model. Stop here, collect more preferences with the trained "
                "team, lower "
                "`learning_rate`, or set `beta`.",
                state.global_step,
                *ends,
            )


def windows(values: list[float]) -> tuple[list[float], list[float]]:
    """Returns the first and the last values, which are compared."""
    size = max(2, round(WINDOW * len(values)))
    return values[:size], values[-size:]


def is_over_optimized(model: list[float], task: list[float]) -> bool:
    """
    Returns whether the model's reward has risen by more than three standard errors, but the task's not at all. The
    oldest come first.
    """
    if len(model) < MIN_LOGS:
        return False
    (first, last), (task_first, task_last) = windows(model), windows(task)
    error = math.sqrt(variance(first) / len(first) + variance(last) / len(last))
    return fmean(last) - fmean(first) > 3 * error and fmean(task_last) <= fmean(task_first)
