"""Finds out whether a program can keep state between the calls of its functions."""

import ast
import bisect
import builtins
import cmath
import collections
import heapq
import itertools
import math
import operator
import re
import string
import typing
from types import ModuleType

from trl_multiagent.environments.python_code.checks import PARSE_ERRORS
from trl_multiagent.environments.python_code.scopes import FUNCTIONS


def _public(owner: ModuleType | type, without: str = "") -> set[str]:
    names = vars(owner).get("__all__") or dir(owner)
    return {name for name in names if not name.startswith("_")} - {*without.split()}


# What a program may import. The members that are left out could store something on a function or in a class
_IMPORTS: dict[str, set[str]] = {
    "bisect": _public(bisect),
    "cmath": _public(cmath),
    "collections": _public(collections),
    "copy": {"copy", "deepcopy"},
    "functools": {"cmp_to_key", "partial", "reduce"},
    "heapq": _public(heapq),
    "itertools": _public(itertools),
    "math": _public(math),
    "operator": _public(operator, "attrgetter methodcaller"),
    "re": _public(re),
    "string": _public(string, "Formatter Template"),
    "typing": {
        name for name in _public(typing) if name[0].isupper()
    },  # its functions mark the functions that they get
}
_BUILTINS = set(
    "abs all any ascii bin bool bytearray bytes callable chr complex dict divmod enumerate filter float format frozenset hash hex "
    "int isinstance issubclass iter len list map max min next object oct ord pow print range repr reversed round set slice sorted "
    "str sum tuple type zip Ellipsis False None NotImplemented True".split()
)
_BUILTINS |= {
    name for name, value in vars(builtins).items() if isinstance(value, type) and issubclass(value, Exception)
}
_OTHER_BUILTINS = {*dir(builtins)} - _BUILTINS  # such as `setattr` and `globals`
# Attributes of other objects: the methods of plain values. `gi_frame.f_globals`, for example, leads to the variables of the module
_PLAIN = (str, bytes, bytearray, list, tuple, dict, set, frozenset, int, float, complex, range)
_METHODS = {name for kind in (*_PLAIN, re.Pattern, re.Match) for name in _public(kind)}
_METHODS |= {
    name for kind in (collections.deque, collections.Counter, collections.OrderedDict) for name in _public(kind)
}
_PLAIN_NODES = (ast.Constant, ast.Tuple, ast.UnaryOp, ast.operator, ast.unaryop, ast.expr_context)


def keeps_state(source: str) -> bool:
    """
    Whether what a function of a program does may depend on earlier calls. False is certain: the module only defines functions
    without decorators, whose defaults are constants; and no code in it can change a function, a class or a module. Programs in
    doubt count as keeping state.

    Args:
        source (`str`): The program.
    """
    try:
        body = ast.parse(source).body
    except PARSE_ERRORS:
        return True
    for statement in body:
        if not isinstance(statement, (*FUNCTIONS, ast.Import, ast.ImportFrom)) and not _is_text(statement):
            return True
        if isinstance(statement, FUNCTIONS) and (statement.decorator_list or not _has_plain_signature(statement)):
            return True
    nodes = [node for statement in body for node in ast.walk(statement)]
    modules: dict[str, set[str]] = {}  # the members of each imported module, by its name in the program
    for node in nodes:
        if isinstance(node, ast.ImportFrom):
            names = {alias.name for alias in node.names}
            if node.level or not names <= _IMPORTS.get(node.module or "", set()):
                return True
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name not in _IMPORTS:
                    return True
                name, public = alias.asname or alias.name, _IMPORTS[alias.name]
                modules[name] = modules.get(name, public) & public
    members: set[ast.AST] = set()  # both nodes of `math.pi`
    for node in nodes:
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in modules:
            if node.attr in modules[node.value.id] and isinstance(node.ctx, ast.Load):
                members |= {node, node.value}
    return any(_may_store(node, modules) for node in nodes if node not in members)


def _may_store(node: ast.AST, modules: dict[str, set[str]]) -> bool:
    """Whether a node may change something that outlives a call, or give a way to do so."""
    if isinstance(node, ast.Name):
        return node.id in _OTHER_BUILTINS or node.id in modules or node.id.startswith("__")
    if isinstance(node, ast.Attribute):
        return not isinstance(node.ctx, ast.Load) or node.attr not in _METHODS
    return isinstance(node, (ast.Global, ast.ClassDef, ast.Match))


def _is_text(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def _has_plain_signature(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether a function's defaults are constants, and its annotations call nothing."""
    arguments = function.args
    defaults = [default for default in [*arguments.defaults, *arguments.kw_defaults] if default is not None]
    if not all(isinstance(node, _PLAIN_NODES) for default in defaults for node in ast.walk(default)):
        return False
    every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg]
    annotations = [argument.annotation for argument in every if argument is not None]
    plain = (*_PLAIN_NODES, ast.Name, ast.Attribute, ast.Subscript, ast.BinOp, ast.List)
    return all(
        isinstance(node, plain)
        for annotation in [*annotations, function.returns]
        if annotation is not None
        for node in ast.walk(annotation)
    )
