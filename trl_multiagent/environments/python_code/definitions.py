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
from itertools import islice

from trl_multiagent.environments.python_code.names import (
    BUILTINS,
    DISPLAYS,
    FUNCTIONS,
    Module,
    Roots,
    Scope,
    Statement,
    assignments,
    bound_in,
    called_name,
    changed_names,
    root_name,
)


MAX_LINKS = 100  # steps from a name to its function
MAX_DEFINITIONS = 20  # of one name in different branches, that are looked at
Function = ast.FunctionDef | ast.AsyncFunctionDef


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

    @property
    def has_result(self) -> bool:
        return self.returns or self.changes


def find_definition(module: Module, name: str) -> Definition | None:
    """
    The function that a name refers to at the end of a module; None if it does not refer to a function.

    If several branches bind the name, any of them may run. A function with a result is then preferred.
    """
    bindings = module.bindings(name)
    found = [*islice((one for binding in bindings for one in _definitions(module, *binding, name)), MAX_DEFINITIONS)]
    return next((one for one in found if one.has_result), found[0] if found else None)


def _definitions(module: Module, place: int, statement: Statement, name: str) -> Iterator[Definition]:
    """The functions that a statement may bind to a name, last first."""
    for node, scope in reversed(statement.nodes):
        if scope.parent is None:
            if isinstance(node, FUNCTIONS) and node.name == name:
                returns = _returns(statement, node)
                yield Definition(node, returns, not returns and _changes(module, statement, node))
            for value in _values(node, name):
                if _makes_function(module, value, place):
                    yield Definition(value, True)


def _returns(statement: Statement, function: ast.AST) -> bool:
    """Whether a function's own code returns a value, or yields."""
    return any(
        isinstance(node, (ast.Yield, ast.YieldFrom))
        or (isinstance(node, ast.Return) and not (node.value is None or _is_none(node.value)))
        for node, scope in statement.nodes
        if scope.node is function
    )


def _is_none(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def _changes(module: Module, statement: Statement, function: Function) -> bool:
    """Whether a function may change an argument, or a variable of the module, directly or through functions that it names."""
    reached, queue = {statement}, [(statement, function)]
    for other, node in queue:
        if (other.changes | other.declares) & module.binders.keys() - module.imported:
            return True
        if _changes_argument(module, other, node):
            return True
        new = {found for name in other.reads for _, found in module.bindings(name)} - reached
        reached |= new
        queue += ((found, found.node) for found in new if isinstance(found.node, FUNCTIONS))
    return False


def _changes_argument(module: Module, statement: Statement, function: Function) -> bool:
    """Whether a function's own code may change an object that its caller knows."""
    inside = [(node, scope) for node, scope in statement.nodes if _is_code_of(scope, function)]
    parameters = {node.arg for node, _ in inside if isinstance(node, ast.arg)}
    replaced = {  # as in `xs = list(xs)`
        name
        for part in function.body
        if isinstance(part, ast.Assign) and _is_new(part.value)
        for target in part.targets
        for name in bound_in(target)
    }
    shared = parameters - replaced | {name for node, _ in inside for name in _aliases(node)}
    roots: Roots = {}
    for node, scope in inside:
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            called = called_name(node.value)
            if scope.owner(called) or called in module.binders.keys():
                continue  # a library's function, or one of the agent's, which is looked at itself
        if any(name in shared and scope.owner(name) for name in changed_names(node, roots)):
            return True
    return False


def _is_code_of(scope: Scope | None, function: Function) -> bool:
    """Whether a scope is that of a function or of a function within it. Classes in a function do not count."""
    while scope is not None and not isinstance(scope.node, ast.ClassDef):
        if scope.node is function:
            return True
        scope = scope.parent
    return False


def _aliases(node: ast.AST) -> Iterator[str]:
    """The names that a node binds to an object that other names may refer to, too."""
    for target, value in assignments(node):
        if isinstance(node, (ast.For, ast.AsyncFor)) or not _is_new(value):
            yield from bound_in(target)


def _is_new(value: ast.AST) -> bool:
    """Whether the value of an expression is an object that nothing else refers to. That of a call counts as one."""
    is_copy = isinstance(value, ast.Subscript) and isinstance(value.slice, ast.Slice)
    return is_copy or isinstance(value, (ast.Constant, ast.BinOp, ast.Call, *DISPLAYS))


def _values(node: ast.AST, name: str) -> Iterator[ast.AST]:
    """The expressions whose values a node assigns to a name."""
    pairs = [] if isinstance(node, (ast.For, ast.AsyncFor, ast.comprehension, ast.withitem)) else [*assignments(node)]
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
            if (root := root_name(node, {})) in module.binders and root not in module.imported:
                return True
        elif isinstance(node, ast.Call):
            if isinstance(node.func, ast.Name) and node.func.id == "staticmethod":
                stack += [(argument, before) for argument in node.args]
            elif _may_return_function(module, node, before):
                return True
        elif isinstance(node, ast.Name):
            for place, statement in module.bindings(node.id, before):
                if isinstance(statement.node, FUNCTIONS):
                    if _returns(statement, statement.node) or _changes(module, statement, statement.node):
                        return True
                stack += [(bound, place) for inner, _ in statement.nodes for bound in _values(inner, node.id)]
    return False


def _may_return_function(module: Module, call: ast.Call, before: int) -> bool:
    if not isinstance(call.func, ast.Name):
        return True
    for _, statement in module.bindings(call.func.id, before):
        if isinstance(statement.node, ast.ClassDef):
            methods = {node.name for node in statement.node.body if isinstance(node, FUNCTIONS)}
            return bool(statement.node.bases) or "__call__" in methods
        return True
    return call.func.id not in BUILTINS
