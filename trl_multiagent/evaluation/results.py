"""The numbers of an evaluation, computed from its transcripts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from trl_multiagent.evaluation.config import EvaluationConfig
from trl_multiagent.evaluation.statistics import Estimate, estimates, pass_at_k


Numbers = dict[str, dict[str, Estimate]]  # "turn_1", ..., "final" -> metric -> estimate
FINAL = "final"  # the last turn, and the return of the episode


@dataclass
class Result:
    """
    The results of one policy.

    Args:
        name, kind, source (`str`): Those of the [`~policies.Policy`].
        names (`list[tuple[str, str]]`): Turn and metric of each column of `values`.
        values (`np.ndarray` of shape `(num_items, number of names)`): The means over each item's episodes, or pass@k of the
            item; NaN if the item does not have the metric.
        cost (`dict[str, float]`): Sums over all episodes: `episodes`, `calls` (completions), `generated_tokens`, `prompt_tokens`
            and `seconds`.
    """

    name: str
    kind: str
    source: str
    names: list[tuple[str, str]]
    values: np.ndarray
    cost: dict[str, float]

    @property
    def cost_per_episode(self) -> dict[str, float]:
        return {name: value / self.cost["episodes"] for name, value in self.cost.items() if name != "episodes"}

    def column(self, metric: str, turn: str = FINAL) -> np.ndarray | None:
        """The value of each item, of shape `(num_items,)`; `None` if there is no such metric."""
        return self.values[:, self.names.index((turn, metric))] if (turn, metric) in self.names else None


def compute_result(
    name: str,
    kind: str,
    source: str,
    records: Sequence[dict[str, Any]],
    num_items: int,
    config: EvaluationConfig,
    rounds: int = 1,
) -> Result:
    """
    Computes the values of each item.

    Args:
        name, kind, source (`str`): Those of the policy.
        records (`list[dict]`): The transcripts, see [`~play.play_batch`].
        num_items (`int`): Number of items.
        config ([`EvaluationConfig`]): The settings.
        rounds (`int`, *optional*, defaults to `1`): Turns of the environment in one turn of the task.
    """
    episodes: list[list[dict[str, Any]]] = [[] for _ in range(num_items)]
    for record in records:
        episodes[record["item"]].append(record)
    of_items = [item_values([record["turns"][rounds - 1 :: rounds] for record in each], config) for each in episodes]
    names = list(dict.fromkeys(key for values in of_items for key in values))
    turns = [f"turn_{t + 1}" for t in range(len(records[0]["turns"]))] + [FINAL]
    names.sort(key=lambda key: (turns.index(key[0]), not key[1].startswith(("return", "reward", "pass@"))))
    matrix = np.array([[values.get(key, np.nan) for key in names] for values in of_items])
    return Result(name, kind, source, names, matrix.reshape(num_items, len(names)), total_cost(records))


def item_values(episodes: list[list[dict[str, Any]]], config: EvaluationConfig) -> dict[tuple[str, str], float]:
    """The values of one item, by turn and metric. `episodes`: the turns of each of its episodes that count."""
    values: dict[tuple[str, str], float] = {}
    last = len(episodes[0])
    discount = 1.0 if config.discount is None else config.discount
    returns = [sum(discount**t * turn["reward"] for t, turn in enumerate(turns)) for turns in episodes]
    values[FINAL, "return"] = float(np.mean(returns))
    for t in range(last):
        turns = [episode[t] for episode in episodes]
        of_turn = {"reward": float(np.mean([turn["reward"] for turn in turns]))}
        passes = [turn["metrics"].get(config.pass_metric) for turn in turns]
        if None not in passes:
            passed = sum(x >= 1.0 for x in passes)
            of_turn |= {f"pass@{k}": pass_at_k(len(passes), passed, k) for k in config.pass_at}
        for name in dict.fromkeys(name for turn in turns for name in turn["metrics"]):
            of_turn[name] = float(np.mean([turn["metrics"][name] for turn in turns if name in turn["metrics"]]))
        for turn_name in (f"turn_{t + 1}", FINAL) if t + 1 == last else (f"turn_{t + 1}",):
            values |= {(turn_name, name): value for name, value in of_turn.items()}
    return values


def total_cost(records: Sequence[dict[str, Any]]) -> dict[str, float]:
    """What the episodes cost, drafts included."""
    turns = [turn for record in records for turn in record["turns"]]
    return {
        "episodes": len(records),
        "calls": sum(len(turn["tokens"]) for turn in turns),
        "generated_tokens": sum(sum(turn["tokens"].values()) for turn in turns),
        "prompt_tokens": sum(sum(turn["prompt_tokens"].values()) for turn in turns),
        "seconds": sum(record["seconds"] for record in records),
    }


def numbers_of(results: Sequence[Result], config: EvaluationConfig) -> Numbers:
    """
    The mean of every metric over items, and over teams if there are several results, with its confidence interval.
    Metrics that not all of the results have are left out.
    """
    names = [key for key in results[0].names if all(key in result.names for result in results)]
    values = np.stack([result.values[:, [result.names.index(key) for key in names]] for result in results])
    return by_turn(names, estimates(values, config.num_bootstraps, config.confidence, config.seed))


def differences(results: Sequence[Result], other: Result, config: EvaluationConfig) -> Numbers:
    """The mean over the results minus the value of another policy, on the same items, with confidence intervals."""
    names = [key for key in results[0].names if all(key in result.names for result in [*results, other])]
    theirs = other.values[:, [other.names.index(key) for key in names]]
    values = np.stack([result.values[:, [result.names.index(key) for key in names]] - theirs for result in results])
    return by_turn(names, estimates(values, config.num_bootstraps, config.confidence, config.seed))


def paired_differences(pairs: Sequence[tuple[Result, Result]], config: EvaluationConfig) -> Numbers:
    """
    The mean over pairs of a team's value minus that of the policy that is compared with it, on the same items, with confidence
    intervals over items, and over pairs if there are several.
    """
    both = [result for pair in pairs for result in pair]
    names = [key for key in both[0].names if all(key in result.names for result in both)]
    first, second = (
        np.stack([pair[k].values[:, [pair[k].names.index(key) for key in names]] for pair in pairs]) for k in (0, 1)
    )
    return by_turn(names, estimates(first - second, config.num_bootstraps, config.confidence, config.seed))


def by_turn(names: Sequence[tuple[str, str]], values: Sequence[Estimate]) -> Numbers:
    numbers: Numbers = {}
    for (turn, metric), value in zip(names, values, strict=True):
        numbers.setdefault(turn, {})[metric] = value
    return numbers
