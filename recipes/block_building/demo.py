"""
The base model of the demo of block building. It has seen careless demonstrations of builders who do not agree on how
to share a wall.
"""

import random
from pathlib import Path

from trl_multiagent.models.imitation import ImitationModel
from trl_multiagent.tasks.block_building import data, environment
from trl_multiagent.tasks.block_building.data import DEMO_PALETTES, DEMO_SIZE, demo_items
from trl_multiagent.tasks.block_building.environment import BlockBuildingEnvironment, read_target


# Probability of each fault, for a place of the wall or for a whole answer
SKIPS, STRAYS, MONOTONOUS = 0.05, 0.04, 0.3


def demonstrate(item: dict, palette: tuple[str, ...], is_alone: bool, rng: random.Random) -> str:
    """
    Draws an agent's answer. It builds the places of one colour of a chessboard, drawn at random; an agent that is
    alone builds all. Some places are left out or wrong, and some agents use one block all the time.
    """
    colour = rng.randrange(2)
    only = rng.choice(palette) if rng.random() < MONOTONOUS else None
    lines = []
    for x, y, z in sorted(read_target(item).blocks, key=lambda place: (-place[1], place[0])):
        if (not is_alone and (x + y) % 2 != colour) or rng.random() < SKIPS:
            continue
        if rng.random() < STRAYS:
            x = rng.randrange(DEMO_SIZE)
        lines.append(f"/setblock {x} {y} {z} {only or rng.choice(palette)}\n")
    return "".join(lines)


def make_demonstrations(number: int, rng: random.Random) -> list[tuple[str, str]]:
    """Draws pairs of a prompt and an agent's answer: of two builders, and of one who is alone."""
    team, alone = (BlockBuildingEnvironment(palettes=DEMO_PALETTES, num_agents=n, explain=False) for n in (2, 1))
    items, pairs = demo_items("train"), []
    for _ in range(number):
        item, builders = rng.choice(items), rng.choice((team, team, alone))
        role = rng.choice(builders.roles)
        answer = demonstrate(item, builders.palettes[role], builders is alone, rng)
        pairs.append((str(builders.prompts(item, ())[role]), answer))
    return pairs


MODEL = ImitationModel(
    "blocks-demo", make_demonstrations, 500, sources=[Path(data.__file__), Path(environment.__file__)]
)
