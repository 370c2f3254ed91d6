"""What tasks of other packages share: items that are seeds, and random numbers of their own."""

import importlib.util
import random
from dataclasses import dataclass

import numpy as np

from trl_multiagent.console import install_command
from trl_multiagent.environments.dataset_rows import Dataset, make_dataset, read_split
from trl_multiagent.environments.task import DatasetSource, setting


SIZES = {"train": 2048, "test": 256}


class OwnDraws:
    """
    Keeps the states that Python's and NumPy's global generators have for one game. Inside `with draws:`, they
    continue from there; outside, as if the game had drawn nothing.
    """

    def __init__(self, seed: int):
        self.states = random.Random(seed).getstate(), np.random.RandomState(seed).get_state()

    def __enter__(self) -> None:
        now = random.getstate(), np.random.get_state()
        random.setstate(self.states[0])
        np.random.set_state(self.states[1])
        self.states = now

    def __exit__(self, *error: object) -> None:
        self.__enter__()  # the states change places again


@dataclass
class Seeds(DatasetSource):
    """The section `dataset` of items that are seeds: splits `train` and `test`, such as `"test[:64]"`."""

    seed: int = setting("Seed of the items.", 1, ge=0)

    def __post_init__(self) -> None:
        if self.name is not None:
            raise ValueError(f"`dataset.name` is {self.name!r}, but the items are seeds, made here: remove it.")

    @property
    def may_be_hub_id(self) -> bool:
        return False

    def row(self, seed: int) -> dict:
        """Returns the columns of an item."""
        return {"seed": seed}

    def load(self, split: str | None) -> Dataset:
        """Makes the items of a split, by default all of `train`."""
        chosen = read_split(split, SIZES, "the generated items", default="train")
        seeds = {(part, k): random.Random(f"{part} {self.seed} {k}").getrandbits(31) for part, k in chosen}
        rows = [{"item_id": f"{part}/{k}", **self.row(seed)} for (part, k), seed in seeds.items()]
        return make_dataset(rows, "the generated items")


def check_package(name: str, extra: str) -> None:
    """Raises `ValueError` if a package is not installed."""
    if importlib.util.find_spec(name) is None:
        raise ValueError(f"The package {name} is not installed: {install_command(extra)}.")
