"""Code problems in the HumanEval schema, from the Hub or from a local file, checked row by row."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from trl_multiagent.code.dependencies import PARSE_ERRORS, names_in
from trl_multiagent.environments.dataset_rows import (
    LOCAL_SUFFIXES,
    check_fields,
    kind_of,
    load_rows,
    read_file,
    select_rows,
)
from trl_multiagent.tasks.code_generation.prompts import AUX
from trl_multiagent.tasks.problems import FIELDS, bound_names, check_problem


if TYPE_CHECKING:
    import datasets


DATASET_TYPES = ("humaneval", "coophumaneval", "mbpp")
MBPP_FIELDS = {"task_id": int, "prompt": str, "code": str, "test_imports": list, "test_list": list}


def load_code_dataset(
    name: str, split: str | None = None, type: str | None = None, num_agents: int = 2
) -> datasets.Dataset:
    """
    Loads code problems, and checks every row.

    Args:
        name (`str`): Id of a dataset on the Hub, path of a local `.jsonl`, `.json` or `.parquet` file, or a benchmark
            that comes with the package: `"humaneval"`, `"coophumaneval"` or `"mbpp"`. Without a network, the ids of
            these on the Hub give the package's copy.
        split (`str`, *optional*): Split, with or without a slice, in the syntax of `datasets`: `"test"`,
            `"test[33:163]"`, `"train[:10%]"`. A slice without a name, such as `"[16:]"`, is taken from the split
            `test`, or from the only split that the dataset has. `None` selects all rows of this split. A local file
            has one split, which may be given any name.
        type (`str`, *optional*): `"humaneval"`, `"coophumaneval"` or `"mbpp"`. Nothing depends on it: rows in MBPP's
            schema, which have a `test_list`, are always brought to HumanEval's.
        num_agents (`int`, *optional*, defaults to `2`): Size of the team. With 2 agents no problem may define `aux`,
            because this is the name of the helper.

    Returns:
        `datasets.Dataset`: Columns `task_id`, `prompt`, `entry_point`, `test` and, where the source has one,
        `canonical_solution`, all text.

    Raises:
        ValueError: a row is malformed, or its test cannot tell right answers from wrong ones; the message names the
        file, the
            row (counted from 1) and the field. Also if the `type` is unknown, or the `split` selects no rows.
        FileNotFoundError: a local file does not exist.
    """
    import datasets  # takes a second to import, and `--help` does not need it

    if type not in (None, *DATASET_TYPES):
        raise ValueError(f"Unknown dataset type {type!r}: expected one of {', '.join(DATASET_TYPES)}.")
    if name.endswith(LOCAL_SUFFIXES):
        rows, source = read_file(Path(name)), name
    else:
        config = "sanitized" if name == "google-research-datasets/mbpp" else None
        rows, source = load_rows(name, config, split), f"{name}, split {split or 'test'}"
    if not rows:
        raise ValueError(f"{source} has no rows.")
    test_field = "test"
    if "test_list" in rows[0]:  # as in MBPP, whatever the type: the peer's files give it others
        test_field = "test_list"
        rows = [mbpp_row(row, f"{source}, row {number}") for number, row in enumerate(rows, 1)]
    dataset = datasets.Dataset.from_list(_checked_rows(rows, source, test_field, num_agents))
    if name.endswith(LOCAL_SUFFIXES):
        dataset = select_rows(dataset, split, source)
    return dataset


def _checked_rows(rows: list[dict], source: str, test_field: str, num_agents: int) -> list[dict]:
    fields = [*FIELDS, "canonical_solution"] if any("canonical_solution" in row for row in rows) else FIELDS
    seen: dict[str, int] = {}  # for each id, the number of the row
    checked = []
    for number, row in enumerate(rows, 1):
        where = f"{source}, row {number}"
        prefix = check_problem(row, fields, where, test_field)
        first = seen.setdefault(row["task_id"], number)
        if first != number:
            raise ValueError(f"{where}: field `task_id` is {row['task_id']!r}, as in row {first}; ids must be unique.")
        if num_agents == 2 and (row["entry_point"] == AUX or AUX in bound_names(prefix)):
            field = "`entry_point` is" if row["entry_point"] == AUX else "`prompt` defines"
            raise ValueError(f"{where}: field {field} `{AUX}`, which is the name of the helper in a team of two.")
        checked.append({field: row[field] for field in fields})
    return checked


# MBPP


def mbpp_row(row: dict, where: str) -> dict:
    """
    Converts a row of sanitized MBPP to the schema of HumanEval.

    The prompt consists of the reference solution's imports and the signature of its function, with the task as
    docstring. Helper functions of the reference belong to the solution, so they follow the body in
    `canonical_solution`. If the signature needs them, they precede it in the prompt.
    """
    check_fields(row, MBPP_FIELDS, where)
    for field in ("test_imports", "test_list"):
        for text in row[field]:
            if not isinstance(text, str):
                raise ValueError(f"{where}: field `{field}` must hold text, not {kind_of(text)}.")
    code = _parsed(row["code"], f"{where}: field `code`")
    asserts = [_mbpp_assert(test, where) for test in row["test_list"]]
    if not asserts:
        raise ValueError(f"{where}: field `test_list` is empty.")
    tested = [
        node
        for node in code.body
        if isinstance(node, ast.FunctionDef) and all(node.name in names_in(test) for test in asserts)
    ]
    if not tested:
        raise ValueError(f"{where}: field `code` defines no function that every entry of `test_list` calls.")
    function = tested[-1]

    imports = [node for node in code.body if isinstance(node, ast.Import | ast.ImportFrom)]
    helpers = [node for node in code.body if node not in imports and node is not function]
    solution = function.body[1:] if ast.get_docstring(function) is not None else function.body
    function.body = [ast.Expr(ast.Constant(f" {row['prompt'].strip()}\n    "))]
    needed_first = bool(names_in(function) & bound_names(_source(helpers)))
    prompt = _source([function])
    function.body = function.body + solution
    body = _source([function]).removeprefix(prompt)
    for name in (node for test in asserts for node in ast.walk(test) if isinstance(node, ast.Name)):
        name.id = "candidate" if name.id == function.name else name.id
    (check,) = (node for node in ast.parse("def check(candidate): pass").body if isinstance(node, ast.FunctionDef))
    check.body = [*asserts]
    return {
        "task_id": f"MBPP/{row['task_id']}",
        "prompt": _sections(_source(imports), _source(helpers) if needed_first else "", prompt),
        "entry_point": function.name,
        "canonical_solution": _sections(body.strip("\n"), "" if needed_first else _source(helpers)),
        "test": _sections("\n".join(row["test_imports"]), _source([check])),
    }


def _mbpp_assert(test: str, where: str) -> ast.Assert:
    body = _parsed(test, f"{where}: field `test_list`, {test!r}").body
    if len(body) != 1 or not isinstance(body[0], ast.Assert):
        raise ValueError(f"{where}: field `test_list`, {test!r} is not one assert.")
    return body[0]


def _parsed(source: str, where: str) -> ast.Module:
    try:
        return ast.parse(source)
    except PARSE_ERRORS as error:
        raise ValueError(f"{where} is not Python source: {error}.") from None


def _source(nodes: Sequence[ast.stmt]) -> str:
    return ast.unparse(ast.fix_missing_locations(ast.Module([*nodes], type_ignores=[]))).strip("\n")


def _sections(*sources: str) -> str:
    return "\n\n\n".join(source for source in sources if source) + "\n"
