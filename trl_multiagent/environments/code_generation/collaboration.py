"""
Finds how main uses the aux agent's function, from the text of its program.

A use is any expression within reach of the entry point that calls the global `aux` or passes it on: `aux(x)`,
`map(aux, xs)`, `key=aux`, `f = aux`, `@aux`, `{"a": aux}`. Expressions that only inspect it are not uses:
`aux is None`, `aux.__name__`, `print(aux)`, `return aux`. Whether `aux` is really called is seen when the tests run.
"""

import ast
from collections import Counter
from collections.abc import Container, Iterator
from dataclasses import dataclass

from trl_multiagent.environments.code_generation.roles import AUX
from trl_multiagent.environments.python_code.definitions import Definition
from trl_multiagent.environments.python_code.scopes import (
    COMPREHENSIONS,
    CONTAINERS,
    DEFINITIONS,
    FUNCTIONS,
    IMPORTS,
    Module,
    Scope,
    Statement,
    children,
    names_of,
    read_names,
    walk,
)


INLINE = (ast.Lambda, *COMPREHENSIONS)
CALLING_ATTRIBUTES = ("__call__", "__wrapped__")
INSPECTING = {  # builtins that do not call their arguments
    *(
        "print",
        "callable",
        "isinstance",
        "issubclass",
        "hasattr",
        "id",
        "type",
        "repr",
        "str",
        "hash",
        "bool",
        "len",
        "dir",
    ),
    *("vars", "help", "format", "ascii"),
}
PURE_FUNCTIONS = {  # builtins whose only effect is their value
    *(
        "list",
        "tuple",
        "set",
        "frozenset",
        "dict",
        "sorted",
        "reversed",
        "enumerate",
        "zip",
        "len",
        "sum",
        "min",
        "max",
    ),
    *("any", "all", "str", "repr", "int", "float", "bool", "abs", "round"),
}
MAX_DEPTH = 20  # levels of expressions and functions that are searched for a thin wrapper


@dataclass(frozen=True)
class Collaboration:
    """
    How main uses `aux`. The fields are those of `Analysis`.
    """

    calls_aux: bool = False
    thin_wrapper: bool = False
    ignored_values: tuple[str, ...] = ()


def read_collaboration(
    module: Module, needed: list[Statement], entry: Definition, entry_point: str, aux_returns: bool
) -> Collaboration:
    """
    Reads main's code.

    Args:
        module (`Module`): Main's code.
        needed (`list[Statement]`): The statements in it that the entry point needs.
        entry (`Definition`): The entry point.
        entry_point (`str`): Its name.
        aux_returns (`bool`): Whether `aux` returns values. Otherwise no value can be ignored.
    """
    parts = _reached(module, needed, entry_point)
    uses = _Uses(module, parts)
    if not uses.loads:
        return Collaboration()
    thin = _is_thin_definition(entry, uses)
    ignored = []
    for scope, nodes in parts:
        if aux_returns and scope is not None and isinstance(scope.node, FUNCTIONS):
            if any(node in uses.results for node in nodes) or any(isinstance(node, INLINE) for node in nodes):
                ignored += _ignored_values(scope, uses.results)
    return Collaboration(True, thin, tuple(ignored))


# Where `aux` is used


def _reached(module: Module, needed: list[Statement], entry_point: str) -> list[tuple[Scope | None, list[ast.AST]]]:
    """
    The code that the entry point may run: scopes of functions and classes that it names, directly or through others,
    and other statements that it needs. Pairs of a scope, None for the module, and its nodes.
    """
    by_node, by_name, at_top = {}, {}, {}
    for statement in module.statements:
        for scope in statement.scopes:
            by_node[scope.node] = scope
            if isinstance(scope.node, DEFINITIONS):
                names = at_top if scope.parent.parent is None else by_name
                names.setdefault(scope.node.name, []).append((statement, scope))
    parts = [(None, statement.nodes) for statement in needed if not isinstance(statement.node, DEFINITIONS)]
    seen, followed = set(), set()

    def follow(name: str) -> None:
        if name in followed:
            return
        followed.add(name)
        current = {statement for _, statement in module.bindings(name)} if name in at_top else ()
        found = [(statement, scope) for statement, scope in at_top.get(name, ()) if statement in current]
        for statement, scope in found + by_name.get(name, []):
            if scope not in seen:
                seen.add(scope)
                parts.append((scope, scope.nodes))
                if statement.node is scope.node:
                    parts.append((None, statement.nodes))  # its decorators and defaults

    follow(entry_point)
    for scope, nodes in parts:
        in_class = scope is not None and isinstance(scope.node, ast.ClassDef)
        for node in nodes:
            if isinstance(node, ast.Name):
                follow(node.id)
            elif isinstance(node, ast.Attribute):
                follow(node.attr)
            elif isinstance(node, INLINE):
                if by_node[node] not in seen:
                    seen.add(by_node[node])
                    parts.append((by_node[node], by_node[node].nodes))
            elif in_class and isinstance(node, FUNCTIONS):
                follow(node.name)
    return parts


class _Uses:
    """
    The uses of the global `aux` in some scopes.

    Attributes:
        loads (`set[ast.Name]`): The names that call it or pass it on.
        calls (`set[ast.Call]`): Its calls, also by another name.
        results (`set[ast.Call]`): Expressions that yield its values: its calls, and `map(aux, xs)`.
    """

    def __init__(self, module: Module, parts: list[tuple[Scope | None, list[ast.AST]]]):
        self.loads, self.calls, self.results = set(), set(), set()
        self.functions = {}  # main's functions, by name
        self.scopes = {}  # the scope of each call and name
        self.aliases = set()  # other names for `aux`, as pairs of scope and name
        self.values = {}  # names that are bound once, to a lambda
        for scope, nodes in parts:
            if scope is not None and isinstance(scope.node, FUNCTIONS):
                self.functions.setdefault(scope.node.name, []).append(scope)
            inspected = set()
            for node in nodes:
                if isinstance(node, ast.Name):
                    if node.id == AUX and isinstance(node.ctx, ast.Load) and node not in inspected:
                        if scope is None or scope.owner(AUX) is None:
                            self.loads.add(node)
                else:
                    inspected.update(_inspected(node))
        if not self.loads:
            return
        for scope, nodes in parts:
            self._note_names(scope, nodes)
        for scope, nodes in parts:
            for node in nodes:
                if isinstance(node, (ast.Call, ast.Name)):
                    self.scopes[node] = scope
        calls = [node for node in self.scopes if isinstance(node, ast.Call)]
        self.calls = {node for node in calls if self.is_aux(node.func)}
        self.results = self.calls | {
            node for node in calls if _is_call_of(node, ("map", "filter")) and node.args and self.is_aux(node.args[0])
        }

    def _note_names(self, scope: Scope | None, nodes: list[ast.AST]) -> None:
        bound = Counter(node.id for node in nodes if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load))
        for node in nodes:
            if not isinstance(node, (ast.Assign, ast.AnnAssign, ast.NamedExpr)):
                continue
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                if isinstance(target, ast.Name) and bound[target.id] == 1:
                    key = (None if scope is None else scope.owner(target.id), target.id)
                    if node.value in self.loads:
                        self.aliases.add(key)
                    elif isinstance(node.value, ast.Lambda):
                        self.values[key] = node.value

        if scope is not None and isinstance(scope.node, FUNCTIONS):
            arguments = scope.node.args
            names = [*reversed(arguments.posonlyargs + arguments.args)]
            defaults = [*zip(names, reversed(arguments.defaults), strict=False)]
            defaults += zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
            self.aliases.update(
                (scope, name.arg) for name, value in defaults if value in self.loads and not bound[name.arg]
            )

    def key(self, name: ast.Name) -> tuple[Scope | None, str]:
        scope = self.scopes.get(name)
        return (None if scope is None else scope.owner(name.id), name.id)

    def is_aux(self, node: ast.AST) -> bool:
        """Whether an expression is `aux` itself."""
        while isinstance(node, ast.NamedExpr) or (isinstance(node, ast.Attribute) and node.attr in CALLING_ATTRIBUTES):
            node = node.value
        return node in self.loads or (isinstance(node, ast.Name) and self.key(node) in self.aliases)


def _inspected(node: ast.AST) -> Iterator[ast.AST]:
    """The direct children of a node that it only inspects."""
    if isinstance(node, ast.Compare):
        yield from (node.left, *node.comparators)
    elif isinstance(node, ast.Attribute):
        if node.attr not in CALLING_ATTRIBUTES:
            yield node.value
    elif isinstance(node, (ast.If, ast.While, ast.IfExp, ast.Assert)):
        yield node.test
    elif isinstance(node, (ast.Return, ast.Expr, ast.FormattedValue)):
        if node.value is not None:
            yield node.value
    elif isinstance(node, ast.UnaryOp):
        yield node.operand
    elif isinstance(node, ast.AnnAssign):
        yield node.annotation
    elif isinstance(node, FUNCTIONS):
        yield from (argument.annotation for argument in walk(node.args) if isinstance(argument, ast.arg))
        yield node.returns
    elif isinstance(node, ast.Call) and _is_call_of(node, INSPECTING):
        yield from node.args


# Thin wrappers


def _is_thin_definition(definition: Definition, uses: _Uses) -> bool:
    if isinstance(definition.node, FUNCTIONS):
        return _is_thin_body(definition.node.body, uses, 0)
    return _is_wrapper(definition.node, uses, 0)


def _is_thin_body(body: list[ast.stmt], uses: _Uses, depth: int) -> bool:
    """Whether a function only returns what `aux` returns, straight or through variables."""
    holders = set()

    def is_value(node: ast.AST) -> bool:
        return _is_value(node, uses, depth + 1) or (isinstance(node, ast.Name) and node.id in holders)

    for node in body:
        if isinstance(node, ast.Return):
            return node.value is not None and is_value(node.value)
        if isinstance(node, (ast.Pass, *IMPORTS, *FUNCTIONS)) or _is_constant(node):
            continue
        if node is body[-1] and _is_thin_generator(node, is_value):
            return True
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.NamedExpr):
            node = ast.Assign([node.value.target], node.value.value)
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        )
        if not targets or node.value is None:
            return False
        if is_value(node.value):
            names = [target.elts[0] if _is_single(target) else target for target in targets]
            if any(_is_single(target) for target in targets) or not all(isinstance(name, ast.Name) for name in names):
                return False
            holders.update(name.id for name in names)
        elif _is_single(targets[0]) and _is_row(node.value, uses, depth + 1):
            holders.add(targets[0].elts[0].id)
        elif not (
            _is_wrapper(node.value, uses, depth + 1) and all(isinstance(target, ast.Name) for target in targets)
        ):
            return False
    return False


def _is_thin_generator(node: ast.stmt, is_value) -> bool:
    """`yield from aux(xs)`, or a loop that does the same."""
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.YieldFrom):
        return is_value(node.value.value)
    if not (isinstance(node, ast.For) and isinstance(node.target, ast.Name) and is_value(node.iter)):
        return False
    inner = node.body[0]
    return (
        len(node.body) == 1
        and not node.orelse
        and isinstance(inner, ast.Expr)
        and isinstance(inner.value, ast.Yield)
        and isinstance(inner.value.value, ast.Name)
        and inner.value.value.id == node.target.id
    )


def _is_single(node: ast.AST) -> bool:
    """`[x]` or `(x,)`."""
    return (
        isinstance(node, (ast.List, ast.Tuple)) and len(node.elts) == 1 and not isinstance(node.elts[0], ast.Starred)
    )


def _is_value(node: ast.AST, uses: _Uses, depth: int) -> bool:
    """Whether an expression is nothing but what a call of `aux` returns."""
    if depth > MAX_DEPTH:
        return False
    if isinstance(node, (ast.Await, ast.NamedExpr, ast.YieldFrom)):
        return _is_value(node.value, uses, depth + 1)
    if isinstance(node, ast.Subscript):
        return _is_end(node.slice) and _is_row(node.value, uses, depth + 1)
    if not isinstance(node, ast.Call):
        return False
    if node in uses.calls or _is_wrapper(node.func, uses, depth + 1):
        return True
    return _is_call_of(node, ("next",)) and bool(node.args) and _is_row(node.args[0], uses, depth + 1)


def _is_call_of(node: ast.Call, names: Container[str]) -> bool:
    return isinstance(node.func, ast.Name) and node.func.id in names


def _is_end(node: ast.AST) -> bool:
    return ast.unparse(node) in ("0", "-1") if isinstance(node, (ast.Constant, ast.UnaryOp)) else False


def _is_row(node: ast.AST, uses: _Uses, depth: int) -> bool:
    """Whether an expression is a row whose only element is what a call of `aux` returns: `list(map(aux, [xs]))`."""
    if depth > MAX_DEPTH:
        return False
    if _is_single(node):
        return _is_value(node.elts[0], uses, depth + 1)
    if isinstance(node, (ast.ListComp, ast.GeneratorExp)):
        (first, *more) = node.generators
        return not more and not first.ifs and _is_single(first.iter) and _is_value(node.elt, uses, depth + 1)
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.args):
        return False
    if node.func.id in ("list", "tuple", "iter"):
        return _is_row(node.args[0], uses, depth + 1)
    return node.func.id == "map" and uses.is_aux(node.args[0]) and all(map(_is_single, node.args[1:]))


def _is_wrapper(node: ast.AST, uses: _Uses, depth: int) -> bool:
    """Whether an expression is a function that only returns what `aux` returns, `aux` itself included."""
    if depth > MAX_DEPTH:
        return False
    if uses.is_aux(node):
        return True
    if isinstance(node, ast.Lambda):
        return _is_value(node.body, uses, depth + 1)
    if isinstance(node, ast.Call):
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        return name == "partial" and bool(node.args) and _is_wrapper(node.args[0], uses, depth + 1)
    if isinstance(node, ast.Name):
        key = uses.key(node)
        if key in uses.values:
            return _is_value(uses.values[key].body, uses, depth + 1)
        scopes = [scope for scope in uses.functions.get(node.id, []) if scope.parent.owner(node.id) is key[0]]
        is_plain = len(scopes) == 1 and isinstance(scopes[0].node, ast.FunctionDef)
        return is_plain and _is_thin_body(scopes[0].node.body, uses, depth + 1)
    return False


def _is_constant(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


# Values that go nowhere


def _ignored_values(scope: Scope, calls: set[ast.Call]) -> Iterator[str]:
    """How the values of calls in a function get lost: the statement drops them, or stores them where nothing reads them."""
    known = {}

    def reads(node: ast.AST) -> set[str]:
        if node not in known:
            known[node] = read_names(node)
        return known[node]

    captured = set()  # names that inner functions may read at any time
    for node in scope.nodes:
        if isinstance(node, ast.Global | ast.Nonlocal):
            captured.update(node.names)
        elif isinstance(node, (*DEFINITIONS, ast.Lambda)):
            captured |= reads(node)
    for block in _blocks(scope.node):
        lost = [list(_unused_calls(statement, calls)) for statement in block]
        if not any(lost):
            continue
        gone = {}  # for each variable, whether its value is replaced before anything reads it
        gone_by_default = block is scope.node.body  # code may follow an inner block
        reasons = []
        for statement, missed in zip(reversed(block), reversed(lost), strict=True):
            names = _names_of_value(statement) if missed else None
            if names is not None and not names & captured:
                read = names & reads(scope.node)
                if not names:
                    reasons += ["a value is dropped"] * len(missed)
                elif not read:
                    reasons += [f"`{', '.join(sorted(names))}` is never read"] * len(missed)
                elif all(gone.get(name, gone_by_default) for name in read):
                    reasons += [f"`{', '.join(sorted(read))}` is replaced before it is read"] * len(missed)
            if isinstance(statement, ast.Return):
                gone, gone_by_default = {}, True
            elif isinstance(statement, ast.Assign | ast.AnnAssign):
                targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
                gone.update(dict.fromkeys(names_of(targets), True))  # containers too, but reading them follows below
            gone.update(dict.fromkeys(reads(statement), False))
        yield from reversed(reasons)


def _blocks(function: ast.AST) -> Iterator[list[ast.stmt]]:
    """The statement lists of a function: its body and those of its loops, branches and so on."""
    blocks = [function.body]
    for block in blocks:
        yield block
        for statement in block:
            if isinstance(statement, DEFINITIONS):
                continue
            for part in [statement, *getattr(statement, "handlers", []), *getattr(statement, "cases", [])]:
                for name in ("body", "orelse", "finalbody"):
                    blocks += [inner] if (inner := getattr(part, name, None)) else []


def _names_of_value(statement: ast.stmt) -> set[str] | None:
    """The variables that a statement puts its value into, none if it drops it; None if it goes into an object."""
    if isinstance(statement, ast.Expr):
        targets = [statement.value.target] if isinstance(statement.value, ast.NamedExpr) else []
    else:
        targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
    if any(isinstance(node, CONTAINERS) for node in walk(*targets)):
        return None
    return names_of(targets)


def _unused_calls(statement: ast.stmt, calls: set[ast.Call]) -> Iterator[ast.Call]:
    """
    Calls whose values only go into the value of the statement. An argument of another call counts as used, unless the
    call is one of a builtin that only makes a new value from it.
    """
    is_assignment = isinstance(statement, ast.Assign) or (isinstance(statement, ast.AnnAssign) and statement.value)
    stack = [statement.value] if is_assignment or isinstance(statement, ast.Expr) else []
    while stack:
        node = stack.pop()
        if node in calls:
            yield node
        elif isinstance(node, ast.comprehension) and isinstance(statement, ast.Expr):
            continue  # a loop uses what it runs over
        elif isinstance(node, ast.Call):
            if _is_call_of(node, PURE_FUNCTIONS):
                stack += node.args
        elif not isinstance(node, (ast.Lambda, ast.Yield, ast.YieldFrom)):
            stack += children(node)
