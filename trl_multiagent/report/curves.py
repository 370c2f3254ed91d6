"""
Turns the logs of runs into curves and tables. Runs that differ only in their seed form a group. Its curves have
means and bands.
"""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from trl_multiagent.evaluation.statistics import t_interval, welch_interval


Runs = Sequence[Mapping[str, pd.Series]]  # the metrics of each run of a group, by name

MAX_POINTS = 400  # of a curve; more log entries are averaged
LAST_SHARE = 0.1  # the last value is the mean of this share of the log entries
NO_METRICS = re.compile(r"step|epoch|total_flos|train_(loss|runtime|.*_per_second)|eval_(.+_)?(runtime|.*_per_second)")
# Metrics of a team's quality: rewards, and the passes of the last turn
KEY_METRICS = r"(eval_([^/]+_)?)?(return|reward|final_turn/reward|accuracy|rewards/accuracies"
KEY_METRICS += r"|turn_{last_turn}/(passed|passed_hidden|test_pass_rate|size_share))"


def series_of(logs: Iterable[Mapping[str, Any]]) -> dict[str, pd.Series]:
    """Returns the finite numbers of each metric, indexed by the optimizer step."""
    found: dict[str, dict[int, float]] = {}
    for log in logs:
        for name, value in log.items():
            if isinstance(value, int | float) and math.isfinite(value) and not NO_METRICS.fullmatch(name):
                found.setdefault(name, {})[log["step"]] = value
    return {name: pd.Series(values, dtype=float).sort_index() for name, values in found.items()}


def curves(groups: Sequence[Runs]) -> dict[str, list[dict[str, list[float]]]]:
    """
    Returns the curve of each metric and group as columns: `step`, `mean` and, for several runs, `low` and `high`.
    """
    return {
        name: [columns([run[name] for run in runs if name in run]) for runs in groups] for name in names_of(groups)
    }


def columns(runs: Sequence[pd.Series]) -> dict[str, list[float]]:
    """Returns the curve of one metric and group."""
    if len(runs) == 1 and len(runs[0]) <= MAX_POINTS:  # a shortcut, because data frames are slow
        return {"step": runs[0].index.tolist(), "mean": runs[0].tolist()}
    return thinned(mean_and_band(runs)).rename_axis("step").reset_index().to_dict("list")


def names_of(groups: Iterable[Runs]) -> list[str]:
    return list(dict.fromkeys(name for runs in groups for run in runs for name in run))


def mean_and_band(runs: Sequence[pd.Series]) -> pd.DataFrame:
    """
    Returns the `mean` of runs at every step that all of them have logged. For several runs, `low` and `high` are the
    lowest and the highest of them.
    """
    if len(runs) < 2:
        return pd.DataFrame({"mean": runs[0]} if runs else {})
    frame = pd.concat(runs, axis=1, join="inner")
    return pd.DataFrame({"mean": frame.mean(axis=1), "low": frame.min(axis=1), "high": frame.max(axis=1)})


def thinned(curve: pd.DataFrame) -> pd.DataFrame:
    """
    Averages neighbouring entries of a curve that has more than [`MAX_POINTS`], and keeps the last step of each
    average.
    """
    size = max(1, -(-len(curve) // MAX_POINTS))
    bins: np.ndarray = np.arange(len(curve)) // size
    return curve.groupby(bins).mean().set_axis(pd.Series(curve.index).groupby(bins).last(), axis=0)


# Tables


def key_metrics(groups: Sequence[Runs]) -> list[str]:
    """Returns the metrics of a team's quality that a run of every group has."""
    names = names_of(groups)
    last_turn = max((int(turn) for name in names for turn in re.findall(r"turn_(\d+)/", name)), default=1)
    pattern = KEY_METRICS.replace("{last_turn}", str(last_turn))
    in_all_groups = [x for x in names if all(any(x in run for run in runs) for runs in groups)]
    return [x for x in in_all_groups if re.fullmatch(pattern, x)]


def run_table(run: Mapping[str, pd.Series]) -> list[list[str]]:
    """Returns first, best and last value of the key metrics of a run."""
    rows = [["metric", "first", "best", "last"]]
    for name in key_metrics([[run]]):
        values = run[name]
        best = f"{values.max():.3f} (step {values.idxmax()})"
        rows.append([name, f"{values.iloc[0]:.3f}", best, f"{last_value(values):.3f}"])
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


def last_value(series: pd.Series) -> float:
    """Returns the mean of the last tenth of the entries."""
    return float(series.tail(max(1, round(LAST_SHARE * len(series)))).mean())


def show(values: Sequence[float]) -> str:
    """Formats the mean of runs, with its 95 % interval if there are several that differ."""
    low, high = t_interval(np.array(values), 0.95)
    interval = "" if math.isnan(low) else f" [{low:.3f}, {high:.3f}]"
    return f"{np.mean(values):.3f}{interval} (n = {len(values)})"


def show_difference(one: Sequence[float], other: Sequence[float]) -> str:
    """Formats a difference of means, with its interval if there is one."""
    difference = f"{np.mean(one) - np.mean(other):+.3f}"
    low, high = welch_interval(one, other)
    if math.isnan(low):
        return difference
    return f"{difference} [{low:+.3f}, {high:+.3f}]{'' if low > 0 or high < 0 else ', no difference shown'}"
