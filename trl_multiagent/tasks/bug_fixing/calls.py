"""Finds calls with literal arguments: in tests, and in the text of a function, whose examples give the result away."""

import ast
import functools
import re
from typing import Any

from trl_multiagent.code.dependencies import PARSE_ERRORS


MAX_CALL = 400  # characters of a call in a text
MAX_ENDS = 8  # closing parentheses in it that are tried as its end


def calls_in(tree: ast.AST, *names: str) -> list[Any]:
    """Returns the arguments of all calls of functions. Raises `ValueError` if one is no literal."""
    calls = [
        x for x in ast.walk(tree) if isinstance(x, ast.Call) and isinstance(x.func, ast.Name) and x.func.id in names
    ]
    try:
        return [[_as_lists(ast.literal_eval(argument)) for argument in call.args] for call in calls]
    except TypeError as error:  # a list as an element of a set, for example
        raise ValueError(str(error)) from error


def _as_lists(value: Any) -> Any:
    """Replaces tuples by lists, since functions hardly ever tell them apart."""
    return [_as_lists(part) for part in value] if isinstance(value, list | tuple) else value


@functools.lru_cache(maxsize=1024)
def examples(text: str, name: str) -> list[Any]:
    """Returns the arguments of the calls with literals in the text of a function, such as those in its docstring."""
    found = []
    for match in re.finditer(rf"\b{re.escape(name)}\(", text):
        rest = text[match.start() : match.start() + MAX_CALL]
        for end in [k + 1 for k, character in enumerate(rest) if character == ")"][:MAX_ENDS]:
            try:
                found += calls_in(ast.parse(rest[:end], mode="eval"), name)
                break
            except PARSE_ERRORS:
                continue
    return found


def without_examples(test: str, text: str, name: str) -> str:
    """
    Returns a test without the asserts of `check` whose calls are examples in the function's text. It stays as it is if
    fewer than two asserts would remain.
    """
    given = examples(text, name)
    tree = ast.parse(test)
    for check in [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "check"]:
        check.body = [x for x in check.body if not (isinstance(x, ast.Assert) and _is_given(x, name, given))]
    left = sum(isinstance(node, ast.Assert) for node in ast.walk(tree))
    return ast.unparse(tree) if given and left > 1 else test


def _is_given(node: ast.Assert, name: str, given: list[Any]) -> bool:
    try:
        calls = calls_in(node, "candidate", name)
    except ValueError:
        return False
    return bool(calls) and all(call in given for call in calls)
