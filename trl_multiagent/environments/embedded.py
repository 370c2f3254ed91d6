"""
Reads the data that comes with the package, so that recipes run without a network. `data/README.md` has its sources and
licences.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path


DATA = Path(__file__).parents[1] / "data"

# For each name, the file, and how its rows are split: one split, or the splits of MBPP by task id
EMBEDDED = {
    "humaneval": ("humaneval", "test"),
    "openai/openai_humaneval": ("humaneval", "test"),
    "coophumaneval": ("coophumaneval", "test"),
    "OpenMLRL/CoopHumanEval": ("coophumaneval", "test"),
    "mbpp": ("mbpp_sanitized", "by id"),
    "google-research-datasets/mbpp": ("mbpp_sanitized", "by id"),
    "OpenMLRL/MBPP": ("mbpp_sanitized", "test"),
    "quixbugs": ("quixbugs", "test"),
    "classeval": ("classeval", "test"),
    "FudanSELab/ClassEval": ("classeval", "test"),
}
SHORT_NAMES = tuple(name for name in EMBEDDED if "/" not in name)  # the others are names on the Hub
MBPP_SPLITS = {"prompt": range(1, 11), "test": range(11, 511), "validation": range(511, 601), "train": range(601, 975)}


def read_embedded(name: str, split: str | None, ending: str = "") -> list[dict]:
    """
    Reads the rows of an embedded benchmark, a key of `EMBEDDED`, that a split selects, see [`read_split`]. `ending`:
    of the name of another file with a row for each of these.
    """
    file, only_split = EMBEDDED[name]
    rows = [json.loads(line) for line in read_data(f"{file}{ending}.jsonl.gz").splitlines()]
    splits = {only_split: rows}
    if only_split == "by id":
        splits = {
            key: [row for row in rows if int(str(row["task_id"]).removeprefix("MBPP/")) in ids]
            for key, ids in MBPP_SPLITS.items()
        }
    chosen = read_split(split, {key: len(rows) for key, rows in splits.items()}, name)
    return [splits[key][position] for key, position in chosen]


def generated_rows(make: Callable[[str], list[dict]], sizes: dict[str, int], split: str | None) -> list[dict]:
    """
    Returns the generated rows that a split selects, by default all of `train`. `make` makes the rows of a split;
    `sizes` has their numbers. Raises `ValueError` as [`read_split`] does.
    """
    chosen = read_split(split, sizes, "the generated data", default="train")
    made = {name: make(name) for name in {name for name, _ in chosen}}
    return [made[name][position] for name, position in chosen]


def read_split(split: str | None, sizes: dict[str, int], source: str, default: str = "test") -> list[tuple[str, int]]:
    """
    Returns the rows that a split such as `"train[:8]"` selects, each as the name of its split and its position there.
    `sizes`: the numbers of rows. Without a name, the split is `default`. Raises `ValueError` if it does not exist, is
    malformed, or selects no rows of `source`.
    """
    import datasets  # takes a second to import

    spec = f"{default}{split or ''}" if not split or split.startswith("[") else split
    try:
        parts = datasets.ReadInstruction.from_spec(spec).to_absolute(sizes)
    except (ValueError, AssertionError) as error:
        raise ValueError(f"{split!r} does not select rows of {source}, as `test[:8]` does: {error}") from None
    rows = [(part.splitname, position) for part in parts for position in range(part.from_, part.to)]
    if not rows:
        raise ValueError(f"The split {split!r} selects none of the {sum(sizes.values())} rows of {source}.")
    return rows


def read_data(file: str) -> str:
    """Reads a file of the folder `data`, compressed if its name ends in `.gz`."""
    content = (DATA / file).read_bytes()
    return (gzip.decompress(content) if file.endswith(".gz") else content).decode()
