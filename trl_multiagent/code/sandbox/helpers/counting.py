"""
Counts the calls of a program's functions.

A counted function is not wrapped. An expression is added to its own body instead, so that decorators, attributes,
stack traces and the depth of recursion stay as they are. The expression refers to a constant of the code object and
not to a name.
"""

import ast
import itertools
import os
import types
import warnings
from collections.abc import Callable, Sequence
from typing import Any


PROGRAM = "<program>"  # the file name in the program's code objects


class Calls:
    """The number of calls of one function."""

    def __init__(self) -> None:
        self.number = 0

    def count(self) -> None:
        """Counts a call."""
        self.number += 1


def _counted(value: Any, calls: Calls) -> Any:
    """Returns what takes the place of a value that has the name of a counted function."""
    return _Counted(value, calls) if callable(value) else value


class _Counted:
    """Replaces a function that has no body to add to: an alias, a partial, an object with `__call__`."""

    def __init__(self, function: Callable, calls: Calls):
        self._function = function
        self._calls = calls

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._calls.count()
        return self._function(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._function, name)


def compile_counted(source: str, names: Sequence[str]) -> tuple[types.CodeType, dict[str, Calls]]:
    """
    Compiles a program in which the calls of some top-level functions are counted.

    Returns:
        `tuple[types.CodeType, dict[str, Calls]]`: The module's code, and the calls by name.
    """
    calls = {name: Calls() for name in names}
    adding = _AddCounts(calls)
    tree = ast.fix_missing_locations(adding.visit(ast.parse(source, PROGRAM)))
    with warnings.catch_warnings():
        # The compiler would warn that strings are called: `_with_constants` replaces them by functions
        warnings.simplefilter("ignore")
        code = compile(tree, PROGRAM, "exec", dont_inherit=True)
    return _with_constants(code, adding.constants), calls


def _with_constants(code: types.CodeType, constants: dict[str, Any]) -> types.CodeType:
    """Returns the code, and that of its functions, with other constants in place of some of its strings."""
    values = (
        _with_constants(value, constants)
        if isinstance(value, types.CodeType)
        else constants.get(value, value)
        if type(value) is str
        else value
        for value in code.co_consts
    )
    return code.replace(co_consts=tuple(values))


class _AddCounts(ast.NodeTransformer):
    """Adds an expression to the counted functions of a module. It does not look into functions."""

    def __init__(self, calls: dict[str, Calls]):
        self.calls = calls
        self.constants: dict[str, Any] = {}  # by the string that takes the place of each until the code is compiled
        self.key = os.urandom(8).hex()  # part of these strings, so that the program contains none of them
        self.numbers = itertools.count()

    def constant(self, value: Any) -> ast.Constant:
        """Returns an expression that will have this value."""
        text = f"{self.key} {next(self.numbers)}"
        self.constants[text] = value
        return ast.Constant(text)

    def visit_ClassDef(self, node: Any) -> ast.AST:
        return node

    visit_Lambda = visit_ClassDef

    def visit_FunctionDef(self, node: Any) -> ast.AST:
        if node.name in self.calls:
            count = ast.Expr(ast.Call(self.constant(self.calls[node.name].count), [], []))
            has_docstring = ast.get_docstring(node, clean=False) is not None
            node.body.insert(has_docstring, ast.copy_location(count, node))
        return node

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_Assign(self, node: Any) -> ast.AST | list[ast.AST]:
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        bound = [node for target in targets for node in ast.walk(target) if isinstance(node, ast.Name)]
        # `aux.memo = {}` reads the name `aux`, and does not bind it
        names = [node.id for node in bound if node.id in self.calls and isinstance(node.ctx, ast.Store)]
        if node.value is None:
            return node
        return [node, *(ast.copy_location(self._counted(name), node) for name in names)]

    visit_AnnAssign = visit_Assign

    def _counted(self, name: str) -> ast.stmt:
        """Returns `name = counted(name)`."""
        arguments = [ast.Name(name, ast.Load()), self.constant(self.calls[name])]
        return ast.Assign([ast.Name(name, ast.Store())], ast.Call(self.constant(_counted), arguments, []))
