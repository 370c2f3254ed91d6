"""
Reads from main's text whether it only passes on what `aux` returns, and whether it drops what `aux` returns. The
reward kind `earned` does not need this: experiments decide it.
"""

import ast
from collections.abc import Sequence

from trl_multiagent.code.names import ASSIGNMENTS, FUNCTIONS, IMPORTS, Statement, assignments
from trl_multiagent.tasks.code_generation.roles import AUX


MAX_DEPTH = 20  # levels of expressions and functions that are searched


def is_thin_wrapper(needed: Sequence[Statement], entry_point: str) -> bool:
    """
    Returns whether the entry point, which needs these statements, only returns the value of `aux`, directly or through
    other names.
    """
    names = {AUX}
    for _ in range(2):  # a function may come before what it uses
        for statement in needed:
            _passes_on_in([statement.node], names, 0)
    return entry_point in names


def drops_value(needed: Sequence[Statement]) -> bool:
    """Returns whether a call of `aux` stands by itself, or its value is assigned to variables that nothing reads."""
    for statement in needed:
        read = {
            node.id
            for node in ast.walk(statement.node)
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)
        }
        for node in ast.walk(statement.node):
            if isinstance(node, ast.Expr) and _is_call_of_aux(node.value):
                return True
            for target, value in assignments(node) if isinstance(node, (*ASSIGNMENTS, ast.NamedExpr)) else ():
                if _is_call_of_aux(value) and isinstance(target, ast.Name) and target.id not in read:
                    return True
    return False


def _is_call_of_aux(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == AUX


def _passes_on_in(body: Sequence[ast.stmt], names: set[str], depth: int) -> bool:
    """
    Returns whether a function with this body, in `depth` other functions, only returns the value of `aux`. `names` are
    those for `aux`, for functions that only return its value, and for that value. Others for these are added.
    """
    for node in body:
        expression = node.value if isinstance(node, ast.Expr) else None
        if isinstance(node, ast.Return):
            return node.value is not None and _passes_on(node.value, names)
        if isinstance(expression, ast.YieldFrom):
            return _passes_on(expression, names)
        if isinstance(node, FUNCTIONS):
            if depth < MAX_DEPTH and _passes_on_in(node.body, {*names}, depth + 1):
                names.add(node.name)
        elif not isinstance(node, (ast.Pass, *IMPORTS)) and not isinstance(expression, ast.Constant):
            pairs = [*assignments(expression or node)]  # `(y := ...)` assigns, too
            if not any(_passes_on(value, names) for _, value in pairs):
                return False
            if not all(isinstance(target, ast.Name) for target, _ in pairs):
                return False
            names |= {target.id for target, _ in pairs if isinstance(target, ast.Name)}
    return False


def _passes_on(node: ast.expr, names: set[str]) -> bool:
    """
    Returns whether an expression is one of these names, or a value of such a function, unchanged or taken out of
    `map`.
    """
    for _ in range(MAX_DEPTH):
        container = _first_argument(node, "next")
        if isinstance(node, ast.Subscript) and isinstance(node.slice, (ast.Constant, ast.UnaryOp)):
            container = node.value
        if container is not None:
            while (inner := _first_argument(container, "list", "tuple", "iter")) is not None:
                container = inner
            mapped = _first_argument(container, "map")
            if mapped is None and isinstance(node, ast.Subscript):
                return False  # to choose an element is work
            node = container if mapped is None else mapped
        elif isinstance(node, ast.Name):
            return node.id in names
        elif (function := _first_argument(node, "partial")) is not None:
            node = function
        elif isinstance(node, (ast.Await, ast.YieldFrom, ast.NamedExpr)):
            node = node.value
        elif isinstance(node, ast.Attribute) and node.attr == "__call__":
            node = node.value
        elif isinstance(node, ast.Lambda):
            node = node.body
        elif isinstance(node, ast.Call):
            node = node.func
        else:
            return False
    return False


def _first_argument(node: ast.expr, *functions: str) -> ast.expr | None:
    """Returns the first argument of a call of one of these functions; None for other expressions."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in functions and node.args:
        return node.args[0]
    return None
