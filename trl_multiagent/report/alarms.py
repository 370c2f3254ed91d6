"""
Alarms about a training.

An alarm is raised when its condition begins to hold. It is a warning, and a line of `alarms.jsonl` in the output
folder, which programs can read. The conditions are functions of the logged metrics, so a resumed run raises the same
alarms as an uninterrupted run.
"""

import itertools
import json
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.utils import logging

from trl_multiagent.environments.base import PASSED
from trl_multiagent.folders import ALARMS_FILE, naming, write_lines
from trl_multiagent.report.run_page import read_lines


logger = logging.get_logger(__name__)

# An alarm is raised if its condition holds in all log entries of the last 20 steps, and in at least 3
STEPS, ENTRIES = 20, 3
NO_SIGNAL = 0.95  # share of the nodes with all returns equal
NO_SIGNAL_TEXT = (
    "the joint actions of nearly all nodes have equal returns, so the agents learn next to nothing. Check the reward, "
    "or raise `num_generations` or `temperature`."
)
OUT_OF_TURNS_TEXT = (
    "every episode uses up its turns before the workflow ends. Unless this is meant, raise `num_turns`, or let the "
    "workflow end."
)
NEARLY_NEVER = 0.02  # below this, a metric in `watched_metrics` counts as near zero
SHORT = 16  # a length limit below this is meant to cut off
# Of each role: a metric of its completions, its least value, and the message
OF_COMPLETIONS = {
    "collapse": (
        "most_common_ratio",
        0.9,
        "agent {!r} almost always gives the same answer, whatever the item. Lower `learning_rate`, or set `beta`.",
    ),
    "repetition": (
        "repetition",
        0.8,
        "nearly all completions of agent {!r} repeat themselves: its training has probably destroyed it. Lower "
        "`learning_rate`, or set `beta`.",
    ),
    "cut_off": (
        "clipped_ratio",
        0.99,
        "nearly all completions of agent {!r} are cut off at `max_completion_length`. If it ended its answers before, "
        "lower `learning_rate`. Otherwise, raise the limit, ask for short answers, or set `stop_strings`.",
    ),
}
FEWER_PASS = (
    "the reward is higher than in the first ones, and fewer answers pass. Read the answers: the reward "
    "pays for something other than the task."
)
EVALUATION_REWARD = r"eval_([^/]*_)?reward"  # eval_reward, or eval_<name>_reward of one of several sets

Log = Mapping[str, Any]


@dataclass(eq=False)
class Alarms(TrainerCallback):
    """
    Raises alarms. If the reward of an evaluation drops, `on_cliff` ends the training; with `"rollback"`, the best team
    is kept.
    """

    roles: Sequence[str]
    # Metrics of the environment that are near zero if something is wrong, each with a description of the problem
    watched_metrics: Mapping[str, str]

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: Any, **kwargs: Any) -> None:
        path = Path(args.output_dir) / ALARMS_FILE
        if state.is_world_process_zero and path.is_file():  # a resumed run repeats the alarms after its checkpoint
            write_lines(path, [alarm for alarm in read_lines(path) if alarm["step"] <= state.global_step])

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if state.is_world_process_zero and "reward" in state.log_history[-1]:
            latest_first = (log for log in reversed(state.log_history) if "reward" in log)
            logs = [*itertools.islice(latest_first, STEPS + 1)][::-1]  # the whole history would be read at every step
            first = [*itertools.islice((log for log in state.log_history if "reward" in log), STEPS)]
            before, found = (self.conditions(entries, state.max_steps, args, first) for entries in (logs[:-1], logs))
            self._raise({name: text for name, text in found.items() if name not in before}, args, state)

    def on_evaluate(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        # With several evaluation sets, this is called after each of them, and each has its own reward
        name = next((name for name in kwargs["metrics"] if re.fullmatch(EVALUATION_REWARD, name)), None)
        rewards = [log[name] for log in state.log_history if name in log]
        if not is_cliff(rewards, args.cliff_drop):
            return
        text = (
            f"The reward of the evaluation ({name}) fell from {max(rewards[:-1]):.3g}, the best so far, to "
            f"{rewards[-1]:.3g}."
        )
        if args.on_cliff is not None:
            control.should_training_stop = True
            text += " The training ends here (`on_cliff`)."
        elif is_cliff(rewards[:-1], args.cliff_drop):
            return  # the alarm was raised when it began
        if state.is_world_process_zero:
            self._raise({"cliff": text}, args, state)

    def conditions(self, logs: Sequence[Log], max_steps: int, args: Any, first: Sequence[Log]) -> dict[str, str]:
        """
        Returns the alarm conditions that hold in all log entries of the last 20 steps, which are at least 3 entries,
        with a message for each. Those of completions need no more than half of a training. In a short one, equal
        returns may just be the highest. The reward and the share of answers that pass are compared with the `first`
        entries of the training.
        """
        last = logs[-1]["step"] if logs else 0

        def latest(steps: int) -> Sequence[Log]:
            return logs[-max(ENTRIES, sum(log["step"] > last - steps for log in logs)) :]

        # Of each alarm: the steps, a metric, its bounds, and the message
        bounds = {
            f"low/{name}": (STEPS, f"turn_1/{name}", 0.0, NEARLY_NEVER, f"turn_1/{name} is nearly zero: {meaning}.")
            for name, meaning in self.watched_metrics.items()
        }
        if args.num_generations > 1:
            bounds["no_signal"] = (STEPS, "frac_reward_zero_std", NO_SIGNAL, 1.0, NO_SIGNAL_TEXT)
        steps = min(STEPS, max_steps // 2)
        place = "episode/out_of_turns" if args.num_turns > 1 else "turn_1/out_of_turns"
        bounds["out_of_turns"] = (steps, place, 1.0, 1.0, OUT_OF_TURNS_TEXT)
        for role, (name, (metric, least, text)) in itertools.product(self.roles, OF_COMPLETIONS.items()):
            if name != "cut_off" or args.max_completion_length >= SHORT:
                place = f"agents/{role}/completions/{metric}"
                bounds[f"{name}/{role}"] = (steps, place, least, 1.0, text.format(role))
        found = {}
        for name, (steps, metric, least, most, text) in bounds.items():
            entries = latest(steps)
            holds = all(metric in log and least <= log[metric] <= most for log in entries)
            if last >= steps and len(entries) >= ENTRIES and holds:
                found[name] = f"Since step {entries[0]['step']} or longer, {text}"
        late = latest(steps // 2)
        early = first[: len(late)]
        if late and early[-1]["step"] < late[0]["step"] and rise(early, late, "reward") > 2:
            if rise(early, late, f"turn_1/{PASSED}") < -2:
                found["fewer_pass"] = f"In the last {len(late)} log entries, {FEWER_PASS}"
        return found

    def _raise(self, alarms: Mapping[str, str], args: TrainingArguments, state: TrainerState) -> None:
        path = Path(args.output_dir) / ALARMS_FILE
        for name, text in alarms.items():
            logger.warning("Step %d: %s", state.global_step, text)
            path.parent.mkdir(parents=True, exist_ok=True)
            with naming(path), path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"step": state.global_step, "alarm": name, "message": text}) + "\n")


def rise(early: Sequence[Log], late: Sequence[Log], metric: str) -> float:
    """
    Returns how much the mean of a metric has risen, in standard errors of the difference; 0 if an entry lacks it.
    """
    if not all(metric in log for log in (*early, *late)):
        return 0.0
    parts = [[log[metric] for log in part] for part in (early, late)]
    error = sum(statistics.variance(part) / len(part) for part in parts) ** 0.5
    return (statistics.mean(parts[1]) - statistics.mean(parts[0])) / (error + 1e-9)


def is_cliff(rewards: Sequence[float], drop: float) -> bool:
    """
    Returns whether the last reward is lower than the best earlier one by more than the share `drop` of the latter.
    """
    if len(rewards) < 2:
        return False
    best = max(rewards[:-1])
    return best - rewards[-1] > drop * abs(best)
