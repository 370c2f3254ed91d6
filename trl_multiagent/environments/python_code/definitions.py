"""
Decides what counts as a definition of a function. The rule is the same for `aux` and for the entry point.

A module defines a function if its last binding of the name is one of these:

- a `def` with a result: it returns something other than a bare `None`, yields, or changes an argument or a variable
  of the module. A function without a result has no effect on its callers and cannot pass a test;
- a `lambda`, unless it is `lambda: None`;
- another name for such a function that the agent wrote;
- the value of a call that may return a function: `partial(helper, 2)`, `decorator(helper)`, `make_helper()`, an
  instance of a class that the agent wrote with `__call__`. Calls of builtins, such as `int("5")`, do not count.

A class does not count, nor does a function that the agent did not write: `from math import gcd as aux`, `aux = len`.
"""

import ast
from collections.abc import Iterator
from dataclasses import dataclass

from trl_multiagent.environments.python_code.effects import changes_something, read_effects
from trl_multiagent.environments.python_code.scopes import BUILTINS, FUNCTIONS, Module, Scope, Statement, root_name


MAX_LINKS = 100  # steps from a name to its function


@dataclass(frozen=True)
class Definition:
    """
    A function that a module defines.

    Args:
        node (`ast.AST`): The `def`, or the expression that is assigned to the name.
        returns (`bool`): Whether it returns or yields a value.
        changes (`bool`): Whether it returns nothing, but changes an argument or a variable of the module.
    """

    node: ast.AST
    returns: bool
    changes: bool = False


def find_definition(module: Module, name: str) -> Definition | None:
    """
    The function that a name refers to at the end of a module; None if it does not refer to a function.

    If several branches bind the name, any of them may run. A function with a result is then preferred.
    """
    found = [one for index, statement in module.bindings(name) for one in _definitions(module, index, statement, name)]
    return next((one for one in found if one.returns or one.changes), found[0] if found else None)


def _definitions(module: Module, index: int, statement: Statement, name: str) -> Iterator[Definition]:
    """The functions that a statement may bind to a name, last first."""
    scopes = {scope.node: scope for scope in statement.scopes}
    for node in reversed(statement.nodes):
        if isinstance(node, FUNCTIONS) and node.name == name:
            returns = _returns(scopes[node])
            yield Definition(node, returns, not returns and changes_something(read_effects(module), name))
        for value in _values(node, name):
            if _makes_function(module, value, index):
                yield Definition(value, True)


def _returns(scope: Scope) -> bool:
    """Whether a function's own code returns a value, or yields."""
    return any(
        isinstance(node, (ast.Yield, ast.YieldFrom))
        or (isinstance(node, ast.Return) and not (node.value is None or _is_none(node.value)))
        for node in scope.nodes
    )


def _is_none(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def _values(node: ast.AST, name: str) -> Iterator[ast.AST]:
    """The expressions whose values a node assigns to a name."""
    if isinstance(node, ast.Assign):
        pairs = [(target, node.value) for target in node.targets]
    elif isinstance(node, (ast.AnnAssign, ast.NamedExpr)) and node.value is not None:
        pairs = [(node.target, node.value)]
    else:
        return
    for target, value in pairs:
        if isinstance(target, (ast.Tuple, ast.List)):
            if isinstance(value, (ast.Tuple, ast.List)) and len(value.elts) == len(target.elts):
                pairs += zip(target.elts, value.elts, strict=True)
            elif isinstance(value, ast.Call):
                pairs += [(inner, value) for inner in target.elts]
        elif isinstance(target, ast.Name) and target.id == name:
            yield value


def _makes_function(module: Module, value: ast.AST, before: int) -> bool:
    """Whether the value of an expression may be a function that the agent wrote or made. `before` is its statement's index."""
    stack = [(value, before)]
    for _ in range(MAX_LINKS):
        if not stack:
            return False
        node, before = stack.pop()
        if isinstance(node, ast.Lambda):
            if not _is_none(node.body):
                return True
        elif isinstance(node, ast.IfExp):
            stack += [(node.body, before), (node.orelse, before)]
        elif isinstance(node, ast.BoolOp):
            stack += [(part, before) for part in node.values]
        elif isinstance(node, ast.NamedExpr):
            stack.append((node.value, before))
        elif isinstance(node, ast.Attribute):  # a method of a class or object in the module
            root = root_name(node, {})
            if root is not None and root.id in module.events and root.id not in module.imported:
                return True
        elif isinstance(node, ast.Call):
            made = _is_made_by_call(module, node, before)
            if made:
                return True
            stack += [(argument, before) for argument in node.args if made is None]
        elif isinstance(node, ast.Name):
            for index, statement in module.bindings(node.id, before):
                for scope in statement.scopes:
                    if isinstance(scope.node, FUNCTIONS) and scope.node.name == node.id and scope.is_top_level:
                        if _returns(scope) or changes_something(read_effects(module), node.id):
                            return True
                stack += [(bound, index) for inner in statement.nodes for bound in _values(inner, node.id)]
    return False


def _is_made_by_call(module: Module, call: ast.Call, before: int) -> bool | None:
    """Whether a call may return a function; None if it returns its own argument."""
    if not isinstance(call.func, ast.Name):
        return True
    name = call.func.id
    for _, statement in module.bindings(name, before):
        if isinstance(statement.node, ast.ClassDef):
            methods = {node.name for node in statement.node.body if isinstance(node, FUNCTIONS)}
            return bool(statement.node.bases) or "__call__" in methods
        return True
    return (None if name == "staticmethod" else False) if name in BUILTINS else True
