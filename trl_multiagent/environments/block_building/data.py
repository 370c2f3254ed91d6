"""What is to be built: strings in block letters, small houses, and the small walls of the demo."""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from typing import TYPE_CHECKING

from trl_multiagent.environments.block_building.world import ANY, MAX_CELLS, read_target
from trl_multiagent.environments.dataset_rows import make_dataset, read_file, select_rows


if TYPE_CHECKING:
    from datasets import Dataset

WALLS, HOUSES, DEMO = "str_build", "house_build", "demo"
# The letters from A to M and from N to Z, five rows of five places each
LETTERS = {
    "ABCDEFGHIJKLM": """
    ..#.. ####. .#### ###.. ##### ##### .#### #...# .###. ..### #..#. #.... #...#
    .#.#. #...# #.... #..#. #.... #.... #.... #...# ..#.. ...#. #.#.. #.... ##.##
    ##### ####. #.... #...# ####. ###.. #..## ##### ..#.. ...#. ##... #.... #.#.#
    #...# #...# #.... #..#. #.... #.... #...# #...# ..#.. #..#. #.#.. #.... #...#
    #...# ####. .#### ###.. ##### #.... .#### #...# .###. .##.. #..#. ####. #...#
    """,
    "NOPQRSTUVWXYZ": """
    #...# .###. ####. .###. ####. .#### ##### #...# #...# #...# #...# #...# #####
    ##..# #...# #...# #...# #...# #.... ..#.. #...# #...# #...# .#.#. .#.#. ...#.
    #.#.# #...# ####. #.#.# ####. .###. ..#.. #...# .#.#. #.#.# ..#.. ..#.. ..#..
    #..## #...# #.... #..#. #..#. ....# ..#.. #...# .#.#. ##.## .#.#. ..#.. .#...
    #...# .###. #.... .##.# #...# ####. ..#.. .###. ..#.. #...# #...# ..#.. #####
    """,
}
FONT = {letter: tuple(half.split()[k::13]) for letters, half in LETTERS.items() for k, letter in enumerate(letters)}
STRINGS = ("T", "H", "O", "X", "UP", "GO", "SKY", "TEAM", "BOX", "ROOF")
NUM_HOUSES = 10
INVENTORY = [["W", "white_concrete"], ["O", "obsidian"], ["S", "stone_stairs"], ["B", "stone_bricks"], ["P", "planks"]]
DEMO_SIZE, DEMO_TEST = 3, 32


def wall_item(name: str, rows: list[str], z: int = 0) -> dict:
    """Makes the item of a wall. `rows`: `#` for a block and `.` for none, from the top row down."""
    return {"task_id": name, "layers": [[row] for row in reversed(rows)], "origin": [0, 0, z], "inventory": []}


def text_item(text: str, spacing: int = 2, z: int = 0) -> dict:
    """Makes the item of a string in letters of 5 x 5 blocks, with `spacing` columns between them."""
    letters = [FONT[letter] for letter in text.upper()]
    return wall_item(text.upper(), [("." * spacing).join(rows) for rows in zip(*letters, strict=True)], z)


def house_item(number: int) -> dict:
    """Makes a small house: floor, walls with posts, a door and windows, and a flat roof with a rim. The number decides its size and materials."""
    rng = random.Random(f"house {number}")
    width, height, depth = rng.randint(5, 7), rng.randint(5, 7), rng.randint(5, 7)
    wall, post, floor = rng.choice("WB"), rng.choice("OB"), rng.choice("BP")
    door = rng.randint(1, width - 2)
    layers = [[floor * width] * depth]
    for y in range(1, height - 1):
        front = "".join("." if x == door and y < 3 else wall for x in range(1, width - 1))
        sides = ["." if y == 2 and z % 2 == 0 else wall for z in range(1, depth - 1)]  # with windows
        rows = [side + "." * (width - 2) + side for side in sides]
        layers.append([post + front + post, *rows, post + wall * (width - 2) + post])
    rim = "S" * width
    layers.append([rim, *["S" + "P" * (width - 2) + "S"] * (depth - 2), rim])
    return {"task_id": f"house_{number}", "layers": layers, "origin": [0, 0, 0], "inventory": INVENTORY}


def demo_items(split: str) -> list[dict]:
    """Makes the small walls of the demo: all with five or six blocks on a square of 3 x 3, at most three on each colour of a chessboard."""
    square = list(itertools.product(range(DEMO_SIZE), repeat=2))
    shapes = [shape for size in (5, 6) for shape in itertools.combinations(square, size)]
    shapes = [shape for shape in shapes if len(shape) - 3 <= sum((x + y) % 2 for x, y in shape) <= 3]
    random.Random("walls of the demo").shuffle(shapes)
    items = []
    for number, shape in enumerate(shapes):
        rows = ["".join(ANY if (x, y) in shape else "." for x in range(DEMO_SIZE)) for y in range(DEMO_SIZE)]
        items.append(wall_item(f"wall_{number}", rows))
    return items[DEMO_TEST:] if split == "train" else items[:DEMO_TEST]


def load_block_dataset(
    name: str = WALLS, split: str | None = None, kind: str = WALLS, spacing: int = 2, z: int = 0
) -> Dataset:
    """
    Loads targets.

    Args:
        name (`str`, *optional*, defaults to `"str_build"`): `"str_build"`, ten strings; `"house_build"`, ten houses; `"demo"`, small walls, with
            the splits `train` and `test`; or a file, whose rows have a `text` of letters or, for houses, the columns below.
        split (`str`, *optional*): Rows, such as `"[:8]"`.
        kind (`str`, *optional*, defaults to `"str_build"`): What a file holds, `"str_build"` or `"house_build"`.
        spacing (`int`, *optional*, defaults to `2`): Columns between letters.
        z (`int`, *optional*, defaults to `0`): The place of a wall.

    Returns:
        `Dataset`: Columns `task_id`; `layers`, from the ground up, each a list of rows from front to back, of symbols from left to right;
        `origin`, the smallest x, y and z; and `inventory`, pairs of a symbol and its block. `.` is air, `#` any block.

    Raises:
        ValueError: a row or the split is malformed.
    """
    if name == DEMO:
        part = (split or "train").partition("[")[0]
        if part not in ("train", "test"):
            raise ValueError(f"{split!r} does not select rows of the demo, whose splits are train and test.")
        rows = demo_items(part)
    elif name == WALLS:
        rows = [text_item(text, spacing, z) for text in STRINGS]
    elif name == HOUSES:
        rows = [house_item(number) for number in range(NUM_HOUSES)]
    else:
        file = enumerate(read_file(Path(name)), 1)
        rows = [checked_row(row, f"{name}, row {number}", kind, spacing, z) for number, row in file]
    return select_rows(make_dataset(rows, name), split, name)


def checked_row(row: dict, where: str, kind: str, spacing: int, z: int) -> dict:
    """Makes the item of a row in a file."""
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
    except (KeyError, TypeError, ValueError, IndexError):
        raise ValueError(f"{where}: {problem}.") from None
    if not target.blocks or target.size > MAX_CELLS or ANY in target.blocks.values():
        raise ValueError(f"{where}: {problem}.")
    return item
