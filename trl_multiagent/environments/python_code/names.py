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
ASSIGNMENTS = (ast.Assign, ast.AnnAssign)
# These statements always bind the names in them. Others may do so in a part that does not run
CERTAIN = (*DEFINITIONS, *IMPORTS, *ASSIGNMENTS, ast.Delete)
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
BLOCKS = (ast.For, ast.AsyncFor, ast.While, ast.If, ast.With, ast.AsyncWith, ast.Try, ast.Match)
END = 1 << 60  # greater than the index of any statement
Roots = dict[ast.AST, str | None]  # results of `root_name`


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
        globals (`set[str]`): Names that it declares `global`.
        waits (`bool`): Whether its code runs only when a function is called.
    """

    def __init__(self, node: ast.AST | None = None, parent: "Scope | None" = None):
        self.node = node
        self.parent = parent
        self.bound: set[str] = set()
        self.globals: set[str] = set()
        self.waits: bool = parent is not None and (parent.waits or isinstance(node, (*FUNCTIONS, ast.Lambda)))

    def owner(self, name: str) -> "Scope | None":
        """The scope in which a name used here is local; None if it belongs to the module or is a builtin."""
        scope = self
        while scope.parent is not None:
            if name in scope.globals:
                return None
            if name in scope.bound:
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
    elif isinstance(node, ast.Global):
        scope.globals.update(node.names)
    elif isinstance(node, ast.NamedExpr):  # it binds the name around a comprehension
        while isinstance(scope.node, COMPREHENSIONS) and scope.parent is not None:
            scope = scope.parent
        scope.bound.add(node.target.id)


class Statement:
    """
    A statement at the top level of a module.

    Args:
        node (`ast.stmt`): The statement's node.

    Attributes:
        nodes (`list[tuple[ast.AST, Scope]]`): All nodes in it, each with its scope.
        binds (`set[str]`): Names of the module that it binds, or may bind.
        declares (`set[str]`): Names of the module that functions in it bind when they are called.
        reads (`set[str]`): Names of the module that it reads when it runs, or later, when a function in it is called.
        reads_now (`set[str]`): Those that it may read when it runs.
        changes (`set[str]`): Names of the module whose objects it may change when it runs, or later.
        changes_now (`set[str]`): Those whose objects it may change when it runs.
    """

    def __init__(self, node: ast.stmt):
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
        for inner, scope in self.nodes:
            if isinstance(inner, ast.Global):
                self.declares |= scope.bound & {*inner.names}
            read = {name for name in _read_names(inner) if scope.owner(name) is None}
            changed = {name for name in changed_names(inner, roots) if scope.owner(name) is None}
            self.reads |= read
            self.changes |= changed
            if not (isinstance(node, DEFINITIONS) and scope.waits):
                self.reads_now |= read
                self.changes_now |= changed

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
    def called(self) -> str:
        """The name of the function or method that it calls, if it does nothing else; otherwise empty."""
        if isinstance(self.node, ast.Expr) and isinstance(self.node.value, ast.Call):
            return called_name(self.node.value)
        return ""


def _read_names(node: ast.AST) -> set[str]:
    """The names that a node reads. `x += 1` reads `x`."""
    if isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
        return {node.target.id}
    return {node.id} if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) else set()


def changed_names(node: ast.AST, known: Roots) -> set[str]:
    """The names whose objects a node may change. `known` caches the results of [`root_name`]."""
    changed: list[ast.expr] = []
    if isinstance(node, CONTAINERS) and not isinstance(node.ctx, ast.Load):
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
    names = {root_name(part.value if isinstance(part, ast.Starred) else part, known) for part in changed}
    setting = {SETTING} if isinstance(node, ast.Attribute) and node.attr == SETTING else set()
    return setting.union(name for name in names if name is not None and name not in BUILTINS)


def called_name(call: ast.Call) -> str:
    """The name of the function or method that a call calls; empty if it has none."""
    if isinstance(call.func, ast.Attribute):
        return call.func.attr
    return call.func.id if isinstance(call.func, ast.Name) else ""


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


class Module:
    """
    A module's statements, or some of them. The dictionaries map names to indices of statements.

    Args:
        statements (`list[Statement]`): In the order of the source.

    Attributes:
        imported (`set[str]`): The names that the module imports at its top level.
        binders (`dict[str, list[int]]`): The statements that bind a name.
        readers (`dict[str, list[int]]`): The statements that read it.
        changers (`dict[str, list[int]]`): The statements that may change its object when they run.
        changing (`dict[str, set[str]]`): The functions and classes whose code changes its object.
    """

    def __init__(self, statements: list[Statement]):
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
            is_script = statement.called in SCRIPT_FUNCTIONS or (
                statement.called in SCRIPT_METHODS and not changes - self.imported
            )
            for name in changes if not is_script and _does_more_than_assign(statement.node) else ():
                self.changers.setdefault(name, []).append(place)
            if any(scope.waits for _, scope in statement.nodes):
                for name in (statement.changes | statement.declares) - self.imported:
                    self.changing.setdefault(name, set()).update(statement.binds)

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


def _does_more_than_assign(node: ast.stmt) -> bool:
    targets = (
        node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    )
    return not (targets and all(isinstance(target, ast.Name) for target in targets))


def read_module(tree: ast.Module) -> Module:
    """Reads a syntax tree."""
    return Module([Statement(node) for node in tree.body])


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
    always = [name, FUTURE, SETTING]
    needed = _Needs(module, name, only_last=True)
    needed.add(always)
    kept = _Needs(module, name, only_last=False)
    kept.add(always)
    kept.calls_count = False
    for place, statement in enumerate(module.statements):
        if isinstance(statement.node, (*DEFINITIONS, *IMPORTS)):
            kept.places.add(place)
            kept.add(statement.reads | statement.binds)
    return sorted(kept.places), sorted(needed.places)


class _Needs:
    """
    Collects the statements that names need: those that bind them, those that change their objects, and what these need.

    Args:
        module (`Module`): The module.
        name (`str`): The function whose calls are examples.
        only_last (`bool`): Whether to leave out bindings of a name that a later one replaces, and calls that print. A
            binding that always happens replaces all earlier ones; one in a branch replaces those in other branches.

    Attributes:
        places (`set[int]`): The indices of the statements.
        calls_count (`bool`): Whether calls of the module's functions are collected for the variables that they change.
    """

    def __init__(self, module: Module, name: str, only_last: bool):
        self.module = module
        self.name = name
        self.only_last = only_last
        self.calls_count = True
        self.places: set[int] = set()
        self.names: set[str] = set()
        self.called = {name}  # functions whose calls are needed, and other names of them
        self.queue: list[str] = []

    def add(self, names: Iterable[str]) -> None:
        """Adds the statements that names need."""
        self.queue += names
        while self.queue:
            name = self.queue.pop()
            if name in self.names:
                continue
            self.names.add(name)
            if name not in self.module.binders and name not in BUILTINS:
                self.queue.append("*")  # it may come from `from module import *`
            for place in self._binders(name):
                self._take(place)
            for place in self.module.changers.get(name, ()):
                statement = self.module.statements[place]
                if self.name not in statement.reads_now - statement.changes_now:  # it would be an example
                    self._take(place)
            if self.calls_count:
                self._add_calls(self.module.changing.get(name, set()))

    def _take(self, place: int) -> None:
        if place not in self.places:
            self.places.add(place)
            statement = self.module.statements[place]
            self.queue += statement.reads
            if isinstance(statement.node, IMPORTS):  # imported names may share state: `getcontext().prec = 5`
                self.queue += statement.binds

    def _binders(self, name: str) -> Iterator[int]:
        in_branch = False  # whether a later branch binds the name
        for place in reversed(self.module.binders.get(name, ())):
            statement = self.module.statements[place]
            if self.only_last and isinstance(statement.node, (ast.If, ast.Try)):
                if in_branch:
                    continue
                in_branch = True
            yield place
            if self.only_last and statement.is_certain and name not in statement.reads_now:
                return

    def _add_calls(self, functions: set[str]) -> None:
        """Adds the statements that call some functions, directly, through other functions, or by another name."""
        queue = [*functions]
        while queue:
            name = queue.pop()
            if name in self.called:
                continue
            self.called.add(name)
            for place in self.module.readers.get(name, ()):
                statement = self.module.statements[place]
                now = name in statement.reads_now
                if now and not (self.only_last and statement.called in SCRIPT_FUNCTIONS):
                    self._take(place)
                if isinstance(statement.node, ASSIGNMENTS if now else DEFINITIONS):
                    queue += statement.binds
