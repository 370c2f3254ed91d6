"""
Draws docs/images/workflows.png: who acts at which turn of three workflows, and how a tree and a group of episodes
continue.

    python docs/images/make_workflows.py
"""

from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch


FIRST, SECOND, THIRD, PLAIN = (
    ("#4c78a8", "#e8f0f8"),
    ("#f58518", "#fdf0e2"),
    ("#54a24b", "#eaf5e9"),
    ("#555555", "#f4f4f4"),
)
WIDTH, STEP, START = 1.3, 2.25, 2.2  # of a box, from a turn to the next, and of the first turn
# Rows from top to bottom: name, boxes (role, turn, height above the row, color), arrows (from box, to box, label),
# reward
WORKFLOWS = [
    (
        "writer_editor",
        [("writer", 1, 0, FIRST), ("editor", 2, 0, SECOND)],
        [(0, 1, "draft")],
        "both: the final text",
    ),
    (
        "solver_critic",
        [("solver", 1, 0, FIRST), ("critic", 2, 0, SECOND), ("solver", 3, 0, FIRST)],
        [(0, 1, "answer"), (1, 2, "if it differs")],
        "both: the final answer;\ncritic: also its verdict",
    ),
    (
        "debate_judge",
        [("pro", 1, 0.42, FIRST), ("con", 1, -0.42, SECOND), ("judge", 2, 0, THIRD)],
        [(0, 2, "argument"), (1, 2, "argument")],
        "pro: won, con: the opposite,\njudge: was right",
    ),
]


def box(axes, x, y, text, color, width=WIDTH, height=0.62):
    edge, fill = color
    style = "round,pad=0.02,rounding_size=0.08"
    axes.add_patch(FancyBboxPatch((x, y - height / 2), width, height, boxstyle=style, ec=edge, fc=fill, lw=1.4))
    axes.text(x + width / 2, y, text, ha="center", va="center", fontsize=9.5, color="#222222")


def arrow(axes, start, end):
    style = {"arrowstyle": "-|>", "color": PLAIN[0], "lw": 1.2, "shrinkA": 2, "shrinkB": 2}
    axes.annotate("", end, start, arrowprops=style)


def draw_workflows(axes):
    for turn in (1, 2, 3):
        x = START + (turn - 1) * STEP + WIDTH / 2
        axes.text(x, 5.75, f"turn {turn}", ha="center", fontsize=10, weight="bold", color="#333333")
    axes.text(START + 3 * STEP, 5.75, "reward", fontsize=10, weight="bold", color="#333333")
    for y, (name, boxes, arrows, reward) in zip((4.8, 3.1, 1.4), WORKFLOWS, strict=True):
        axes.text(0, y, name, fontsize=10, va="center", family="monospace", color="#333333")
        places = [(START + (turn - 1) * STEP, y + above) for _, turn, above, _ in boxes]
        for (role, _, _, color), place in zip(boxes, places, strict=True):
            box(axes, *place, role, color)
        for first, second, label in arrows:
            (x, start), (end_x, end) = places[first], places[second]
            arrow(axes, (x + WIDTH, start), (end_x, end))
            lift = 0.12 if start == end else 0.24 if start > end else -0.36
            axes.text((x + WIDTH + end_x) / 2, (start + end) / 2 + lift, label, ha="center", fontsize=8)
        axes.text(START + 3 * STEP, y, reward, fontsize=9, va="center")
    axes.text(
        0,
        0.25,
        "The roles with a prompt act at a turn. A role without one has no completion, no row and no loss there.\n"
        "No prompt at all ends the episode.",
        fontsize=9.5,
        color="#333333",
        va="center",
    )
    axes.set(xlim=(-0.1, 11.6), ylim=(-0.2, 6.1))


def draw_branching(axes):
    """Three completions of the first turn, continued as a tree and as episodes."""
    for top, title in ((5.0, "tree: 3 + 9 completions"), (1.9, "episodes: 3 + 3 completions")):
        axes.text(0, top + 0.75, title, fontsize=10, weight="bold", color="#333333")
        is_tree = title.startswith("tree")
        box(axes, 0, top - 0.45, "item", PLAIN, 0.7, 0.45)
        for k in range(3):
            y = top + 0.25 - 0.7 * k
            arrow(axes, (0.72, top - 0.45), (1.35, y))
            box(axes, 1.4, y, "", FIRST, 0.55, 0.3)
            ends = [y + 0.2, y, y - 0.2] if is_tree else [y]
            for end in ends:
                arrow(axes, (1.97, y), (2.6, end))
                box(axes, 2.65, end, "", SECOND, 0.55, 0.1 if is_tree else 0.3)
    axes.text(3.4, 4.55, "compares answers\nto the same prompt", fontsize=9, va="center")
    axes.text(3.4, 1.45, "compares answers\nof the same turn", fontsize=9, va="center")
    axes.set(xlim=(-0.1, 5.3), ylim=(-0.2, 6.1))


def draw(path: Path) -> None:
    figure = Figure(figsize=(13, 4.6), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(2.3, 1))
    draw_workflows(left)
    draw_branching(right)
    for axes in (left, right):
        axes.axis("off")
    figure.savefig(path, dpi=130)


if __name__ == "__main__":
    draw(Path(__file__).with_name("workflows.png"))
