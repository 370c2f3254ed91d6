"""
Turns the logs of runs into curves and tables. Runs that differ only in their seed form a group. Its curves have
means and bands.
"""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean
from typing import Any

import numpy as np

from trl_multiagent.evaluation.statistics import brackets, t_interval, welch_interval


Series = dict[int, float]  # a metric by the optimizer step
Runs = Sequence[Mapping[str, Series]]  # the metrics of each run of a group, by name

MAX_POINTS = 400  # of a curve; more log entries are averaged
LAST_SHARE = 0.1  # the last value is the mean of this share of the log entries
NO_METRICS = r"step|epoch|total_flos|train_(loss|runtime|.*_per_second)|(eval|test)_(.+_)?(runtime|.*_per_second)"
# Metrics of a team's quality: rewards, and the passes of the last turn
KEY_METRICS = r"(eval_([^/]+_)?)?(return|reward|final_turn/reward|accuracy|rewards/accuracies"
KEY_METRICS += r"|turn_{last_turn}/(passed|passed_hidden|test_pass_rate|size_share))"


def series_of(logs: Iterable[Mapping[str, Any]]) -> dict[str, Series]:
    """Returns the finite numbers of each metric by the optimizer step, in order."""
    found: dict[str, Series] = {}
    for log in logs:
        for name, value in log.items():
            if isinstance(value, int | float) and math.isfinite(value) and not re.fullmatch(NO_METRICS, name):
                found.setdefault(name, {})[log["step"]] = float(value)
    return {name: dict(sorted(series.items())) for name, series in found.items()}


def curves(groups: Sequence[Runs]) -> dict[str, list[dict[str, list[float]]]]:
    """
    Returns the curve of each metric and group as columns: `step`, `mean` and, for several runs, `low` and `high`.
    """
    return {name: [curve([run[name] for run in runs if name in run]) for runs in groups] for name in names_of(groups)}


def curve(runs: Sequence[Series]) -> dict[str, list[float]]:
    """
    Returns the curve of one metric and group at the steps that all runs have logged. If these are more than
    [`MAX_POINTS`], a point is the mean of neighbouring ones, at the last of their steps.
    """
    if not runs:
        return {"step": []}
    steps = [step for step in runs[0] if all(step in run for run in runs)]
    values = np.array([[run[step] for step in steps] for run in runs])
    columns = {"mean": values.mean(axis=0)}
    if len(runs) > 1:
        columns |= {"low": values.min(axis=0), "high": values.max(axis=0)}
    starts = np.arange(0, len(steps), max(1, -(-len(steps) // MAX_POINTS)))
    sizes = np.diff([*starts, len(steps)])
    points = {name: (np.add.reduceat(column, starts) / sizes).tolist() for name, column in columns.items()}
    return {"step": [steps[k - 1] for k in starts + sizes], **points}


def names_of(groups: Iterable[Runs]) -> list[str]:
    return list(dict.fromkeys(name for runs in groups for run in runs for name in run))


# Tables


def key_metrics(groups: Sequence[Runs]) -> list[str]:
    """Returns the metrics of a team's quality that a run of every group has."""
    names = names_of(groups)
    last_turn = max((int(turn) for name in names for turn in re.findall(r"turn_(\d+)/", name)), default=1)
    pattern = KEY_METRICS.replace("{last_turn}", str(last_turn))
    return [x for x in names if re.fullmatch(pattern, x) and all(any(x in run for run in runs) for runs in groups)]


def run_table(run: Mapping[str, Series]) -> list[list[str]]:
    """Returns first, best and last value of the key metrics of a run."""
    rows = [["metric", "first", "best", "last"]]
    for name in key_metrics([[run]]):
        series = run[name]
        best = max(series, key=series.__getitem__)
        first, *_ = series.values()
        rows.append([name, f"{first:.3f}", f"{series[best]:.3f} (step {best})", f"{last_value(series):.3f}"])
    return rows


def group_table(groups: Mapping[str, Runs]) -> list[list[str]]:
    """
    Returns the means over runs of the last values of each group's key metrics, and the first group minus every other
    one, all with 95 % intervals.
    """
    first, *others = groups
    rows = [["last value", *groups, *(f"{first} minus {name}" for name in others)]]
    for name in key_metrics([*groups.values()]):
        values = [[last_value(run[name]) for run in runs if name in run] for runs in groups.values()]
        rows.append([name, *map(show, values), *(show_difference(values[0], other) for other in values[1:])])
    return rows


def last_value(series: Series) -> float:
    """Returns the mean of the last tenth of the entries."""
    return fmean([*series.values()][-max(1, round(LAST_SHARE * len(series))) :])


def show(values: Sequence[float]) -> str:
    """Formats the mean of runs, with its 95 % interval if there are several that differ."""
    interval = brackets(*t_interval(np.array(values), 0.95), ".3f")
    return f"{np.mean(values):.3f}{interval} (n = {len(values)})"


def show_difference(one: Sequence[float], other: Sequence[float]) -> str:
    """Formats a difference of means, with its interval if there is one."""
    low, high = welch_interval(one, other)
    note = ", no difference shown" if low <= 0 <= high else ""
    return f"{np.mean(one) - np.mean(other):+.3f}{brackets(low, high, '+.3f')}{note}"
