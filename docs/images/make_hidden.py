"""
Draws docs/images/hidden.png: what two copies of SmolLM2 say before and after they were trained on `hidden`. On phones,
hidden_phone.png has after below before.

    make demo-real && python docs/images/make_hidden.py outputs/demo-real/<run>
"""

import sys
from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

from trl_multiagent.configs.recipes.real.demo import policies_of, said_in, talks_of


SPEAKER, DECIDER = ("#4c78a8", "#e8f0f8"), ("#f58518", "#fdf0e2")
RIGHT, WRONG, GREY = "#2e7d32", "#b3261e", "#555555"
ITEMS = (0, 21, 42)  # held-out items
WIDE, PHONE = ((0.25, 0.0), (6.45, 0.0)), ((0.25, 0.0), (0.25, -6.0))  # left and upper edges of before and after
PICTURES = {
    Path(__file__).with_name("hidden.png"): (WIDE, (10.5, 5)),
    Path(__file__).with_name("hidden_phone.png"): (PHONE, (5.25, 9.7)),
}


def bubble(axes, x, y, width, text, color):
    edge, fill = color
    style = "round,pad=0.02,rounding_size=0.12"
    axes.add_patch(FancyBboxPatch((x, y - 0.24), width, 0.48, boxstyle=style, ec=edge, fc=fill, lw=1.2))
    axes.text(x + 0.14, y, text, va="center", fontsize=10.5, color="#222222")


def draw(axes, run, places):
    policies = policies_of(run)
    cut = policies["trained, messages cut"][1]["results"]["turn_2"]["reward"]["mean"]
    for (left, y), when, key in zip(places, ("untrained", "after 12 steps"), ("untrained", "trained"), strict=True):
        transcripts, policy = policies[key]
        right = policy["results"]["turn_2"]["reward"]["mean"]
        title = f"{when}: {right:.0%} right on new words"
        axes.text(left, y + 0.75, title, fontsize=12, weight="bold", color="#222222")
        talk = talks_of(transcripts)
        for number in ITEMS:
            turns = talk[number]
            secret = turns[0]["prompts"]["speaker"].split(" is hidden")[0].split()[-1]
            axes.text(left, y + 0.28, f"in the box: {secret}", fontsize=10, style="italic", color=GREY)
            said = said_in(turns)
            bubble(axes, left, y - 0.15, 4.7, said[0], SPEAKER)
            bubble(axes, left + 0.6, y - 0.75, 4.7, said[-1], DECIDER)
            sign, color = ("✓", RIGHT) if turns[-1]["reward"] else ("✗", WRONG)
            axes.text(left + 5.5, y - 0.75, sign, va="center", fontsize=15, color=color)
            y -= 1.65
    colors = "blue: the speaker, who knows; orange: the decider."
    below = f"Messages cut: {cut:.0%}. Without messages, 25 % at most."
    below = (" " if places == WIDE else "\n").join((colors, below))
    axes.text(places[0][0], y + 0.3, below, fontsize=10, color=GREY, va="top")
    axes.set_xlim(0, places[1][0] + 5.85)
    axes.set_ylim(y - 0.2, 1.15)
    axes.axis("off")


def save(run):
    for path, (places, size) in PICTURES.items():
        figure = Figure(figsize=size, layout="constrained")
        draw(figure.subplots(), run, places)
        figure.savefig(path, dpi=110)


if __name__ == "__main__":
    save(Path(sys.argv[1]))
