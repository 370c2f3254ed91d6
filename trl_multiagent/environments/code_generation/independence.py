"""
Decides from the texts of two answers whether experiments can tell what each agent contributes.

They can if the answers are independent: all that one uses of the other is the function `aux`, or the entry point; and neither uses what tells
programs apart that return the same values, such as time, chance, or objects of the interpreter. No program is run for this.
"""

import ast
import importlib
import re
import string
import types
from collections.abc import Iterator
from functools import cached_property

from trl_multiagent.environments.python_code.names import (
    DISPLAYS,
    FUNCTIONS,
    IMPORTS,
    PARSE_ERRORS,
    all_tables,
    read_globals,
)


MODULES = set(
    """
    __future__ abc array bisect cmath collections copy dataclasses datetime decimal enum fractions functools hashlib heapq itertools json math
    numbers operator re statistics string sys textwrap typing unicodedata
    """.split()
)
SYS = ("maxsize", "getsizeof", "setrecursionlimit", "float_info")  # what may be used of `sys`
# Built-in functions that reach other objects by name, or tell equal values apart
NAMES = set(
    """
    __builtins__ __import__ breakpoint compile delattr dir eval exec getattr globals hasattr hash id input locals memoryview open setattr vars
    """.split()
)
DUNDERS = {"__init__", "__name__", "__main__", "__slots__", "__all__"}
DUNDER = re.compile(r"__\w+__")
_RUNNING = (types.FrameType, types.CodeType, types.TracebackType)
_PAUSED = (types.GeneratorType, types.CoroutineType, types.AsyncGeneratorType)
ATTRIBUTES = {name for kind in (*_RUNNING, *_PAUSED) for name in vars(kind) if "_" in name.strip("_")}
ATTRIBUTES |= set(
    """
    send throw asend athrow now today utcnow attrgetter methodcaller Formatter format_map get_type_hints register getcontext setcontext
    localcontext
    """.split()
)
# Modules that an allowed one contains, such as `statistics.sys`
ATTRIBUTES |= {
    name
    for module in MODULES - {"sys"}
    for name, value in vars(importlib.import_module(module)).items()
    if isinstance(value, types.ModuleType) and name not in MODULES - {"sys"}
}


def are_independent(aux: str, main: str, prefix: str, entry_point: str, signature: str) -> bool:
    """
    Returns whether the answers `aux` and `main` to a problem are independent. `prefix` is the source before the entry point in the prompt, and
    `signature` the entry point's header.
    """
    try:
        given, helper, caller = _Text(prefix), _Text(aux), _Text(main)
        imported = {name for node in ast.walk(given.tree) for name, _ in _imports(node)}
        if any(one.looks_around(MODULES | imported) for one in (helper, caller)):
            return False
        bound = caller.bound_except(helper.without_state | given.statements.keys())
        if _parameters(main, entry_point) <= _parameters(f"{signature} pass", entry_point):
            bound -= {entry_point}  # aux may call it, but not ask it for another function
        only_helpers = (
            helper.bound_except({*given.statements}) - caller.bound_except(set()) - helper.imported - {"aux"}
        )
        if helper.reads & bound or caller.reads & only_helpers:
            return False
        if helper.uses_attribute_of(entry_point) or caller.uses_attribute_of("aux"):
            return False
        return not (helper.read_attributes & caller.set_attributes or caller.read_attributes & helper.set_attributes)
    except PARSE_ERRORS:  # it cannot be decided
        return False


class _Text:
    """What one answer binds and uses."""

    def __init__(self, source: str):
        self.tree = ast.parse(source)
        self.nodes = [*ast.walk(self.tree)]
        self.tables = all_tables(source)
        self.reads = read_globals(self.tables)
        self.imported = {one.get_name() for table in self.tables for one in table.get_symbols() if one.is_imported()}
        attributes = [node for node in self.nodes if isinstance(node, ast.Attribute)]
        self.set_attributes = {node.attr for node in attributes if not isinstance(node.ctx, ast.Load)}
        self.read_attributes = {node.attr for node in attributes if isinstance(node.ctx, ast.Load)}
        for node in self.nodes:
            if isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Attribute):
                self.read_attributes.add(node.target.attr)
            elif isinstance(node, ast.MatchClass):
                self.read_attributes.update(node.kwd_attrs)

    @cached_property
    def statements(self) -> dict[str, ast.stmt]:
        """The statements of the module by their texts, with an import of several names as one statement for each."""
        return {ast.unparse(node): node for node in self._single_statements()}

    @property
    def without_state(self) -> set[str]:
        """Those that the other text may have, too: imports, functions, and names of constants."""
        return {text for text, node in self.statements.items() if _keeps_no_state(node)}

    def _single_statements(self) -> Iterator[ast.stmt]:
        for node in self.tree.body:
            if isinstance(node, ast.Import):
                yield from (ast.Import([alias]) for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                yield from (ast.ImportFrom(node.module, [alias], node.level) for alias in node.names)
            else:
                yield node

    def bound_except(self, others: set[str]) -> set[str]:
        """Returns the module's names that this text binds, without statements that another text has, too."""
        mains, *inner = all_tables("\n".join(one for one in self.statements if one not in others))
        symbols = [*mains.get_symbols()]
        symbols += [one for table in inner for one in table.get_symbols() if one.is_declared_global()]
        return {one.get_name() for one in symbols if one.is_assigned() or one.is_imported()}

    def uses_attribute_of(self, name: str) -> bool:
        """Returns whether it uses an attribute of the other agent's function, except those of a cache."""
        return any(
            isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name)
            and node.value.id == name
            and not node.attr.startswith("cache_")
            for node in self.nodes
        )

    def looks_around(self, modules: set[str]) -> bool:
        """Returns whether it uses other modules than these, or what tells programs apart that return the same values."""
        own = self.set_attributes | {
            inner for table in self.tables if table.get_type() == "class" for inner in table.get_identifiers()
        }
        used = self.read_attributes | self.set_attributes
        return (
            bool(used & ATTRIBUTES or self.reads & NAMES)
            or any(DUNDER.fullmatch(name) and name not in DUNDERS for name in used)
            or any(name.startswith("_") and not DUNDER.fullmatch(name) for name in used - own)
            or any(self._is_suspect(node, modules) for node in self.nodes)
            or ("*" in {name for node in self.nodes for _, name in _imports(node)} and bool(self.reads & ATTRIBUTES))
        )

    def _is_suspect(self, node: ast.AST, modules: set[str]) -> bool:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            found = _imports(node)
            return any(
                module not in modules or name in ATTRIBUTES or name[0] == "_" or (module == "sys" and name not in SYS)
                for module, name in found
            )
        if isinstance(node, ast.Compare):  # the identity of values shows whether they were copied
            sides = [node.left, *node.comparators]
            return any(
                isinstance(operator, (ast.Is, ast.IsNot))
                and not any(isinstance(side, ast.Constant) for side in sides[k : k + 2])
                for k, operator in enumerate(node.ops)
            )
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            return any(name not in DUNDERS for name in DUNDER.findall(node.value))
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            return bool(DUNDER.fullmatch(node.id)) and node.id not in DUNDERS
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "type":
            return len(node.args) > 1  # a class with any attributes
        if not isinstance(node, ast.Attribute):
            return False
        owner = node.value.id if isinstance(node.value, ast.Name) else ""
        if owner in self.imported and (node.attr[0] == "_" or not isinstance(node.ctx, ast.Load)):
            return True  # a private or a new attribute of a module
        return (owner == "sys" and node.attr not in SYS) or (node.attr == "format" and _reads_fields(node.value))


def _keeps_no_state(node: ast.stmt) -> bool:
    """Returns whether a statement binds no object that can change, such as a dictionary, a cache or a default value."""
    if isinstance(node, FUNCTIONS):
        return not (node.decorator_list or node.args.defaults or node.args.kw_defaults)
    if isinstance(node, ast.Assign):
        return not any(isinstance(inner, (*DISPLAYS, ast.Call, ast.Lambda)) for inner in ast.walk(node.value))
    return isinstance(node, IMPORTS)


def _reads_fields(text: ast.expr) -> bool:
    """Returns whether a template for `format` may contain attributes or items of a value."""
    if not isinstance(text, ast.Constant) or not isinstance(text.value, str):
        return True
    return any(set(".[") & set(name or "") for _, name, _, _ in string.Formatter().parse(text.value))


def _parameters(source: str, name: str) -> set[tuple[str, int]]:
    """Returns the parameters of a module's function, as kinds and numbers."""
    functions = [node.args for node in ast.parse(source).body if isinstance(node, FUNCTIONS) and node.name == name]
    return {
        (kind, number)
        for one in functions
        for kind, found in ast.iter_fields(one)
        if "defaults" not in kind
        for number in range(len(found) if isinstance(found, list) else found is not None)
    } or {("none", len(functions))}


def _imports(node: ast.AST) -> list[tuple[str, str]]:
    """Returns the packages that a statement imports, each with the name in it; for `import sys`, an allowed one."""
    if isinstance(node, ast.ImportFrom):
        return [((node.module or "").partition(".")[0], alias.name) for alias in node.names]
    names = node.names if isinstance(node, ast.Import) else []
    return [(alias.name.partition(".")[0], alias.asname or SYS[0]) for alias in names]
