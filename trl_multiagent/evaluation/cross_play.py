"""Cross-play: the agents of several runs with each other, as matrices of runs by runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from trl_multiagent.evaluation.config import EvaluationConfig
from trl_multiagent.evaluation.results import Result
from trl_multiagent.evaluation.statistics import Estimate, interval, resample


Mix = tuple[int, ...]  # the run from which each role's agent comes


@dataclass
class CrossPlay:
    """
    The results of a cross-play in one metric.

    Args:
        metric (`str`): The metric of the last turn.
        runs (`list[str]`): The runs.
        matrices (`dict[str, np.ndarray]`): For each role, the mean over items where the agent of this role is that of the run of the
            row, and all other agents are those of the run of the column. With two roles, only the first role's, because
            the second one's is its transpose.
        diagonal, off_diagonal, difference ([`Estimate`]): The mean over teams as they were trained, over mixed teams, and
            the first minus the second. Items and runs are resampled.
        difference_over_items ([`Estimate`]): The difference, where only items are resampled: the interval is about these runs.
    """

    metric: str
    runs: list[str]
    matrices: dict[str, np.ndarray]
    diagonal: Estimate
    off_diagonal: Estimate
    difference: Estimate
    difference_over_items: Estimate

    def to_json(self) -> dict[str, Any]:
        names = ("diagonal", "off_diagonal", "difference", "difference_over_items")
        return {
            "matrices": {role: matrix.tolist() for role, matrix in self.matrices.items()},
            **{name: getattr(self, name).to_json() for name in names},
        }


def roles_to_vary(roles: Sequence[str]) -> Sequence[str]:
    """The roles that have a matrix."""
    return roles[:1] if len(roles) == 2 else roles


def mixes(num_runs: int, roles: Sequence[str]) -> list[Mix]:
    """All teams of a cross-play, each once: the teams as trained, and the teams in which one role's agent is from another run."""
    found: dict[Mix, None] = {}
    for varied in roles_to_vary(roles):
        for i in range(num_runs):
            for j in range(num_runs):
                found[mix_of(roles, varied, i, j)] = None
    return list(found)


def mix_of(roles: Sequence[str], varied: str, i: int, j: int) -> Mix:
    """The team in which the agent of one role is that of run i, and all others are those of run j."""
    return tuple(i if role == varied else j for role in roles)


def summarize_cross_play(
    results: Mapping[Mix, Result], runs: Sequence[str], roles: Sequence[str], metric: str, config: EvaluationConfig
) -> CrossPlay | None:
    """
    Compares teams as they were trained with mixed teams.

    Args:
        results (`dict[Mix, Result]`): The result of each of [`mixes`].
        runs (`list[str]`): The names of the runs.
        roles (`list[str]`): The roles.
        metric (`str`): A metric of the last turn.
        config ([`EvaluationConfig`]): The settings.

    Returns:
        [`CrossPlay`] or `None`: `None` if there is no such metric.
    """
    columns = {mix: result.column(metric) for mix, result in results.items()}
    if any(column is None for column in columns.values()):
        return None
    size = len(runs)
    varied = roles_to_vary(roles)
    # Shape: (roles, runs, runs, items)
    values = np.array(
        [[[columns[mix_of(roles, role, i, j)] for j in range(size)] for i in range(size)] for role in varied],
        dtype=float,
    )
    values = values[..., ~np.isnan(values).any(axis=(0, 1, 2))]  # items that have the metric
    per_pair = values.mean(axis=0)
    everything = np.ones((1, size)), np.ones((1, per_pair.shape[2]))
    parts = resample(size, per_pair.shape[2], config.num_bootstraps, config.seed)
    point = _diagonal_and_rest(per_pair, *everything)
    resampled = np.concatenate([_diagonal_and_rest(per_pair, *part) for part in parts])
    same_runs = np.concatenate([_diagonal_and_rest(per_pair, np.ones_like(runs_), items) for runs_, items in parts])
    diagonal, rest = (Estimate(float(point[0, k]), *interval(resampled[:, k], config.confidence)) for k in range(2))
    gap = float(point[0, 0] - point[0, 1])
    return CrossPlay(
        metric=metric,
        runs=list(runs),
        matrices={role: values[k].mean(axis=2) for k, role in enumerate(varied)},
        diagonal=diagonal,
        off_diagonal=rest,
        difference=Estimate(gap, *interval(resampled[:, 0] - resampled[:, 1], config.confidence)),
        difference_over_items=Estimate(gap, *interval(same_runs[:, 0] - same_runs[:, 1], config.confidence)),
    )


def _diagonal_and_rest(values: np.ndarray, runs: np.ndarray, items: np.ndarray) -> np.ndarray:
    """
    The weighted means of the diagonal and of the rest, of shape `(number of weights, 2)`. A resample that has one run only, with
    which no mixed team can be made, is NaN.
    """
    means = np.einsum("bk,ijk->bij", items, values, optimize=True) / items.sum(axis=1)[:, None, None]
    weights = runs[:, :, None] * runs[:, None, :] * (1.0 - np.eye(values.shape[0]))
    diagonal = np.einsum("bi,bii->b", runs, means) / runs.sum(axis=1)
    total = weights.sum(axis=(1, 2))
    rest = np.divide((weights * means).sum(axis=(1, 2)), total, out=np.full_like(total, np.nan), where=total > 0)
    return np.stack([np.where(total > 0, diagonal, np.nan), rest], axis=1)
