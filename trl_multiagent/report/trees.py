"""Turns the rows of a trace into rollout trees, and groups of episodes, for the page of a report. Their columns are listed in `rollout/trace.py`."""

import math
from collections.abc import Iterable
from typing import Any


MAX_TREES = 60
MAX_CHARS = 4_000_000  # of all texts of a page
MAX_TEXT = 20_000  # characters of one text

Row = dict[str, Any]


def trees_of(rows: Iterable[Row]) -> list[list[Row]]:
    """Groups rows by tree, in their order. A tree of several episodes is one group."""
    found: dict[tuple, list[Row]] = {}
    for row in rows:
        found.setdefault((row["step"], row["split"], row["process"], row["tree"]), []).append(row)
    return list(found.values())


def tree_page(trees: list[list[Row]]) -> dict[str, Any]:
    """
    Returns trees as plain values. Every text is stored once, because siblings share their prompts. What is too much for a page is left out:
    `left_out` is the number of trees.
    """
    texts: dict[str, int] = {}
    names = list(dict.fromkeys(name.partition("/")[2] for rows in trees for name in rows[0] if name[:8] == "metrics/"))
    kept: list[dict[str, Any]] = []
    for rows in trees[-MAX_TREES:][::-1]:  # the latest are the most interesting
        if kept and sum(map(len, texts)) > MAX_CHARS:
            break
        kept.append(tree_values(rows, names, texts))
    return {"trees": kept[::-1], "texts": [*texts], "metrics": names, "left_out": len(trees) - len(kept)}


def tree_values(rows: list[Row], names: list[str], texts: dict[str, int]) -> dict[str, Any]:
    """Returns one tree: its nodes, by path, and the joint actions of each. Texts become their numbers in `texts`, which grows."""

    def number(text: Any) -> int | None:
        if not isinstance(text, str):  # such as the NaN of a role that does not act
            return None
        cut = text if len(text) <= MAX_TEXT else f"{text[:MAX_TEXT]}\n... {len(text) - MAX_TEXT} more characters"
        return texts.setdefault(cut, len(texts))

    def by_role(row: Row, kind: str) -> Row:
        return {name[len(kind) + 1 :]: value for name, value in row.items() if name.startswith(f"{kind}/")}

    first = rows[0]
    nodes: dict[tuple, dict[str, Any]] = {}
    for row in rows:
        episode = known(row.get("episode"))
        key = (episode, row["node"])
        if key not in nodes:
            prompts = {role: number(text) for role, text in by_role(row, "prompt").items()}
            nodes[key] = {"path": row["node"], "parent": row["parent"], "turn": row["turn"], "prompts": prompts}
            nodes[key] |= {"episode": None if episode is None else int(episode), "actions": []}
        metrics = by_role(row, "metrics")
        nodes[key]["actions"].append(
            {
                "action": row["action"],
                "texts": {role: number(text) for role, text in by_role(row, "completion").items()},
                "reward": row["reward"],
                "return": row["return"],
                "rewards": {role: known(x) for role, x in by_role(row, "reward").items()},
                "returns": {role: known(x) for role, x in by_role(row, "return").items()},
                "advantages": {role: known(x) for role, x in by_role(row, "advantage").items()},
                "metrics": [known(metrics.get(name)) for name in names],
                "extra": {name: known(x) for name, x in by_role(row, "extra").items() if known(x) not in (None, "")},
            }
        )
    name = f"{first['split']}-{first['step']}-{first['process']}-{first['tree']}"
    values = {"id": name, "step": first["step"], "split": first["split"], "item": str(first["item"])}
    return {**values, "nodes": list(nodes.values())}


def known(value: Any) -> Any:
    """Returns a value of a table, and `None` for NaN, with which a table fills its gaps."""
    return None if isinstance(value, float) and math.isnan(value) else value
