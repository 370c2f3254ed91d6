"""
Finds the side effects of a module's functions: changes of their arguments, and of the module's variables.

The code is read, not run. Where it is not clear whether a function changes something, it is assumed to do so.
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
    Roots,
    Scope,
    names_of,
    root_name,
)


DISPLAYS = (ast.List, ast.Set, ast.Dict, *COMPREHENSIONS)
ASSIGNMENTS = (ast.Assign, ast.AnnAssign, ast.NamedExpr, ast.For, ast.AsyncFor, ast.comprehension, ast.withitem)


@dataclass
class Effects:
    """
    The side effects of a function, or of the methods of a class.

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
    """
    The effects of each function and class of a module, by name. `arguments` covers changes made by functions to which an
    argument is passed on.
    """
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
    passed_by: dict[str, list[str]] = {}
    for name, own in effects.items():
        for called in own.passes:
            passed_by.setdefault(called, []).append(name)
    queue = [*changing]
    for name in queue:
        effects[name].arguments = True
        queue += [caller for caller in passed_by.pop(name, ()) if not effects[caller].arguments]


def _own_effects(module: Module, scopes: list[Scope]) -> Effects:
    """The effects of the code in one function's scopes, without those of the functions that it calls."""
    own = Effects()
    roots: Roots = {}
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
                elif isinstance(node.func, ast.Name) and scope.owner(node.func.id) is None:
                    function = node.func.id
                    known = function in module.events or function in BUILTINS
                    if function in module.functions:
                        outside = [root_name(argument, roots) for argument in arguments]
                        if any(other is not None and is_outside(scope, other.id) for other in outside):
                            own.passes.add(function)
                    elif function in MUTATORS or not known:
                        for argument in arguments:
                            change(scope, argument)
    return own


def call_arguments(call: ast.Call) -> Iterator[ast.expr]:
    """The expressions that a call passes, without the stars of `*xs`."""
    for argument in [*call.args, *(keyword.value for keyword in call.keywords)]:
        yield argument.value if isinstance(argument, ast.Starred) else argument


def _given_names(module: Module, scopes: list[Scope], roots: Roots) -> tuple[set[str], set[str]]:
    """
    Two sets: the local names of a function that may refer to the same objects as its arguments, and the module's variables to
    whose objects local names may refer. Parameters of methods are left out, because they only belong to objects that
    the module makes itself.
    """
    given: set[str] = set()
    aliased: set[str] = set()
    flows: dict[str, set[str]] = {}
    for scope in scopes:
        if not scope.is_in_class:
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


def _replaced_parameters(scopes: list[Scope], roots: Roots) -> dict[tuple[Scope, str], int]:
    """The parameters that always get a new object, as in `xs = list(xs)`, and the line of the assignment."""
    replaced: dict[tuple[Scope, str], int] = {}
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


def _loop_parts(node: ast.expr) -> Iterator[ast.expr]:
    """The expressions whose elements a loop may run over: `enumerate(xs)` and `xs.values()` run over those of `xs`."""
    if isinstance(node, ast.Call):
        yield from call_arguments(node)
        if isinstance(node.func, ast.Attribute):
            yield node.func.value
    else:
        yield node


def sources(value: ast.AST, roots: Roots) -> Iterator[str]:
    """The names whose objects an expression's value may be or contain. `list(xs)` makes a new object, so `xs` does not count."""
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
