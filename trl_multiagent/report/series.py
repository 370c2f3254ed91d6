"""Turns the logs of a training into series, the tables of a model card, and its learning curve."""

import itertools
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from trl_multiagent.report.pictures import COLORS, draw_curve, picture


TRAINING = "training"
MAX_WINDOW = 10  # log entries


def reward_series(log_history: list[dict[str, Any]]) -> dict[str, pd.Series]:
    """
    Returns the mean joint rewards in a trainer's logs, indexed by the optimizer step: `"training"`, and `"evaluation,
    <set>"` for each evaluation set.
    """
    series = {}
    logs = pd.DataFrame(log_history)
    for column in logs:
        if match := re.fullmatch(r"(?:(eval)_(?:([^/]+)_)?)?reward", column):
            prefix, dataset = match.groups()
            name = TRAINING if prefix is None else f"evaluation, {dataset}" if dataset else "evaluation"
            series[name] = pd.Series(logs[column].to_numpy(), logs["step"]).dropna()
    return series


def averaging_window(series: Mapping[str, pd.Series]) -> int:
    """Returns how many log entries of the training a table averages: a fifth of them, but at most [`MAX_WINDOW`]."""
    return max(1, min(MAX_WINDOW, len(series.get(TRAINING, ())) // 5))


def reward_table(series: Mapping[str, pd.Series]) -> list[list[str]]:
    """
    Returns a row with the first, best and final value of each series of [`reward_series`]. Training values are means
    over a window.
    """
    rows = [["joint reward", "first", "best", "final"]]
    for name, rewards in series.items():
        means = rewards.rolling(averaging_window(series) if name == TRAINING else 1).mean().dropna()
        best = f"{means.max():.3f} (step {means.idxmax()})"
        rows.append([name, f"{means.iloc[0]:.3f}", best, f"{means.iloc[-1]:.3f}"])
    return rows


def metric_table(log_history: list[dict[str, Any]], window: int) -> list[list[str]]:
    """
    Returns the last values of the environment's metrics. Training values are means over the last `window` log entries.
    """
    logs = pd.DataFrame(log_history)
    last: dict[str, dict[str, str]] = {}
    for heading, prefix, size in ((TRAINING, "", window), ("evaluation", "eval_", 1)):
        for column in logs:
            if re.fullmatch(rf"{prefix}turn_\d+/.+", column):
                value = logs[column].dropna().tail(size).mean()
                last.setdefault(heading, {})[column.removeprefix(prefix)] = f"{value:.3f}"
    names = sorted({name for values in last.values() for name in values})
    return [["metric", *last], *([f"`{name}`", *(values.get(name, "") for values in last.values())] for name in names)]


def draw_reward_curve(series: Mapping[str, pd.Series], path: Path) -> None:
    """Draws the series of [`reward_series`] against the optimizer step into a PNG file."""
    colors = itertools.cycle(COLORS[1:])
    with picture(path, size=(8, 4.5)) as (axes,):
        for name, rewards in series.items():
            if name == TRAINING:
                draw_curve(axes, [*rewards.index], [*rewards], name)
            else:
                axes.plot(rewards.index, rewards, color=next(colors), marker="o", markersize=5, label=name)
        axes.set(title="Joint reward of the team", xlabel="optimizer step", ylabel="mean joint reward")
        axes.xaxis.get_major_locator().set_params(integer=True)
