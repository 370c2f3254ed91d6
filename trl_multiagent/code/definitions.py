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
from itertools import islice

from trl_multiagent.code.names import (
    BUILTINS,
    DEFINITIONS,
    DISPLAYS,
    FUNCTIONS,
    Module,
    Statement,
    assignments,
    called_name,
    changed_names,
    own_nodes,
    root_name,
)


MAX_LINKS = 100  # steps from a name to its function
MAX_DEFINITIONS = 20  # of one name in different branches, that are looked at
Function = ast.FunctionDef | ast.AsyncFunctionDef


VALUE, CHANGE, NOTHING = "value", "change", "nothing"  # results of a function


def find_result(module: Module, name: str) -> str | None:
    """
    Finds the function that a name refers to at the end of a module. If several branches bind the name, any of them may
    run, and a function with a result is preferred. Returns `"value"` if the function returns or yields one, `"change"`
    if it only changes an argument or a variable of the module, otherwise `"nothing"`. Returns `None` if the name does
    not refer to a function.
    """
    found = [*islice(_results(module, name), MAX_DEFINITIONS)]
    return next((result for result in found if result != NOTHING), found[0] if found else None)


def _results(module: Module, name: str) -> Iterator[str]:
    """Yields the results of the functions that may be bound to a name, last first."""
    for place, statement in islice(module.bindings(name), MAX_DEFINITIONS):
        for node in own_nodes(statement.node):
            if isinstance(node, FUNCTIONS) and node.name == name:
                yield _result(module, statement, node)
            for value in _values(node, name):
                if _makes_function(module, value, place):
                    yield VALUE


def _result(module: Module, statement: Statement, function: Function) -> str:
    for node in own_nodes(*function.body):
        if isinstance(node, ast.Return) and node.value is not None and not _is_none(node.value):
            return VALUE
        if isinstance(node, (ast.Yield, ast.YieldFrom)):
            return VALUE
    return CHANGE if _changes(module, statement, function) else NOTHING


def _is_none(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def _changes(module: Module, statement: Statement, function: Function) -> bool:
    """
    Returns whether a function may change an argument, or a variable of the module, directly or through functions that
    it names.
    """
    reached, queue = {statement}, [(statement, function)]
    for other, node in queue:
        if (other.changes | other.declares) & module.binders.keys() - module.imported:
            return True
        if _changes_argument(module, node):
            return True
        new = {found for name in other.reads for _, found in module.bindings(name)} - reached
        reached |= new
        queue += ((found, found.node) for found in new if isinstance(found.node, FUNCTIONS))
    return False


def _changes_argument(module: Module, function: Function) -> bool:
    """Returns whether the code of a function, or of one within it, may change an object that its caller knows."""
    nodes, local, shared = [], set(), set()
    stack: list[ast.AST] = [function.args, *function.body]
    while stack:
        node = stack.pop()
        nodes.append(node)
        if not isinstance(node, ast.ClassDef):
            stack += ast.iter_child_nodes(node)
        if isinstance(node, ast.arg):
            shared.add(node.arg)
        elif isinstance(node, DEFINITIONS):
            local.add(node.name)
        elif isinstance(node, ast.alias):
            local.add((node.asname or node.name).split(".")[0])
        elif isinstance(node, (ast.For, ast.AsyncFor, ast.comprehension)):  # an element belongs to what is run over
            shared |= _bound_in(node.target)
        for target, value in assignments(node):
            (local if _is_new(value) else shared).update(_bound_in(target))
    for part in function.body:  # `xs = list(xs)` replaces the argument by a copy
        for target, value in assignments(part):
            shared -= _bound_in(target) if _is_new(value) else set()
    for node in nodes:
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            called = called_name(node.value)
            if called in local | shared or called in module.binders:
                continue  # a library's function, or one of the agent's, which is looked at itself
        if changed_names(node) & shared:
            return True
    return False


def _bound_in(target: ast.AST) -> set[str]:
    """Returns the names that a target of an assignment binds: `a` and `b` in `a, b[0], *b`."""
    names = (node for node in ast.walk(target) if isinstance(node, ast.Name))
    return {name.id for name in names if not isinstance(name.ctx, ast.Load)}


def _is_new(value: ast.AST) -> bool:
    """
    Returns whether the value of an expression is an object that nothing else refers to. That of a call counts as one.
    """
    is_copy = isinstance(value, ast.Subscript) and isinstance(value.slice, ast.Slice)
    return is_copy or isinstance(value, (ast.Constant, ast.BinOp, ast.Call, *DISPLAYS))


def _values(node: ast.AST, name: str) -> Iterator[ast.expr]:
    """Yields the expressions whose values a node assigns to a name."""
    pairs = assignments(node)
    for target, value in pairs:
        if isinstance(target, (ast.Tuple, ast.List)):
            if isinstance(value, (ast.Tuple, ast.List)) and len(value.elts) == len(target.elts):
                pairs += zip(target.elts, value.elts, strict=True)
            elif isinstance(value, ast.Call):
                pairs += [(inner, value) for inner in target.elts]
        elif isinstance(target, ast.Name) and target.id == name:
            yield value


def _makes_function(module: Module, value: ast.expr, before: int) -> bool:
    """
    Returns whether the value of an expression may be a function that the agent wrote or made. `before` is its
    statement's index.
    """
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
            if root_name(node) in module.binders.keys() - module.imported:
                return True
        elif isinstance(node, ast.Call):
            if _may_return_function(module, node, before):
                return True
        elif isinstance(node, ast.Name):
            for place, statement in islice(module.bindings(node.id, before), MAX_DEFINITIONS):
                if isinstance(statement.node, FUNCTIONS) and _result(module, statement, statement.node) != NOTHING:
                    return True
                stack += [(bound, place) for inner in own_nodes(statement.node) for bound in _values(inner, node.id)]
    return False


def _may_return_function(module: Module, call: ast.Call, before: int) -> bool:
    if not isinstance(call.func, ast.Name):
        return True
    for _, statement in module.bindings(call.func.id, before):
        if isinstance(statement.node, ast.ClassDef):
            methods = {node.name for node in statement.node.body if isinstance(node, FUNCTIONS)}
            return bool(statement.node.bases) or "__call__" in methods
        return True
    return call.func.id not in BUILTINS - {"staticmethod"}
