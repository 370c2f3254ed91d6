"""
Splits a module's syntax tree into scopes and top-level statements, and records which names each of them binds and
reads.

Completions can be long and hostile. Therefore each node is visited once, without recursion; later analyses work on
the lists that this pass makes.
"""

import ast
import bisect
import builtins
from collections.abc import Iterable, Iterator, Sequence


FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
DEFINITIONS = (*FUNCTIONS, ast.ClassDef)
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
SCOPES = (*DEFINITIONS, ast.Lambda, *COMPREHENSIONS)
IMPORTS = (ast.Import, ast.ImportFrom)
CONTAINERS = (ast.Attribute, ast.Subscript)
# These statements always bind the names in them. Others may do so in a part that does not run
SIMPLE = (*DEFINITIONS, *IMPORTS, ast.Assign, ast.AnnAssign, ast.Delete)
BUILTINS = frozenset(dir(builtins))
PURE_METHODS = {*dir(str), *dir(frozenset), *dir(type(type.__dict__))}  # methods of immutable types
# Library functions that change their arguments
MUTATORS = set(
    "heapify heappush heappop heapreplace heappushpop insort insort_left insort_right "
    "shuffle setitem delitem setattr delattr next".split()
)
# Fields that hold text, numbers, operators or contexts
FIELDS_WITHOUT_NODES = set(
    "id ctx op ops attr arg name asname module level kind type_comment conversion simple names rest kwd_attrs is_async "
    "type_ignores".split()
)
# For each class of nodes, the fields that hold the child nodes
NODE_FIELDS: dict[type[ast.AST], tuple[str, ...]] = {
    kind: ()
    if kind in (ast.Constant, ast.MatchSingleton)
    else tuple(field for field in kind._fields if field not in FIELDS_WITHOUT_NODES)
    for kind in vars(ast).values()
    if isinstance(kind, type) and issubclass(kind, ast.AST)
}
END = 1 << 60  # greater than the index of any statement
Roots = dict[ast.AST, ast.Name | None]  # results of `root_name`


def children(node: ast.AST) -> list[ast.AST]:
    """A node's child nodes in the order of its fields, without operators and contexts."""
    nodes: list[ast.AST] = []
    for field in NODE_FIELDS[node.__class__]:
        value = getattr(node, field, None)
        if value.__class__ is list:
            nodes += value if None not in value else [part for part in value if part is not None]
        elif value is not None:
            nodes.append(value)
    return nodes


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


def walk(*nodes: ast.AST) -> Iterator[ast.AST]:
    """The given nodes and all nodes below them, like `ast.walk`, but in source order, without operators and contexts."""
    stack = [*reversed(nodes)]
    while stack:
        node = stack.pop()
        yield node
        stack += reversed(children(node))


def read_names(*nodes: ast.AST) -> set[str]:
    """The names that are read anywhere in the nodes. `x += 1` reads `x`."""
    names = set()
    for node in walk(*nodes):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            names.add(node.id)
        elif isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
            names.add(node.target.id)
    return names


class Scope:
    """
    A module, function, class, lambda or comprehension.

    Args:
        node (`ast.AST`): The node of the scope.
        parent (`Scope`, *optional*): The enclosing scope; None for a module.

    Attributes:
        nodes (`list[ast.AST]`): The scope's nodes in source order. An inner scope contributes its node and the parts that are
            evaluated outside it (decorators, defaults, annotations, base classes), but not its body.
        bound (`set[str]`): Names that are bound in the scope, parameters included.
        parameters (`set[str]`): The function's parameters.
        nonlocals (`set[str]`): Names that the scope declares `nonlocal`.
        globals (`set[str]`): Names that the scope declares `global`.
    """

    __slots__ = ("bound", "globals", "node", "nodes", "nonlocals", "parameters", "parent")

    def __init__(self, node: ast.AST, parent: "Scope | None" = None):
        self.node = node
        self.parent = parent
        self.nodes: list[ast.AST] = []
        arguments = walk(node.args) if isinstance(node, (*FUNCTIONS, ast.Lambda)) else ()
        self.parameters = {inner.arg for inner in arguments if isinstance(inner, ast.arg)}
        self.bound = {*self.parameters}
        self.nonlocals: set[str] = set()
        self.globals: set[str] = set()

    @property
    def is_top_level(self) -> bool:
        """Whether the scope lies directly in the module."""
        return self.parent is not None and self.parent.parent is None

    @property
    def is_in_class(self) -> bool:
        """Whether the scope lies directly in the body of a class."""
        return self.parent is not None and isinstance(self.parent.node, ast.ClassDef)

    def owner(self, name: str) -> "Scope | None":
        """The scope in which a name used here is local; None if it belongs to the module or is a builtin."""
        scope = self
        while scope.parent is not None:
            if name in scope.globals:
                return None
            if name in scope.bound and name not in scope.nonlocals:
                if scope is self or not isinstance(scope.node, ast.ClassDef):
                    return scope
            scope = scope.parent
        return None

    def waits(self) -> bool:
        """Whether the code runs only when a function is called. The body of a class runs when the class is defined."""
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
        node (`ast.stmt`): The statement's node.
        nodes (`list[ast.AST]`): The nodes of the statement that are in the module's own scope.
        scopes (`list[Scope]`): The scopes in the statement.
        binds (`set[str]`): Names of the module that the statement binds, or may bind.

    Attributes:
        certain (`bool`): Whether the statement always binds them.
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
        self.reads_now: set[str] = set()
        self.reads_later: set[str] = set()
        self.calls: set[str] = set()
        roots: Roots = {}
        parts: list[tuple[Scope | None, list[ast.AST]]] = [(None, nodes), *((scope, scope.nodes) for scope in scopes)]
        for scope, inner in parts:
            now = scope is None or scope in running
            later = scope is not None and scope.waits()
            for part in inner:
                if isinstance(part, ast.Call) and now:
                    root = root_name(part.func, roots)
                    if root is not None:
                        self.calls.add(root.id)
                if isinstance(part, ast.AugAssign) and isinstance(part.target, ast.Name):
                    name = part.target.id
                elif isinstance(part, ast.Name) and isinstance(part.ctx, ast.Load):
                    name = part.id
                else:
                    continue
                if scope is None or scope.owner(name) is None:
                    if now:
                        self.reads_now.add(name)
                    if later:
                        self.reads_later.add(name)


def root_name(node: ast.AST, known: Roots) -> ast.Name | None:
    """The first name of a chain of attributes, items and calls: `a` in `a.b[0].c()`. `known` caches the results."""
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
        # For each name, the indices of the statements that bind it, and whether they always do
        self.events: dict[str, list[tuple[int, bool]]] = {}
        self.imported: set[str] = set()
        # For each function and class, by name, the scopes in its statement
        self.functions: dict[str, list[Scope]] = {}
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
        """
        The statements before an index that may have bound a name, each with its index. The latest comes first, and the first
        one that always binds the name comes last.
        """
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
        nodes: list[ast.AST] = []
        scopes: list[Scope] = []
        binds: set[str] = set()
        module.nodes, module.bound = nodes, binds
        _fill(module, [node], scopes)
        statements.append(Statement(node, nodes, scopes, binds))
    return Module(statements)


def _fill(scope: Scope, parts: Sequence[ast.AST], scopes: list[Scope]) -> None:
    """Adds the nodes of some parts to a scope. Creates the inner scopes and appends them to `scopes`."""
    pending = [(scope, parts)]
    while pending:
        scope, parts = pending.pop()
        append = scope.nodes.append
        stack = [*reversed(parts)]
        while stack:
            node = stack.pop()
            append(node)
            if isinstance(node, ast.Name):
                if not isinstance(node.ctx, ast.Load):
                    scope.bound.add(node.id)
                continue
            if isinstance(node, ast.Constant):
                continue
            if isinstance(node, SCOPES):
                inner = Scope(node, scope)
                scopes.append(inner)
                outside, inside = _scope_parts(node)
                pending.append((inner, inside))
                stack += reversed(outside)
            elif isinstance(node, ast.AnnAssign) and node.value is None and scope.parent is None:
                stack.append(node.annotation)  # at module level, a name without a value is not bound
            elif isinstance(node, ast.NamedExpr):
                _block_scope(scope).bound.add(node.target.id)
                append(node.target)
                stack.append(node.value)
            else:
                stack += reversed(children(node))
            _bind(scope, node)


def _block_scope(scope: Scope) -> Scope:
    """The scope in which `name := value` binds the name. It is the scope around a comprehension, not the comprehension."""
    while isinstance(scope.node, COMPREHENSIONS) and scope.parent is not None:
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


def _scope_parts(
    node: ast.FunctionDef
    | ast.AsyncFunctionDef
    | ast.ClassDef
    | ast.Lambda
    | ast.ListComp
    | ast.SetComp
    | ast.DictComp
    | ast.GeneratorExp,
) -> tuple[Sequence[ast.AST], Sequence[ast.AST]]:
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
    """All names in the nodes, read or bound."""
    return {node.id for node in walk(*nodes) if isinstance(node, ast.Name)}
