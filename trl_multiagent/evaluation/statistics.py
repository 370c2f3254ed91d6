"""
The numbers of an evaluation: pass@k, means with confidence intervals, cost and speed, computed from its transcripts.

Values with known bounds have the interval of Gaffke (2005), see [`bounded_intervals`]; other values have Student's t
interval. Several teams widen both by the variation between teams, see [`estimates`].
"""

import functools
import math
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from trl_multiagent.environments.base import PASSED, PASSED_HIDDEN
from trl_multiagent.evaluation.config import EvaluationConfig
from trl_multiagent.evaluation.players import Policy
from trl_multiagent.rollout.tree import grouped, mean_of_known


Numbers = dict[str, dict[str, "Estimate"]]  # "turn_1", ..., "final" -> metric -> estimate
Records = list[dict[str, Any]]  # episodes
CALL = " + "  # joins the names of the agents that one generate call answers for, such as adapters of one base
FINAL = "final"  # the last turn, and the return of the episode


class Estimate(NamedTuple):
    """
    A mean and its confidence intervals: the one that suits the values, and Student's t interval. The ends of an
    interval are NaN if the values do not allow it, such as Student's if all values are equal.
    """

    mean: float
    low: float
    high: float
    t_low: float
    t_high: float


def pass_at_k(num_episodes: int, num_passed: int, k: int) -> float:
    """
    Computes the unbiased estimate of pass@k of one item: 1 - C(n - c, k) / C(n, k), the probability that k of the n
    sampled answers contain at least one of the c that pass.

    Args:
        num_episodes (`int`): n, the number of sampled answers.
        num_passed (`int`): c, the number of answers that pass.
        k (`int`): Number of tries, at most n.
    """
    return 1.0 - math.comb(num_episodes - num_passed, k) / math.comb(num_episodes, k)


def estimates(values: np.ndarray, bounds: Sequence[tuple[float, float]], config: EvaluationConfig) -> list[Estimate]:
    """
    Computes means with confidence intervals over items and, if there are several teams, over teams.

    The interval over items is computed from the items' means over the teams. The interval over teams is Student's t
    interval of the teams' means over the items, with one degree of freedom less than teams. Both are combined by the
    method of variance estimates recovery (Zou and Donner, 2008, Statistics in Medicine 27): on either side, the
    distance from the mean is the root of the sum of the squared distances. If one of the two intervals does not exist,
    because all items or all teams have the same mean, or there is one team, the other one is taken.

    Args:
        values (`np.ndarray` of shape `(num_teams, num_items, num_metrics)`): The mean of each metric over an item's
            episodes; NaN if the item does not have the metric.
        bounds (`Sequence[tuple[float, float]]`): The smallest and the largest possible value of each metric; infinite
            if not known.
        config ([`EvaluationConfig`]): Has the level of the intervals, and the number and the seed of the random draws
            for those of bounded metrics.

    Returns:
        `list[Estimate]`: One per metric.
    """
    item_means, team_means = nan_mean(values, axis=0), nan_mean(values, axis=1)
    limits = np.array(bounds, dtype=float).T
    student = np.transpose([t_interval(column, config.confidence) for column in item_means.T])
    suited = student.copy()
    bounded = np.isfinite(limits).all(axis=0)
    suited[:, bounded] = bounded_intervals(
        item_means[:, bounded], limits[:, bounded], config.num_bootstraps, config.confidence, config.seed
    )
    means = nan_mean(values.reshape(-1, len(bounds)), axis=0)
    radius = [(high - low) / 2 for low, high in (t_interval(x, config.confidence) for x in team_means.T)]
    ends = []
    for intervals in (suited, student):
        distances = np.abs(intervals - nan_mean(item_means, axis=0))
        combined = np.sqrt(distances**2 + np.square(radius))
        distances = np.where(np.isnan(combined), np.fmax(distances, radius), combined)
        ends += [means - distances[0], means + distances[1]]
    low, high = np.clip(ends[:2], *limits)
    return [Estimate(*map(float, x)) for x in zip(means, low, high, *ends[2:], strict=True)]


def smallest_difference(num_items: int, confidence: float) -> float:
    """
    Returns the smallest difference of two means that the interval of [`bounded_intervals`] can tell from zero with so
    many items, as a share of the largest possible difference. It is reached if all items differ equally.
    """
    weight = 1 - ((1 - confidence) / 2) ** (1 / num_items)  # of the bound, at the lower end of the interval
    return weight / (1 - weight)


def bounded_intervals(
    values: np.ndarray, bounds: np.ndarray, num_draws: int, confidence: float, seed: int
) -> np.ndarray:
    """
    Computes confidence intervals of the means of values with known bounds: Gaffke's (2005), studied by Learned-Miller
    and Thomas (2019, https://huggingface.co/papers/1905.06208).

    The upper end is a quantile of the weighted mean of the n values and the upper bound, with weights from the flat
    Dirichlet distribution of n + 1 parts; the lower end is the same with the lower bound. This is the Bayesian
    bootstrap with one more value, which stands for the unseen part of the distribution. For zeros and ones it is the
    interval of Clopper and Pearson.

    `values` have the shape `(num_items, num_metrics)`, with NaN if an item does not have the metric; `bounds`, the
    smallest and the largest possible value of each metric, and the returned lower and upper ends have the shape `(2,
    num_metrics)`.
    """
    is_there = ~np.isnan(values)
    filled = np.where(is_there, values, 0.0)
    generator = np.random.default_rng(seed)
    size = 1 + 2**22 // (1 + len(values))  # draws at a time, which bounds the memory
    drawn = []
    for start in range(0, num_draws, size):
        weights = generator.standard_exponential((min(size, num_draws - start), len(values) + 1))
        sums, totals = weights[:, :-1] @ filled, weights[:, :-1] @ is_there + weights[:, -1:]
        drawn.append(np.stack([sums + weights[:, -1:] * bound for bound in bounds]) / totals)
    tail = (1 - confidence) / 2
    low, high = np.concatenate(drawn, axis=1)
    return np.stack([np.quantile(low, tail, axis=0), np.quantile(high, 1 - tail, axis=0)])


def nan_mean(values: np.ndarray, axis: int) -> np.ndarray:
    """Computes the means of the values that are not NaN, or NaN if there are none."""
    with warnings.catch_warnings(action="ignore", category=RuntimeWarning):
        return np.nanmean(values, axis=axis)


def welch_interval(one: Sequence[float], other: Sequence[float]) -> tuple[float, float]:
    """
    Computes Welch's 95 % t interval of the difference of two means; NaN if a side has one value, or no side has a
    spread.
    """
    parts = [float(np.var(x, ddof=1)) / len(x) if len(x) > 1 else math.nan for x in (one, other)]
    variance = sum(parts)
    if not variance > 0:
        return math.nan, math.nan
    degrees = variance**2 / sum(part**2 / (len(x) - 1) for part, x in zip(parts, (one, other), strict=True))
    radius = t_quantile(0.975, degrees) * math.sqrt(variance)
    difference = float(np.mean(one) - np.mean(other))
    return difference - radius, difference + radius


def t_interval(values: np.ndarray, confidence: float) -> tuple[float, float]:
    """
    Computes Student's t interval of the mean of the values that are not NaN; NaN if they are all the same, so that
    there is no spread.
    """
    values = values[~np.isnan(values)]
    if len(values) < 2:
        return math.nan, math.nan
    mean, spread = float(values.mean()), float(values.std(ddof=1))
    if spread <= 1e-12 * abs(mean):
        return math.nan, math.nan
    radius = t_quantile(0.5 + confidence / 2, len(values) - 1) * spread / math.sqrt(len(values))
    return mean - radius, mean + radius


def brackets(low: float, high: float, form: str) -> str:
    """Formats an interval, or returns nothing if there is none."""
    return "" if math.isnan(low) else f" [{low:{form}}, {high:{form}}]"


@functools.cache
def t_quantile(probability: float, degrees: float) -> float:
    """
    Computes a quantile of Student's t distribution with n degrees of freedom, by numerical integration: t = sqrt(n)
    tan(a), where the density of a is proportional to cos(a)^(n - 1).
    """
    angles = np.linspace(-math.pi / 2, math.pi / 2, 200_001)
    density = np.cos(angles).clip(0) ** (degrees - 1)
    cumulated = np.concatenate([[0.0], np.cumsum((density[1:] + density[:-1]) / 2)])
    return math.sqrt(degrees) * math.tan(np.interp(probability, cumulated / cumulated[-1], angles))


# Transcripts


@dataclass
class Result:
    """The results of one policy."""

    policy: Policy
    # By turn and metric: the means over each item's episodes, or pass@k of the item; NaN if the item does not have the
    # metric. Shape `(num_items,)`
    values: dict[tuple[str, str], np.ndarray]
    cost: dict[str, float]  # sums over all episodes, see [`total_cost`]
    speed: dict[str, Any]  # how fast the policy answered, see [`speed_of`]
    # The smallest and the largest possible value of metrics, as in [`~trl_multiagent.environments.Environment`], and
    # of `return`
    ranges: Mapping[str, tuple[float, float]]
    answers: Sequence[Records]  # to show, see [`answers_of`]

    @property
    def name(self) -> str:
        return self.policy.name

    @property
    def cost_per_episode(self) -> dict[str, float]:
        return {name: value / self.cost["episodes"] for name, value in self.cost.items() if name != "episodes"}

    def column(self, metric: str) -> np.ndarray | None:
        """Returns the last value of each item, of shape `(num_items,)`; `None` if there is no such metric."""
        return self.values.get((FINAL, metric))

    def bounds(self, metric: str) -> tuple[float, float]:
        """Returns the smallest and the largest possible value of a metric; infinite if they are not known."""
        if metric.startswith("pass@") or metric in (PASSED, PASSED_HIDDEN):
            return 0.0, 1.0
        return self.ranges.get(metric, (-math.inf, math.inf))


def compute_result(policy: Policy, records: Records, num_items: int, config: EvaluationConfig) -> Result:
    """Computes the values of each item from the transcripts of a policy, see [`~play.play_policy`]."""
    episodes = grouped((record["item"], record["turns"]) for record in records)
    by_item = [item_values(episodes[item], config) for item in range(num_items)]
    num_turns = max(len(record["turns"]) for record in records)
    ranges = dict(policy.environment.unwrapped.metric_ranges)
    if "reward" in ranges and "return" not in ranges:
        most = config.num_turns or num_turns
        weight = sum(config.discount_factor**t for t in range(most))
        ends = [weight * end for end in ranges["reward"]]
        ends += [0.0] if most > 1 else []  # episodes may end early
        ranges["return"] = min(ends), max(ends)
    turns = [f"turn_{t + 1}" for t in range(num_turns)] + [FINAL]
    found = dict.fromkeys(key for values in by_item for key, value in values.items() if not math.isnan(value))
    keys = sorted(found, key=lambda key: (turns.index(key[0]), not key[1].startswith(("return", "reward", "pass@"))))
    values = {key: np.array([values.get(key, np.nan) for values in by_item]) for key in keys}
    return Result(
        policy, values, total_cost(records, policy.is_pipeline), speed_of(records), ranges, answers_of(records)
    )


def answers_of(records: Records) -> list[Records]:
    """Returns the best, a typical and the worst answer of each turn, by what is earned from this turn on."""
    answers = grouped(
        (t, {**turn, "name": x["name"], "value": sum(y["reward"] for y in x["turns"][t:])})
        for x in records
        for t, turn in enumerate(x["turns"])
    )
    turns = []
    for found in answers.values():
        ranked = sorted((x for x in found if not math.isnan(x["value"])), key=lambda x: -x["value"])
        turns.append([ranked[k] for k in (0, len(ranked) // 2, -1) if ranked])
    return turns


def item_values(episodes: list[Records], config: EvaluationConfig) -> dict[tuple[str, str], float]:
    """
    Computes the values of one item, by turn and metric. `episodes`: the turns of each of its episodes.
    If each role has a reward of its own, `reward/<role>` and `return/<role>` are among the values.
    """
    own = dict.fromkeys(role for turns in episodes for turn in turns for role in turn.get("role_rewards", ()))
    # The team and the roles with rewards of their own, by the suffixes of the names of their rewards
    roles = {"": None, **{f"/{role}": role for role in own}}
    values, discount = {}, config.discount_factor
    for suffix, role in roles.items():
        returns = [
            sum(discount**t * role_reward(x, role) for t, x in enumerate(turns if discount else turns[:1]))
            for turns in episodes  # 0 * NaN is NaN
        ]
        values[FINAL, f"return{suffix}"] = mean_of_known(returns)
    played = grouped((f"turn_{t}", turn) for turns in episodes for t, turn in enumerate(turns, start=1))
    played[FINAL] = [turns[-1] for turns in episodes]
    for number, turns in played.items():
        for suffix, role in roles.items():
            values[number, f"reward{suffix}"] = mean_of_known([role_reward(turn, role) for turn in turns])
        metrics = [turn["metrics"] for turn in turns]
        # An answer that was dropped and has the metric counts, as in the metric's mean
        passes = [x.get(config.pass_metric) for x in metrics if config.pass_metric in x or not x.get("reward_none")]
        if None not in passes:
            passed = sum(x >= 1.0 for x in passes)
            at = [k for k in config.pass_at if k <= len(passes)]
            values |= {(number, f"pass@{k}"): pass_at_k(len(passes), passed, k) for k in at}
        for name in dict.fromkeys(name for x in metrics for name in x):
            values[number, name] = float(np.mean([x[name] for x in metrics if name in x]))
    return values


def role_reward(turn: dict[str, Any], role: str | None) -> float:
    """Returns the reward of a role in a turn: its own if it has one, else the team's. The role `None` is the team."""
    return turn.get("role_rewards", {}).get(role, turn["reward"])


def total_cost(records: Records, is_pipeline: bool) -> dict[str, float]:
    """
    Sums the cost of the episodes. A call is one completion. One waits for the longest of those in a turn, or for all
    in a pipeline. The wall time of a batch includes scoring.
    """
    wait: Any = sum if is_pipeline else functools.partial(max, default=0)
    turns = [turn for record in records for turn in record["turns"]]
    return {
        "episodes": len(records),
        "calls": sum(len(turn["tokens"]) for turn in turns),
        "generated_tokens": sum(sum(turn["tokens"].values()) for turn in turns),
        "waited_tokens": sum(wait(turn["tokens"].values()) for turn in turns),
        "prompt_tokens": sum(sum(turn["prompt_tokens"].values()) for turn in turns),
        "wall_seconds": sum(x["timing"]["batch_seconds"] / x["timing"]["batch_episodes"] for x in records),
    }


def speed_of(records: Records) -> dict[str, Any]:
    """
    Computes the speed of a policy, without scoring, from the wall times of its generate calls. A call makes the
    answers of a whole batch, so latency depends on the number of episodes that are played at a time. Every episode
    counts for its share of its batch.

    Returns:
        `dict`: `episodes`, the mean number of episodes at a time; `latency`, the seconds that the team generates in an
        episode; `tokens_per_second`, its tokens in each of these seconds; and in `agents`, both numbers of each agent,
        or of agents that share a call.
    """
    seconds, busy, tokens = Counter[str](), Counter[str](), Counter[str]()
    for record in records:
        timing = record["timing"]
        for t, calls in enumerate(timing["generation_seconds"]):
            made = record["turns"][t]["tokens"] if t < len(record["turns"]) else {}
            for call, time in calls.items():
                seconds[call] += time
                busy[call] += time / timing["batch_episodes"]
                tokens[call] += sum(made.get(role, 0) for role in call.split(CALL))

    def rate(number: float, time: float) -> float:
        return number / time if time else math.nan

    return {
        "episodes": float(np.mean([record["timing"]["batch_episodes"] for record in records])),
        "latency": seconds.total() / len(records),
        "tokens_per_second": rate(tokens.total(), busy.total()),
        "agents": {x: (seconds[x] / len(records), rate(tokens[x], busy[x])) for x in seconds},
    }


def numbers_of(results: Sequence[Result], config: EvaluationConfig, others: Sequence[Result] = ()) -> Numbers:
    """
    Estimates the mean over items, and over several teams, of every metric that all results have, see [`estimates`].
    With `others`, one per result, these are the mean differences on the same items.
    """
    everyone = [*results, *others]
    keys = [key for key in everyone[0].values if all(key in result.values for result in everyone)]
    if not keys:
        return {FINAL: {}}
    values, bounds = stacked(results, keys)
    if others:
        other_values, other_bounds = stacked(others, keys)
        values, bounds = values - other_values, bounds - other_bounds[..., ::-1]
    limits = [*zip(bounds[..., 0].min(axis=0), bounds[..., 1].max(axis=0), strict=True)]
    numbers: Numbers = {}
    for (turn, metric), estimate in zip(keys, estimates(values, limits, config), strict=True):
        numbers.setdefault(turn, {})[metric] = estimate
    numbers.setdefault(FINAL, {})
    return numbers


def stacked(results: Sequence[Result], keys: Sequence[tuple[str, str]]) -> tuple[np.ndarray, np.ndarray]:
    """
    Returns some values of results, of shape `(num_results, num_items, num_keys)`, and their bounds, of shape
    `(num_results, num_keys, 2)`.
    """
    values = [[result.values[key] for key in keys] for result in results]
    bounds = [[result.bounds(metric) for _, metric in keys] for result in results]
    return np.array(values).swapaxes(1, 2), np.array(bounds)
