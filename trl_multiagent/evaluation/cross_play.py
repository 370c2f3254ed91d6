"""Cross-play: evaluates teams of agents from several runs, as matrices of runs by runs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import numpy as np
from transformers import PreTrainedModel

from trl_multiagent.evaluation.config import EvaluationConfig
from trl_multiagent.evaluation.metrics import Result
from trl_multiagent.evaluation.play import LoadedTeam
from trl_multiagent.evaluation.statistics import Estimate, estimates
from trl_multiagent.models.grouped_lora import Stacked
from trl_multiagent.rollout.sampler import SamplingTeam


Mix = tuple[int, ...]  # the run from which each role's agent comes


class MixedTeam:
    """
    A team whose agents come from several teams, `sources`, by role. It can sample, but it cannot be trained or saved.
    """

    def __init__(self, sources: Mapping[str, SamplingTeam]):
        self.sources = dict(sources)
        self.roles = tuple(sources)
        self.tokenizers = {role: team.tokenizers[role] for role, team in sources.items()}

    def activate(self, role: str) -> AbstractContextManager[PreTrainedModel]:
        return self.sources[role].activate(role)

    @property
    def joinable(self) -> dict[str, str]:
        return {}

    def sampling(self, roles: Sequence[str]) -> AbstractContextManager[tuple[PreTrainedModel, Stacked | None]]:
        return self.sources[roles[0]].sampling(roles)

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for team in {id(team): team for team in self.sources.values()}.values():
                stack.enter_context(team.evaluating())
            yield

    def end_tokens(self, role: str) -> list[int]:
        return self.sources[role].end_tokens(role)


def mix(parts: Mapping[str, LoadedTeam]) -> LoadedTeam:
    """
    Makes a team of agents that come from several teams. `parts`: the team of each role's agent, in the order of the
    roles.
    """
    description = {f"agent {role}": part.description[f"agent {role}"] for role, part in parts.items()}
    return LoadedTeam(MixedTeam({role: part.team for role, part in parts.items()}), description)


def roles_to_vary(roles: Sequence[str]) -> Sequence[str]:
    """
    Returns the roles that have a matrix. With two roles, the second one's would be the transpose of the first one's.
    """
    return roles[:1] if len(roles) == 2 else roles


def mixes(num_runs: int, roles: Sequence[str]) -> list[Mix]:
    """
    Returns all teams of a cross-play, each once: the teams as trained, and those in which one role's agent is from
    another run.
    """
    runs = range(num_runs)
    return list(dict.fromkeys(mix_of(roles, role, i, j) for role in roles_to_vary(roles) for i in runs for j in runs))


def mix_of(roles: Sequence[str], varied: str, i: int, j: int) -> Mix:
    """Returns the team in which the agent of one role is that of run i, and all others are those of run j."""
    return tuple(i if role == varied else j for role in roles)


@dataclass
class CrossPlay:
    """
    The results of a cross-play in one metric of the last turn. The intervals are over items, for these runs: a mixed
    team depends on two runs, so a few runs do not show how much other runs would differ.
    """

    metric: str
    runs: list[str]
    # For each role of [`roles_to_vary`], the mean over items where the agent of this role is that of the run of the
    # row, and all other agents are those of the run of the column. Shape `(num_runs, num_runs)`
    matrices: dict[str, np.ndarray]
    diagonal: Estimate  # the mean over teams as they were trained
    off_diagonal: Estimate  # the mean over mixed teams
    difference: Estimate  # the first minus the second

    def to_json(self) -> dict[str, Any]:
        return {
            "intervals": "over items, for these runs",
            "matrices": {role: matrix.tolist() for role, matrix in self.matrices.items()},
            **{name: getattr(self, name)._asdict() for name in ("diagonal", "off_diagonal", "difference")},
        }


def summarize_cross_play(
    results: Mapping[Mix, Result], runs: Sequence[str], metric: str, config: EvaluationConfig
) -> CrossPlay | None:
    """
    Compares teams as they were trained with mixed teams in a metric of the last turn. `results`: the result of each of
    [`mixes`]. `runs`: the names of the runs. Returns `None` if there is no such metric.
    """
    roles = next(iter(results.values())).policy.environment.roles
    columns = {mix: result.column(metric) for mix, result in results.items()}
    if any(column is None for column in columns.values()):
        return None
    size, varied = len(runs), roles_to_vary(roles)
    teams = [mix_of(roles, role, i, j) for role in varied for i in range(size) for j in range(size)]
    values = np.array([columns[mix] for mix in teams], dtype=float).reshape(len(varied), size, size, -1)
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
