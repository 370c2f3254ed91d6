"""
Turns the logs of runs into curves. Runs that differ only in their seed are a group; a group has means and bands.

A metric's name says in which chart it is: `turn_2/passed` is the line `turn 2` of the chart `passed`, `agents/aux/loss` the line `aux` of the
chart `loss`, and `eval_return` the line `evaluation` of the chart `return`.
"""

import functools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd


Log = Mapping[str, Any]
Runs = Sequence[Mapping[str, pd.Series]]  # the metrics of each run of a group, by name

MAX_POINTS = 400  # of a line; more log entries are averaged
LAST_SHARE = 0.1  # of the log entries, whose mean is the last value
ENDS = re.compile(r"step|epoch|total_flos|train_(loss|runtime|.*_per_second)|eval_(.+_)?(runtime|.*_per_second)")
KEY_METRICS = re.compile(r"(eval_([^/]+_)?)?(return|reward|final_turn/reward|accuracy|rewards/accuracies)")
PASS_METRICS = ("passed", "passed_hidden", "test_pass_rate")
# Sections of the page, with the charts that belong there; all other charts of a turn belong to "Parts of the reward"
SECTIONS = {
    "Reward": r"reward|return|reward_mean|expected_return|final_turn/reward|rewards/.*|eval_reward",
    "Solved": r"passed|passed_hidden|test_pass_rate|tests_passed|.*accurac(y|ies)",
    "Time and tokens": r"time/.*|step_time|num_tokens|env_step|.*tokens",
    "Scoring and sandbox": r"reward/.*",
}


class Estimate(NamedTuple):
    """A mean of runs, and their standard deviation, NaN of one run."""

    mean: float
    deviation: float
    number: int


def series_of(logs: Iterable[Log]) -> dict[str, pd.Series]:
    """Returns the finite numbers of each metric, indexed by the optimizer step."""
    found: dict[str, dict[int, float]] = {}
    for log in logs:
        for name, value in log.items():
            if isinstance(value, int | float) and math.isfinite(value) and not ENDS.fullmatch(name):
                found.setdefault(name, {})[log["step"]] = value
    return {name: pd.Series(values, dtype=float).sort_index() for name, values in found.items()}


def place_of(name: str, names: Iterable[str]) -> tuple[str, str, str]:
    """Returns section, chart and line of a metric, given the `names` of all."""
    line, rest = [], name
    if name.startswith("eval_"):
        # The sets of an evaluation have names of their own: the metric is the longest ending that the training has, too
        endings = [x for x in names if name.endswith(f"_{x}") and not x.startswith("eval_")]
        rest = max(endings, key=len, default=name.removeprefix("eval_"))
        line = [f"evaluation {name[5 : -len(rest)].rstrip('_')}".rstrip()]
    turn, agent = re.fullmatch(r"turn_(\d+)/(.+)", rest), re.fullmatch(r"agents/([^/]+)/(.+)", rest)
    section = "Training"
    if turn:
        line, rest, section = [f"turn {turn[1]}", *line], turn[2], "Parts of the reward"
    elif agent:
        line, rest, section = [agent[1], *line], agent[2], "Agents"
    elif rest.startswith("time/"):
        line, rest, section = [rest[5:], *line], "seconds of a step", "Time and tokens"
    if section != "Agents":
        section = next((title for title, charts in SECTIONS.items() if re.fullmatch(charts, rest)), section)
    return section, rest.replace("_", " "), ", ".join(line) or "training"


def charts(groups: Mapping[str, Runs]) -> tuple[list[dict[str, Any]], list[list[str]]]:
    """Returns the charts of groups of runs, by section, and the metrics that never change, with their values."""
    names = list(dict.fromkeys(name for runs in groups.values() for run in runs for name in run))
    drawn: dict[tuple[str, str], list[dict[str, Any]]] = {}
    constant = []
    for name in names:
        section, chart, line = place_of(name, names)
        values = np.concatenate([run[name] for runs in groups.values() for run in runs if name in run])
        if np.ptp(values) == 0.0 and len(values) > 1:
            constant.append([name, f"{values[0]:.6g}"])
            continue
        for k, (label, runs) in enumerate(groups.items()):
            curve = mean_and_band([run[name] for run in runs if name in run])
            if len(curve):
                label = line if len(groups) == 1 else f"{label}: {line}" if line != "training" else label
                lines = drawn.setdefault((section, chart), [])
                lines.append({"label": label, "group": k, "line": line, "curve": thinned(curve)})
    order = ["Reward", "Solved", "Parts of the reward", "Agents", "Training", "Time and tokens", "Scoring and sandbox"]
    places = sorted(drawn, key=lambda place: order.index(place[0]))
    return [chart_of(*place, drawn[place]) for place in places], constant


def chart_of(section: str, title: str, lines: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns one chart as plain values. All of its lines have the same steps, with gaps where one has no value."""
    steps = sorted(set().union(*(line["curve"].index for line in lines)))
    of_chart = []
    for line in lines:
        curve = line.pop("curve").reindex(steps)
        of_chart.append({**line, **{name: curve[name].tolist() for name in curve}})
    return {"section": section, "title": title, "x": [int(step) for step in steps], "lines": of_chart}


def mean_and_band(runs: Sequence[pd.Series]) -> pd.DataFrame:
    """
    Returns the `mean` of runs at every step that all of them have logged and, of several, `low` and `high`: one standard deviation of the runs
    below and above.
    """
    if len(runs) < 2:
        return pd.DataFrame({"mean": runs[0]} if runs else {})
    frame = pd.concat(runs, axis=1, join="inner")
    mean, deviation = frame.mean(axis=1), frame.std(axis=1)
    return pd.DataFrame({"mean": mean, "low": mean - deviation, "high": mean + deviation})


def thinned(curve: pd.DataFrame) -> pd.DataFrame:
    """Averages neighbouring entries of a curve that has more than [`MAX_POINTS`], and keeps the last step of each."""
    size = -(-len(curve) // MAX_POINTS)
    if size <= 1:
        return curve
    bins: np.ndarray = np.arange(len(curve)) // size
    means = curve.groupby(bins).mean()
    return means.set_axis(pd.Series(curve.index).groupby(bins).last(), axis=0)


# Numbers


def last_value(series: pd.Series) -> float:
    """Returns the mean of the last tenth of the entries."""
    return float(series.tail(max(1, round(LAST_SHARE * len(series)))).mean())


def key_metrics(groups: Mapping[str, Runs]) -> list[str]:
    """Returns the metrics that say how good a team is, among those that a run of every group has: rewards, and what passes in the last turn."""
    names = list(dict.fromkeys(name for runs in groups.values() for run in runs for name in run))
    turns = [int(found[1]) for name in names if (found := re.match(r"(?:eval_)?turn_(\d+)/", name))]
    passes = [f"{split}turn_{max(turns)}/{name}" for split in ("", "eval_") for name in PASS_METRICS] if turns else []
    keys = [name for name in names if KEY_METRICS.fullmatch(name)] + [name for name in passes if name in names]
    return [name for name in keys if all(any(name in run for run in runs) for runs in groups.values())]


def run_table(run: Mapping[str, pd.Series]) -> list[list[str]]:
    """Returns first, best and last value of the key metrics of a run."""
    rows = [["metric", "first", "best", "last"]]
    for name in key_metrics({"": [run]}):
        values = run[name]
        best = f"{values.max():.3f} (step {values.idxmax()})"
        rows.append([name, f"{values.iloc[0]:.3f}", best, f"{last_value(values):.3f}"])
    return rows


def group_table(groups: Mapping[str, Runs]) -> list[list[str]]:
    """Returns the last values of the key metrics of each group, and the first minus every other group, with 95 % intervals."""
    first, *others = groups
    rows = [["metric, last value", *groups, *(f"{first} minus {name}" for name in others)]]
    for name in key_metrics(groups):
        found = [estimate([last_value(run[name]) for run in runs if name in run]) for runs in groups.values()]
        rows.append([name, *map(show, found), *(show_difference(found[0], x) for x in found[1:])])
    return rows


def estimate(values: Sequence[float]) -> Estimate:
    deviation = float(np.std(values, ddof=1)) if len(values) > 1 else math.nan
    return Estimate(float(np.mean(values)), deviation, len(values))


def show(x: Estimate) -> str:
    spread = "" if x.number < 2 else f" ± {x.deviation:.3f}"
    return f"{x.mean:.3f}{spread} (n = {x.number})"


def show_difference(one: Estimate, other: Estimate) -> str:
    """Formats a difference with Welch's interval, if there are several runs on both sides."""
    low, high = welch_interval(one, other)
    if math.isnan(low):
        return f"{one.mean - other.mean:+.3f}"
    verdict = "" if low > 0 or high < 0 else ", no difference shown"
    return f"{one.mean - other.mean:+.3f} [{low:+.3f}, {high:+.3f}]{verdict}"


def welch_interval(one: Estimate, other: Estimate, confidence: float = 0.95) -> tuple[float, float]:
    """Computes Welch's t interval of the difference of two means; NaN if a side has one run, or no side has a spread."""
    parts = [(x.deviation**2 / x.number, x.number - 1) for x in (one, other)]
    variance = sum(part for part, _ in parts)
    if min(one.number, other.number) < 2 or variance == 0.0:
        return math.nan, math.nan
    degrees = variance**2 / sum(part**2 / freedom for part, freedom in parts)
    radius = t_quantile(0.5 + confidence / 2, degrees) * math.sqrt(variance)
    return one.mean - other.mean - radius, one.mean - other.mean + radius


@functools.cache
def t_quantile(probability: float, degrees: float) -> float:
    """
    Computes a quantile of Student's t distribution with n degrees of freedom, integrated numerically: t = sqrt(n) tan(a), where the density of a is in
    proportion to cos(a)^(n - 1).
    """
    angles = np.linspace(-math.pi / 2, math.pi / 2, 200_001)
    density = np.cos(angles).clip(0) ** (degrees - 1)
    cumulated = np.concatenate([[0.0], np.cumsum((density[1:] + density[:-1]) / 2)])
    return math.sqrt(degrees) * math.tan(np.interp(probability, cumulated / cumulated[-1], angles))
