"""
Estimators: pass@k, and means with confidence intervals. No function here needs a model.

Values with known bounds have the interval of Gaffke (2005), see [`bounded_intervals`]; other values have Student's t
interval. Several teams widen both by the variation between teams, see [`estimates`].
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from trl_multiagent.report.curves import t_interval


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

    Raises:
        ValueError: the numbers do not fit.
    """
    if not (0 <= num_passed <= num_episodes and 1 <= k <= num_episodes):
        raise ValueError(f"pass@{k} is not defined for {num_passed} of {num_episodes} answers that pass.")
    return 1.0 - math.comb(num_episodes - num_passed, k) / math.comb(num_episodes, k)


def estimates(
    values: np.ndarray, bounds: Sequence[tuple[float, float]], num_draws: int, confidence: float, seed: int
) -> list[Estimate]:
    """
    Computes means with confidence intervals over items and, if there are several teams, over teams.

    The interval over items is computed from the items' means over the teams. The interval over teams is Student's t
    interval of the teams' means over the items, with one degree of freedom less than teams. Both are combined by the
    method of variance estimates recovery (Zou and Donner, 2008, Statistics in Medicine 27): on either side, the
    distance from the mean is the root of the sum of the squared distances. If one of the two intervals does not exist,
    because all items or all teams have the same mean, the other one is taken.

    Args:
        values (`np.ndarray` of shape `(num_teams, num_items, num_metrics)`): The mean of each metric over an item's
        episodes; NaN if the
            item does not have the metric.
        bounds (`Sequence[tuple[float, float]]`): The smallest and the largest possible value of each metric; infinite
            if not known.
        num_draws (`int`): Number of random draws for the intervals of bounded metrics.
        confidence (`float`): Level of the intervals, such as 0.95.
        seed (`int`): Decides the draws.

    Returns:
        `list[Estimate]`: One per metric.
    """
    num_teams, _, num_metrics = values.shape
    if num_metrics == 0:
        return []
    item_means = nan_mean(values, axis=0)
    limits = np.array(bounds, dtype=float).T
    student = np.stack([t_interval(item_means[:, m], confidence) for m in range(num_metrics)], axis=1)
    suited = student.copy()
    bounded = np.isfinite(limits).all(axis=0)
    suited[:, bounded] = bounded_intervals(item_means[:, bounded], limits[:, bounded], num_draws, confidence, seed)
    means = nan_mean(values.reshape(-1, num_metrics), axis=0)
    ends = []
    for intervals in (suited, student):
        distances = np.abs(intervals - nan_mean(item_means, axis=0))
        if num_teams > 1:
            team_means = nan_mean(values, axis=1)
            radius = [(high - low) / 2 for low, high in (t_interval(x, confidence) for x in team_means.T)]
            squares = np.stack([distances**2, np.broadcast_to(np.square(radius), distances.shape)])
            squares[np.isnan(squares) & ~np.isnan(squares[::-1])] = 0.0
            distances = np.sqrt(squares.sum(axis=0))
        ends += [means - distances[0], means + distances[1]]
    low, high = np.clip(ends[:2], *limits)
    return [Estimate(*map(float, x)) for x in zip(means, low, high, *ends[2:], strict=True)]


def smallest_difference(num_items: int, confidence: float) -> float:
    """
    Returns the smallest difference of two means that the interval of [`bounded_intervals`] can tell from zero with so
    many items, as a share of the largest possible difference: that of items which all differ equally.
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
    size = max(1, 2**22 // len(values))  # draws at a time, which bounds the memory
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
    is_there = ~np.isnan(values)
    counts = is_there.sum(axis=axis)
    sums = np.where(is_there, values, 0.0).sum(axis=axis)
    return np.divide(sums, counts, out=np.full(np.shape(sums), np.nan), where=counts > 0)
