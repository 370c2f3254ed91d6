"""Confidence intervals of means that assume normal values: Student's and Welch's."""

import functools
import math
from collections.abc import Sequence

import numpy as np


def welch_interval(one: Sequence[float], other: Sequence[float], confidence: float = 0.95) -> tuple[float, float]:
    """
    Computes Welch's t interval of the difference of two means; NaN if a side has one value, or no side has a spread.
    """
    parts = [float(np.var(x, ddof=1)) / len(x) if len(x) > 1 else math.nan for x in (one, other)]
    variance = sum(parts)
    if not variance > 0:
        return math.nan, math.nan
    degrees = variance**2 / sum(part**2 / (len(x) - 1) for part, x in zip(parts, (one, other), strict=True))
    radius = t_quantile(0.5 + confidence / 2, degrees) * math.sqrt(variance)
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
