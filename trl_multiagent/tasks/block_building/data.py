"""
The data of block building, and its task: strings in block letters, and small houses. The demo has small walls, see
recipes/block_building/demo.py.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from trl_multiagent.environments.dataset_rows import (
    LOCAL_FILE,
    Dataset,
    make_dataset,
    read_data,
    read_file,
    select_rows,
)
from trl_multiagent.environments.task import DatasetSource, Task, TaskSettings, load_datasets, setting
from trl_multiagent.tasks.block_building.environment import (
    ANY,
    HOUSES,
    MAX_CELLS,
    MODES,
    WALLS,
    BlockBuildingEnvironment,
    read_target,
)


BLOCKS = json.loads(read_data("blocks.json"))
FONT = {letter: tuple(rows.split()) for letter, rows in BLOCKS["letters"].items()}  # five rows of five places each


def wall_item(name: str, rows: list[str], z: int = 0) -> dict:
    """Returns the item of a wall. `rows`: `#` for a block and `.` for none, from the top row down."""
    return {"task_id": name, "layers": [[row] for row in reversed(rows)], "origin": [0, 0, z], "inventory": []}


def text_item(text: str, spacing: int = 2, z: int = 0) -> dict:
    """Returns the item of a string in letters of 5 x 5 blocks, with `spacing` columns between them."""
    letters = [FONT[letter] for letter in text.upper()]
    return wall_item(text.upper(), [("." * spacing).join(rows) for rows in zip(*letters, strict=True)], z)


def load_block_dataset(
    name: str = WALLS, split: str | None = None, kind: str = WALLS, spacing: int = 2, z: int = 0
) -> Dataset:
    """
    Loads targets.

    Args:
        name (`str`, *optional*, defaults to `"str_build"`): `"str_build"`, ten strings; `"house_build"`, ten houses;
            or a file of rows with a `text` of letters or, for houses, the columns below.
        split (`str`, *optional*): Rows, such as `"[:8]"`.
        kind (`str`, *optional*, defaults to `"str_build"`): What a file holds, `"str_build"` or `"house_build"`.
        spacing (`int`, *optional*, defaults to `2`): Columns between letters.
        z (`int`, *optional*, defaults to `0`): The place of a wall.

    Returns:
        `Dataset`: Columns `task_id`; `layers`, from the ground up, each a list of rows from front to back, of symbols
        from left to right; `origin`, the smallest x, y and z; and `inventory`, pairs of a symbol and its block. `.` is
        air, `#` any block.

    Raises `ValueError` if a row or the split is malformed.
    """
    if name == WALLS:
        rows = [text_item(text, spacing, z) for text in BLOCKS[WALLS].split()]
    elif name == HOUSES:
        rows = BLOCKS[HOUSES]
    else:
        file = enumerate(read_file(Path(name)), 1)
        rows = [checked_row(row, f"{name}, row {number}", kind, spacing, z) for number, row in file]
    return select_rows(make_dataset(rows, name), split, name)


def checked_row(row: dict, where: str, kind: str, spacing: int, z: int) -> dict:
    """Returns the item of a row in a file."""
    if kind == WALLS:
        text = row.get("text")
        if not isinstance(text, str) or not 0 < len(text) <= 20 or set(text.upper()) - FONT.keys():
            raise ValueError(f"{where}: `text` must be 1 to 20 letters from A to Z, not {text!r:.80}.")
        return text_item(text, spacing, z)
    item = {"task_id": str(row.get("task_id", where)), "origin": row.get("origin") or [0, 0, 0]}
    problem = f"`layers` must be lists of equally long texts, with symbols of `inventory`, at most {MAX_CELLS} in all"
    try:
        item |= {key: [[str(text) for text in part] for part in row[key]] for key in ("layers", "inventory")}
        target = read_target(item)
        sizes = {(len(part), len(row)) for part in item["layers"] for row in part}
        is_right = len(sizes) == 1 and target.blocks and target.size <= MAX_CELLS and ANY not in target.blocks.values()
    except (KeyError, TypeError, ValueError, IndexError):
        is_right = False
    if not is_right:
        raise ValueError(f"{where}: {problem}.")
    return item


# The task


@dataclass
class BlockDataset(DatasetSource):
    """The section `dataset`."""

    generated: ClassVar[tuple[str, ...]] = (WALLS, HOUSES)
    kinds: ClassVar = {WALLS: WALLS, HOUSES: HOUSES}  # of the data that comes with the package
    name: str | None = setting(f"'{WALLS}', '{HOUSES}' or 'demo', or the path of a {LOCAL_FILE}.", WALLS)
    type: str | None = setting("What a file holds: walls or houses.", choices=(WALLS, HOUSES))
    spacing: int = setting("Columns between the letters of a wall.", 2, ge=0, le=20)
    local_z: int = setting("The z of a wall.", 0, ge=-9999, le=9999)

    def __post_init__(self) -> None:
        kind = self.kinds.get(self.name or WALLS)
        if self.type is not None and kind not in (None, self.type):
            raise ValueError(f"`dataset.type` is {self.type!r}, but `dataset.name` {self.name!r}, which is {kind!r}.")

    @property
    def kind(self) -> str:
        return HOUSES if HOUSES in (self.name, self.type) else WALLS

    def load(self, split: str | None) -> Dataset:
        """Loads the rows of a split. Raises `ValueError` if a row or the split is malformed."""
        return load_block_dataset(self.name or WALLS, split, self.kind, self.spacing, self.local_z)


@dataclass
class Feedback:
    """The section `external`: what later turns show."""

    mode: str | None = setting("Feedback between turns; by default as in CoMLRL's file.", choices=(*MODES,))
    lim: int | None = setting("Lines of a list of mistakes, all by default.", ge=1)


@dataclass
class BlockSettings:
    """The section `block_building`."""

    palettes: dict[str, list[str]] | None = setting("The blocks of each role, such as {builder_1: [stone, glass]}.")
    max_commands: int | None = setting("Commands of all agents; 300 by default, 600 for houses.", ge=1)
    provide_graph: bool = setting("Whether a wall is shown as a drawing, instead of as a list of places.", True)
    limited_resource: bool = setting("Whether agents have a limited number of each kind of block.", False)
    player: dict[str, int] | None = setting("`hp`, the health of the player; 5 by default.", keys=("hp",), ge=1)
    spider: dict[str, int] | None = setting(
        "Spiders of a house: `num`, `atk_low`, `atk_high`; 0, 1 and 3.", keys=("num", "atk_low", "atk_high"), ge=0
    )
    count_air: bool = setting("Whether empty places that are right count in the reward of a house.", True)


def make_environment(settings: TaskSettings, **changes: Any) -> BlockBuildingEnvironment:
    """
    Builds the environment, with `changes` of its arguments. Raises `ValueError` if the palettes do not fit the number
    of agents.
    """
    dataset: BlockDataset = settings.sections["dataset"]
    own: BlockSettings = settings.sections["block_building"]
    feedback: Feedback = settings.sections["external"]
    more = {"mode": feedback.mode, "limit": feedback.lim, **vars(own), **changes}
    return BlockBuildingEnvironment(dataset.kind, num_agents=settings.num_agents, **more)


TASK = Task(
    make_environment,
    load_datasets,
    settings={"dataset": BlockDataset, "external": Feedback, "block_building": BlockSettings},
)
