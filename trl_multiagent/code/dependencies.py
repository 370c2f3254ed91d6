"""
Reads which names the top-level statements of a module bind and read, and which statements a function needs.

The code is not run. Completions can be long and hostile, so each node and each name is visited once.
"""

import ast
import symtable
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence


# What parsing raises. Null bytes, lone surrogates and very deep nesting raise other errors than SyntaxError
PARSE_ERRORS = (SyntaxError, ValueError, RecursionError, MemoryError)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
DEFINITIONS = (*FUNCTIONS, ast.ClassDef)
IMPORTS = (ast.Import, ast.ImportFrom)
ASSIGNMENTS = (ast.Assign, ast.AnnAssign)
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


def all_tables(source: str) -> list[symtable.SymbolTable]:
    """Returns the symbol tables of a module, which comes first, and of the functions and classes in it."""
    tables = [symtable.symtable(source, "<source>", "exec")]
    for table in tables:
        tables += table.get_children()
    return tables


def read_globals(tables: Iterable[symtable.SymbolTable]) -> set[str]:
    """
    Returns the module's names, and those of builtins, that code reads. In `class A: x = x`, the value is that of the
    module.
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
        changes (`set[str]`): Names whose objects it changes by an assignment to an item or attribute, or as
            decorators.
        is_script (`bool`): Whether it belongs to a script: it prints, asks for input, asserts or raises.
    """

    def __init__(self, node: ast.stmt, text: str):
        self.node = node
        self.binds: set[str] = {node.name} if isinstance(node, DEFINITIONS) else set()
        self.declares: set[str] = set()
        self.reads: set[str] = set()
        self.changes: set[str] = set()
        self.is_script = isinstance(node, ast.Assert | ast.Raise)
        try:
            module, *inner = tables = all_tables(text)
        except PARSE_ERRORS:  # the compiler refuses what the parser accepts, so the program will not run
            return
        if not isinstance(node, ast.AnnAssign) or node.value is not None:
            self.binds = {one.get_name() for one in module.get_symbols() if one.is_assigned() or one.is_imported()}
        self.declares = {
            symbol.get_name()
            for table in inner
            for symbol in table.get_symbols()
            if symbol.is_declared_global() and symbol.is_assigned()
        }
        self.reads = read_globals(tables) | self.declares
        if isinstance(node, DEFINITIONS):
            self.changes = names_in(*node.decorator_list)
        elif isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            self.changes = names_in(*(one for one in targets if isinstance(one, ast.Attribute | ast.Subscript)))
        elif not isinstance(node, IMPORTS):
            own = [*own_nodes(node)]
            defines = any(isinstance(inner, (*DEFINITIONS, *IMPORTS)) for inner in own)
            names = {inner.id for inner in own if isinstance(inner, ast.Name)}
            self.is_script |= bool(names & ({"__name__"} if defines else SCRIPT_NAMES))
            self.binds |= {SETTING} if isinstance(node, ast.Expr) and SETTING in text else set()


class Module:
    """
    A module's statements in the order of the source.

    Attributes:
        binders (`dict[str, list[int]]`): Maps a name to the indices of the statements that bind it.
        readers (`dict[str, list[int]]`): Maps a name to those that read it.
        variables (`set[str]`): The names that something other than a definition or an import binds.
        examples (`set[str]`): The function `name`, and the functions and classes that use it. Calls of these are
            examples, tests, or the script's own.
    """

    def __init__(self, statements: Sequence[Statement], name: str):
        self.statements = statements
        self.binders: defaultdict[str, list[int]] = defaultdict(list)
        self.readers: defaultdict[str, list[int]] = defaultdict(list)
        self.variables: set[str] = set()
        for place, statement in enumerate(statements):
            for bound in statement.binds if not statement.is_script else ():
                self.binders[bound].append(place)
            for read in statement.reads:
                self.readers[read].append(place)
            if not isinstance(statement.node, (*DEFINITIONS, *IMPORTS)):
                self.variables |= statement.binds
            self.variables |= statement.declares
        self.examples, queue = {name}, [name]
        for used in queue:
            for place in self.readers.get(used, ()):
                if isinstance(statements[place].node, DEFINITIONS):
                    queue += statements[place].binds - self.examples
                    self.examples |= statements[place].binds

    def is_example(self, statement: Statement) -> bool:
        """Returns whether a statement is an example, a test, or the script's own."""
        if isinstance(statement.node, (*DEFINITIONS, *IMPORTS)):
            return False
        return statement.is_script or bool(statement.reads & self.examples)

    def needs(self, names: Iterable[str], only_last: bool) -> list[int]:
        """
        Returns the indices of the statements that names need: those that bind them, those that change their objects,
        and what these need. `only_last` leaves out bindings of a name that a later one replaces.
        """
        places: set[int] = set()
        seen: set[str] = set()
        touched: set[str] = set()
        queue = [*names]
        while queue:
            wanted = queue.pop()
            if wanted in seen:
                continue
            seen.add(wanted)
            for place in {*self._bindings(wanted, only_last), *self._changers(wanted, touched)} - places:
                places.add(place)
                queue += self.statements[place].reads
        return sorted(places)

    def _bindings(self, name: str, only_last: bool) -> Iterator[int]:
        for place in reversed(self.binders.get(name, ())):
            yield place
            node, reads = self.statements[place].node, self.statements[place].reads
            if only_last and (isinstance(node, DEFINITIONS) or (isinstance(node, ASSIGNMENTS) and name not in reads)):
                return

    def _changers(self, name: str, touched: set[str]) -> Iterator[int]:
        """
        Yields the statements that may change the object of a name: those with an assignment to its item or attribute
        and definitions that it decorates; for a variable, others that read it, too, directly or through functions and
        other variables. `touched` are the names that were looked at for this, to which new ones are added.
        """
        if name not in self.variables:
            is_own = any(isinstance(self.statements[k].node, DEFINITIONS) for k in self.binders.get(name, ()))
            yield from (k for k in self.readers.get(name, ()) if is_own and name in self.statements[k].changes)
            return
        queue = [name]
        while queue:
            read = queue.pop()
            if read in touched:
                continue
            touched.add(read)
            for place in self.readers.get(read, ()):
                statement = self.statements[place]
                if read in statement.changes:
                    yield place
                elif isinstance(statement.node, (*DEFINITIONS, *ASSIGNMENTS)):
                    queue += statement.binds - self.examples
                elif not self.is_example(statement):
                    yield place
