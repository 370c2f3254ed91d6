"""What is to be built: strings in block letters, small houses, and the small walls of the demo."""

import json
from pathlib import Path

from trl_multiagent.environments.dataset_rows import Dataset, make_dataset, read_file, select_rows
from trl_multiagent.environments.embedded import generated_rows, read_data
from trl_multiagent.tasks.block_building.world import ANY, MAX_CELLS, read_target


WALLS, HOUSES, DEMO = "str_build", "house_build", "demo"
BLOCKS = json.loads(read_data("blocks.json"))
FONT = {letter: tuple(rows.split()) for letter, rows in BLOCKS["letters"].items()}  # five rows of five places each
INVENTORY = BLOCKS[HOUSES][0]["inventory"]
DEMO_SIZE, DEMO_SIZES = 3, {"train": 108, "test": 32}


def wall_item(name: str, rows: list[str], z: int = 0) -> dict:
    """Makes the item of a wall. `rows`: `#` for a block and `.` for none, from the top row down."""
    return {"task_id": name, "layers": [[row] for row in reversed(rows)], "origin": [0, 0, z], "inventory": []}


def text_item(text: str, spacing: int = 2, z: int = 0) -> dict:
    """Makes the item of a string in letters of 5 x 5 blocks, with `spacing` columns between them."""
    letters = [FONT[letter] for letter in text.upper()]
    return wall_item(text.upper(), [("." * spacing).join(rows) for rows in zip(*letters, strict=True)], z)


def demo_items(split: str) -> list[dict]:
    """
    Returns the small walls of the demo: five or six blocks on a square of 3 x 3, at most three on each colour of a
    chessboard.
    """
    items = [wall_item(f"wall_{number}", rows.split("/")) for number, rows in enumerate(BLOCKS[DEMO].split())]
    return items[DEMO_SIZES["test"] :] if split == "train" else items[: DEMO_SIZES["test"]]


def load_block_dataset(
    name: str = WALLS, split: str | None = None, kind: str = WALLS, spacing: int = 2, z: int = 0
) -> Dataset:
    """
    Loads targets.

    Args:
        name (`str`, *optional*, defaults to `"str_build"`): `"str_build"`, ten strings; `"house_build"`, ten houses;
            `"demo"`, small walls, with the splits `train` and `test`; or a file, whose rows have a `text` of letters
            or, for houses, the columns below.
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
    if name == DEMO:
        return make_dataset(generated_rows(demo_items, DEMO_SIZES, split), name)
    if name == WALLS:
        rows = [text_item(text, spacing, z) for text in BLOCKS[WALLS].split()]
    elif name == HOUSES:
        rows = BLOCKS[HOUSES]
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
        is_right = target.blocks and target.size <= MAX_CELLS and ANY not in target.blocks.values()
    except (KeyError, TypeError, ValueError, IndexError):
        is_right = False
    if not is_right:
        raise ValueError(f"{where}: {problem}.")
    return item
