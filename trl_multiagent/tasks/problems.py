"""Problems in the schema of HumanEval: a prompt that specifies a function, and a test of that function."""

import ast
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

from trl_multiagent.code.checks import source_problem, unusable_test
from trl_multiagent.code.dependencies import PARSE_ERRORS
from trl_multiagent.code.sandbox.asserts import read_asserts
from trl_multiagent.environments.dataset_rows import check_fields


FIELDS = ("task_id", "prompt", "entry_point", "test")


@dataclass(frozen=True)
class Problem:
    """The parts of a problem's prompt."""

    prefix: str  # source before the entry point: imports, constants and helper functions
    signature: str  # header of the entry point on one line, from `def` to the colon


@lru_cache(maxsize=8192)
def read_problem(prompt: str, entry_point: str) -> Problem:
    """
    Splits a prompt into the source before the entry point, and the entry point's signature. Raises `ValueError` if the
    prompt does not parse or does not define the entry point as a function at its top level.
    """
    prompt = prompt.replace("\r\n", "\n")
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


def check_problem(row: dict, fields: Iterable[str], where: str, test_field: str = "test") -> str:
    """
    Refuses a row that lacks one of the `fields`, all text, or whose test cannot tell right answers from wrong ones.
    Returns the source before the entry point. The `ValueError` begins with `where`, the file and number of the row,
    and names the field; `test_field` is that of the user's file from which the test was made.
    """
    check_fields(row, dict.fromkeys(fields, str), where)
    try:
        prefix = read_problem(row["prompt"], row["entry_point"]).prefix
    except ValueError as error:
        raise ValueError(f"{where}: field `prompt` is malformed: {error}.") from None
    if problem := source_problem(prefix, {row["entry_point"]}):
        raise ValueError(f"{where}: field `prompt` {problem}.")
    if problem := unusable_test(row["test"], prefix, row["entry_point"]):
        raise ValueError(f"{where}: field `{test_field}` {problem}.")
    return prefix


def count_asserts(test: str) -> int:
    """Returns the number of asserts in a test that can fail. `assert True` does not count."""
    return len(read_asserts(test).sources)
