"""
Problems in the schema of HumanEval: a prompt that specifies a function, and a test of that function.

A test that cannot tell right answers from wrong ones is refused. It is read, not run, so a test that the reference
solution fails, or whose asserts are never reached, is not found here.
"""

import ast
import builtins
import importlib.util
import sys
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

from trl_multiagent.code.dependencies import FUNCTIONS, PARSE_ERRORS, all_tables, names_in, read_globals
from trl_multiagent.code.sandbox.program import read_asserts
from trl_multiagent.environments.dataset_rows import check_fields


FIELDS = ("task_id", "prompt", "entry_point", "test")
MODULE_NAMES = {*dir(builtins), "__file__", "__annotations__"}


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


def unusable_test(test: str, setup: str, entry_point: str) -> str:
    """
    Explains why a test cannot tell right answers from wrong ones. The result is empty if no reason was found.

    Args:
        test (`str`): Module source that defines `check(candidate)`.
        setup (`str`): Source that runs before the test in the same namespace.
        entry_point (`str`): Name of the function under test. The test may call it by this name or as `candidate`.
    """
    known = {entry_point, "candidate"} | bound_names(setup)
    if problem := source_problem(test, known):
        return problem
    tree = ast.parse(test)
    check = [node for node in tree.body if isinstance(node, FUNCTIONS) and node.name == "check"][-1:]
    if not check:
        return "does not define `check(candidate)` at its top level"
    arguments = check[0].args
    others = arguments.vararg or arguments.kwonlyargs or arguments.kwarg
    names = [argument.arg for argument in arguments.posonlyargs + arguments.args]
    if not isinstance(check[0], ast.FunctionDef) or len(names) != 1 or others:
        return "must define `check` as a plain function that takes one argument, the candidate"
    asserts = [node for node in ast.walk(tree) if isinstance(node, ast.Assert)]
    if all(isinstance(node.test, ast.Constant) and node.test.value for node in asserts):
        return "has no assert that can fail"
    if not names_in(tree) & {"candidate", entry_point, *names}:
        return "never calls the candidate"
    return ""


def source_problem(source: str, known: set[str]) -> str:
    """
    Explains why a module cannot run: a syntax error, an undefined name, or a missing module. Empty if its text shows
    none of these. `known` are the names that are defined before the module runs.
    """
    if problem := _compile_problem(source):
        return problem
    known = known | bound_names(source)
    if "*" not in known:
        for name in read_globals(all_tables(source)):
            if name not in known and name not in MODULE_NAMES:
                return f"uses the name `{name}`, which is neither defined nor imported"
    tree = ast.parse(source)
    guarded = {inner for node in ast.walk(tree) if isinstance(node, ast.Try) for inner in ast.walk(node)}
    for node in ast.walk(tree):
        if node in guarded or not isinstance(node, ast.Import | ast.ImportFrom):
            continue
        if isinstance(node, ast.ImportFrom) and node.level:
            return "has a relative import, but is not part of a package"
        for name in [node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]:
            module = name.split(".")[0]
            if module not in sys.stdlib_module_names and importlib.util.find_spec(module) is None:
                return f"imports `{module}`, which is not installed"
    return ""


def _compile_problem(source: str) -> str:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # `x is 1` gives one, for example
            compile(source, "<source>", "exec", dont_inherit=True)  # finds errors that the parser does not
    except PARSE_ERRORS as error:
        return f"is not Python source: {error}"
    return ""


def bound_names(source: str) -> set[str]:
    """
    Returns the names that a module defines at its top level, and `"*"` if it has an import such as `from math import
    *`.
    """
    module, *tables = all_tables(source)
    names = {symbol.get_name() for symbol in module.get_symbols() if symbol.is_assigned() or symbol.is_imported()}
    for inner in tables:
        names |= {s.get_name() for s in inner.get_symbols() if s.is_declared_global() and s.is_assigned()}
    stars = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ImportFrom))
    return names | {"*" for node in stars if node.names[0].name == "*"}
