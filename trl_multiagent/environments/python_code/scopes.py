"""
Splits a module's syntax tree into scopes and top-level statements, and records which names each of them binds and
reads.

Completions can be long and hostile. Therefore each node is visited once, without recursion; later analyses work on
the lists that this pass makes.
"""

import ast
import bisect
import builtins
import functools
from collections.abc import Iterable, Iterator


FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
DEFINITIONS = (*FUNCTIONS, ast.ClassDef)
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
SCOPES = {*DEFINITIONS, ast.Lambda, *COMPREHENSIONS}
IMPORTS = (ast.Import, ast.ImportFrom)
CONTAINERS = (ast.Attribute, ast.Subscript)
SIMPLE = (
    *DEFINITIONS,
    *IMPORTS,
    ast.Assign,
    ast.AnnAssign,
    ast.Delete,
)  # these always bind the names in them; others may not run
BUILTINS = frozenset(dir(builtins))
PURE_METHODS = {*dir(str), *dir(frozenset), *dir(type(type.__dict__))}  # methods of immutable types
MUTATORS = {
    *("heapify", "heappush", "heappop", "heapreplace", "heappushpop", "insort", "insort_left", "insort_right"),
    *("shuffle", "setitem", "delitem", "setattr", "delattr", "next"),
}  # library functions that change their arguments
NO_NODES = {
    *(
        "id",
        "ctx",
        "op",
        "ops",
        "attr",
        "arg",
        "name",
        "asname",
        "module",
        "level",
        "kind",
        "type_comment",
        "conversion",
    ),
    *("simple", "names", "rest", "kwd_attrs", "is_async", "type_ignores"),
}
END = 1 << 60  # greater than the index of any statement


@functools.cache
def _node_fields(kind: type) -> tuple[str, ...]:
    return () if kind is ast.Constant else tuple(field for field in kind._fields if field not in NO_NODES)


def children(node: ast.AST) -> list[ast.AST]:
    """A node's child nodes in the order of its fields, without operators and contexts."""
    nodes = []
    for field in _node_fields(node.__class__):
        value = getattr(node, field, None)
        if value.__class__ is list:
            nodes += value if None not in value else [part for part in value if part is not None]
        elif value is not None:
            nodes.append(value)
    return nodes


def walk(*nodes: ast.AST) -> Iterator[ast.AST]:
    """Some nodes and all below them, like `ast.walk`, but in source order, without operators and contexts."""
    stack = [*reversed(nodes)]
    while stack:
        node = stack.pop()
        yield node
        stack += reversed(children(node))


def read_names(*nodes: ast.AST) -> set[str]:
    """Names that are read anywhere in nodes; `x += 1` reads `x`."""
    names = set()
    for node in walk(*nodes):
        if node.__class__ is ast.Name and node.ctx.__class__ is ast.Load:
            names.add(node.id)
        elif node.__class__ is ast.AugAssign and node.target.__class__ is ast.Name:
            names.add(node.target.id)
    return names


class Scope:
    """
    A module, function, class, lambda or comprehension.

    Args:
        node (`ast.AST`): Its node.
        parent (`Scope`, *optional*): The scope around it; None for a module.

    Attributes:
        nodes (`list[ast.AST]`): Its nodes in source order. An inner scope contributes its node and the parts that are
            evaluated outside it (decorators, defaults, annotations, base classes), but not its body.
        bound (`set[str]`): Names that are bound in it, parameters included.
        parameters (`set[str]`): Its parameters.
        nonlocals (`set[str]`): Names that it declares `nonlocal`.
        globals (`set[str]`): Names that it declares `global`.
    """

    __slots__ = ("bound", "globals", "node", "nodes", "nonlocals", "parameters", "parent")

    def __init__(self, node: ast.AST, parent: "Scope | None" = None):
        self.node = node
        self.parent = parent
        self.nodes = []
        arguments = walk(node.args) if isinstance(node, (*FUNCTIONS, ast.Lambda)) else ()
        self.parameters = {inner.arg for inner in arguments if inner.__class__ is ast.arg}
        self.bound = {*self.parameters}
        self.nonlocals, self.globals = set(), set()

    def owner(self, name: str) -> "Scope | None":
        """The scope in which a name that is used here is local; None for names of the module and builtins."""
        scope = self
        while scope.parent is not None:
            if name in scope.globals:
                return None
            if name in scope.bound and name not in scope.nonlocals:
                if scope is self or scope.node.__class__ is not ast.ClassDef:
                    return scope
            scope = scope.parent
        return None

    def waits(self) -> bool:
        """Whether its code runs only when a function is called. The body of a class runs at once."""
        scope = self
        while scope.parent is not None:
            if isinstance(scope.node, (*FUNCTIONS, ast.Lambda)):
                return True
            scope = scope.parent
        return False


class Statement:
    """
    A statement at the top level of a module.

    Args:
        node (`ast.stmt`): Its node.
        nodes (`list[ast.AST]`): Its nodes in the module's own scope.
        scopes (`list[Scope]`): The scopes in it.

    Attributes:
        binds (`set[str]`): Names of the module that it binds, or may bind.
        certain (`bool`): Whether it always binds them.
        running (`list[Scope]`): The inner scopes whose code may run when the statement runs.
        reads_now (`set[str]`): Names of the module that may be read when the statement runs.
        reads_later (`set[str]`): Names of the module that may be read later, when a function in it is called. A
            `lambda` may be called at once or later, so its names are in both sets.
        calls (`set[str]`): Names that the statement calls when it runs, or whose methods it calls.
    """

    def __init__(self, node: ast.stmt, nodes: list[ast.AST], scopes: list[Scope], binds: set[str]):
        self.node = node
        self.nodes = nodes
        self.scopes = scopes
        self.binds = binds
        self.certain = isinstance(node, SIMPLE)
        defines = isinstance(node, DEFINITIONS)
        self.running = [scope for scope in scopes if not (defines and scope.waits())]
        running = {*self.running}
        self.reads_now, self.reads_later, self.calls = set(), set(), set()
        roots = {}
        for scope, inner in [(None, nodes), *((scope, scope.nodes) for scope in scopes)]:
            now = scope is None or scope in running
            later = scope is not None and scope.waits()
            for node in inner:
                kind = node.__class__
                if kind is ast.Call and now:
                    root = root_name(node.func, roots)
                    if root is not None:
                        self.calls.add(root.id)
                if kind is ast.AugAssign and node.target.__class__ is ast.Name:
                    name = node.target.id
                elif kind is ast.Name and node.ctx.__class__ is ast.Load:
                    name = node.id
                else:
                    continue
                if scope is None or scope.owner(name) is None:
                    if now:
                        self.reads_now.add(name)
                    if later:
                        self.reads_later.add(name)


def root_name(node: ast.AST, known: dict[ast.AST, ast.Name | None]) -> ast.Name | None:
    """The first name of a chain of attributes, items and calls. `known` stores results for long chains."""
    path = []
    while isinstance(node, (*CONTAINERS, ast.Call)) and node not in known:
        path.append(node)
        node = node.func if isinstance(node, ast.Call) else node.value
    root = known[node] if node in known else node if isinstance(node, ast.Name) else None
    known.update(dict.fromkeys(path, root))
    return root


class Module:
    """
    A module's statements, or some of them.

    Args:
        statements (`list[Statement]`): In the order of the source.
    """

    def __init__(self, statements: list[Statement]):
        self.statements = statements
        self.events = {}  # for each name, the indices of the statements that bind it, and whether they always do
        self.imported = set()
        self.functions = {}  # for each function and class, by name, the scopes in its statement
        for index, statement in enumerate(statements):
            node = statement.node
            if isinstance(node, IMPORTS):
                self.imported |= statement.binds
            if any(isinstance(scope.node, (*DEFINITIONS, ast.Lambda)) for scope in statement.scopes):
                for name in statement.binds:
                    self.functions.setdefault(name, []).extend(statement.scopes)
            for name in statement.binds:
                self.events.setdefault(name, []).append((index, statement.certain))

    def bindings(self, name: str, before: int = END) -> Iterator[tuple[int, Statement]]:
        """The statements before an index that may have bound a name, latest first, up to one that always binds it."""
        events = self.events.get(name, [])
        for index, certain in reversed(events[: bisect.bisect_left(events, (before,))]):
            yield index, self.statements[index]
            if certain:
                return


def read_module(tree: ast.Module) -> Module:
    """Reads a syntax tree."""
    module = Scope(tree)
    statements = []
    for node in tree.body:
        nodes, scopes, binds = [], [], set()
        module.nodes, module.bound = nodes, binds
        _fill(module, [node], scopes)
        statements.append(Statement(node, nodes, scopes, binds))
    return Module(statements)


def _fill(scope: Scope, parts: list[ast.AST], scopes: list[Scope]) -> None:
    """Adds the nodes of some parts to a scope, and creates the inner scopes."""
    pending = [(scope, parts)]
    while pending:
        scope, parts = pending.pop()
        append = scope.nodes.append
        stack = parts[::-1]
        while stack:
            node = stack.pop()
            append(node)
            kind = node.__class__
            if kind is ast.Name:
                if node.ctx.__class__ is not ast.Load:
                    scope.bound.add(node.id)
                continue
            if kind is ast.Constant:
                continue
            if kind in SCOPES:
                inner = Scope(node, scope)
                scopes.append(inner)
                outside, inside = _scope_parts(node)
                pending.append((inner, inside))
                stack += reversed(outside)
            elif kind is ast.AnnAssign and node.value is None and scope.parent is None:
                stack.append(node.annotation)  # at module level, a name without a value is not bound
            elif kind is ast.NamedExpr:
                _block_scope(scope).bound.add(node.target.id)
                append(node.target)
                stack.append(node.value)
            else:
                stack += reversed(children(node))
            _bind(scope, node)


def _block_scope(scope: Scope) -> Scope:
    """The scope in which `name := value` binds the name: a comprehension passes it outwards."""
    while isinstance(scope.node, COMPREHENSIONS):
        scope = scope.parent
    return scope


def _bind(scope: Scope, node: ast.AST) -> None:
    """Records the names that a node binds or declares, except for `Name` nodes, which `_fill` handles."""
    if isinstance(node, DEFINITIONS):
        scope.bound.add(node.name)
    elif isinstance(node, IMPORTS):
        scope.bound.update((alias.asname or alias.name).split(".")[0] for alias in node.names)
        if isinstance(node, ast.ImportFrom) and node.module == "__future__":
            scope.bound.add("__future__")
    elif isinstance(node, (ast.ExceptHandler, ast.MatchAs, ast.MatchStar)):
        scope.bound.update([node.name] if node.name else [])
    elif isinstance(node, ast.MatchMapping):
        scope.bound.update([node.rest] if node.rest else [])
    elif isinstance(node, ast.Global):
        scope.globals.update(node.names)
    elif isinstance(node, ast.Nonlocal):
        scope.nonlocals.update(node.names)


def _scope_parts(node: ast.AST) -> tuple[list[ast.AST], list[ast.AST]]:
    """The parts of a scope's node that are evaluated in the enclosing scope, and those that are evaluated inside."""
    if isinstance(node, (*FUNCTIONS, ast.Lambda)):
        arguments = node.args
        outside = [*arguments.defaults, *(default for default in arguments.kw_defaults if default is not None)]
        if isinstance(node, ast.Lambda):
            return outside, [node.body]
        annotations = [
            inner.annotation for inner in walk(arguments) if isinstance(inner, ast.arg) and inner.annotation
        ]
        returns = [node.returns] if node.returns is not None else []
        return [*node.decorator_list, *outside, *annotations, *returns], node.body
    if isinstance(node, ast.ClassDef):
        return [*node.decorator_list, *node.bases, *node.keywords], node.body
    first = node.generators[0]
    inside = [part for part in children(node) if part is not first]
    return [first.iter], [first.target, *first.ifs, *inside]


def names_of(nodes: Iterable[ast.AST]) -> set[str]:
    """All names in nodes, read or bound."""
    return {node.id for node in walk(*nodes) if node.__class__ is ast.Name}
