"""The numbers of an evaluation, computed from its transcripts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from trl_multiagent.environments.base import PASSED, PASSED_HIDDEN
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
            and `wall_seconds`, the wall time of all batches with scoring.
        speed ([`Speed`], *optional*): How fast the policy answered.
        ranges (`Mapping[str, tuple[float, float]]`, *optional*): The smallest and the largest possible value of metrics, as in
            [`~trl_multiagent.environments.Environment`], with those of `return`.
    """

    name: str
    kind: str
    source: str
    names: list[tuple[str, str]]
    values: np.ndarray
    cost: dict[str, float]
    speed: Speed | None = None
    ranges: Mapping[str, tuple[float, float]] = field(default_factory=dict)

    @property
    def cost_per_episode(self) -> dict[str, float]:
        return {name: value / self.cost["episodes"] for name, value in self.cost.items() if name != "episodes"}

    def column(self, metric: str, turn: str = FINAL) -> np.ndarray | None:
        """The value of each item, of shape `(num_items,)`; `None` if there is no such metric."""
        return self.values[:, self.names.index((turn, metric))] if (turn, metric) in self.names else None

    def bounds(self, metric: str) -> tuple[float, float]:
        """The smallest and the largest possible value of a metric; infinite if they are not known."""
        if metric.startswith("pass@") or metric in (PASSED, PASSED_HIDDEN):
            return 0.0, 1.0
        return self.ranges.get(metric, (-math.inf, math.inf))


@dataclass
class Speed:
    """
    How fast a policy answers when it plays several episodes at a time, without scoring. All seconds are wall time. The latency of an answer is the
    time of the generate call that made it, so it depends on the number of episodes of a batch.

    Args:
        episodes (`float`): Mean number of episodes that were played at a time.
        latency (`dict[str, float]`): For each role, the seconds of an episode in which it generates.
        tokens_per_second (`dict[str, float]`): For each role, the tokens that it generates in a second of these.
        sequential_latency, parallel_latency (`float`):
            Seconds of an episode of the team: if the agents answer one after the other, as they do here, and if they answered at the
            same time, each on a machine of its own, so that every turn takes as long as its slowest agent. A pipeline is never parallel.
        sequential_tokens_per_second, parallel_tokens_per_second (`float`): The tokens of all agents in a second, likewise.
    """

    episodes: float
    latency: dict[str, float]
    tokens_per_second: dict[str, float]
    sequential_latency: float
    parallel_latency: float
    sequential_tokens_per_second: float
    parallel_tokens_per_second: float


def compute_result(
    name: str,
    kind: str,
    source: str,
    records: Sequence[dict[str, Any]],
    num_items: int,
    config: EvaluationConfig,
    rounds: int = 1,
    ranges: Mapping[str, tuple[float, float]] | None = None,
    is_pipeline: bool = False,
) -> Result:
    """
    Computes the values of each item.

    Args:
        name, kind, source (`str`): Those of the policy.
        records (`list[dict]`): The transcripts, see [`~play.play_batch`].
        num_items (`int`): Number of items.
        config ([`EvaluationConfig`]): The settings.
        rounds (`int`, *optional*, defaults to `1`): Turns of the environment in one turn of the task.
        ranges (`Mapping[str, tuple[float, float]]`, *optional*): The `metric_ranges` of the environment.
        is_pipeline (`bool`, *optional*, defaults to `False`): Whether every agent waits for the answers of those before it.
    """
    episodes: list[list[dict[str, Any]]] = [[] for _ in range(num_items)]
    for record in records:
        episodes[record["item"]].append(record)
    of_items = [item_values([record["turns"][rounds - 1 :: rounds] for record in each], config) for each in episodes]
    names = list(dict.fromkeys(key for values in of_items for key in values))
    num_turns = len(records[0]["turns"]) // rounds
    turns = [f"turn_{t + 1}" for t in range(num_turns)] + [FINAL]
    ranges = dict(ranges or {})
    if "reward" in ranges:
        weight = sum(discount_of(config) ** t for t in range(num_turns))
        ranges["return"] = (weight * ranges["reward"][0], weight * ranges["reward"][1])
    names.sort(key=lambda key: (turns.index(key[0]), not key[1].startswith(("return", "reward", "pass@"))))
    matrix = np.array([[values.get(key, np.nan) for key in names] for values in of_items])
    values = matrix.reshape(num_items, len(names))
    return Result(name, kind, source, names, values, total_cost(records), speed_of(records, is_pipeline), ranges)


def discount_of(config: EvaluationConfig) -> float:
    return 1.0 if config.discount is None else config.discount


def item_values(episodes: list[list[dict[str, Any]]], config: EvaluationConfig) -> dict[tuple[str, str], float]:
    """The values of one item, by turn and metric. `episodes`: the turns of each of its episodes that count."""
    values: dict[tuple[str, str], float] = {}
    last = len(episodes[0])
    returns = [sum(discount_of(config) ** t * turn["reward"] for t, turn in enumerate(turns)) for turns in episodes]
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
        "wall_seconds": sum(x["timing"]["batch_seconds"] / x["timing"]["batch_episodes"] for x in records),
    }


def speed_of(records: Sequence[dict[str, Any]], is_pipeline: bool) -> Speed:
    """Computes the speed from the timing of the records' batches. Every record counts for its share of the batch."""
    timings = [record["timing"] for record in records]
    roles = list(records[0]["turns"][0]["tokens"])
    slowest = sum if is_pipeline else max
    seconds: dict[str, list[list[float]]] = {
        **{role: [[turn[role] for turn in x["generation_seconds"]] for x in timings] for role in roles},
        "sequential": [[sum(turn.values()) for turn in x["generation_seconds"]] for x in timings],
        "parallel": [[slowest(turn.values()) for turn in x["generation_seconds"]] for x in timings],
    }
    tokens = {role: sum(turn["tokens"][role] for record in records for turn in record["turns"]) for role in roles}
    latency = {name: float(np.mean([sum(turns) for turns in of_name])) for name, of_name in seconds.items()}
    rate = {}
    for name, of_name in seconds.items():
        total = sum(sum(turns) / x["batch_episodes"] for turns, x in zip(of_name, timings, strict=True))
        rate[name] = tokens.get(name, sum(tokens.values())) / total if total else math.nan
    return Speed(
        float(np.mean([x["batch_episodes"] for x in timings])),
        {role: latency[role] for role in roles},
        {role: rate[role] for role in roles},
        latency["sequential"],
        latency["parallel"],
        rate["sequential"],
        rate["parallel"],
    )


def numbers_of(results: Sequence[Result], config: EvaluationConfig) -> Numbers:
    """
    The mean of every metric over items, and over teams if there are several results, with its confidence interval.
    Metrics that not all of the results have are left out.
    """
    names = common_names(results)
    bounds = [union([result.bounds(metric) for result in results]) for _, metric in names]
    return summarize(names, np.stack([columns_of(result, names) for result in results]), bounds, config)


def differences(results: Sequence[Result], other: Result, config: EvaluationConfig) -> Numbers:
    """The mean over the results minus the value of another policy, on the same items, with confidence intervals."""
    return paired_differences([(result, other) for result in results], config)


def paired_differences(pairs: Sequence[tuple[Result, Result]], config: EvaluationConfig) -> Numbers:
    """
    The mean over pairs of a team's value minus that of the policy that is compared with it, on the same items, with confidence
    intervals over items, and over pairs if there are several.
    """
    names = common_names([result for pair in pairs for result in pair])
    bounds = []
    for _, metric in names:
        ranges = [(team.bounds(metric), other.bounds(metric)) for team, other in pairs]
        bounds.append(union([(own[0] - others[1], own[1] - others[0]) for own, others in ranges]))
    values = np.stack([columns_of(team, names) - columns_of(other, names) for team, other in pairs])
    return summarize(names, values, bounds, config)


def common_names(results: Sequence[Result]) -> list[tuple[str, str]]:
    """The columns that all results have."""
    return [key for key in results[0].names if all(key in result.names for result in results)]


def columns_of(result: Result, names: Sequence[tuple[str, str]]) -> np.ndarray:
    """Some columns of the values, of shape `(num_items, number of names)`."""
    return result.values[:, [result.names.index(key) for key in names]]


def union(ranges: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """The smallest range that contains all ranges."""
    return min(low for low, _ in ranges), max(high for _, high in ranges)


def summarize(
    names: Sequence[tuple[str, str]],
    values: np.ndarray,
    bounds: Sequence[tuple[float, float]],
    config: EvaluationConfig,
) -> Numbers:
    """The estimates of all columns, by turn and metric. See [`~statistics.estimates`]."""
    return by_turn(names, estimates(values, bounds, config.num_bootstraps, config.confidence, config.seed))


def by_turn(names: Sequence[tuple[str, str]], values: Sequence[Estimate]) -> Numbers:
    numbers: Numbers = {}
    for (turn, metric), value in zip(names, values, strict=True):
        numbers.setdefault(turn, {})[metric] = value
    return numbers
