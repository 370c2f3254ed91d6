"""The joint rewards of block building. `recipes/block_building/README.md` has them as tables."""

from collections.abc import Mapping, Sequence

from trl_multiagent.environments.base import PASSED
from trl_multiagent.tasks.block_building.world import Built, Target, texture


REWARD_VERSION = 1
COVERED, EXTRA, ADJACENT, MISSING = 2.0, -1.5, -1.0, -0.25
SPIDERS = -0.1


def wall_metrics(target: Target, built: Built, palettes: Mapping[str, Sequence[str]]) -> dict[str, float]:
    """
    Returns the reward of a wall, and its parts: R = 2 · covered - 1.5 · extra - adjacent - 0.25 · missing

    - covered: the share of the target's places that have a block, whatever block.
    - extra: the share of the other places that have one.
    - adjacent: of all pairs of blocks beside or on top of each other, the share with the same [`~world.texture`].
    - missing: the number of agents whose palette is not in the wall as a whole.
    """
    wanted, blocks = target.blocks.keys(), {place: block for place, (block, _) in built.items()}
    covered, extra = len(wanted & blocks.keys()), len(blocks.keys() - wanted)
    neighbours = [(blocks.get((x + 1, y, z)), blocks.get((x, y + 1, z))) for x, y, z in blocks]
    pairs = [(a, b) for a, near in zip(blocks.values(), neighbours, strict=True) for b in near if b is not None]
    same = sum(texture(a) == texture(b) for a, b in pairs)
    metrics = {
        "covered": covered / len(wanted),
        "extra": extra / max(1, target.size - len(wanted)),
        "adjacent": same / max(1, len(pairs)),
        "missing": float(sum(not set(palette) <= set(blocks.values()) for palette in palettes.values())),
    }
    reward = COVERED * metrics["covered"] + EXTRA * metrics["extra"]
    reward += ADJACENT * metrics["adjacent"] + MISSING * metrics["missing"]
    is_right = covered == len(wanted) and not extra and not same and not metrics["missing"]
    more = {"iou": covered / (len(wanted) + extra), "adjacent_pairs": float(same)}
    return {"total_reward": reward, PASSED: float(is_right), **more, **metrics}


def house_metrics(target: Target, built: Built, damage: float, count_air: bool) -> dict[str, float]:
    """
    Returns the reward of a house, and its parts: R = match - 0.1 · hurt

    - match: the share of places that are right, of the whole box if `count_air`, as published: an empty box earns its
      share of air. Otherwise of the places at which the house or what was built has a block.
    - hurt: the `damage` of the spiders, as a share of the player's health, 0 to 1.
    """
    wanted = target.blocks.keys()
    union = len(wanted | built.keys())
    right = sum(place in built and built[place][0] == block for place, block in target.blocks.items())
    match = (right + target.size - union) / target.size if count_air else right / union
    return {
        "total_reward": match + SPIDERS * damage,
        PASSED: float(right == union),
        "iou": len(wanted & built.keys()) / union,
        "match": match,
        "match_of_blocks": right / union,
        "hurt": damage,
    }
