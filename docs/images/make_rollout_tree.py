"""
Draws docs/images/rollout_tree.png: one item, its rollout tree, joint actions, returns and advantages.

    python docs/images/make_rollout_tree.py

The numbers follow from the rewards in the script: G = 3, two turns, discount 1, the baseline of MAGRPO.
"""

from pathlib import Path
from statistics import fmean

from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch


REWARDS = [1.0, 2.0, 3.0]  # of the joint actions of the first turn
NEXT_REWARDS = [[1.5, 2.5, 2.0], [3.0, 4.0, 3.5], [2.0, 2.0, 2.0]]  # of those that follow on each
AUX, MAIN, PLAIN = "#4c78a8", "#f58518", "#555555"


def box(axes, x, y, width, height, text, color, fill="white", size=9, weight="normal"):
    style = "round,pad=0.02,rounding_size=0.08"
    axes.add_patch(FancyBboxPatch((x, y - height / 2), width, height, boxstyle=style, ec=color, fc=fill, lw=1.4))
    axes.text(x + width / 2, y, text, ha="center", va="center", fontsize=size, color="#222222", weight=weight)


def arrow(axes, start, end, color=PLAIN):
    axes.annotate(
        "", end, start, arrowprops={"arrowstyle": "-|>", "color": color, "lw": 1.2, "shrinkA": 2, "shrinkB": 2}
    )


def joint_action(axes, x, y, number):
    """One completion of each agent, side by side."""
    box(axes, x, y, 0.72, 0.42, f"aux $a_{number}$", AUX, "#e8f0f8", 8.5)
    box(axes, x + 0.8, y, 0.78, 0.42, f"main $m_{number}$", MAIN, "#fdf0e2", 8.5)


def draw(path: Path) -> None:
    values = [fmean(rewards) for rewards in NEXT_REWARDS]
    returns = [r + v for r, v in zip(REWARDS, values, strict=True)]
    baseline = fmean(returns)
    next_baseline = values[1]

    figure = Figure(figsize=(12, 5.2), layout="constrained")
    axes = figure.subplots()
    axes.set(xlim=(0, 13.1), ylim=(0.2, 6.1))
    axes.axis("off")
    titles = [
        (0.75, "item"),
        (2.75, "node, turn 1:\neach agent sees its own prompt"),
        (5.62, "joint actions\n(G = 3)"),
    ]
    titles += [
        (7.72, "reward and\nreturn"),
        (9.62, "node, turn 2\n(one per joint action)"),
        (12.0, "joint actions, rewards"),
    ]
    for x, title in titles:
        axes.text(x, 5.7, title, ha="center", va="center", fontsize=9.5, weight="bold", color="#333333")

    box(axes, 0.1, 3.0, 1.3, 0.9, "a row of\nthe dataset", PLAIN, "#f4f4f4")
    box(axes, 1.95, 3.45, 1.6, 0.6, "prompt of aux", AUX, "#e8f0f8")
    box(axes, 1.95, 2.55, 1.6, 0.6, "prompt of main", MAIN, "#fdf0e2")
    arrow(axes, (1.43, 3.05), (1.9, 3.4))
    arrow(axes, (1.43, 2.95), (1.9, 2.6))
    for k, y in enumerate((4.6, 3.0, 1.4)):
        arrow(axes, (3.6, 3.4), (4.72, y + 0.05), AUX)
        arrow(axes, (3.6, 2.6), (4.72, y - 0.08), MAIN)
        joint_action(axes, 4.8, y, k + 1)
        sign = "#2a7f3f" if returns[k] > baseline else "#b03a2e"
        axes.text(6.6, y + 0.26, f"reward $r_{k + 1}$ = {REWARDS[k]:g}", fontsize=9)
        axes.text(6.6, y - 0.04, f"return $R_{k + 1}$ = {REWARDS[k]:g} + {values[k]:g} = {returns[k]:g}", fontsize=9)
        axes.text(6.6, y - 0.36, f"advantage {returns[k] - baseline:+.1f}", fontsize=9.5, color=sign, weight="bold")
        arrow(axes, (8.75, y), (9.05, y))
        box(axes, 9.1, y, 1.15, 0.5, "next prompts", PLAIN, "#f4f4f4", 8.5)
        if k == 1:
            for j, (offset, reward) in enumerate(zip((0.62, 0.0, -0.62), NEXT_REWARDS[k], strict=True)):
                arrow(axes, (10.3, y), (10.72, y + offset))
                joint_action(axes, 10.78, y + offset, j + 1)
                axes.text(12.45, y + offset - 0.06, f"{reward:g}", fontsize=9)
            axes.text(12.9, y - 0.06, f"mean\n{next_baseline:g}", fontsize=8.5, ha="center", va="center")
        else:
            axes.text(10.4, y - 0.05, f"...  mean return {values[k]:g}", fontsize=9)
    axes.text(
        0.1,
        0.45,
        "All agents share the reward of their joint action. An advantage is the return of a joint action minus "
        "the mean of its node "
        f"({baseline:g} here);\neach agent is trained on its own completions with it. MARLOO, MAReMax and "
        "MAREINFORCE have other baselines.",
        fontsize=9.5,
        color="#333333",
        va="center",
    )
    figure.savefig(path, dpi=130)


if __name__ == "__main__":
    draw(Path(__file__).with_name("rollout_tree.png"))
