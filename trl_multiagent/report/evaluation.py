"""The report of an evaluation: JSON, a table, a page; and the matrices of a cross-play."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from trl_multiagent.console import text_table
from trl_multiagent.environments.base import PASSED_HIDDEN
from trl_multiagent.evaluation.config import EvaluationConfig
from trl_multiagent.evaluation.statistics import (
    FINAL,
    Estimate,
    Numbers,
    Result,
    brackets,
    estimates,
    nan_mean,
    numbers_of,
    smallest_difference,
)
from trl_multiagent.folders import write_json, write_text
from trl_multiagent.report.html import REPORT_FILE, json_values, write_page
from trl_multiagent.rollout.tree import grouped


Mix = tuple[int, ...]  # in a cross-play, the run from which each role's agent comes
CROSS_PLAY_NOTE = (
    ", for these runs. There is no interval over runs: a mixed team depends on two of them, so a "
    "few runs do not show how others differ."
)
NOTHING_NOTE = (
    "Replaced by nothing, an agent answers with an empty text. Where no answer is right without its part, the loss "
    "is the whole pass rate by construction: it shows that the part is needed, not that the agent does it well."
)
RANGE_NOTE = (
    " Numbers without a known range (`metric_ranges`), such as {}, have Student's t interval, which is "
    "too narrow if rare values decide the mean."
)
COMPARISONS = {"baseline": "differences", "control": "control", "ablation": "contributions"}  # by kind of policy
HEADINGS = {
    "differences": "the team minus",
    "control": "the team minus the trained control",
    "contributions": "the team minus the team with",
}
DIFFERENCE_NOTE = (
    "In brackets: an interval that is right for any values within the range of the metric. With {} items, no "
    "difference{} can be shown. t: Student's paired interval, which is narrower, and too narrow if a few items decide "
    "the mean."
)
COST_NOTE = (
    "Calls, tokens and wall s are per episode. Waited for: the tokens of the longest answer of each turn, in a "
    "pipeline of all. "
    "Wall s is the wall time of the batches, with scoring."
)


@dataclass
class Report:
    """
    The results of all policies of an evaluation. Teams are compared with baselines, their controls, and ablations of
    themselves.
    """

    config: EvaluationConfig
    results: list[Result]  # one per policy, teams first
    num_items: int
    facts: dict[str, Any] = field(default_factory=dict)  # more to write into the JSON file, such as the dataset
    control_note: str = ""  # a line below the comparison with the controls

    def __post_init__(self) -> None:
        self.teams = [result for result in self.results if result.policy.kind == "team"]
        # Tables do not show teams with an agent replaced one by one
        self.shown = [result for result in self.results if result.policy.is_shown]
        self.numbers: dict[str, Numbers] = {x.name: numbers_of([x], self.config) for x in self.results}
        mixes = {result.policy.mix: result for result in self.results if result.policy.mix}
        self.over_teams = numbers_of(self.teams, self.config) if len(self.teams) > 1 and not mixes else None
        self.comparisons = self._compare()
        unknown = [name for x in self.shown for _, name in x.values if not np.isfinite(x.bounds(name)).all()]
        self.range_note = RANGE_NOTE.format(unknown[0]) if unknown else ""
        smallest = smallest_difference(self.num_items, self.config.confidence)
        below = f" below {smallest:.1%} of the largest possible one" if smallest < 1 else ""
        self.difference_note = DIFFERENCE_NOTE.format(self.num_items, below) if self.comparisons else ""
        metrics = [m for m in ("return", "pass@1") if mixes and all(x.column(m) is not None for x in mixes.values())]
        self.cross_play = {m: summarize_cross_play(mixes, len(self.teams), m, self.config) for m in metrics}

    def _compare(self) -> dict[str, dict[str, Numbers]]:
        """Returns the differences between teams and other policies, by kind and row of the comparison."""
        pairs = grouped(
            ((COMPARISONS[other.policy.kind], other.policy.row or other.name), (team, other))
            for other in self.results
            if other.policy.kind in COMPARISONS
            for team in self.teams
            if other.policy.compared_with in ("", team.name)
        )
        compared = defaultdict[str, dict[str, Numbers]](dict)
        for (name, row_name), found in pairs.items():
            teams, others = zip(*found, strict=True)
            compared[name][row_name] = numbers_of(teams, self.config, others)
        return compared

    def to_json(self) -> dict[str, Any]:
        """Returns everything, as plain values. Numbers that are not known are null."""
        contents = {
            **self.facts,
            "items": self.num_items,
            "settings": asdict(self.config),
            "range_note": self.range_note,
            "difference_note": self.difference_note,
            "policies": {
                result.name: {
                    "kind": result.policy.kind,
                    "source": result.policy.source,
                    "results": self.numbers[result.name],
                    "cost": result.cost,
                    "cost_per_episode": result.cost_per_episode,
                    "speed": result.speed,
                    "percent_of_maximum": percent_of_maximum(result, self.numbers[result.name]),
                    "answers": result.answers,
                }
                for result in self.results
            },
            **self.comparisons,
        }
        if self.over_teams is not None:
            contents["over_teams"] = self.over_teams
        if self.cross_play:
            contents["cross_play"] = {**self.cross_play, "runs": [team.name for team in self.teams]}
        return json_values(contents, digits=17)

    def write(self, folder: Path) -> list[Path]:
        """Writes the JSON file, the table and the page, and returns their paths."""
        folder.mkdir(parents=True, exist_ok=True)
        name = "cross_play" if self.cross_play else "evaluation"
        paths = [folder / f"{name}.json", folder / f"{name}.txt", folder / REPORT_FILE]
        contents = self.to_json()
        write_json(paths[0], contents)
        write_text(paths[1], self.table() + "\n")
        write_page(
            {"title": f"Evaluation: {'/'.join(folder.absolute().parts[-2:])}", "evaluation": contents}, paths[2]
        )
        return paths

    # Text

    def table(self) -> str:
        """Returns the results as text."""
        note = (
            ". The row 'all teams' and its differences: over items, and over teams by Student's t, n = "
            f"{len(self.teams)}; over items alone if all teams have the same mean."
        )
        over = CROSS_PLAY_NOTE if self.cross_play else note if self.over_teams else "."
        lines = [
            f"{self.num_items} items, {self.config.num_episodes} sampled episodes each. In brackets: "
            f"{100 * self.config.confidence:g}% confidence interval over items{over} A number has no brackets if its "
            f"values have no spread and no known bounds.{self.range_note}"
        ]
        lines += ["", *self._main_table()]
        notes = {"control": self.control_note, "contributions": NOTHING_NOTE if self.config.contributions else ""}
        for name, rows in self.comparisons.items():
            metrics = [m for m in ("return", "pass@1") if all(m in numbers[FINAL] for numbers in rows.values())]
            table = [[row, *[show_difference(numbers[FINAL][m], m) for m in metrics]] for row, numbers in rows.items()]
            lines += ["", *text_table([[HEADINGS[name], *metrics], *table])]
            lines += [notes[name]] if notes.get(name) else []
        lines += ["", self.difference_note] if self.comparisons else []
        for metric, found in self.cross_play.items():
            lines += ["", *cross_play_lines(metric, found)]
        for result in [] if self.cross_play else self.shown:
            lines += ["", *self._components(result)]
        return "\n".join(lines)

    def _main_table(self) -> list[str]:
        rates = [*(f"pass@{k}" for k in self.config.pass_at), PASSED_HIDDEN]
        metrics = ["return", *[name for name in rates if any(x.column(name) is not None for x in self.shown)]]
        headings = ["pass@1, hidden tests" if name == PASSED_HIDDEN else name for name in metrics]
        rows = [["", *headings, "calls", "tokens", "waited for", "wall s"]]
        for result in self.shown:
            numbers, cost = self.numbers[result.name][FINAL], result.cost_per_episode
            costs = [f"{cost[name]:.1f}" for name in ("calls", "generated_tokens", "waited_tokens")]
            shown = [show(numbers.get(name), name) for name in metrics]
            rows.append([result.name, *shown, *costs, f"{cost['wall_seconds']:.3f}"])
        if self.over_teams is not None:
            numbers = self.over_teams[FINAL]
            rows.append(["all teams", *[show(numbers.get(name), name) for name in metrics], "", "", "", ""])
        lines = text_table(rows)
        if len(metrics) == 1:
            lines.append(
                f"No pass@k: the task reports no metric `{self.config.pass_metric}`, see `evaluation.pass_metric`."
            )
        elif any("turn_2" in numbers for numbers in self.numbers.values()):
            hidden = " The column of hidden tests leaves these out." if PASSED_HIDDEN in metrics else ""
            lines.append(
                "pass@k is for the last turn. It counts all tests, also those that feedback has shown to the agents."
                f"{hidden}"
            )
        return [*lines, COST_NOTE]

    def _components(self, result: Result) -> list[str]:
        """Returns all metrics of a policy, by turn."""
        numbers = self.numbers[result.name]
        turns = [turn for turn in numbers if turn != FINAL]
        percent = percent_of_maximum(result, numbers)
        rows = [[result.name, *[turn.replace("_", " ") for turn in turns], *(["last, of maximum"] if percent else [])]]
        for name in dict.fromkeys(name for turn in turns for name in numbers[turn]):
            row = [name, *[show(numbers[turn].get(name), name) for turn in turns]]
            share = f"{percent[name]:.1f} % of {result.bounds(name)[1]:g}" if name in percent else ""
            rows.append([*row, share] if percent else row)
        return text_table(rows)


def percent_of_maximum(result: Result, numbers: Numbers) -> dict[str, float]:
    """Returns the reward of the last turn and its parts in percent of their largest values, as papers report them."""
    final = numbers[FINAL]
    return {
        name: 100 * final[name].mean / high
        for name, (_, high) in result.ranges.items()
        if name in final and 0 < high < math.inf
    }


def show(estimate: Estimate | None, name: str) -> str:
    """Formats a number and its interval, if it has one; rates as percentages."""
    if estimate is None or math.isnan(estimate.mean):
        return "-"
    form = form_of(name)
    return f"{estimate.mean:{form}}{brackets(estimate.low, estimate.high, form)}"


def show_difference(estimate: Estimate, name: str) -> str:
    """Formats a difference, with both of its intervals, and a note if an interval does not exclude zero."""
    difference, low, high, t_low, t_high = estimate
    text = show(estimate, name)
    # Without a spread, Student's interval is not defined, and the other one is as wide as the number of items allows
    if math.isnan(low) or (math.isnan(t_low) and difference != 0):
        return f"{text} (no spread)"
    student = brackets(t_low, t_high, form_of(name))
    text += f", t{student}" if student and t_low != low else ""
    if low > 0 or high < 0:
        return text
    return text + (" only t excludes 0" if t_low > 0 or t_high < 0 else " no difference shown")


def form_of(name: str) -> str:
    return ".1%" if name.startswith("pass@") or name == PASSED_HIDDEN else ".3f"


def cross_play_lines(metric: str, found: CrossPlay) -> list[str]:
    """Returns the comparison of a cross-play as text. The page shows its matrices."""
    return text_table(
        [
            ["cross-play", metric],
            ["agents trained together", show(found.diagonal, metric)],
            ["agents of two runs", show(found.off_diagonal, metric)],
            ["difference", show_difference(found.difference, metric)],
        ]
    )


# Cross-play


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
    return list(dict.fromkeys(entries(num_runs, roles)))


def entries(num_runs: int, roles: Sequence[str]) -> list[Mix]:
    """
    Returns the teams in the matrices of a cross-play, role by role and row by row: the agent of the role comes from
    the row's run, and all others from the column's.
    """
    runs = range(num_runs)
    return [
        tuple(i if role == varied else j for role in roles)
        for varied in roles_to_vary(roles)
        for i in runs
        for j in runs
    ]


class CrossPlay(NamedTuple):
    """
    The results of a cross-play in one metric of the last turn. The intervals are over items, for these runs: a mixed
    team depends on two runs, so a few runs do not show how much other runs would differ.
    """

    # For each role of [`roles_to_vary`], the mean over items where the agent of this role comes from the row's run,
    # and all other agents from the column's. Shape `(num_runs, num_runs)`
    matrices: dict[str, list[list[float]]]
    diagonal: Estimate  # the mean over teams as they were trained
    off_diagonal: Estimate  # the mean over mixed teams
    difference: Estimate  # the first minus the second
    intervals: str = "over items, for these runs"


def summarize_cross_play(
    results: Mapping[Mix, Result], num_runs: int, metric: str, config: EvaluationConfig
) -> CrossPlay:
    """
    Compares teams as they were trained with mixed teams in a metric of the last turn. `results`: the result of each of
    [`mixes`].
    """
    first = next(iter(results.values()))
    roles = first.policy.environment.roles
    values = np.array([results[mix].column(metric) for mix in entries(num_runs, roles)], dtype=float)
    values = values.reshape(-1, num_runs, num_runs, values.shape[1])
    values = values[..., ~np.isnan(values).any(axis=(0, 1, 2))]  # items that have the metric
    per_pair = values.mean(axis=0)
    is_together = np.eye(num_runs, dtype=bool)
    together, mixed = per_pair[is_together].mean(axis=0), per_pair[~is_together].mean(axis=0)
    low, high = first.bounds(metric)  # all teams play one environment
    diagonal, rest, difference = estimates(
        np.stack([together, mixed, together - mixed], axis=1)[None],
        [(low, high), (low, high), (low - high, high - low)],
        config,
    )
    matrices = {role: nan_mean(values[k], axis=2).tolist() for k, role in enumerate(roles_to_vary(roles))}
    return CrossPlay(matrices, diagonal, rest, difference)
