"""
Draws docs/images/code.png: how two copies of a small code model learn to share the work of a function. It reads the
runs of `python -m benchmarks.learning.coder --folder runs`.

    python docs/images/make_code.py runs
"""

import json
import sys
from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch


AUX, MAIN = ("#4c78a8", "#e8f0f8"), ("#f58518", "#fdf0e2")
RIGHT, WRONG, GREY = "#2e7d32", "#b3261e", "#555555"
SEEDS = ("small_trained", "small_trained_2", "small_trained_3")
ALONE = ("small_alone_trained", "small_alone_plain_trained")  # a single agent, shown two functions or one
ITEMS = (0, 3)  # numbers of held-out problems
LINE = 0.24  # height of a line of code
FILE = Path(__file__).resolve().with_name("code.png")


def episodes(row):
    """Returns the episodes of an evaluation."""
    (file,) = row.glob("transcripts/*/transcripts.jsonl")
    return [json.loads(line) for line in file.read_text().splitlines()]


def mean(found, metric):
    return sum(episode["turns"][0]["metrics"][metric] for episode in found) / len(found)


def draw_curves(axes, folder):
    for number, row in enumerate(SEEDS, start=1):
        log = folder / row / "run" / "log.jsonl"
        if log.is_file():
            steps = map(json.loads, log.read_text().splitlines())
            rewards = [step["reward"] for step in steps if "reward" in step]
            axes.plot(range(1, len(rewards) + 1), rewards, marker=".", label=f"seed {number}")
    axes.set(xlabel="step of 32 joint answers", ylabel="mean joint reward", ylim=(0, 4.1))
    axes.axhline(2.1, color=GREY, lw=0.8, ls="--", label="most without aux")
    axes.legend(loc="lower right", frameon=False, fontsize=8, labelspacing=0.3)
    axes.spines[["top", "right"]].set_visible(False)


def draw_waits(axes, folder):
    """Draws the share of problems that each policy solves within a number of tokens that one waits for."""
    for row in (*SEEDS, *ALONE):
        if (folder / row / "evaluation.json").is_file():
            found = [episode["turns"][0] for episode in episodes(folder / row)]
            waits = [max(turn["tokens"].values()) for turn in found if turn["metrics"]["passed"] == 1]
            shares = [sum(wait <= limit for wait in waits) / len(found) for limit in range(20, 49)]
            style = {"color": GREY, "ls": "--"} if row in ALONE else {}
            axes.step(
                range(20, 49), shares, where="post", label="one trained agent" if row == ALONE[0] else None, **style
            )
    axes.set(xlabel="tokens that one waits for", ylabel="problems solved", ylim=(0, 1))
    axes.legend(loc="lower right", frameon=False, fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)


def draw_code(axes, left, y, code, color):
    """Draws the code of an agent in a box. Returns the lower edge."""
    lines = code.strip().removesuffix("```").strip().splitlines()  # a fence is no code
    height = LINE * len(lines) + 0.12
    edge, fill = color
    style = "round,pad=0.02,rounding_size=0.08"
    axes.add_patch(FancyBboxPatch((left, y - height), 4.7, height, boxstyle=style, ec=edge, fc=fill, lw=1.2))
    axes.text(left + 0.12, y - 0.1, "\n".join(lines), va="top", fontsize=8, family="monospace", linespacing=1.35)
    return y - height - 0.15


def draw_answers(axes, before, after):
    for left, title, found in ((0, "untrained", before), (5.1, "trained", after)):
        share = mean(found, "passed")
        axes.text(left, 3.3, f"{title}: {share:.0%} of {len(found)} new problems", fontsize=11, weight="bold")
        for item, top in zip(ITEMS, (2.85, 0.15), strict=True):
            (turn,) = found[item]["turns"]
            if left == 0:
                task = turn["prompts"]["main"][-1]["content"].split("\n")[0]
                axes.text(left, top, task, fontsize=9.5, style="italic", color=GREY)
            y = draw_code(axes, left, top - 0.2, turn["completions"]["aux"], AUX)
            y = draw_code(axes, left, y, turn["completions"]["main"], MAIN)
            passed, total = (round(turn["metrics"][name]) for name in ("tests_passed", "tests_total"))
            color = RIGHT if passed == total else WRONG
            axes.text(left, y - 0.1, f"{passed} of {total} tests pass", fontsize=10, color=color)
    axes.set_xlim(-0.1, 10)
    axes.set_ylim(-2.1, 3.6)
    axes.axis("off")


def draw(folder, path=FILE):
    figure = Figure(figsize=(11.5, 4.6))
    draw_curves(figure.add_axes((0.05, 0.62, 0.24, 0.35)), folder)
    draw_waits(figure.add_axes((0.05, 0.12, 0.24, 0.35)), folder)
    axes = figure.add_axes((0.33, 0, 0.67, 1))
    draw_answers(axes, *(episodes(folder / row) for row in ("small_untrained", "small_trained")))
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    draw(Path(sys.argv[1]))
