"""
Reads which names the top-level statements of a module bind and read, and which statements a function needs.

The code is not run. Completions can be long and hostile, so each node and each name is visited once.
"""

import ast
import contextlib
import symtable
import sys
import warnings
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any


# What parsing raises. Null bytes, lone surrogates and very deep nesting raise other errors than SyntaxError
PARSE_ERRORS = (SyntaxError, ValueError, RecursionError, MemoryError)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
DEFINITIONS = (*FUNCTIONS, ast.ClassDef)
IMPORTS = (ast.Import, ast.ImportFrom)
ASSIGNMENTS = (ast.Assign, ast.AnnAssign, ast.AugAssign)
MAX_DEPTH = 100  # levels of a function's syntax tree. `ast.unparse` and the compiler recurse into it
SCRIPT_NAMES = {"print", "input", "help", "exit", "quit", "__name__"}
SETTING = "setrecursionlimit"  # affects every function, although no function reads the name


def own_nodes(*nodes: ast.AST) -> Iterator[ast.AST]:
    """Yields the nodes and those in them, last first. Functions, lambdas and classes come without what is in them."""
    stack = [*nodes]
    while stack:
        node = stack.pop()
        yield node
        if not isinstance(node, (*DEFINITIONS, ast.Lambda)):
            stack += ast.iter_child_nodes(node)


def names_in(*nodes: ast.AST) -> set[str]:
    """Returns all names in nodes, read or bound."""
    return {inner.id for node in nodes for inner in ast.walk(node) if isinstance(inner, ast.Name)}


def first_line(node: ast.stmt) -> int:
    """Returns the index of a statement's first line, decorators included."""
    return min(one.lineno for one in (node, *getattr(node, "decorator_list", ()))) - 1


def depth(node: ast.AST) -> int:
    """Returns the number of levels of a syntax tree. Raises `RecursionError` if there are too many to count."""
    return 1 + max(map(depth, ast.iter_child_nodes(node)), default=0)


def can_be_written(node: ast.AST) -> bool:
    """
    Returns whether a syntax tree is text that Python compiles. One with too many levels is not, or with a hexadecimal
    number of more than 4,300 decimal digits, or a `break` outside of a loop.
    """
    with warnings.catch_warnings(action="ignore"), contextlib.suppress(*PARSE_ERRORS):
        copy = _WithoutFinally().visit(ast.parse(ast.unparse(node)))
        compile(ast.fix_missing_locations(copy), "", "exec")
        return depth(node) <= MAX_DEPTH
    return False


class _WithoutFinally(ast.NodeTransformer):
    """Moves the statements of `finally` behind their `try`. Python compiles them once for each way out of it."""

    def visit_Try(self, node: Any) -> Any:
        self.generic_visit(node)
        last = node.finalbody
        node.finalbody = [ast.Pass() for _ in last[:1]]
        return [node, *last]

    visit_TryStar = visit_Try


def is_foreign(node: ast.AST) -> bool:
    """Returns whether a statement imports what does not come with Python."""
    names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
    if isinstance(node, ast.ImportFrom):
        names = ["." * node.level + (node.module or "")]
    return any(name.partition(".")[0] not in sys.stdlib_module_names for name in names)


def called_name(node: ast.AST | None) -> str | None:
    """Returns the name that a node calls, if it is a call and what it calls has a name."""
    return node.func.id if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) else None


def bound_names(module: symtable.SymbolTable) -> set[str]:
    """Returns the names that a module binds at its top level."""
    return {one.get_name() for one in module.get_symbols() if one.is_assigned() or one.is_imported()}


def all_tables(source: str) -> list[symtable.SymbolTable]:
    """Returns the symbol tables of a module, which comes first, and of the functions and classes in it."""
    with warnings.catch_warnings(action="ignore"):  # invalid escapes
        tables = [symtable.symtable(source, "<source>", "exec")]
    for table in tables:
        tables += table.get_children()
    return tables


def read_globals(tables: Iterable[symtable.SymbolTable]) -> set[str]:
    """
    Returns the names of the module and of builtins that code reads. In `class A: x = x`, the value is the module's
    `x`.
    """
    return {
        symbol.get_name()
        for table in tables
        for symbol in table.get_symbols()
        if symbol.is_referenced() and (symbol.is_global() or (table.get_type() == "class" and symbol.is_local()))
    }


class Statement:
    """
    A statement at the top level of a module, from its node and its source.

    Attributes:
        binds (`set[str]`): Names of the module that it binds, or may bind.
        declares (`set[str]`): Names of the module that functions in it bind when they are called.
        reads (`set[str]`): Names of the module that it reads when it runs, or later, when a function in it is called.
        is_script (`bool`): Whether it belongs to a script: it prints, asks for input, asserts or raises.
    """

    def __init__(self, node: ast.stmt, text: str):
        self.node = node
        self.text = text
        self.binds: set[str] = set()
        self.declares: set[str] = set()
        self.reads: set[str] = set()
        self.is_script = isinstance(node, ast.Assert | ast.Raise)
        try:
            module, *inner = tables = all_tables(text)
        except PARSE_ERRORS:  # the compiler refuses what the parser accepts, so the program will not run
            self.binds = {getattr(node, "name", "")}
            return
        if not isinstance(node, ast.AnnAssign) or node.value is not None:
            self.binds = bound_names(module)
        self.declares = {
            symbol.get_name()
            for table in inner
            for symbol in table.get_symbols()
            if symbol.is_declared_global() and symbol.is_assigned()
        }
        self.reads = read_globals(tables) | self.declares
        if not isinstance(node, (*DEFINITIONS, *IMPORTS, *ASSIGNMENTS)):
            defines = any(isinstance(one, (*DEFINITIONS, *IMPORTS)) for one in own_nodes(node))
            self.is_script |= bool(self.reads & ({"__name__"} if defines else SCRIPT_NAMES))
            self.binds |= {SETTING} if isinstance(node, ast.Expr) and SETTING in text else set()


def binds_of(statements: Iterable[Statement]) -> set[str]:
    """Returns the names that statements bind, or may bind."""
    return set().union(*(statement.binds for statement in statements))


class Module:
    """
    A module's statements in the order of the source.

    Attributes:
        binders (`dict[str, list[int]]`): Maps a name to the indices of the statements that bind it.
        users (`dict[str, list[int]]`): Maps a name that is not imported to the indices of the statements that may
            change its object: those that read it, but no definitions, examples, or assignments to names.
        readers (`dict[str, list[Statement]]`): Maps a name to the definitions that read it.
        own (`set[str]`): The names that statements or their functions bind, but not imports.
        examples (`set[int]`): The indices of the examples, tests, and statements of a script: they print, or use the
            function `name` or input, directly or through other functions.
    """

    def __init__(self, statements: Sequence[Statement], name: str):
        self.statements = statements
        self.binders: defaultdict[str, list[int]] = defaultdict(list)
        self.users: defaultdict[str, list[int]] = defaultdict(list)
        self.readers: defaultdict[str, list[Statement]] = defaultdict(list)
        for place, statement in enumerate(statements):
            for bound in statement.binds if not statement.is_script else ():
                self.binders[bound].append(place)
            for read in statement.reads if isinstance(statement.node, DEFINITIONS) else ():
                self.readers[read].append(statement)
        self.own = own = binds_of(one for one in statements if not isinstance(one.node, IMPORTS)).union(
            *(one.declares for one in statements)
        )
        used, queue = {name, "input"}, [name, "input"]
        for one in queue:
            new = binds_of(self.readers[one]) - used
            queue += new
            used |= new
        self.examples = set()
        for place, statement in enumerate(statements):
            if isinstance(statement.node, (*DEFINITIONS, *IMPORTS)):
                continue
            is_assignment = isinstance(statement.node, ASSIGNMENTS)
            if statement.is_script or (statement.reads & used and (statement.binds or not is_assignment)):
                self.examples.add(place)
            elif not (is_assignment and statement.binds):
                for read in statement.reads & own:
                    self.users[read].append(place)

    def needs(self, names: Iterable[str], only_last: bool) -> list[int]:
        """
        Returns the indices of the statements that names need: those that bind them, those that may change their
        objects, and what these need. `only_last` leaves out the bindings of a name that a later definition replaces.
        """
        places: set[int] = set()
        callers: set[str] = set()  # the functions that read what is wanted, directly or through others
        queue = [*names]
        seen = {*queue}
        while queue:
            wanted = queue.pop()
            bound = self.binders[wanted]
            if only_last and bound and isinstance(self.statements[bound[-1]].node, DEFINITIONS):
                bound = bound[-1:]
            through, changing = [wanted], list[int]()
            for name in through:
                changing += self.users[name]
                found = self.readers[name] if wanted in self.own else []
                new_callers = binds_of(found) - callers
                callers |= new_callers
                through += new_callers
            for place in {*bound, *changing} - places:
                places.add(place)
                new = (self.statements[place].reads | self.statements[place].binds) - seen
                seen |= new
                queue += new
        return sorted(places)

    def with_readers(self, places: Iterable[int]) -> set[int]:
        """Returns the indices of statements, and of those that read what these bind, directly or through others."""
        found, names = {*places}, binds_of(self.statements[place] for place in places)
        while new := {k for k, one in enumerate(self.statements) if k not in found and one.reads & names}:
            found |= new
            names |= binds_of(self.statements[place] for place in new)
        return found
