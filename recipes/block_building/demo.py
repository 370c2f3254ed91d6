"""
The task of the demo of block building: small walls, their palettes and base model.

The base model has seen careless demonstrations of builders who do not agree on how to share a wall.
"""

import random
from dataclasses import dataclass
from pathlib import Path

from trl_multiagent.environments.dataset_rows import Dataset, generated_rows, make_dataset
from trl_multiagent.environments.task import Task, TaskSettings, load_datasets
from trl_multiagent.models.imitation import ImitationModel
from trl_multiagent.tasks.block_building import data
from trl_multiagent.tasks.block_building.environment import WALLS, BlockBuildingEnvironment, read_target


DEMO = "demo"  # the name of the walls and of their base model
FAMILY = sorted(Path(data.__file__).parent.glob("*.py"))  # whose code determines the base model, too
SIZE, SIZES = 3, {"train": 108, "test": 32}
PALETTES = {"builder_1": ("planks", "stone"), "builder_2": ("glass", "obsidian")}
# Probability of each fault, for a place of the wall or for a whole answer
SKIPS, STRAYS, MONOTONOUS = 0.05, 0.04, 0.3


def demo_items(split: str) -> list[dict]:
    """
    Returns the small walls of the demo: five or six blocks on a square of 3 x 3, at most three on each colour of a
    chessboard.
    """
    items = [
        data.wall_item(f"wall_{number}", rows.split("/")) for number, rows in enumerate(data.BLOCKS[DEMO].split())
    ]
    return items[SIZES["test"] :] if split == "train" else items[: SIZES["test"]]


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
            x = rng.randrange(SIZE)
        lines.append(f"/setblock {x} {y} {z} {only or rng.choice(palette)}\n")
    return "".join(lines)


def make_demonstrations(number: int, rng: random.Random) -> list[tuple[str, str]]:
    """Draws pairs of a prompt and an agent's answer: of two builders, and of one who is alone."""
    team, alone = (BlockBuildingEnvironment(palettes=PALETTES, num_agents=n, explain=False) for n in (2, 1))
    items, pairs = demo_items("train"), []
    for _ in range(number):
        item, environment = rng.choice(items), rng.choice((team, team, alone))
        role = rng.choice(environment.roles)
        answer = demonstrate(item, environment.palettes[role], environment is alone, rng)
        pairs.append((str(environment.prompts(item, ())[role]), answer))
    return pairs


# The task


@dataclass
class DemoDataset(data.BlockDataset):
    """The section `dataset`, in which the name `demo` selects the small walls."""

    generated = (*data.BlockDataset.generated, DEMO)
    kinds = {**data.BlockDataset.kinds, DEMO: WALLS}

    def load(self, split: str | None) -> Dataset:
        if self.name != DEMO:
            return super().load(split)
        return make_dataset(generated_rows(demo_items, SIZES, split), DEMO)


def make_environment(settings: TaskSettings) -> BlockBuildingEnvironment:
    palettes = settings.sections["block_building"].palettes or PALETTES
    changes = {"palettes": palettes, "explain": False} if settings.dataset.name == DEMO else {}
    return data.make_environment(settings, **changes)


# Block building in which the name `demo` selects the small walls and their base model
TASK = Task(
    make_environment,
    load_datasets,
    settings={**data.TASK.settings, "dataset": DemoDataset},
    models={DEMO: ImitationModel("blocks-demo", make_demonstrations, 500, FAMILY).path},
)
