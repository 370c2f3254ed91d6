"""Turns the rows of a trace into the trees of a page. `rollout/trace.py` lists their columns."""

import math
import random
from collections.abc import Iterable
from typing import Any


MAX_TREES = 60
MAX_CHARS = 4_000_000  # of all texts of a page
MAX_TEXT = 20_000  # characters of one text

Row = dict[str, Any]


def trees_of(rows: Iterable[Row]) -> list[list[Row]]:
    """Groups rows by tree, in their order. The episodes of an item are one group."""
    found: dict[tuple, list[Row]] = {}
    for row in rows:
        found.setdefault((row["step"], row["split"], row["process"], row["tree"]), []).append(row)
    return list(found.values())


def choose_trees(trees: list[list[Row]], number: int, seed: int) -> list[tuple[str, list[Row]]]:
    """Returns the best and the worst tree, and then random ones, each with its name."""
    ranked = sorted(trees, key=root_return, reverse=True)
    chosen = [("best", ranked[0])]
    if len(ranked) > 1:
        chosen.append(("worst", ranked[-1]))
    # Not the global generator, which the rollouts use
    others = random.Random(seed).sample(ranked[1:-1], max(0, min(number - 2, len(ranked) - 2)))
    return [*chosen, *(("random", tree) for tree in others)][: max(0, number)]


def root_return(tree: list[Row]) -> float:
    """Returns the mean return of a tree's first joint actions."""
    returns = [row["return"] for row in tree if row["turn"] == 1]
    return sum(returns) / len(returns)


def tree_page(trees: list[list[Row]]) -> dict[str, Any]:
    """
    Returns trees as one table: the names of its columns, and the rows of each tree. Siblings share prompts and
    completions, so each is stored once, in `texts`, and a cell has its number. Long texts are cut. If there are too
    many trees, the latest are kept.
    """
    columns = list(dict.fromkeys(name for tree in trees for name in tree[0]))
    texts: dict[str, int] = {}

    def cell(name: str, value: Any) -> Any:
        if isinstance(value, str):
            more = len(value) - MAX_TEXT
            value = f"{value[:MAX_TEXT]}\n... {more} more characters" if more > 0 else value
            return texts.setdefault(value, len(texts)) if name.startswith(("prompt/", "completion/")) else value
        return None if isinstance(value, float) and math.isnan(value) else value  # data frames fill gaps with NaN

    kept: list[list[list[Any]]] = []
    size = 0  # of the texts in cells
    for tree in trees[-MAX_TREES:][::-1]:
        if kept and size + sum(map(len, texts)) > MAX_CHARS:
            break
        kept.append([[cell(name, row.get(name)) for name in columns] for row in tree])
        size += sum(len(x) for row in kept[-1] for x in row if isinstance(x, str))
    return {"columns": columns, "trees": kept[::-1], "texts": [*texts], "left_out": len(trees) - len(kept)}
