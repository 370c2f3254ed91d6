"""A picture of a build."""

from pathlib import Path

from matplotlib.figure import Figure

from trl_multiagent.environments.base import JointAction
from trl_multiagent.tasks.block_building import BlockBuildingEnvironment
from trl_multiagent.tasks.block_building.environment import ANY, read_target


def draw_build(path: str | Path, environment: BlockBuildingEnvironment, item: dict, joint_action: JointAction) -> None:
    """
    Draws the target, what a joint action builds, and who placed its blocks, as a PNG file. The environment reads the
    answers, and the item is a row of its dataset. A wall is seen from the front, the layers of a house from above, the
    lowest one at the bottom.
    """
    target = read_target(item)
    (outcome,) = environment.score([item], [joint_action], [()])
    blocks = {place: block for place, (block, _) in outcome.info.items()}
    owners = {place: role for place, (_, role) in outcome.info.items()}
    views = {"target": target.blocks, "built": blocks, "who placed it": owners}
    kinds = sorted({*target.blocks.values(), *blocks.values()} - {ANY})
    colors = {ANY: "0.75", **{name: f"C{k % 10}" for k, name in enumerate((*kinds, *environment.roles))}}
    (x1, y1, z1), (width, height, depth) = target.low, map(len, target.ranges)
    step = 1 if depth == 1 else depth + 1  # rows of a layer, and an empty one between the layers of a house
    rows = height * step - (depth > 1)
    size = (len(views) * max(2.6, 1.2 + 0.2 * width), 2.4 + 0.2 * rows)
    figure = Figure(size, dpi=150, layout="constrained")
    figure.suptitle(f"{item['task_id']}: reward {outcome.reward:.2f}")
    marks = {}  # of the legend
    for axes, (name, shown) in zip(figure.subplots(1, len(views)), views.items(), strict=True):
        for label, color in colors.items():
            found = [(x - x1, (y - y1) * step + z - z1) for (x, y, z), what in shown.items() if what == label]
            if found:
                marks[label] = axes.scatter(*zip(*found, strict=True), marker="s", s=60, color=color)
        axes.set(title=name, xlim=(-1, width), ylim=(-1, rows), aspect="equal", xticks=[], yticks=[])
    figure.legend(marks.values(), marks, loc="outside lower center", ncols=2 * len(views), frameon=False)
    figure.savefig(path)
