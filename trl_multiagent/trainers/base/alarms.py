"""
Warns about collapsed or idle agents, about broken completions, and about reward drops.

An alarm is raised when its condition begins to hold. It is a warning, and a line of `alarms.jsonl` in the output
folder, which programs can read. The conditions are functions of the logged metrics, so a resumed run raises the same
alarms as an uninterrupted run.
"""

import json
import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from statistics import fmean
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from trl_multiagent.folders import ALARMS_FILE, naming, write_text


logger = logging.getLogger(__name__)

WINDOW = 20  # successive log entries in which a condition must hold
NO_SIGNAL = 0.95  # share of the nodes whose returns are all equal
COLLAPSED = 0.9  # share of the completions that are one text
NO_CONTRIBUTION = 0.01  # of the variance of the rewards
BROKEN_STEPS, BROKEN_ENTRIES = 20, 3  # least steps and log entries in which completions must be broken
REPEATED = 0.8  # share of the phrases that a completion has written before
CUT_OFF = 0.99  # share of the completions that reach the length limit
SHORT = 16  # a length limit below this is meant to cut off
NEARLY_NEVER = 0.02  # below this, a metric in `watched_metrics` counts as near zero
EVALUATION_REWARD = re.compile(r"eval_([^/]*_)?reward")  # eval_reward, or eval_<name>_reward of one of several sets

Log = Mapping[str, Any]


@dataclass(eq=False)
class Alarms(TrainerCallback):
    """
    Raises alarms. If the reward of an evaluation drops, `on_cliff` ends the training; with `"rollback"`, the best team
    is kept.
    """

    roles: Sequence[str]
    has_siblings: bool  # whether a node has several joint actions
    # Metrics of the environment that are near zero if something is wrong, each with a description of the problem
    watched_metrics: Mapping[str, str] = field(default_factory=dict)
    on_cliff: str | None = None  # or `"stop"` or `"rollback"`
    cliff_drop: float = 0.3  # share of the best reward of an evaluation whose loss is a drop
    is_chain: bool = False  # whether only one joint action of a node is continued

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: Any, **kwargs: Any) -> None:
        path = Path(args.output_dir) / ALARMS_FILE
        if state.is_world_process_zero and path.is_file():  # a resumed run repeats the alarms after its checkpoint
            lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
            # A process that was killed may have left its last line unfinished
            complete = [line for line in lines if line.endswith("\n")]
            kept = [line for line in complete if json.loads(line)["step"] <= state.global_step]
            write_text(path, "".join(kept))

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if state.is_world_process_zero and "reward" in state.log_history[-1]:
            latest_first = (log for log in reversed(state.log_history) if "reward" in log)
            logs = [*islice(latest_first, WINDOW + 1)][::-1]  # the whole history would be read at every step
            limit = args.max_completion_length
            before = self.conditions(logs[:-1][-WINDOW:], limit)
            found = self.conditions(logs[-WINDOW:], limit)
            raised = {name: text for name, text in found.items() if name not in before}
            self._raise(raised, args, state)

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: Any, **kwargs: Any) -> None:
        # With several evaluation sets, this is called after each of them, and each has its own reward
        name = next((name for name in kwargs["metrics"] if EVALUATION_REWARD.fullmatch(name)), "eval_reward")
        rewards = [log[name] for log in state.log_history if name in log]
        if not is_cliff(rewards, self.cliff_drop):
            return
        text = (
            f"The reward of the evaluation ({name}) fell from {max(rewards[:-1]):.3g}, the best so far, to "
            f"{rewards[-1]:.3g}."
        )
        if self.on_cliff is not None:
            control.should_training_stop = True
            text += " The training ends here (`on_cliff`)."
        elif is_cliff(rewards[:-1], self.cliff_drop):
            return  # the alarm was raised when it began
        if state.is_world_process_zero:
            self._raise({"cliff": text}, args, state)

    def conditions(self, logs: Sequence[Log], limit: int) -> dict[str, str]:
        """
        Returns the alarm conditions that hold in all of 20 successive log entries, with a message for each. Completions
        count as broken after fewer entries. `limit`: the largest number of tokens of a completion.
        """
        found = self.broken(logs, limit)
        if len(logs) < WINDOW:
            return found
        if self.has_siblings and always(logs, "frac_reward_zero_std", at_least=NO_SIGNAL):
            found["no_signal"] = (
                f"In the last {WINDOW} log entries, the joint actions of nearly all nodes had equal returns, so the "
                "agents learn next to nothing. Check the reward, or raise `num_generations` or `temperature`."
            )
        if self.is_chain and always(logs, "turn_2/reward_mean") and always(logs, "turn_1/reward_mean", 0.0, 0.0):
            found["chain"] = (
                f"In the last {WINDOW} log entries, all rewards of turn 1 were 0. In a chain, the return of a turn is "
                "its own reward, so nothing is learned there. Remove `handoff`, or set `branching` to 'episodes'."
            )
        variance = mean_of(logs, "team/reward_variance")
        for role in self.roles:
            if always(logs, f"agents/{role}/completions/most_common_ratio", at_least=COLLAPSED):
                found[f"collapse/{role}"] = (
                    f"In the last {WINDOW} log entries, agent {role!r} almost always gave the same answer, whatever "
                    "the item. Lower `learning_rate`, or set `beta`."
                )
            own = mean_of(logs, f"agents/{role}/total_contribution")
            if variance is not None and own is not None and variance > 0 and own <= NO_CONTRIBUTION * variance:
                found[f"no_contribution/{role}"] = (
                    f"In the last {WINDOW} log entries, the reward hardly depended on the answers of agent {role!r}: "
                    "it contributes nothing, or the others ignore it."
                )
        for name, meaning in self.watched_metrics.items():
            if always(logs, f"turn_1/{name}", at_most=NEARLY_NEVER):
                found[f"low/{name}"] = f"In the last {WINDOW} log entries, turn_1/{name} was nearly zero: {meaning}."
        return found

    def broken(self, logs: Sequence[Log], limit: int) -> dict[str, str]:
        """Returns the agents whose completions repeat themselves or never end, with a message for each."""
        last = logs[-1]["step"] if logs else 0
        recent = [log for log in logs if log["step"] > last - BROKEN_STEPS]
        logs = logs[-max(BROKEN_ENTRIES, len(recent)) :]
        found = {}
        for role in self.roles if len(logs) >= BROKEN_ENTRIES and last >= BROKEN_STEPS else ():
            since = f"Since step {logs[0]['step']} or longer, nearly all completions of agent {role!r}"
            name = f"agents/{role}/completions"
            if always(logs, f"{name}/repetition", at_least=REPEATED):
                found[f"repetition/{role}"] = (
                    f"{since} repeat themselves: its training has probably destroyed it. Lower `learning_rate`, or "
                    "set `beta`."
                )
            if limit >= SHORT and always(logs, f"{name}/clipped_ratio", at_least=CUT_OFF):
                found[f"cut_off/{role}"] = (
                    f"{since} are cut off at `max_completion_length`, {limit} tokens. If it ended its answers before, "
                    "lower `learning_rate`. Otherwise, raise the limit, ask for short answers, or set `stop_strings`."
                )
        return found

    def _raise(self, alarms: Mapping[str, str], args: TrainingArguments, state: TrainerState) -> None:
        path = Path(args.output_dir) / ALARMS_FILE
        for name, text in alarms.items():
            logger.warning("Step %d: %s", state.global_step, text)
            path.parent.mkdir(parents=True, exist_ok=True)
            with naming(path), path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"step": state.global_step, "alarm": name, "message": text}) + "\n")


def always(logs: Iterable[Log], name: str, at_least: float = float("-inf"), at_most: float = float("inf")) -> bool:
    """Returns whether a metric is in all log entries and within bounds in each."""
    return all(name in log and at_least <= log[name] <= at_most for log in logs)


def mean_of(logs: Sequence[Log], name: str) -> float | None:
    """Returns the mean of a metric over log entries; `None` if one of them lacks it."""
    return fmean(log[name] for log in logs) if all(name in log for log in logs) else None


def is_cliff(rewards: Sequence[float], drop: float) -> bool:
    """
    Returns whether the last reward is lower than the best earlier one by more than the share `drop` of the latter.
    """
    if len(rewards) < 2:
        return False
    best = max(rewards[:-1])
    return best - rewards[-1] > drop * abs(best)
