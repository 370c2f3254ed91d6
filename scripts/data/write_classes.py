"""
Writes the items of class completion from classes in the format of ClassEval.

    python scripts/data/write_classes.py classes.jsonl items.jsonl
    python scripts/data/write_classes.py ClassEval.jsonl trl_multiagent/data/classeval.jsonl.gz  # about a minute

The input needs `task_id`, `class_name`, `skeleton`, `solution_code` and `test` (a module of `unittest`), all text, and
`methods_info` and `import_statement`, lists. The reference of each class runs twice, and constants run in place of all
methods; see `find_tests`. To be run after a change of the data, or of how answers are merged, on a machine whose
sandbox can give programs a folder.
"""

import ast
import contextlib
import sys
from dataclasses import replace
from pathlib import Path

from write_bugs import read_rows, write_rows

from trl_multiagent.code.dependencies import PARSE_ERRORS
from trl_multiagent.code.sandbox import Program, Sandbox
from trl_multiagent.environments.dataset_rows import check_fields
from trl_multiagent.tasks.class_completion.environment import (
    find_class,
    functions_of,
    passed_by,
    program_of,
    read_class,
)


FIELDS: dict[str, type] = {
    **dict.fromkeys(("task_id", "class_name", "skeleton", "solution_code", "test"), str),
    **dict.fromkeys(("methods_info", "import_statement"), list),
}
METHOD_FIELDS: dict[str, type] = dict.fromkeys(("method_name", "test_class"), str)
# What a method can return without any work. A test method that passes with one of them in place of all methods earns
# nothing
CONSTANTS = ("None", "True", "0", "''", "[]")
ENOUGH = 0.8  # share of its test methods that a class's reference must pass
LEFT_OUT = {"ClassEval_17", "ClassEval_58"}  # whose tests depend on today's date, or on chance
# Typographic quotes and spaces, which some skeletons have in place of Python's
STRAIGHT = str.maketrans(
    {"\u2018": "'", "\u2019": "'", "\u201c": '"', "\u201d": '"', "\u00a0": " ", "\u200b": None, "\ufeff": None}
)


def make_item(row: dict, where: str) -> dict:
    """
    Returns the item of a row, before its tests were tried. Of each of its `methods`, it has the test class,
    `method_tests`; the other methods that the reference calls in it, `uses`; the reference's number of statements,
    `weights`; and the number of parameters in the skeleton with `self`, `parameters`. Raises `ValueError`, which
    begins with `where`, if the row is malformed.
    """
    check_fields(row, FIELDS, where)
    for number, method in enumerate(row["methods_info"], 1):
        if not isinstance(method, dict):
            raise ValueError(f"{where}: entry {number} of `methods_info` is no mapping.")
        check_fields(method, METHOD_FIELDS, f"{where}, entry {number} of `methods_info`")
    try:
        ast.parse("\n".join(row["import_statement"]))
    except (TypeError, *PARSE_ERRORS) as error:
        raise ValueError(f"{where}: `import_statement` must be a list of import statements: {error}.") from None
    bodies = read_methods(row["solution_code"], row["class_name"], where)
    skeleton = clean_skeleton(row)
    headers = read_methods(skeleton, row["class_name"], where)
    tests = {method["method_name"]: method["test_class"] for method in row["methods_info"]}
    names = [name for name in headers if name in tests and name in bodies]
    if not names:
        raise ValueError(f"{where}: no method of the skeleton is in both `methods_info` and `solution_code`.")
    inside = [[*ast.walk(bodies[name])] for name in names]
    attributes = [{node.attr for node in nodes if isinstance(node, ast.Attribute)} for nodes in inside]
    arguments = [[x for x in ast.iter_child_nodes(headers[name].args) if isinstance(x, ast.arg)] for name in names]
    return {
        **{field: row[field] for field in ("task_id", "class_name", "test")},
        "skeleton": skeleton,
        "imports": "\n".join(row["import_statement"]),
        "reference": row["solution_code"],
        "methods": names,
        "method_tests": [tests[name] for name in names],
        "uses": [sorted(found & {*names} - {name}) for name, found in zip(names, attributes, strict=True)],
        "weights": [sum(isinstance(node, ast.stmt) for node in nodes) for nodes in inside],
        "parameters": [len(own) for own in arguments],
    }


def read_methods(source: str, class_name: str, where: str) -> dict[str, ast.FunctionDef]:
    """
    Returns the methods of a class in the dataset. Raises `ValueError` if there is no such class; the message begins
    with `where`.
    """
    try:
        owner = find_class(ast.parse(source), class_name)
    except PARSE_ERRORS as error:
        raise ValueError(f"{where}: `skeleton` or `solution_code` is not Python source: {error}.") from None
    if owner is None:
        raise ValueError(f"{where}: `skeleton` or `solution_code` has no class `{class_name}`.")
    return {node.name: node for node in functions_of(owner)}


def clean_skeleton(row: dict) -> str:
    """
    Returns the text of a row's skeleton, with straight quotes. If it is still not Python, it is made of the reference
    without the bodies of the methods to write.
    """
    text = row["skeleton"].translate(STRAIGHT)
    with contextlib.suppress(ValueError):
        read_methods(text, row["class_name"], "")
        return text
    tree = ast.parse(row["solution_code"])
    texts = {method["method_name"]: method.get("method_description") or "" for method in row["methods_info"]}
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.name in texts:
            description = texts[node.name].partition('"""')[2].rpartition('"""')[0].strip()
            node.body = [ast.Expr(ast.Constant(description))]
    return ast.unparse(ast.fix_missing_locations(tree))


def find_tests(items: list[dict], sandbox: Sandbox) -> list[dict | None]:
    """
    Runs references and constants on the tests of some items; if a reference fails, again with a folder where the
    sandbox can give one. Returns the columns `tests`, `counting`, `check_timeout` and `folder` of each; `None` if the
    tests cannot tell right from wrong.
    """
    found = _find_tests(items, sandbox)
    failed = [k for k, columns in enumerate(found) if columns is None]
    if failed and sandbox.has_folders():
        with_folder = _find_tests([items[k] | {"folder": True} for k in failed], sandbox)
        found = [columns or with_folder.pop(0) for columns in found]
    return found


def _find_tests(items: list[dict], sandbox: Sandbox) -> list[dict | None]:
    references = [single_program(item, item["reference"]) for item in items]
    first = sandbox.run(references)
    # enough for each test, because this is twice the time of all of them
    limits = [min(sandbox.check_timeout, max(1.0, round(2 * verdict.cpu_seconds, 1))) for verdict in first]
    again = sandbox.run([replace(p, check_timeout=limit) for p, limit in zip(references, limits, strict=True)])
    tests = [sorted(passed_by(one) & passed_by(other)) for one, other in zip(first, again, strict=True)]
    kept = [k for k, verdict in enumerate(first) if tests[k] and len(tests[k]) >= ENOUGH * verdict.total]
    programs = [single_program(items[k], constant(items[k], x)) for k in kept for x in CONSTANTS]
    trivial = iter(sandbox.run([replace(p, check_timeout=1.0) for p in programs]))
    found: list[dict | None] = [None] * len(items)
    for k in kept:
        passed = set().union(*(passed_by(next(trivial)) for _ in CONSTANTS))
        of_methods = [test for test in tests[k] if test.split(".")[0] in items[k]["method_tests"]]
        if counting := [test for test in of_methods if test not in passed]:
            own = {"check_timeout": limits[k], "folder": references[k].folder}
            found[k] = {"tests": tests[k], "counting": counting, **own}
    return found


def constant(item: dict, value: str) -> str:
    """Returns an answer in which every method returns a constant."""
    return "".join(f"def {name}(*args, **kwargs):\n    return {value}\n" for name in item["methods"])


def single_program(item: dict, answer: str) -> Program:
    """Returns the program of a single agent's answer to an item."""
    return program_of(item, [read_class(answer, item["class_name"])], [item["methods"]])


def main() -> None:
    items = [make_item(row, f"{sys.argv[1]}, row {k}") for k, row in enumerate(read_rows(sys.argv[1]), 1)]
    with Sandbox(check_timeout=10.0) as sandbox:
        assert sandbox.has_folders()
        found = find_tests(items, sandbox)
    for item, columns in zip(items, found, strict=True):
        if item["task_id"] in LEFT_OUT or columns is None:
            columns = dict.fromkeys(("tests", "counting", "check_timeout", "folder"))
        item |= columns
    write_rows(items, Path(sys.argv[2]))


if __name__ == "__main__":
    main()
