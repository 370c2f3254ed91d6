"""
Reads from an answer's text whether its program may depend on chance or time, so that two runs of it can differ. No
program is run for this.

Experiments compare runs. A program that fails by chance would fail in them without being changed.
"""

import ast
import importlib
import re
import types

from trl_multiagent.code.names import PARSE_ERRORS, all_tables, read_globals


MODULES = set(
    """
    __future__ abc array bisect cmath collections copy dataclasses datetime decimal enum fractions functools hashlib heapq itertools json math
    numbers operator re statistics string sys textwrap typing unicodedata
    """.split()
)
SYS = ("maxsize", "getsizeof", "setrecursionlimit", "float_info")  # what may be used of `sys`
# Built-in functions that reach other objects by name, or whose values depend on the process
NAMES = set(
    """
    __builtins__ __import__ breakpoint compile dir eval exec getattr globals hash id input locals memoryview open vars
    """.split()
)
DUNDERS = {"__init__", "__name__", "__main__", "__slots__", "__all__"}
DUNDER = re.compile(r"__\w+__")
_RUNNING = (types.FrameType, types.CodeType, types.TracebackType, types.GeneratorType, types.CoroutineType)
# Attributes with which a text reaches the interpreter or the clock
ATTRIBUTES = {name for kind in _RUNNING for name in vars(kind) if "_" in name.strip("_")}
ATTRIBUTES |= set("now today utcnow attrgetter methodcaller Formatter get_type_hints register".split())
# Modules that an allowed one contains, such as `statistics.sys`
ATTRIBUTES |= {
    name
    for module in MODULES - {"sys"}
    for name, value in vars(importlib.import_module(module)).items()
    if isinstance(value, types.ModuleType) and name not in MODULES - {"sys"}
}


def is_repeatable(source: str, prefix: str) -> bool:
    """
    Returns whether all runs of an answer give the same values. The answer may import what `prefix`, the source before
    it, imports.
    """
    try:
        nodes, tables = [*ast.walk(ast.parse(source))], all_tables(source)
        modules = MODULES | {name for node in ast.walk(ast.parse(prefix)) for name, _ in _imports(node)}
    except PARSE_ERRORS:  # it cannot be decided
        return False
    reads = read_globals(tables)
    imported = {one.get_name() for table in tables for one in table.get_symbols() if one.is_imported()}
    everything = any(name == "*" for node in nodes for _, name in _imports(node))
    if reads & NAMES or (everything and reads & ATTRIBUTES):
        return False
    return not any(_reaches_out(node, modules, imported) for node in nodes)


def _reaches_out(node: ast.AST, modules: set[str], imported: set[str]) -> bool:
    """
    Returns whether a node imports something else than these modules, or names what leads to others. `imported` are
    names of what the text imports.
    """
    found = _imports(node)
    if any(
        module not in modules or name in ATTRIBUTES or name[0] == "_" or (module == "sys" and name not in SYS)
        for module, name in found
    ):
        return True
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return any(name not in DUNDERS for name in DUNDER.findall(node.value))
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "type":
        return len(node.args) > 1  # a class with any attributes
    if isinstance(node, ast.MatchClass):
        return any(name in ATTRIBUTES or DUNDER.fullmatch(name) for name in node.kwd_attrs)
    if isinstance(node, ast.Name):
        return bool(DUNDER.fullmatch(node.id)) and node.id not in DUNDERS
    if not isinstance(node, ast.Attribute):
        return False
    owner = node.value.id if isinstance(node.value, ast.Name) else ""
    if node.attr in ATTRIBUTES or (DUNDER.fullmatch(node.attr) and node.attr not in DUNDERS):
        return True
    return (owner in imported and node.attr[0] == "_") or (owner == "sys" and node.attr not in SYS)


def _imports(node: ast.AST) -> list[tuple[str, str]]:
    """Returns the packages that a statement imports, each with the name in it; for `import sys`, an allowed one."""
    if isinstance(node, ast.ImportFrom):
        return [((node.module or "").partition(".")[0], alias.name) for alias in node.names]
    names = node.names if isinstance(node, ast.Import) else []
    return [(alias.name.partition(".")[0], alias.asname or SYS[0]) for alias in names]
