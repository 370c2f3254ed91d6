"""Code problems in the HumanEval schema, from the Hub or from a local file, checked row by row."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from trl_multiagent.sandbox.asserts import read_asserts

from .checks import PARSE_ERRORS, bound_names, source_problem, unusable_test


if TYPE_CHECKING:
    import datasets


DATASET_TYPES = ("humaneval", "coophumaneval", "mbpp")
LOCAL_SUFFIXES = (".jsonl", ".json", ".parquet")
FIELDS = ("task_id", "prompt", "entry_point", "test")
MBPP_FIELDS = {"task_id": int, "prompt": str, "code": str, "test_imports": list, "test_list": list}
AUX = "aux"  # what the helper's agent of a team calls its function
BYTE_ORDER_MARK = "\ufeff"


@dataclass(frozen=True)
class Problem:
    """
    What the prompt of a problem gives, read from its syntax tree.

    Args:
        prefix (`str`): Source before the entry point: imports, constants and helper functions. May be empty.
        signature (`str`): Header of the entry point on one line, from `def` to the colon.
    """

    prefix: str
    signature: str


@lru_cache(maxsize=8192)
def read_problem(prompt: str, entry_point: str) -> Problem:
    """
    Splits a prompt into what stands before the entry point and the entry point's signature.

    Raises:
        `ValueError`: If the prompt does not parse or does not define the entry point as a function at its top level.
    """
    prompt = prompt.removeprefix(BYTE_ORDER_MARK).replace("\r\n", "\n")
    try:
        tree = ast.parse(prompt)
    except PARSE_ERRORS:
        try:
            tree = ast.parse(f"{prompt.rstrip()}\n    pass\n")  # a signature without a docstring has no body yet
        except PARSE_ERRORS as error:
            raise ValueError(f"it is not Python source: {error}") from None
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == entry_point]
    if not functions:
        raise ValueError(f"it does not define the entry point `{entry_point}`")
    function = functions[-1]
    first_line = min([function.lineno, *(decorator.lineno for decorator in function.decorator_list)])
    returns = f" -> {ast.unparse(function.returns)}" if function.returns else ""
    return Problem(
        prefix="\n".join(prompt.split("\n")[: first_line - 1]).strip("\n"),
        signature=f"def {entry_point}({ast.unparse(function.args)}){returns}:",
    )


def load_code_dataset(
    name: str, split: str | None = None, type: str | None = None, num_agents: int = 2
) -> datasets.Dataset:
    """
    Loads code problems and checks every row.

    Args:
        name (`str`):
            Id of a dataset on the Hub, or path of a local `.jsonl`, `.json` or `.parquet` file.
        split (`str`, *optional*):
            Split, with or without a slice, as `datasets` reads it: `"test"`, `"test[33:163]"`, `"train[:10%]"`. A bare
            slice, `"[16:]"`, takes the split `test`, or the only one there is; so does `None`, whole. A local file is
            one split that answers to any name.
        type (`str`, *optional*):
            `"humaneval"`, `"coophumaneval"` or `"mbpp"`; inferred from `name` by default. Rows of `"mbpp"` may come in
            MBPP's own schema, and are then brought to HumanEval's.
        num_agents (`int`, *optional*, defaults to `2`):
            Size of the team. With 2 agents no problem may use the name `aux`, which is that of the helper.

    Returns:
        `datasets.Dataset`: Columns `task_id`, `prompt`, `entry_point`, `test` and, where the source has one,
        `canonical_solution`, all text.

    Raises:
        `ValueError`: If a row is malformed, or its test can judge no answer; the message names the file, the row (from
            1) and the field. Also for an unknown `type`, or a `split` that selects nothing.
        `FileNotFoundError`: If a local file does not exist.
    """
    import datasets  # takes a second, and `--help` does not need it

    type = _dataset_type(name, type)
    if name.endswith(LOCAL_SUFFIXES):
        rows, source = _read_file(Path(name)), name
    else:
        config = "sanitized" if name == "google-research-datasets/mbpp" else None
        split = _hub_split(name, config, split)
        rows, source = datasets.load_dataset(name, config, split=split).to_list(), f"{name}, split {split}"
    if not rows:
        raise ValueError(f"{source} has no rows.")
    rows = [_without_marks(row) for row in rows]
    test_field = "test"
    if type == "mbpp" and "test_list" in rows[0]:
        test_field = "test_list"
        rows = [_mbpp_row(row, f"{source}, row {number}") for number, row in enumerate(rows, 1)]
    dataset = datasets.Dataset.from_list(_checked_rows(rows, source, test_field, num_agents))
    if name.endswith(LOCAL_SUFFIXES):
        dataset = _slice(dataset, split, source)
    return dataset


def _dataset_type(name: str, type: str | None) -> str:
    if type is None:
        lowered = name.lower()
        found = [kind for kind in ("mbpp", "coop", "humaneval") if kind in lowered]
        if not found:
            raise ValueError(
                f"The kind of problems in {name!r} cannot be told from its name: give the dataset's type, one of "
                f"{', '.join(DATASET_TYPES)}."
            )
        return "coophumaneval" if found[0] == "coop" else found[0]
    if type not in DATASET_TYPES:
        raise ValueError(f"Unknown dataset type {type!r}: expected one of {', '.join(DATASET_TYPES)}.")
    return type


# Reading and slicing


def _read_file(path: Path) -> list[dict]:
    if not path.is_file():
        raise FileNotFoundError(f"There is no file {path}: give the path of a .jsonl, .json or .parquet file.")
    if path.suffix == ".parquet":
        import pyarrow.parquet

        return pyarrow.parquet.read_table(path).to_pylist()
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text: {error}.") from None
    if path.suffix == ".json":
        try:
            rows = json.loads(text)
        except ValueError as error:
            raise ValueError(f"{path} is not JSON: {error}.") from None
        if not isinstance(rows, list):
            raise ValueError(f"{path} must hold a list of rows, not {_kind(rows)}.")
    else:
        rows = []
        for number, line in enumerate(text.split("\n"), 1):
            try:
                line = line.strip().removeprefix(BYTE_ORDER_MARK)  # of files that were put together
                rows += [json.loads(line)] if line else []
            except ValueError as error:
                raise ValueError(f"{path}, row {number} is not a line of JSON: {error}.") from None
    for number, row in enumerate(rows, 1):
        if not isinstance(row, dict):
            raise ValueError(f"{path}, row {number} must be an object with the fields of a problem, not {_kind(row)}.")
    return rows


def _hub_split(name: str, config: str | None, split: str | None) -> str:
    if split and not split.startswith("["):
        return split
    import datasets

    names = datasets.get_dataset_split_names(name, config)
    if len(names) > 1 and "test" not in names:
        raise ValueError(f"{name} has the splits {', '.join(names)}: name one, e.g. {names[0]}{split or ''}.")
    return ("test" if "test" in names else names[0]) + (split or "")


def _slice(dataset: datasets.Dataset, split: str | None, source: str) -> datasets.Dataset:
    if not split:
        return dataset
    import datasets

    spec = f"test{split}" if split.startswith("[") else split
    only_split = re.match(r"\w*", spec).group()  # a file's one split takes the name it is asked by
    try:
        instructions = datasets.ReadInstruction.from_spec(spec).to_absolute({only_split: len(dataset)})
    except (ValueError, AssertionError) as error:
        raise ValueError(f"{split!r} does not select rows of {source}: {error}") from None
    indices = [index for part in instructions for index in range(part.from_, part.to)]
    if not indices:
        raise ValueError(f"The split {split!r} selects none of the {len(dataset)} rows of {source}.")
    return dataset.select(indices)


# Checking


def _without_marks(row: dict) -> dict:
    """A row whose texts do not begin with a byte-order mark, which Python would not parse."""
    return {
        field: value.removeprefix(BYTE_ORDER_MARK) if isinstance(value, str) else value for field, value in row.items()
    }


def _checked_rows(rows: list[dict], source: str, test_field: str, num_agents: int) -> Iterable[dict]:
    fields = [*FIELDS, "canonical_solution"] if any("canonical_solution" in row for row in rows) else FIELDS
    seen = {}
    checked = []
    for number, row in enumerate(rows, 1):
        where = f"{source}, row {number}"
        _check_fields(row, dict.fromkeys(fields, str), where)
        first = seen.setdefault(row["task_id"], number)
        if first != number:
            raise ValueError(f"{where}: field `task_id` is {row['task_id']!r}, as in row {first}; ids must be unique.")
        try:
            prefix = read_problem(row["prompt"], row["entry_point"]).prefix
        except ValueError as error:
            raise ValueError(f"{where}: field `prompt` is malformed: {error}.") from None
        if num_agents == 2 and row["entry_point"] == AUX:
            raise ValueError(f"{where}: field `entry_point` is `{AUX}`, which is the helper's name in a team of two.")
        if problem := source_problem(prefix, {row["entry_point"]}):
            raise ValueError(f"{where}: field `prompt` {problem}.")
        if num_agents == 2 and AUX in bound_names(prefix):
            raise ValueError(f"{where}: field `prompt` defines `{AUX}`, which is the helper's name in a team of two.")
        if problem := unusable_test(row["test"], prefix, row["entry_point"]):
            raise ValueError(f"{where}: field `{test_field}` {problem}.")
        checked.append({field: row[field] for field in fields})
    return checked


def _check_fields(row: dict, fields: dict[str, type], where: str) -> None:
    for field, kind in fields.items():
        if row.get(field) is None:
            raise ValueError(f"{where}: field `{field}` is missing.")
        value = row[field]
        if not isinstance(value, kind) or isinstance(value, bool):
            raise ValueError(f"{where}: field `{field}` must be {_kind(kind())}, not {_kind(value)}.")
        if isinstance(value, str) and not value.strip():
            raise ValueError(f"{where}: field `{field}` is empty.")


def count_asserts(test: str) -> int:
    """Number of asserts in a test; `assert True` is none."""
    return len(read_asserts(test).sources)


def _kind(value: object) -> str:
    names = {
        str: "text",
        int: "an integer",
        float: "a number",
        bool: "true or false",
        list: "a list",
        dict: "an object",
    }
    return names.get(value.__class__, value.__class__.__name__)


# MBPP


class _AskCandidate(ast.NodeTransformer):
    """Lets the asserts call `candidate` instead of the function's own name."""

    def __init__(self, entry_point: str):
        self.entry_point = entry_point

    def visit_Name(self, node: ast.Name) -> ast.Name:
        return ast.Name("candidate", node.ctx) if node.id == self.entry_point else node


def _mbpp_row(row: dict, where: str) -> dict:
    """
    Brings a row of sanitized MBPP to the HumanEval schema.

    The prompt holds the imports of the reference solution and its function's real signature, with the task as
    docstring. Helper functions of the reference are part of the solution, not of the problem: they follow the body in
    `canonical_solution`, unless the signature itself needs them.
    """
    _check_fields(row, MBPP_FIELDS, where)
    for field in ("test_imports", "test_list"):
        for text in row[field]:
            if not isinstance(text, str):
                raise ValueError(f"{where}: field `{field}` must hold text, not {_kind(text)}.")
    try:
        code = ast.parse(row["code"])
    except PARSE_ERRORS as error:
        raise ValueError(f"{where}: field `code` is not Python source: {error}.") from None
    asserts = [_mbpp_assert(test, where) for test in row["test_list"]]
    if not asserts:
        raise ValueError(f"{where}: field `test_list` is empty.")
    called = [{node.id for node in ast.walk(test) if isinstance(node, ast.Name)} for test in asserts]
    tested = [
        node for node in code.body if isinstance(node, ast.FunctionDef) and all(node.name in names for names in called)
    ]
    if not tested:
        raise ValueError(f"{where}: field `code` defines no function that every entry of `test_list` calls.")
    function = tested[-1]

    imports = [node for node in code.body if isinstance(node, ast.Import | ast.ImportFrom)]
    helpers = [node for node in code.body if node not in imports and node is not function]
    solution = function.body[1:] if ast.get_docstring(function) is not None else function.body
    function.body = [ast.Expr(ast.Constant(f" {row['prompt'].strip()}\n    "))]
    header = {node.id for node in ast.walk(function) if isinstance(node, ast.Name)}
    needed_first = any(_defined_name(node) in header for node in helpers)
    prompt = _source([function])
    function.body = function.body + solution
    body = _source([function]).removeprefix(prompt)
    check = ast.parse("def check(candidate): pass").body[0]
    check.body = [_AskCandidate(function.name).visit(test) for test in asserts]
    return {
        "task_id": f"MBPP/{row['task_id']}",
        "prompt": _sections(_source(imports), _source(helpers) if needed_first else "", prompt),
        "entry_point": function.name,
        "canonical_solution": _sections(body.strip("\n"), "" if needed_first else _source(helpers)),
        "test": _sections("\n".join(row["test_imports"]), _source([check])),
    }


def _mbpp_assert(test: str, where: str) -> ast.Assert:
    try:
        body = ast.parse(test).body
    except PARSE_ERRORS as error:
        raise ValueError(f"{where}: field `test_list`, {test!r} is not Python source: {error}.") from None
    if len(body) != 1 or not isinstance(body[0], ast.Assert):
        raise ValueError(f"{where}: field `test_list`, {test!r} is not one assert.")
    return body[0]


def _defined_name(node: ast.stmt) -> str | None:
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return node.name
    if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
        return node.targets[0].id
    return None


def _source(nodes: list[ast.stmt]) -> str:
    return ast.unparse(ast.fix_missing_locations(ast.Module(nodes, type_ignores=[]))).strip("\n")


def _sections(*sources: str) -> str:
    return "\n\n\n".join(source for source in sources if source) + "\n"
