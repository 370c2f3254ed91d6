"""
Finds what the functions of a module change when they are called: their arguments, and variables of the module.

Only the text is read. In doubt, a function is assumed to change what it may change.
"""

import ast
import functools
from collections.abc import Iterator
from dataclasses import dataclass, field

from trl_multiagent.environments.python_code.scopes import (
    BUILTINS,
    COMPREHENSIONS,
    CONTAINERS,
    FUNCTIONS,
    IMPORTS,
    MUTATORS,
    PURE_METHODS,
    Module,
    Scope,
    names_of,
    root_name,
)


DISPLAYS = (ast.List, ast.Set, ast.Dict, *COMPREHENSIONS)
ASSIGNMENTS = (ast.Assign, ast.AnnAssign, ast.NamedExpr, ast.For, ast.AsyncFor, ast.comprehension, ast.withitem)


@dataclass
class Effects:
    """
    What a function, or the methods of a class, change.

    Args:
        arguments (`bool`): Whether it changes an argument.
        variables (`set[str]`): Variables of the module that it assigns, or whose objects it changes.
        calls (`set[str]`): Functions and classes of the module that it names.
        passes (`set[str]`): Functions of the module to which it passes an argument of its own.
    """

    arguments: bool = False
    variables: set[str] = field(default_factory=set)
    calls: set[str] = field(default_factory=set)
    passes: set[str] = field(default_factory=set)


@functools.lru_cache(maxsize=2)
def read_effects(module: Module) -> dict[str, Effects]:
    """The effects of each function and class of a module, by name; `arguments` also through other functions."""
    effects = {name: _own_effects(module, scopes) for name, scopes in module.functions.items()}
    _spread(effects, {name for name, own in effects.items() if own.arguments})
    return effects


def changes_something(effects: dict[str, Effects], name: str) -> bool:
    """Whether a function changes an argument or a variable, directly or through functions that it names."""
    if effects[name].arguments:
        return True
    reached = {name: None}
    queue = [name]
    for other in queue:
        if effects[other].variables:
            return True
        new = [called for called in effects[other].calls if called not in reached]
        reached.update(dict.fromkeys(new))
        queue += new
    return False


def _spread(effects: dict[str, Effects], changing: set[str]) -> None:
    """Marks the functions that pass an argument to a function which changes it."""
    passed_by = {}
    for name, own in effects.items():
        for called in own.passes:
            passed_by.setdefault(called, []).append(name)
    queue = [*changing]
    for name in queue:
        effects[name].arguments = True
        queue += [caller for caller in passed_by.pop(name, ()) if not effects[caller].arguments]


def _own_effects(module: Module, scopes: list[Scope]) -> Effects:
    """The effects of one function's scopes, without those of other functions that it calls."""
    own = Effects()
    roots = {}
    local_modules = {
        name
        for scope in scopes
        for node in scope.nodes
        if isinstance(node, IMPORTS)
        for name in [(alias.asname or alias.name).split(".")[0] for alias in node.names]
    }
    given, aliased = _given_names(module, scopes, roots)
    replaced = _replaced_parameters(scopes, roots)

    def is_library(scope: Scope, name: str) -> bool:
        if scope.owner(name) is not None:
            return name in local_modules
        return name in module.imported or name not in module.events

    def is_outside(scope: Scope, name: str) -> bool:
        return name in given if scope.owner(name) is not None else name in module.events

    def change(scope: Scope, node: ast.AST) -> None:
        root = root_name(node, roots)
        if root is None or not is_outside(scope, root.id):
            return
        owner = scope.owner(root.id)
        if owner is None:
            own.variables.add(root.id)
        elif root.lineno <= replaced.get((owner, root.id), root.lineno):
            own.arguments = True
            own.variables |= aliased

    for scope in scopes:
        own.variables |= scope.globals & scope.bound
        for node in scope.nodes:
            if isinstance(node, CONTAINERS):
                if not isinstance(node.ctx, ast.Load):
                    change(scope, node)
            elif isinstance(node, ast.Name):
                if node.id in module.functions and scope.owner(node.id) is None:
                    own.calls.add(node.id)
            elif isinstance(node, ast.AugAssign):
                if isinstance(node.target, ast.Name) and isinstance(node.value, (ast.Name, *DISPLAYS)):
                    change(scope, node.target)
            elif isinstance(node, ast.Call):
                arguments = list(call_arguments(node))
                root = root_name(node.func, roots)
                if isinstance(node.func, ast.Attribute):
                    if root is not None and is_library(scope, root.id):
                        for argument in arguments if node.func.attr in MUTATORS else ():
                            change(scope, argument)
                    elif node.func.attr not in PURE_METHODS:
                        change(scope, node.func)
                elif isinstance(node.func, ast.Name) and scope.owner(root.id) is None:
                    known = root.id in module.events or root.id in BUILTINS
                    if root.id in module.functions:
                        outside = [root_name(argument, roots) for argument in arguments]
                        if any(other is not None and is_outside(scope, other.id) for other in outside):
                            own.passes.add(root.id)
                    elif root.id in MUTATORS or not known:
                        for argument in arguments:
                            change(scope, argument)
    return own


def call_arguments(call: ast.Call) -> Iterator[ast.AST]:
    for argument in [*call.args, *(keyword.value for keyword in call.keywords)]:
        yield argument.value if isinstance(argument, ast.Starred) else argument


def _given_names(module: Module, scopes: list[Scope], roots: dict) -> tuple[set[str], set[str]]:
    """
    The local names of a function that may refer to its arguments' objects, and the module's variables that local
    names may refer to. Parameters of methods are left out: an object of a class that the module defines is not
    changed outside of it.
    """
    given, aliased, flows = set(), set(), {}
    for scope in scopes:
        if not isinstance(scope.parent.node, ast.ClassDef):
            given |= scope.parameters
        for node in scope.nodes:
            for target, value in assignments(node):
                names = names_of([target])
                for source in sources(value, roots):
                    if scope.owner(source) is not None:
                        flows.setdefault(source, set()).update(names)
                    elif source in module.events and source not in module.imported and source not in module.functions:
                        aliased.add(source)
                        given |= names
    queue = [*given]
    for name in queue:
        new = flows.pop(name, set()) - given
        given |= new
        queue += new
    return given, aliased


def _replaced_parameters(scopes: list[Scope], roots: dict) -> dict[tuple[Scope, str], int]:
    """The parameters that always get a new object, as in `xs = list(xs)`, and the line of the assignment."""
    replaced = {}
    for scope in scopes:
        for statement in scope.node.body if isinstance(scope.node, FUNCTIONS) else ():
            if isinstance(statement, ast.Assign) and not any(True for _ in sources(statement.value, roots)):
                for target in statement.targets:
                    if isinstance(target, ast.Name) and target.id in scope.parameters:
                        replaced.setdefault((scope, target.id), statement.lineno)
    return replaced


def assignments(node: ast.AST) -> Iterator[tuple[ast.AST, ast.AST]]:
    """The targets of a node that assigns, each with the expression whose value it gets."""
    if isinstance(node, ast.Assign):
        for target in node.targets:
            yield target, node.value
    elif isinstance(node, (ast.AnnAssign, ast.NamedExpr)):
        if node.value is not None:
            yield node.target, node.value
    elif isinstance(node, (ast.For, ast.AsyncFor, ast.comprehension)):
        yield node.target, ast.Tuple([*_loop_parts(node.iter)], ast.Load())
    elif isinstance(node, ast.withitem) and node.optional_vars is not None:
        yield node.optional_vars, node.context_expr


def _loop_parts(node: ast.AST) -> Iterator[ast.AST]:
    """The expressions whose elements a loop may run over: `enumerate(xs)` and `xs.values()` run over those of `xs`."""
    if isinstance(node, ast.Call):
        yield from call_arguments(node)
        if isinstance(node.func, ast.Attribute):
            yield node.func.value
    else:
        yield node


def sources(value: ast.AST, roots: dict) -> Iterator[str]:
    """Names to whose objects an expression's value may refer. New objects, as `list(xs)` makes, do not count."""
    stack = [value]
    while stack:
        node = stack.pop()
        if isinstance(node, (ast.Tuple, ast.List)):
            stack += node.elts
        elif isinstance(node, ast.BoolOp):
            stack += node.values
        elif isinstance(node, ast.IfExp):
            stack += [node.body, node.orelse]
        elif isinstance(node, (ast.Starred, ast.NamedExpr, ast.Await)):
            stack.append(node.value)
        elif isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Slice):
            continue  # slices are copies
        elif isinstance(node, (ast.Name, *CONTAINERS)):
            root = root_name(node, roots)
            if root is not None:
                yield root.id
        elif isinstance(node, ast.Call):
            if isinstance(node.func, ast.Attribute):
                if node.func.attr not in PURE_METHODS and node.func.attr != "deepcopy":
                    stack += [node.func, *call_arguments(node)]
            elif not (isinstance(node.func, ast.Name) and node.func.id in BUILTINS - {"next", "iter", "getattr"}):
                stack += call_arguments(node)
