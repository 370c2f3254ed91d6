"""Draws a target, what was built, and who placed it."""

from collections.abc import Mapping
from pathlib import Path

from trl_multiagent.environments.base import JointAction
from trl_multiagent.environments.block_building.environment import BlockBuildingEnvironment
from trl_multiagent.environments.block_building.world import ANY, Place, Target, read_target


def draw_build(path: str | Path, environment: BlockBuildingEnvironment, item: dict, joint_action: JointAction) -> None:
    """
    Draws the target, what a joint action builds, and who placed its blocks, as a PNG file. A wall is seen from the front, the layers of a house from
    above, the lowest one at the bottom.

    Args:
        path (`str` or `Path`): The file.
        environment ([`BlockBuildingEnvironment`]): Reads the answers.
        item (`dict`): A row of the dataset.
        joint_action (`dict[str, str]`): The answer of each role.
    """
    # `--help` of a recipe need not wait for numpy
    from trl_multiagent.report.pictures import picture

    target, built = read_target(item), environment.build(item, joint_action)
    blocks = {place: block for place, (block, _) in built.items()}
    panels = {
        "target": target.blocks,
        "built": blocks,
        "who placed it": {place: role for place, (_, role) in built.items()},
    }
    kinds = sorted({*target.blocks.values(), *blocks.values()} - {ANY})
    colors = {ANY: "0.75", **{name: f"C{k % 10}" for k, name in enumerate((*kinds, *environment.roles))}}
    width, height, depth = map(len, target.ranges)
    rows = height if depth == 1 else height * (depth + 1) - 1
    title = f"{item['task_id']}: reward {environment.score([item], [joint_action], [()])[0].reward:.2f}"
    with picture(Path(path), len(panels), (max(2.6, 1.2 + 0.2 * width), 2.4 + 0.2 * rows), title) as every:
        for axes, (name, shown) in zip(every, panels.items(), strict=True):
            for label, color in colors.items():
                places = [
                    (x, y if depth == 1 else y * (depth + 1) + z) for x, y, z in _from_corner(shown, target, label)
                ]
                if places:
                    axes.scatter(*zip(*places, strict=True), marker="s", s=60, color=color, label=label)
            axes.set(title=name, xlim=(-1, width), ylim=(-1, rows), aspect="equal", xticks=[], yticks=[])
            axes.grid(False)


def _from_corner(shown: Mapping[Place, str], target: Target, label: str) -> list[Place]:
    (x1, y1, z1) = target.low
    return [(x - x1, y - y1, z - z1) for (x, y, z), found in shown.items() if found == label]
