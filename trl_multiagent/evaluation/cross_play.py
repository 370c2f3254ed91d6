"""Cross-play: the agents of several runs with each other, as matrices of runs by runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from trl_multiagent.evaluation.config import EvaluationConfig
from trl_multiagent.evaluation.results import Result
from trl_multiagent.evaluation.statistics import Estimate, estimates


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
            the first minus the second. The intervals are over items, for these runs: a mixed team depends on two runs, so a few runs do
            not show how much other runs would differ.
    """

    metric: str
    runs: list[str]
    matrices: dict[str, np.ndarray]
    diagonal: Estimate
    off_diagonal: Estimate
    difference: Estimate

    def to_json(self) -> dict[str, Any]:
        names = ("diagonal", "off_diagonal", "difference")
        return {
            "intervals": "over items, for these runs",
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
    together = per_pair[np.eye(size, dtype=bool)].mean(axis=0)
    mixed = per_pair[~np.eye(size, dtype=bool)].mean(axis=0)
    low, high = next(iter(results.values())).bounds(metric)
    diagonal, rest, difference = estimates(
        np.stack([together, mixed, together - mixed], axis=1)[None],
        [(low, high), (low, high), (low - high, high - low)],
        config.num_bootstraps,
        config.confidence,
        config.seed,
    )
    matrices = {role: values[k].mean(axis=2) for k, role in enumerate(varied)}
    return CrossPlay(metric, list(runs), matrices, diagonal, rest, difference)
