"""Estimators: pass@k, and means with bootstrap confidence intervals. No function here needs a model."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class Estimate(NamedTuple):
    """A mean and its confidence interval."""

    mean: float
    low: float
    high: float

    def to_json(self) -> dict[str, float]:
        return {"mean": self.mean, "low": self.low, "high": self.high}


def pass_at_k(num_episodes: int, num_passed: int, k: int) -> float:
    """
    The unbiased estimate of pass@k of one item: 1 - C(n - c, k) / C(n, k), the probability that k different ones of the n
    sampled answers contain at least one of the c that pass.

    Args:
        num_episodes (`int`): n, the number of sampled answers.
        num_passed (`int`): c, the number of those that pass.
        k (`int`): Number of tries, at most n.

    Raises:
        ValueError: the numbers do not fit.
    """
    if not (0 <= num_passed <= num_episodes and 1 <= k <= num_episodes):
        raise ValueError(f"pass@{k} is not defined for {num_passed} of {num_episodes} answers that pass.")
    return 1.0 - math.comb(num_episodes - num_passed, k) / math.comb(num_episodes, k)


def estimates(values: np.ndarray, num_bootstraps: int, confidence: float, seed: int) -> list[Estimate]:
    """
    Means with percentile bootstrap confidence intervals. Items are resampled; if there are several teams, teams are
    resampled, too, independently of the items, because all teams answer the same items.

    Args:
        values (`np.ndarray` of shape `(num_teams, num_items, num_metrics)`):
            The mean of each metric over an item's episodes; NaN if the item does not have the metric.
        num_bootstraps (`int`): Number of resamples.
        confidence (`float`): Level of the intervals, such as 0.95.
        seed (`int`): Decides the resamples.

    Returns:
        `list[Estimate]`: One per metric.
    """
    num_metrics = values.shape[2]
    if num_metrics == 0:
        return []
    is_there = ~np.isnan(values)
    filled = np.where(is_there, values, 0.0)
    resamples = np.concatenate(
        [
            _weighted_means(filled, is_there, *weights)
            for weights in resample(values.shape[0], values.shape[1], num_bootstraps, seed)
        ]
    )
    ones = np.ones((1, values.shape[0])), np.ones((1, values.shape[1]))
    (means,) = _weighted_means(filled, is_there, *ones)
    return [Estimate(float(means[m]), *interval(resamples[:, m], confidence)) for m in range(num_metrics)]


def interval(resamples: np.ndarray, confidence: float) -> tuple[float, float]:
    """The percentile interval of resampled values. Resamples without a value, which are NaN, do not count."""
    tail = 100 * (1 - confidence) / 2
    low, high = np.nanpercentile(resamples, [tail, 100 - tail])
    return float(low), float(high)


def resample(num_teams: int, num_items: int, number: int, seed: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """
    Draws resamples, as the number of times that each team and each item occurs in it.

    Returns:
        `list[tuple[np.ndarray, np.ndarray]]`: Parts of the resamples, of bounded size: counts of shape
        `(size, num_teams)` and `(size, num_items)`. A single team occurs once in each.
    """
    generator = np.random.default_rng(seed)
    size = max(1, 2**22 // num_items)
    parts = []
    for start in range(0, number, size):
        rows = min(size, number - start)
        items = generator.multinomial(num_items, np.full(num_items, 1 / num_items), rows)
        teams = generator.multinomial(num_teams, np.full(num_teams, 1 / num_teams), rows)
        parts.append((teams, items))
    return parts


def _weighted_means(filled: np.ndarray, is_there: np.ndarray, teams: np.ndarray, items: np.ndarray) -> np.ndarray:
    """The means over teams and items with the given weights. Shape: `(number of weights, num_metrics)`."""
    path = "bs,bi,sim->bm"
    sums = np.einsum(path, teams, items, filled, optimize=True)
    counts = np.einsum(path, teams, items, is_there.astype(float), optimize=True)
    return np.divide(sums, counts, out=np.full_like(sums, np.nan), where=counts > 0)


def mean_of(values: Sequence[float]) -> float:
    """The mean of some numbers; NaN without any."""
    return sum(values) / len(values) if values else math.nan
