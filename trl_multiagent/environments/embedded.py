"""Reads the benchmarks that come with the package, so that recipes run without a network. `data/README.md` has their sources and licences."""

from __future__ import annotations

import gzip
import json
from importlib.resources import files


Splits = dict[str, list[dict]]

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
MBPP_SPLITS = {"prompt": range(1, 11), "test": range(11, 511), "validation": range(511, 601), "train": range(601, 975)}


def is_short_name(name: str) -> bool:
    """Returns whether `name` is the package's own name of a benchmark. Other names in `EMBEDDED` are those of the Hub."""
    return name in EMBEDDED and "/" not in name


def read_embedded(name: str, split: str | None) -> list[dict]:
    """Reads the rows of an embedded benchmark, a key of `EMBEDDED`, that a split selects, see [`read_split`]."""
    splits = embedded_splits(name)
    chosen = read_split(split, {key: len(rows) for key, rows in splits.items()}, name)
    return [splits[key][position] for key, position in chosen]


def read_split(split: str | None, sizes: dict[str, int], source: str) -> list[tuple[str, int]]:
    """
    Returns the rows that a split such as `"train[:8]"` selects, each as the name of its split and its position there. `sizes`: the numbers
    of rows. Without a name, the split is `test`. Raises `ValueError` if it does not exist, is malformed, or selects no rows of `source`.
    """
    import datasets  # takes a second to import

    spec = f"test{split or ''}" if not split or split.startswith("[") else split
    try:
        parts = datasets.ReadInstruction.from_spec(spec).to_absolute(sizes)
    except (ValueError, AssertionError) as error:
        raise ValueError(f"{split!r} does not select rows of {source}: {error}") from None
    rows = [(part.splitname, position) for part in parts for position in range(part.from_, part.to)]
    if not rows:
        raise ValueError(f"The split {split!r} selects none of the {sum(sizes.values())} rows of {source}.")
    return rows


def read_data(file: str) -> str:
    """Reads a compressed file of the folder `data`."""
    return gzip.decompress((files("trl_multiagent") / "data" / file).read_bytes()).decode()


def embedded_splits(name: str) -> Splits:
    """Reads all splits of an embedded benchmark."""
    file, split = EMBEDDED[name]
    rows = [json.loads(line) for line in read_data(f"{file}.jsonl.gz").splitlines()]
    if split == "by id":
        return {key: [row for row in rows if row["task_id"] in ids] for key, ids in MBPP_SPLITS.items()}
    return {split: rows}
