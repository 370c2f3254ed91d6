"""
Draws docs/images/hidden.png: what two copies of SmolLM2 say before and after they were trained by the program in
README.md, which runs here. On phones, hidden_phone.png has after below before.

    python docs/images/make_hidden.py
"""

import os
import re
import tempfile
from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

from trl_multiagent.report.trace_files import read_trace


SPEAKER, DECIDER = ("#4c78a8", "#e8f0f8"), ("#f58518", "#fdf0e2")
RIGHT, WRONG, GREY = "#2e7d32", "#b3261e", "#555555"
ITEMS = (0, 21, 42)  # new boxes
WIDE, PHONE = ((0.25, 0.0), (6.45, 0.0)), ((0.25, 0.0), (0.25, -6.0))  # left and upper edges of before and after
FOLDER = Path(__file__).resolve().parent
PICTURES = {FOLDER / "hidden.png": (WIDE, (10.5, 5)), FOLDER / "hidden_phone.png": (PHONE, (5.25, 9.7))}


def run_program():
    """Runs the program with a trace. Returns the rows of its two evaluations on the new boxes, by step."""
    (program,) = re.findall(r"```python\n(.*?)```", (FOLDER.parents[1] / "README.md").read_text(), flags=re.DOTALL)
    exec(program.replace('MAGRPOConfig("hidden",', 'MAGRPOConfig("hidden", trace_steps=1,'), {})
    rows = read_trace("hidden/trace")
    return rows[rows["split"] == "eval"].groupby("step")


def bubble(axes, x, y, width, text, color):
    edge, fill = color
    style = "round,pad=0.02,rounding_size=0.12"
    axes.add_patch(FancyBboxPatch((x, y - 0.24), width, 0.48, boxstyle=style, ec=edge, fc=fill, lw=1.2))
    axes.text(x + 0.14, y, " ".join(text.split()), va="center", fontsize=10.5, color="#222222")


def draw(axes, evaluations, places):
    for (left, y), (step, rows) in zip(places, evaluations, strict=True):
        right = rows[rows["turn"] == 2]["reward"].mean()
        title = f"{f'after {step} steps' if step else 'untrained'}: {right:.0%} right on new words"
        axes.text(left, y + 0.75, title, fontsize=12, weight="bold", color="#222222")
        for item in ITEMS:
            first, last = (rows[(rows["item"].astype(str) == str(item)) & (rows["turn"] == turn)] for turn in (1, 2))
            first, last = first.iloc[0], last.iloc[0]
            secret = first["prompt/speaker"].split(" is hidden")[0].split()[-1]
            axes.text(left, y + 0.28, f"in the box: {secret}", fontsize=10, style="italic", color=GREY)
            bubble(axes, left, y - 0.15, 4.7, first["completion/speaker"], SPEAKER)
            bubble(axes, left + 0.6, y - 0.75, 4.7, last["completion/decider"], DECIDER)
            sign, color = ("✓", RIGHT) if last["reward"] else ("✗", WRONG)
            axes.text(left + 5.5, y - 0.75, sign, va="center", fontsize=15, color=color)
            y -= 1.65
    colors = "blue: the speaker, who knows; orange: the decider."
    below = (" " if places == WIDE else "\n").join(
        (colors, "Without messages, 25 % at most are expected to be right.")
    )
    axes.text(places[0][0], y + 0.3, below, fontsize=10, color=GREY, va="top")
    axes.set_xlim(0, places[1][0] + 5.85)
    axes.set_ylim(y - 0.2, 1.15)
    axes.axis("off")


def save(evaluations):
    for path, (places, size) in PICTURES.items():
        figure = Figure(figsize=size, layout="constrained")
        draw(figure.subplots(), evaluations, places)
        figure.savefig(path, dpi=110)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        os.chdir(scratch)
        evaluations = run_program()
    save(evaluations)
