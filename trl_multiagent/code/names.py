"""
Reads which names the top-level statements of a module bind, read and change, and which statements a function needs.

The code is not run. Completions can be long and hostile. Therefore nodes are visited without recursion, and each one
once.
"""

import ast
import builtins
import symtable
from collections.abc import Iterable, Iterator, Sequence


# What parsing raises. Null bytes, lone surrogates and very deep nesting raise other errors than SyntaxError
PARSE_ERRORS = (SyntaxError, ValueError, RecursionError, MemoryError)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
DEFINITIONS = (*FUNCTIONS, ast.ClassDef)
IMPORTS = (ast.Import, ast.ImportFrom)
DISPLAYS = (ast.List, ast.Set, ast.Dict, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
ASSIGNMENTS = (ast.Assign, ast.AnnAssign)
# These statements always bind the names in them. Others may do so in a part that does not run
CERTAIN = (*DEFINITIONS, *IMPORTS, *ASSIGNMENTS, ast.Delete)
BLOCKS = (ast.For, ast.AsyncFor, ast.While, ast.If, ast.With, ast.AsyncWith, ast.Try, ast.Match)
BUILTINS = frozenset(dir(builtins))
PURE_METHODS = {*dir(str), *dir(frozenset), *dir(type(type.__dict__))}  # methods of immutable types
# Library functions that change their arguments
MUTATORS = set(
    "heapify heappush heappop heapreplace heappushpop insort insort_left insort_right "
    "shuffle setitem delitem setattr delattr next".split()
)
SCRIPT_FUNCTIONS = {"print", "input", "help", "exit", "quit"}
# Library functions that start or end a script, or print
SCRIPT_METHODS = {"exit", "_exit", "abort", "main", "run", "testmod", "write", "writelines", "flush", "show"}
SETTING = "setrecursionlimit"  # affects every function, although no function reads the name
FUTURE = "__future__"
MAX_CHAIN = 100  # attributes, items and calls of one chain
END = 1 << 60  # greater than the index of any statement


def own_nodes(*nodes: ast.AST) -> Iterator[ast.AST]:
    """Yields the nodes and those in them, last first. Functions, lambdas and classes come without what is in them."""
    stack = [*nodes]
    while stack:
        node = stack.pop()
        yield node
        if not isinstance(node, (*DEFINITIONS, ast.Lambda)):
            stack += ast.iter_child_nodes(node)


def _nodes_that_run(definition: ast.stmt) -> Iterator[ast.AST]:
    """Yields the nodes of a definition that run with it, and not when a function is called."""
    stack: list[ast.AST] = [definition]
    while stack:
        node = stack.pop()
        yield node
        if isinstance(node, (*FUNCTIONS, ast.Lambda)):
            stack += [node.args, *getattr(node, "decorator_list", [])]
        else:
            stack += ast.iter_child_nodes(node)


def names_in(node: ast.AST) -> set[str]:
    """Returns all names in a node, read or bound."""
    return {inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name)}


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
        reads_now (`set[str]`): Those that it may read when it runs.
        changes (`set[str]`): Names of the module whose objects it may change when it runs, or later.
        changes_now (`set[str]`): Those whose objects it may change when it runs.
        has_function (`bool`): Whether it contains a function or lambda.
    """

    def __init__(self, node: ast.stmt, text: str):
        self.node = node
        nodes = [*ast.walk(node)]
        self.binds, self.declares, self.reads = _names_of(node, text)
        self.reads |= {
            inner.target.id
            for inner in nodes
            if isinstance(inner, ast.AugAssign) and isinstance(inner.target, ast.Name)
        } & (self.binds | self.declares)  # `x += 1` reads `x`
        known = self.reads | {SETTING}
        self.changes = {name for inner in nodes for name in changed_names(inner)} & known
        self.reads_now, self.changes_now = self.reads, self.changes
        if isinstance(node, DEFINITIONS):
            nodes = [*_nodes_that_run(node)]
            self.reads_now = self.reads & {inner.id for inner in nodes if isinstance(inner, ast.Name)}
            self.changes_now = {name for inner in nodes for name in changed_names(inner)} & known
        self.has_function = any(isinstance(inner, (*FUNCTIONS, ast.Lambda)) for inner in nodes)

    @property
    def is_certain(self) -> bool:
        """Whether it always binds its names."""
        return isinstance(self.node, CERTAIN)

    @property
    def is_left_out(self) -> bool:
        """Whether it belongs to a script, even if it changes something."""
        if isinstance(self.node, ast.If):
            return "__name__" in names_in(self.node.test)
        return isinstance(self.node, ast.Assert)

    @property
    def called(self) -> str:
        """The name of the function or method that it calls, if it does nothing else; otherwise empty."""
        if isinstance(self.node, ast.Expr) and isinstance(self.node.value, ast.Call):
            return called_name(self.node.value)
        return ""


def _names_of(node: ast.stmt, text: str) -> tuple[set[str], set[str], set[str]]:
    """Returns what a statement binds, what functions in it declare `global` and bind, and what it reads."""
    try:
        module, *inner = tables = all_tables(text)
    except PARSE_ERRORS:  # the compiler refuses what the parser accepts, so the program will not run
        return ({node.name} if isinstance(node, DEFINITIONS) else set()), set(), set()
    bound = {symbol.get_name() for symbol in module.get_symbols() if symbol.is_assigned() or symbol.is_imported()}
    if isinstance(node, ast.AnnAssign) and node.value is None:
        bound = set()  # a name without a value is not bound
    if isinstance(node, ast.ImportFrom):
        bound |= {"*"} if node.names[0].name == "*" else set()
        bound |= {FUTURE} if node.module == FUTURE else set()
    declared = {
        symbol.get_name()
        for table in inner
        for symbol in table.get_symbols()
        if symbol.is_declared_global() and symbol.is_assigned()
    }
    return bound, declared, read_globals(tables)


def changed_names(node: ast.AST) -> set[str]:
    """Returns the names whose objects a node may change."""
    changed: list[ast.expr] = []
    if isinstance(node, (ast.Attribute, ast.Subscript)) and not isinstance(node.ctx, ast.Load):
        changed = [node]
    elif isinstance(node, ast.AugAssign) and isinstance(node.value, (ast.Name, *DISPLAYS)):
        changed = [node.target]
    elif isinstance(node, ast.Call):
        if called_name(node) in MUTATORS:
            changed = [node.func, *node.args]
        elif isinstance(node.func, ast.Attribute) and node.func.attr not in PURE_METHODS:
            changed = [node.func]
    elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and isinstance(node.value.func, ast.Name):
        if node.value.func.id not in BUILTINS:  # a call by itself, which may be there to change its arguments
            changed = [*node.value.args, *(keyword.value for keyword in node.value.keywords)]
    names = {root_name(part.value if isinstance(part, ast.Starred) else part) for part in changed} - BUILTINS
    return names - {""} | ({SETTING} if isinstance(node, ast.Attribute) and node.attr == SETTING else set())


def root_name(node: ast.expr) -> str:
    """
    Returns the first name of a chain of attributes, items and calls: `a` in `a.b[0].c()`. Empty if it begins
    otherwise.
    """
    for _ in range(MAX_CHAIN):
        if isinstance(node, ast.Name):
            return node.id
        if not isinstance(node, (ast.Attribute, ast.Subscript, ast.Call)):
            return ""
        node = node.func if isinstance(node, ast.Call) else node.value
    return ""


def called_name(call: ast.Call) -> str:
    """Returns the name of the function or method that a call calls; empty if it has none."""
    if isinstance(call.func, ast.Attribute):
        return call.func.attr
    return call.func.id if isinstance(call.func, ast.Name) else ""


def assignments(node: ast.AST) -> list[tuple[ast.expr, ast.expr]]:
    """Returns the targets of a node that assigns values, each with the expression."""
    if isinstance(node, ast.Assign):
        return [(target, node.value) for target in node.targets]
    if isinstance(node, (ast.AnnAssign, ast.NamedExpr)) and node.value is not None:
        return [(node.target, node.value)]
    return []


class Module:
    """
    A module's statements, or some of them, in the order of the source. The dictionaries map names to indices of
    statements.

    Attributes:
        imported (`set[str]`): The names that the module imports at its top level.
        binders (`dict[str, list[int]]`): The statements that bind a name.
        readers (`dict[str, list[int]]`): The statements that read it.
        changers (`dict[str, list[int]]`): The statements that may change its object when they run.
        changing (`dict[str, set[str]]`): The functions and classes whose code changes its object.
    """

    def __init__(self, statements: Sequence[Statement]):
        self.statements = statements
        self.imported = {name for one in statements if isinstance(one.node, IMPORTS) for name in one.binds}
        self.binders: dict[str, list[int]] = {}
        self.readers: dict[str, list[int]] = {}
        self.changers: dict[str, list[int]] = {}
        self.changing: dict[str, set[str]] = {}
        functions = {name for one in statements if isinstance(one.node, DEFINITIONS) for name in one.binds}
        for place, statement in enumerate(statements):
            if statement.is_left_out:
                continue
            for name in statement.binds:
                self.binders.setdefault(name, []).append(place)
            for name in statement.reads:
                self.readers.setdefault(name, []).append(place)
            changes = statement.changes_now - statement.binds
            if isinstance(statement.node, BLOCKS) and statement.changes_now:  # of what it runs over, for example
                changes |= statement.reads_now - functions - statement.binds
            targets = [target for target, _ in assignments(statement.node)]
            only_assigns = isinstance(statement.node, ASSIGNMENTS) and all(isinstance(x, ast.Name) for x in targets)
            called = statement.called
            is_script = called in SCRIPT_FUNCTIONS or (called in SCRIPT_METHODS and not changes - self.imported)
            for name in changes if not is_script and not only_assigns else ():
                self.changers.setdefault(name, []).append(place)
            for name in (statement.changes | statement.declares) - self.imported if statement.has_function else ():
                self.changing.setdefault(name, set()).update(statement.binds)

    def bindings(self, name: str, before: int = END) -> Iterator[tuple[int, Statement]]:
        """
        Yields the statements before an index that may have bound a name, with their indices: the latest first, up to
        one that always does.
        """
        for place in reversed(self.binders.get(name, ())):
            if place < before:
                yield place, self.statements[place]
                if self.statements[place].is_certain:
                    return


def kept_and_needed(module: Module, name: str) -> tuple[list[int], list[int]]:
    """
    Returns the indices of the statements of a completion to keep in the program, and of those that the function `name`
    needs, for which the agent was asked. Calls of this function are examples, which are never needed.

    All definitions and imports are kept, with the statements that they need. A call is kept only if the function that
    was asked for needs it; a call such as `main()` may fill a variable that only `main` reads. Bindings that later
    ones replace are kept, but the function does not need them.
    """
    always = {name, FUTURE, SETTING}
    kept = _needs(module, name, always, only_last=False)
    defining = {k: one for k, one in enumerate(module.statements) if isinstance(one.node, (*DEFINITIONS, *IMPORTS))}
    mentioned = {wanted for one in defining.values() for wanted in one.reads | one.binds}
    kept |= defining.keys() | _needs(module, name, mentioned, only_last=False, with_calls=False)
    return sorted(kept), sorted(_needs(module, name, always, only_last=True))


def _needs(module: Module, name: str, names: set[str], only_last: bool, with_calls: bool = True) -> set[int]:
    """
    Collects the statements that names need: those that bind them, those that change their objects, and what these
    need. Calls of the function `name` are examples. `only_last` leaves out bindings of a name that a later one
    replaces, and calls that print. `with_calls` collects calls of the module's functions for the variables that they
    change.
    """
    places: set[int] = set()
    seen: set[str] = set()
    called = {name}  # functions whose calls were collected, and other names of them
    queue = [*names]
    while queue:
        wanted = queue.pop()
        if wanted in seen:
            continue
        seen.add(wanted)
        if wanted not in module.binders and wanted not in BUILTINS:
            queue.append("*")  # it may come from `from module import *`
        found = {*_binders(module, wanted, only_last)}
        for place in module.changers.get(wanted, ()):
            statement = module.statements[place]
            if name not in statement.reads_now - statement.changes_now:  # it would be an example
                found.add(place)
        if with_calls:
            found.update(_calls(module, module.changing.get(wanted, set()), called, only_last))
        for place in found - places:
            places.add(place)
            statement = module.statements[place]
            queue += statement.reads
            if isinstance(statement.node, IMPORTS):  # imported names may share state: `getcontext().prec = 5`
                queue += statement.binds
    return places


def _binders(module: Module, name: str, only_last: bool) -> Iterator[int]:
    """
    Yields the statements that bind a name. With `only_last`, a binding that always happens replaces all earlier ones,
    and one in a branch replaces those in other branches.
    """
    in_branch = False  # whether a later branch binds the name
    for place in reversed(module.binders.get(name, ())):
        statement = module.statements[place]
        is_branch = isinstance(statement.node, (ast.If, ast.Try))
        if not (only_last and is_branch and in_branch):
            yield place
        in_branch |= is_branch
        if only_last and statement.is_certain and name not in statement.reads_now:
            return


def _calls(module: Module, functions: set[str], called: set[str], only_last: bool) -> Iterator[int]:
    """
    Yields the statements that call some functions not in `called`: directly, through other functions, or by another
    name.
    """
    queue = [*functions]
    while queue:
        name = queue.pop()
        if name in called:
            continue
        called.add(name)
        for place in module.readers.get(name, ()):
            statement = module.statements[place]
            now = name in statement.reads_now
            if now and not (only_last and statement.called in SCRIPT_FUNCTIONS):
                yield place
            if isinstance(statement.node, ASSIGNMENTS if now else DEFINITIONS):
                queue += statement.binds
