"""
Draws the pictures of reports. They share one style: a title per panel, a faint grid, and one legend below the panels.
"""

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from trl_multiagent.folders import replacing


STYLE: dict[str, Any] = {"axes.grid": True, "grid.alpha": 0.2, "axes.spines.top": False, "axes.spines.right": False}
STYLE |= {"axes.axisbelow": True, "axes.titlesize": "medium", "legend.frameon": False, "legend.fontsize": "small"}
STYLE |= {"savefig.dpi": 150}
GREY = "0.6"
COLORS = ("tab:blue", "tab:orange", "tab:green", "tab:red", "tab:purple")
MAX_REACH = 5  # log entries
SMOOTHED_FROM = 20  # log entries


@contextlib.contextmanager
def picture(
    path: Path, panels: int = 1, size: tuple[float, float] = (5.0, 4.0), title: str = "", **grid: Any
) -> Iterator[list[Any]]:
    """
    Yields the axes of panels side by side to draw on, each of a `size` in inches, and writes the PNG file when the
    block ends. `grid`: arguments of [`~matplotlib.figure.Figure.subplots`], such as `sharey`.
    """
    from matplotlib import rc_context  # takes long to import
    from matplotlib.figure import Figure

    with rc_context(STYLE):
        figure = Figure(figsize=(panels * size[0], size[1]), layout="constrained")
        if title:
            figure.suptitle(title, fontsize="medium")
        yield list(figure.subplots(1, panels, squeeze=False, **grid)[0])
        labels: dict[str, Any] = {}
        for axes in figure.axes:
            handles, names = axes.get_legend_handles_labels()
            labels |= dict(zip(names, handles, strict=True))
        if labels:
            columns = min(len(labels), 2 * panels)
            figure.legend(labels.values(), labels.keys(), loc="outside lower center", ncols=columns)
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as unfinished:
            figure.savefig(unfinished, format="png")


def draw_curve(axes: Any, steps: Sequence[int], values: Sequence[float], label: str) -> None:
    """
    Draws a logged metric against the optimizer step, and a moving mean if there are at least [`SMOOTHED_FROM`]
    entries. The mean reaches equally far back and ahead, so that it does not lag.
    """
    reach = min(MAX_REACH, len(values) // 10) if len(values) >= SMOOTHED_FROM else 0
    means = [fmean(values[max(0, k - reach) : k + reach + 1]) for k in range(len(values))]
    if reach:
        axes.plot(steps, values, color=COLORS[0], alpha=0.3, linewidth=1, label=f"{label}, every log entry")
        axes.plot(steps, means, color=COLORS[0], linewidth=2, label=f"{label}, mean of {2 * reach + 1} entries")
    else:
        axes.plot(steps, values, color=COLORS[0], marker="o", markersize=4, label=label)
