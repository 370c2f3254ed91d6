"""
Reads the rows of a dataset from the package or a local file, selects a split of it, and checks the fields of rows.

With the data of the package, recipes run without a network. `data/README.md` has its sources and licences.
"""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trl_multiagent.console import tell
from trl_multiagent.environments.base import ID_COLUMNS


if TYPE_CHECKING:
    import datasets
    from datasets import Dataset
else:
    Dataset = Any  # `datasets` takes a second to import

Datasets = tuple[Dataset, Dataset | None]  # to train on, and to evaluate on

LOCAL_SUFFIXES = (".jsonl", ".json", ".parquet")
LOCAL_FILE = f"{', '.join(LOCAL_SUFFIXES[:-1])} or {LOCAL_SUFFIXES[-1]} file"  # for messages
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


# The data of the package


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


# Files


def check_name(name: str) -> None:
    """Raises `ValueError` if the setting `dataset.name` is the path of a file that is missing, or of another kind."""
    path, is_local = Path(name), name.endswith(LOCAL_SUFFIXES)
    if path.is_file() and not is_local:
        raise ValueError(f"`dataset.name` is {name}; give a Hub id or a path of a {LOCAL_FILE}.")
    if not path.exists() and (is_local or name.startswith(("/", "./", "../"))):
        raise ValueError(f"`dataset.name` is {name!r}, but there is no such file in {Path.cwd()}.")


def read_file(path: Path) -> list[dict]:
    """
    Reads the rows of a local file, `.jsonl`, `.json` or `.parquet`. Raises `FileNotFoundError`, or, if the file is not
    JSON in UTF-8 or a row is not an object, a `ValueError` that names the file.
    """
    if not path.is_file():
        raise FileNotFoundError(f"There is no file {path}: give the path of a {LOCAL_FILE}.")
    if path.suffix == ".parquet":
        import pyarrow.parquet

        return pyarrow.parquet.read_table(path).to_pylist()
    try:
        text = path.read_text(encoding="utf-8-sig")
        parts = [text] if path.suffix == ".json" else text.split("\n")
        values, number = [], 0
        for part in parts:
            number += 1
            values += [json.loads(part)] if part.strip() else []
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text: {error}.") from None
    except ValueError as error:
        raise ValueError(f"{path}, row {number} is not JSON: {error}.") from None
    rows = values[0] if path.suffix == ".json" and values else values
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise ValueError(f"{path} must hold rows, each an object with named fields.")
    return rows


def make_dataset(rows: list[dict], source: str) -> datasets.Dataset:
    """
    Makes a dataset of rows. A field that a row lacks is null in it. Raises a `ValueError` that names `source` if a
    field has values of different types.
    """
    import datasets
    import pyarrow

    fields = dict.fromkeys(field for row in rows for field in row)
    try:
        return datasets.Dataset.from_list([{field: row.get(field) for field in fields} for row in rows])
    except (pyarrow.ArrowException, TypeError, ValueError, OverflowError) as error:
        raise ValueError(
            f"{source} cannot be read as a table, in which a field has one type: {' '.join(str(error).split())}"
        ) from error


def check_columns(dataset: datasets.Dataset, columns: list[str], source: str) -> None:
    """Raises `ValueError` if one of these columns, which prompts need, is missing or has a null."""
    for column in columns:
        if column not in dataset.column_names:
            raise ValueError(f"A prompt needs the column {column!r}; {source} has {', '.join(dataset.column_names)}.")
        if None in dataset[column]:
            raise ValueError(
                f"{source}, row {list(dataset[column]).index(None) + 1}: field `{column}` is missing or null, but a "
                "prompt needs it."
            )


def load_rows(name: str, config: str | None, split: str | None) -> list[dict]:
    """
    Loads the rows of a dataset of the package, on the Hub, or in a local file.

    If the Hub cannot be reached, the package's copy is read if there is one, and a warning says so.

    Args:
        name (`str`): A key of `EMBEDDED`, the id of a dataset on the Hub, or the path of a local file.
        config (`str`, *optional*): Configuration of the dataset on the Hub.
        split (`str`, *optional*): Split in the syntax of `datasets`. Without a name, it is `test` or the only split.

    Raises:
        ValueError: the dataset cannot be loaded, or the split selects no rows.
        ConnectionError: the Hub cannot be reached.
    """
    if name in SHORT_NAMES:
        return read_embedded(name, split)
    if name.endswith(LOCAL_SUFFIXES):
        return load_file(name, split).to_list()
    try:
        return load_from_hub(name, config, hub_split(name, config, split)).to_list()
    except ConnectionError:
        if name not in EMBEDDED:
            raise
        tell(f"The Hub cannot be reached, so {name} is read from the copy in this package.")
        return read_embedded(name, split)


def hub_split(name: str, config: str | None, split: str | None) -> str:
    """
    Returns the split to load from the Hub. If `split` has no name, it is `test`, or the only split of the dataset.
    Raises `ValueError` if it has several, and none of them is `test`.
    """
    if split and not split.startswith("["):
        return split
    import datasets

    names = datasets.get_dataset_split_names(name, config)
    if len(names) > 1 and "test" not in names:
        raise ValueError(f"{name} has the splits {', '.join(names)}: name one, e.g. {names[0]}{split or ''}.")
    return ("test" if "test" in names else names[0]) + (split or "")


def load_from_hub(name: str, config: str | None, split: str) -> datasets.Dataset:
    """
    Loads rows of a dataset on the Hub. Raises `ConnectionError` if the Hub cannot be reached, and `ValueError` if the
    dataset cannot be loaded, for example because it is a script.
    """
    import datasets

    try:
        return datasets.load_dataset(name, config, split=split)
    except (RuntimeError, datasets.exceptions.DatasetBuildError) as error:
        raise ValueError(f"{name} cannot be loaded: {' '.join(str(error).split())}") from error


def load_file(name: str, split: str | None) -> datasets.Dataset:
    """Loads the rows of a local file, see [`read_file`] and [`select_rows`]."""
    return select_rows(make_dataset(read_file(Path(name)), name), split, name)


def select_rows(dataset: datasets.Dataset, split: str | None, source: str) -> datasets.Dataset:
    """Selects the rows of a local file, see [`read_split`]. The file has only one split, so any name is accepted."""
    if not split:
        return dataset
    only_split = re.split(r"\W", split, maxsplit=1)[0] or "test"
    return dataset.select([position for _, position in read_split(split, {only_split: len(dataset)}, source)])


def check_fields(row: dict, fields: dict[str, type], where: str) -> None:
    """
    Raises `ValueError` if a field of a row is missing, is empty, or has another type than in `fields`. The message
    names the field and begins with `where`, the file and number of the row.
    """
    for field, required_type in fields.items():
        value = row.get(field)
        if value is None:
            raise ValueError(f"{where}: field `{field}` is missing.")
        if not isinstance(value, required_type) or isinstance(value, bool):
            raise ValueError(f"{where}: field `{field}` must be {kind_of(required_type())}, not {kind_of(value)}.")
        if isinstance(value, str) and not value.strip():
            raise ValueError(f"{where}: field `{field}` is empty.")


def kind_of(value: object) -> str:
    """Returns the type of a value in words."""
    names = {
        str: "text",
        int: "an integer",
        float: "a number",
        bool: "true or false",
        list: "a list",
        dict: "an object",
    }
    return names.get(type(value), type(value).__name__)


def item_ids(dataset: Dataset) -> list[str]:
    """Returns the name of each item: its `item_id`, `task_id` or `id` if these all differ, else its number."""
    for column in ID_COLUMNS:
        if column in dataset.column_names:
            names = [str(value) for value in dataset[column]]
            if len(set(names)) == len(names):
                return names
    return [str(k) for k in range(len(dataset))]
