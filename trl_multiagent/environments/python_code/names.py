"""
Reads which names the top-level statements of a module bind, read and change, and which statements a function needs.

The code is not run. Completions can be long and hostile. Therefore nodes are visited without recursion, and each one once.
"""

import ast
import builtins
from collections.abc import Iterable, Iterator


FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
DEFINITIONS = (*FUNCTIONS, ast.ClassDef)
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
SCOPES = (*DEFINITIONS, ast.Lambda, *COMPREHENSIONS)
IMPORTS = (ast.Import, ast.ImportFrom)
CONTAINERS = (ast.Attribute, ast.Subscript)
DISPLAYS = (ast.List, ast.Set, ast.Dict, *COMPREHENSIONS)
# These statements always bind the names in them. Others may do so in a part that does not run
CERTAIN = (*DEFINITIONS, *IMPORTS, ast.Assign, ast.AnnAssign, ast.Delete)
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
MAX_ALIASES = 20  # at most this many names of one object are followed
END = 1 << 60  # greater than the index of any statement
Roots = dict[ast.AST, str | None]  # results of `root_name`


def inner_blocks(statement: ast.stmt) -> list[list[ast.stmt]]:
    """The lists of statements directly in a statement: its body and its branches, then those of its handlers or cases."""
    own: list[list[ast.stmt]] = []
    nested: list[list[ast.stmt]] = []
    for _, value in ast.iter_fields(statement):
        first = value[0] if isinstance(value, list) and value else None
        if isinstance(first, ast.stmt):
            own.append(value)
        elif isinstance(first, ast.ExceptHandler | ast.match_case):
            nested += [part.body for part in value]
    return own + nested


def root_name(node: ast.AST, known: Roots) -> str | None:
    """The first name of a chain of attributes, items and calls: `a` in `a.b[0].c()`. `known` caches the results."""
    path = []
    while isinstance(node, (*CONTAINERS, ast.Call)) and node not in known:
        path.append(node)
        node = node.func if isinstance(node, ast.Call) else node.value
    root = known[node] if node in known else node.id if isinstance(node, ast.Name) else None
    known.update(dict.fromkeys(path, root))
    return root


class Scope:
    """
    A module, function, class, lambda or comprehension.

    Args:
        node (`ast.AST`, *optional*): The node of the scope; None for the module.
        parent (`Scope`, *optional*): The enclosing scope; None for the module.

    Attributes:
        bound (`set[str]`): Names that the scope binds, parameters included.
        declared (`set[str]`): Names that it declares `global` or `nonlocal`.
        waits (`bool`): Whether its code runs only when a function is called.
    """

    def __init__(self, node: ast.AST | None = None, parent: "Scope | None" = None):
        self.node = node
        self.parent = parent
        self.bound: set[str] = set()
        self.declared: set[str] = set()
        self.waits: bool = parent is not None and (parent.waits or isinstance(node, (*FUNCTIONS, ast.Lambda)))

    def owner(self, name: str) -> "Scope | None":
        """The scope in which a name used here is local; None if it belongs to the module or is a builtin."""
        scope = self
        while scope.parent is not None:
            if name in scope.bound and name not in scope.declared:
                if scope is self or not isinstance(scope.node, ast.ClassDef):
                    return scope
            scope = scope.parent
        return None


def _walk(statement: ast.stmt, module: Scope) -> Iterator[tuple[ast.AST, Scope]]:
    """All nodes of a statement in source order, each with its scope. The scopes are complete at the end."""
    stack: list[tuple[ast.AST, Scope]] = [(statement, module)]
    apart: set[ast.AST] = set()  # parts of a scope's node that are evaluated in the enclosing scope
    while stack:
        node, scope = stack.pop()
        yield node, scope
        _bind(node, scope)
        outside = _outside(node)
        apart.update(outside)
        inner = Scope(node, scope) if isinstance(node, SCOPES) else scope
        stack += [(part, inner) for part in ast.iter_child_nodes(node) if part._fields and part not in apart][::-1]
        stack += [(part, scope) for part in reversed(outside)]


def _outside(node: ast.AST) -> list[ast.AST]:
    """The parts of a scope's node that are evaluated in the enclosing scope."""
    if isinstance(node, COMPREHENSIONS):
        return [node.generators[0].iter]
    if isinstance(node, ast.ClassDef):
        return [*node.decorator_list, *node.bases, *node.keywords]
    if not isinstance(node, (*FUNCTIONS, ast.Lambda)):
        return []
    parts: list[ast.AST | None] = [*node.args.defaults, *node.args.kw_defaults]
    if not isinstance(node, ast.Lambda):
        annotations = [part.annotation for part in ast.walk(node.args) if isinstance(part, ast.arg)]
        parts = [*node.decorator_list, *parts, *annotations, node.returns]
    return [part for part in parts if part is not None]


def _bind(node: ast.AST, scope: Scope) -> None:
    """Records the names that a node binds or declares."""
    if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
        scope.bound.add(node.id)
    elif isinstance(node, ast.arg):
        scope.bound.add(node.arg)
    elif isinstance(node, DEFINITIONS):
        scope.bound.add(node.name)
    elif isinstance(node, IMPORTS):
        scope.bound.update((alias.asname or alias.name).split(".")[0] for alias in node.names)
        if isinstance(node, ast.ImportFrom) and node.module == FUTURE:
            scope.bound.add(FUTURE)
    elif isinstance(node, (ast.ExceptHandler, ast.MatchAs, ast.MatchStar)):
        scope.bound.update([node.name] if node.name else [])
    elif isinstance(node, ast.MatchMapping):
        scope.bound.update([node.rest] if node.rest else [])
    elif isinstance(node, (ast.Global, ast.Nonlocal)):
        scope.declared.update(node.names)
    elif isinstance(node, ast.NamedExpr):  # it binds the name around a comprehension
        while isinstance(scope.node, COMPREHENSIONS) and scope.parent is not None:
            scope = scope.parent
        scope.bound.add(node.target.id)


class Statement:
    """
    A statement at the top level of a module.

    Args:
        node (`ast.stmt`): The statement's node.
        imported (`set[str]`): The names that the module imports.

    Attributes:
        nodes (`list[tuple[ast.AST, Scope]]`): All nodes in it, each with its scope.
        binds (`set[str]`): Names of the module that it binds, or may bind.
        declares (`set[str]`): Names of the module that functions in it bind when they are called.
        reads (`set[str]`): Names of the module that it reads when it runs, or later, when a function in it is called.
        reads_now (`set[str]`): Those that it may read when it runs.
        changes (`set[str]`): Names of the module whose objects it may change when it runs, or later.
        changes_now (`set[str]`): Those whose objects it may change when it runs.
    """

    def __init__(self, node: ast.stmt, imported: set[str]):
        self.node = node
        module = Scope()
        self.nodes = [*_walk(node, module)]
        if isinstance(node, ast.AnnAssign) and node.value is None:
            module.bound.clear()  # a name without a value is not bound
        self.binds = module.bound
        self.declares: set[str] = set()
        self.reads: set[str] = set()
        self.reads_now: set[str] = set()
        self.changes: set[str] = set()
        self.changes_now: set[str] = set()
        roots: Roots = {}
        dropped = {inner.value for inner, _ in self.nodes if isinstance(inner, ast.Expr)}
        for inner, scope in self.nodes:
            read = _read_name(inner)
            changed = changed_names(inner, roots)
            if isinstance(inner, ast.Call) and isinstance(inner.func, ast.Attribute):
                # a library's function changes something of the library if its value is not used
                if inner not in dropped or inner.func.attr in SCRIPT_METHODS:
                    changed -= imported
            elif isinstance(inner, ast.Call) and isinstance(inner.func, ast.Name):
                if inner.func.id in imported - MUTATORS:
                    changed = set()
            read_here = {read} if read is not None and scope.owner(read) is None else set()
            changed = {name for name in changed if scope.owner(name) is None}
            self.reads |= read_here
            self.changes |= changed
            if not (isinstance(node, DEFINITIONS) and scope.waits):
                self.reads_now |= read_here
                self.changes_now |= changed
            if isinstance(inner, ast.Global):
                self.declares |= scope.bound & {*inner.names}

    @property
    def is_certain(self) -> bool:
        """Whether it always binds its names."""
        return isinstance(self.node, CERTAIN)

    @property
    def is_left_out(self) -> bool:
        """Whether it belongs to a script, even if it changes something."""
        if isinstance(self.node, ast.If):
            return any(isinstance(inner, ast.Name) and inner.id == "__name__" for inner in ast.walk(self.node.test))
        return isinstance(self.node, ast.Assert)

    @property
    def is_script_call(self) -> bool:
        """Whether it calls a function that only prints, reads input or ends the program."""
        call = self.node.value if isinstance(self.node, ast.Expr) else None
        return isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id in SCRIPT_FUNCTIONS


def _read_name(node: ast.AST) -> str | None:
    """The name that a node reads. `x += 1` reads `x`."""
    name = node.target if isinstance(node, ast.AugAssign) else node
    if isinstance(name, ast.Name) and (name is not node or isinstance(name.ctx, ast.Load)):
        return name.id
    return None


def changed_names(node: ast.AST, known: Roots) -> set[str]:
    """The names whose objects a node may change. `known` caches the results of [`root_name`]."""
    changed: list[ast.expr] = []
    if isinstance(node, CONTAINERS) and not isinstance(node.ctx, ast.Load):
        changed = [node]
    elif isinstance(node, ast.AugAssign) and isinstance(node.value, (ast.Name, *DISPLAYS)):
        changed = [node.target]
    elif isinstance(node, ast.Call):
        arguments = [*node.args, *(keyword.value for keyword in node.keywords)]
        if isinstance(node.func, ast.Attribute) and node.func.attr not in PURE_METHODS:
            changed = [node.func, *(arguments if node.func.attr in MUTATORS else ())]
        elif isinstance(node.func, ast.Name) and (node.func.id in MUTATORS or node.func.id not in BUILTINS):
            changed = arguments
    names = {root_name(part.value if isinstance(part, ast.Starred) else part, known) for part in changed}
    setting = {SETTING} if isinstance(node, ast.Attribute) and node.attr == SETTING else set()
    return setting.union(name for name in names if name is not None and name not in BUILTINS)


class Module:
    """
    A module's statements, or some of them.

    Args:
        statements (`list[Statement]`): In the order of the source.
        imported (`set[str]`): The names that the module imports.

    Attributes:
        binders (`dict[str, list[int]]`): For each name, the indices of the statements that bind it.
    """

    def __init__(self, statements: list[Statement], imported: set[str]):
        self.statements = statements
        self.imported = imported
        self.binders: dict[str, list[int]] = {}
        for place, statement in enumerate(statements):
            for name in statement.binds:
                self.binders.setdefault(name, []).append(place)

    def bindings(self, name: str, before: int = END) -> Iterator[tuple[int, Statement]]:
        """
        The statements before an index that may have bound a name, each with its index. The latest comes first, and the first
        one that always binds the name comes last.
        """
        for place in reversed(self.binders.get(name, ())):
            if place < before:
                yield place, self.statements[place]
                if self.statements[place].is_certain:
                    return


def read_module(tree: ast.Module) -> Module:
    """Reads a syntax tree."""
    imports = (node for node in ast.walk(tree) if isinstance(node, IMPORTS))
    imported = {(alias.asname or alias.name).split(".")[0] for node in imports for alias in node.names}
    return Module([Statement(node, imported) for node in tree.body], imported)


# Which statements a function needs


def kept_and_needed(module: Module, name: str) -> tuple[list[int], list[int]]:
    """
    Chooses the statements that belong in the program.

    Args:
        module (`Module`): A completion's code.
        name (`str`): The function that the agent was asked for. Its calls are examples, which are never needed.

    Returns:
        `tuple[list[int], list[int]]`: The indices of the statements to keep, and of those that the function needs. All
        definitions and imports are kept, with the statements that they need. A call is kept only if the function
        that was asked for needs it; a call such as `main()` may fill a variable that only `main` reads. Bindings that
        later ones replace are kept, but the function does not need them.
    """
    facts = _Facts(module, name)
    always = [name, FUTURE, SETTING]
    needed = _Needs(facts, only_last=True)
    needed.add(always)
    kept = _Needs(facts, only_last=False)
    kept.add(always)
    kept.calls_count = False
    for place, statement in enumerate(module.statements):
        if isinstance(statement.node, (*DEFINITIONS, *IMPORTS)):
            kept.places.add(place)
            kept.add(statement.reads | statement.binds)
    return sorted(kept.places), sorted(needed.places)


class _Facts:
    """
    How the statements of a module affect names, for the function `name`.

    Attributes:
        binders (`dict[str, list[int]]`): For each name, the indices of the statements that bind it.
        changers (`dict[str, list[int]]`): For each name, the indices of the statements that change its object when they run.
        changed_by (`dict[str, list[str]]`): For each name, the functions and classes whose code changes it.
        users (`dict[str, list[int]]`): For each name, the indices of the statements that read it.
    """

    def __init__(self, module: Module, name: str):
        self.module = module
        self.name = name
        self.binders: dict[str, list[int]] = {}
        self.changers: dict[str, list[int]] = {}
        self.changed_by: dict[str, list[str]] = {}
        self.users: dict[str, list[int]] = {}
        aliases: dict[str, set[str]] = {}  # for each name, names that may refer to the same object
        for place, statement in enumerate(module.statements):
            if statement.is_left_out:
                continue
            for bound in statement.binds:
                self.binders.setdefault(bound, []).append(place)
            _add_aliases(statement, aliases)
            is_example = name in statement.reads_now - statement.changes_now  # a call of the function
            if not (is_example or statement.is_script_call):
                for changed in _with_aliases(statement.changes_now, aliases) - statement.binds:
                    self.changers.setdefault(changed, []).append(place)
            if any(scope.waits for _, scope in statement.nodes):
                for changed in statement.changes | statement.declares:
                    self.changed_by.setdefault(changed, []).extend(statement.binds - {name})
            for read in statement.reads:
                self.users.setdefault(read, []).append(place)


def assignments(node: ast.AST) -> Iterator[tuple[ast.expr, ast.expr]]:
    """The targets of a node that assigns, each with the expression whose value, or whose elements, it gets."""
    if isinstance(node, ast.Assign):
        for target in node.targets:
            yield target, node.value
    elif isinstance(node, (ast.AnnAssign, ast.NamedExpr)):
        if node.value is not None:
            yield node.target, node.value
    elif isinstance(node, (ast.For, ast.AsyncFor, ast.comprehension)):
        yield node.target, node.iter
    elif isinstance(node, ast.withitem) and node.optional_vars is not None:
        yield node.optional_vars, node.context_expr


def bound_in(target: ast.AST) -> set[str]:
    """The names that a target of an assignment binds: `a` and `b` in `a, b[0], *b`."""
    names = (node for node in ast.walk(target) if isinstance(node, ast.Name))
    return {name.id for name in names if not isinstance(name.ctx, ast.Load)}


def _add_aliases(statement: Statement, aliases: dict[str, set[str]]) -> None:
    """Records for the names that a statement binds the names whose objects they may refer to."""
    if isinstance(
        statement.node, IMPORTS
    ):  # imported names may share state: `getcontext().prec = 5` affects `Decimal`
        for bound in statement.binds if len(statement.binds) <= MAX_ALIASES else ():
            aliases[bound] = statement.binds
    elif not isinstance(statement.node, DEFINITIONS):
        for node, _ in statement.nodes:
            for target, value in assignments(node):
                sources = {inner.id for inner in ast.walk(value) if isinstance(inner, ast.Name)}
                for bound in bound_in(target) if len(sources) <= MAX_ALIASES else ():
                    aliases.setdefault(bound, set()).update(sources)


def _with_aliases(names: set[str], aliases: dict[str, set[str]]) -> set[str]:
    """The names, and other names of the same objects."""
    found, queue = {*names}, [*names]
    for name in queue:
        if len(found) > MAX_ALIASES:
            break
        new = aliases.get(name, set()) - found
        found |= new
        queue += new
    return found


class _Needs:
    """
    Collects the statements that names need: those that bind them, those that change their objects, and what these need.

    Args:
        facts (`_Facts`): The facts about the module.
        only_last (`bool`): Whether to leave out bindings of a name that a later one replaces, and calls that print. A
            binding that always happens replaces all earlier ones; one in a branch replaces those in other branches.

    Attributes:
        places (`set[int]`): The indices of the statements.
        calls_count (`bool`): Whether calls of the module's functions are collected for the variables that they change.
    """

    def __init__(self, facts: _Facts, only_last: bool):
        self.facts = facts
        self.only_last = only_last
        self.calls_count = True
        self.places: set[int] = set()
        self.names: set[str] = set()
        self.called: set[str] = set()  # functions whose calls are needed, and other names of them
        self.queue: list[str] = []

    def add(self, names: Iterable[str]) -> None:
        """Adds the statements that names need."""
        self.queue += names
        while self.queue:
            name = self.queue.pop()
            if name in self.names:
                continue
            self.names.add(name)
            if name not in self.facts.binders and name not in BUILTINS:
                self.queue.append("*")  # it may come from `from module import *`
            for place in [*self._binders(name), *self.facts.changers.get(name, ())]:
                self._take(place)
            for function in self.facts.changed_by.get(name, ()) if self.calls_count else ():
                self._add_calls(function)

    def _take(self, place: int) -> None:
        if place not in self.places:
            self.places.add(place)
            self.queue += self.facts.module.statements[place].reads

    def _binders(self, name: str) -> Iterator[int]:
        in_branch = False  # whether a later branch binds the name
        for place in reversed(self.facts.binders.get(name, ())):
            statement = self.facts.module.statements[place]
            if self.only_last and isinstance(statement.node, (ast.If, ast.Try)):
                if in_branch:
                    continue
                in_branch = True
            yield place
            if self.only_last and statement.is_certain and name not in statement.reads_now:
                return

    def _add_calls(self, function: str) -> None:
        """Adds the statements that call a function, directly, through other functions, or by another name."""
        queue = [function]
        while queue:
            name = queue.pop()
            if name in self.called or name == self.facts.name:
                continue
            self.called.add(name)
            for place in self.facts.users.get(name, ()):
                statement = self.facts.module.statements[place]
                if name in statement.reads_now and not (self.only_last and statement.is_script_call):
                    self._take(place)
                    if not isinstance(statement.node, (ast.Assign, ast.AnnAssign)):
                        continue
                if isinstance(statement.node, (*DEFINITIONS, ast.Assign, ast.AnnAssign)):
                    queue += statement.binds
