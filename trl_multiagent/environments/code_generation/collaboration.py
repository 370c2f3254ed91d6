"""
Finds how main's code uses the aux agent's function.

A use is any expression that the entry point may reach and that calls the global `aux` or passes it on: `aux(x)`,
`map(aux, xs)`, `key=aux`, `f = aux`, `@aux`, `{"a": aux}`. Expressions that only inspect `aux` are not uses:
`aux is None`, `aux.__name__`, `print(aux)`, `return aux`. Only a run of the tests shows whether `aux` is called.
"""

import ast
from collections import Counter
from collections.abc import Callable, Container, Iterator, Sequence
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
    inner_blocks,
    names_of,
    read_names,
    walk,
)


INLINE = (ast.Lambda, *COMPREHENSIONS)
CALLING_ATTRIBUTES = ("__call__", "__wrapped__")
# Builtins that do not call their arguments
INSPECTING = set(
    "print callable isinstance issubclass hasattr id type repr str hash bool len dir vars help format ascii".split()
)
# Builtins that have no side effects
PURE_FUNCTIONS = set(
    "list tuple set frozenset dict sorted reversed enumerate zip len sum min max any all str repr int float bool abs "
    "round".split()
)
MAX_DEPTH = 20  # levels of expressions and functions that are searched for a thin wrapper
Function = ast.FunctionDef | ast.AsyncFunctionDef
Part = tuple[Scope | None, Sequence[ast.AST]]  # a scope, None for the module, and some of its nodes


@dataclass(frozen=True)
class Collaboration:
    """The use of `aux` by main. The fields have the same meaning as those of `Analysis`."""

    calls_aux: bool = False
    thin_wrapper: bool = False
    ignored_values: tuple[str, ...] = ()


def read_collaboration(
    module: Module, needed: list[Statement], entry: Definition, entry_point: str, aux_returns: bool
) -> Collaboration:
    """
    Analyses main's code.

    Args:
        module (`Module`): Main's code.
        needed (`list[Statement]`): The statements of the code that the entry point needs.
        entry (`Definition`): The entry point.
        entry_point (`str`): Name of the entry point.
        aux_returns (`bool`): Whether `aux` returns values. If not, no value can be ignored.
    """
    parts = _reached(module, needed, entry_point)
    uses = _Uses(module, parts)
    if not uses.loads:
        return Collaboration()
    thin = _is_thin_definition(entry, uses)
    ignored: list[str] = []
    for scope, nodes in parts:
        if aux_returns and scope is not None and isinstance(scope.node, FUNCTIONS):
            if any(node in uses.results for node in nodes) or any(isinstance(node, INLINE) for node in nodes):
                ignored += _ignored_values(scope.node, nodes, uses.results)
    return Collaboration(True, thin, tuple(ignored))


# Uses of `aux`


def _reached(module: Module, needed: list[Statement], entry_point: str) -> list[Part]:
    """
    The code that the entry point may run: the functions and classes that it names, directly or through others, and the other
    statements that it needs.
    """
    by_node: dict[ast.AST, Scope] = {}
    nested: dict[str, list[tuple[Statement, Scope]]] = {}  # functions and classes inside of others, by name
    at_top: dict[str, list[tuple[Statement, Scope]]] = {}  # those at the top level
    for statement in module.statements:
        for scope in statement.scopes:
            by_node[scope.node] = scope
            if isinstance(scope.node, DEFINITIONS):
                names = at_top if scope.is_top_level else nested
                names.setdefault(scope.node.name, []).append((statement, scope))
    parts: list[Part] = [
        (None, statement.nodes) for statement in needed if not isinstance(statement.node, DEFINITIONS)
    ]
    seen: set[Scope] = set()
    followed: set[str] = set()

    def follow(name: str) -> None:
        if name in followed:
            return
        followed.add(name)
        current = {statement for _, statement in module.bindings(name)} if name in at_top else set()
        found = [(statement, scope) for statement, scope in at_top.get(name, ()) if statement in current]
        for statement, scope in found + nested.get(name, []):
            if scope not in seen:
                seen.add(scope)
                parts.append((scope, scope.nodes))
                if statement.node is scope.node:
                    parts.append((None, statement.nodes))  # its decorators and defaults

    follow(entry_point)
    for part, nodes in parts:
        in_class = part is not None and isinstance(part.node, ast.ClassDef)
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
        loads (`set[ast.AST]`): The name nodes that call `aux` or pass it on.
        calls (`set[ast.AST]`): The calls of `aux`, also those by another name.
        results (`set[ast.AST]`): The expressions that give values of `aux`: its calls, and `map(aux, xs)`.
    """

    def __init__(self, module: Module, parts: list[Part]):
        self.loads: set[ast.AST] = set()
        self.calls: set[ast.AST] = set()
        self.results: set[ast.AST] = set()
        self.functions: dict[str, list[Scope]] = {}  # main's functions, by name
        self.scopes: dict[ast.AST, Scope | None] = {}  # the scope of each call and name
        self.aliases: set[tuple[Scope | None, str]] = set()  # other names for `aux`, as pairs of scope and name
        self.values: dict[tuple[Scope | None, str], ast.Lambda] = {}  # names that are bound once, to a lambda
        for scope, nodes in parts:
            if scope is not None and isinstance(scope.node, FUNCTIONS):
                self.functions.setdefault(scope.node.name, []).append(scope)
            inspected: set[ast.AST] = set()
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

    def _note_names(self, scope: Scope | None, nodes: Sequence[ast.AST]) -> None:
        """Records the names in one scope that are bound once, to `aux` or to a lambda."""
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
            defaults: list[tuple[ast.arg, ast.expr | None]] = [*zip(names, reversed(arguments.defaults), strict=False)]
            defaults += zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
            self.aliases.update(
                (scope, name.arg) for name, value in defaults if value in self.loads and not bound[name.arg]
            )

    def key(self, name: ast.Name) -> tuple[Scope | None, str]:
        """The variable that a name node refers to: the scope in which it is local, None for the module, and the name."""
        scope = self.scopes.get(name)
        return (None if scope is None else scope.owner(name.id), name.id)

    def is_aux(self, node: ast.AST) -> bool:
        """Whether an expression is `aux` itself."""
        while isinstance(node, ast.NamedExpr) or (isinstance(node, ast.Attribute) and node.attr in CALLING_ATTRIBUTES):
            node = node.value
        return node in self.loads or (isinstance(node, ast.Name) and self.key(node) in self.aliases)


def _inspected(node: ast.AST) -> Iterator[ast.AST]:
    """The direct children of a node that the node only inspects. Such a child does not use the function that it names."""
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
        annotations = [argument.annotation for argument in walk(node.args) if isinstance(argument, ast.arg)]
        yield from (annotation for annotation in [*annotations, node.returns] if annotation is not None)
    elif isinstance(node, ast.Call) and _is_call_of(node, INSPECTING):
        yield from node.args


# Thin wrappers


def _is_thin_definition(definition: Definition, uses: _Uses) -> bool:
    if isinstance(definition.node, FUNCTIONS):
        return _is_thin_body(definition.node.body, uses, 0)
    return _is_wrapper(definition.node, uses, 0)


def _is_thin_body(body: list[ast.stmt], uses: _Uses, depth: int) -> bool:
    """Whether a function only returns the value of `aux`, directly or through variables."""
    holders: set[str] = set()  # variables with the value of `aux`

    def is_value(node: ast.AST) -> bool:
        return _is_value(node, uses, depth + 1) or (isinstance(node, ast.Name) and node.id in holders)

    for node in body:
        if isinstance(node, ast.Return):
            return node.value is not None and is_value(node.value)
        if isinstance(node, (ast.Pass, *IMPORTS, *FUNCTIONS)) or _is_constant(node):
            continue
        if node is body[-1] and _is_thin_generator(node, is_value):
            return True
        targets, value = _assignment(node)
        if value is None:
            return False
        names = {target.id for target in targets if isinstance(target, ast.Name)}
        single = _single_element(targets[0])
        if is_value(value):
            if not all(isinstance(target, ast.Name) for target in targets):
                return False
            holders |= names
        elif isinstance(single, ast.Name) and _is_row(value, uses, depth + 1):
            holders.add(single.id)
        elif not (_is_wrapper(value, uses, depth + 1) and all(isinstance(target, ast.Name) for target in targets)):
            return False
    return False


def _assignment(node: ast.stmt) -> tuple[Sequence[ast.expr], ast.expr | None]:
    """The targets and the value of an assignment; none if the statement is not one."""
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.NamedExpr):
        return [node.value.target], node.value.value
    if isinstance(node, ast.Assign):
        return node.targets, node.value
    if isinstance(node, ast.AnnAssign):
        return [node.target], node.value
    return [], None


def _is_thin_generator(node: ast.stmt, is_value: Callable[[ast.AST], bool]) -> bool:
    """Whether a statement is `yield from aux(xs)`, or a loop with the same effect."""
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


def _single_element(node: ast.AST) -> ast.expr | None:
    """The element `x` of `[x]` or `(x,)`; None for other expressions."""
    if isinstance(node, (ast.List, ast.Tuple)) and len(node.elts) == 1 and not isinstance(node.elts[0], ast.Starred):
        return node.elts[0]
    return None


def _is_single(node: ast.AST) -> bool:
    """Whether an expression is `[x]` or `(x,)`."""
    return _single_element(node) is not None


def _is_value(node: ast.AST, uses: _Uses, depth: int) -> bool:
    """Whether the value of an expression is the value of a call of `aux`, unchanged."""
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
    """Whether an index is 0 or -1."""
    return ast.unparse(node) in ("0", "-1") if isinstance(node, (ast.Constant, ast.UnaryOp)) else False


def _is_row(node: ast.AST, uses: _Uses, depth: int) -> bool:
    """Whether the only element of a row is the value of a call of `aux`, as in `list(map(aux, [xs]))`."""
    if depth > MAX_DEPTH:
        return False
    element = _single_element(node)
    if element is not None:
        return _is_value(element, uses, depth + 1)
    if isinstance(node, (ast.ListComp, ast.GeneratorExp)):
        (first, *more) = node.generators
        return not more and not first.ifs and _is_single(first.iter) and _is_value(node.elt, uses, depth + 1)
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.args):
        return False
    if node.func.id in ("list", "tuple", "iter"):
        return _is_row(node.args[0], uses, depth + 1)
    return node.func.id == "map" and uses.is_aux(node.args[0]) and all(map(_is_single, node.args[1:]))


def _is_wrapper(node: ast.AST, uses: _Uses, depth: int) -> bool:
    """Whether an expression is `aux` itself or a function that only returns the value of `aux`."""
    if depth > MAX_DEPTH:
        return False
    if uses.is_aux(node):
        return True
    if isinstance(node, ast.Lambda):
        return _is_value(node.body, uses, depth + 1)
    if isinstance(node, ast.Call):
        is_partial = (isinstance(node.func, ast.Attribute) and node.func.attr == "partial") or (
            isinstance(node.func, ast.Name) and node.func.id == "partial"
        )
        return is_partial and bool(node.args) and _is_wrapper(node.args[0], uses, depth + 1)
    if isinstance(node, ast.Name):
        key = uses.key(node)
        if key in uses.values:
            return _is_value(uses.values[key].body, uses, depth + 1)
        functions = [
            scope.node
            for scope in uses.functions.get(node.id, [])
            if scope.parent is not None and scope.parent.owner(node.id) is key[0]
        ]
        if len(functions) == 1 and isinstance(functions[0], ast.FunctionDef):
            return _is_thin_body(functions[0].body, uses, depth + 1)
    return False


def _is_constant(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


# Values that are not used


def _ignored_values(function: Function, nodes: Sequence[ast.AST], calls: set[ast.AST]) -> Iterator[str]:
    """
    For each of the calls in a function whose value is not used, the reason: the statement drops the value, or assigns it to
    a variable that is not read afterwards.
    """
    known: dict[ast.AST, set[str]] = {}

    def reads(node: ast.AST) -> set[str]:
        if node not in known:
            known[node] = read_names(node)
        return known[node]

    captured: set[str] = set()  # names that inner functions may read at any time
    for node in nodes:
        if isinstance(node, ast.Global | ast.Nonlocal):
            captured.update(node.names)
        elif isinstance(node, (*DEFINITIONS, ast.Lambda)):
            captured |= reads(node)
    for block in _blocks(function):
        lost = [list(_unused_calls(statement, calls)) for statement in block]
        if not any(lost):
            continue
        replaced: dict[str, bool] = {}  # for each variable, whether its value is replaced before it is read
        replaced_by_default = block is function.body  # code that reads it may follow an inner block
        reasons: list[str] = []
        for statement, missed in zip(reversed(block), reversed(lost), strict=True):
            names = _names_of_value(statement) if missed else None
            if names is not None and not names & captured:
                read = names & reads(function)
                if not names:
                    reasons += ["a value is dropped"] * len(missed)
                elif not read:
                    reasons += [f"`{', '.join(sorted(names))}` is never read"] * len(missed)
                elif all(replaced.get(name, replaced_by_default) for name in read):
                    reasons += [f"`{', '.join(sorted(read))}` is replaced before it is read"] * len(missed)
            if isinstance(statement, ast.Return):
                replaced, replaced_by_default = {}, True
            elif isinstance(statement, ast.Assign | ast.AnnAssign):
                targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
                replaced.update(dict.fromkeys(names_of(targets), True))  # the next line corrects this for containers
            replaced.update(dict.fromkeys(reads(statement), False))
        yield from reversed(reasons)


def _blocks(function: Function) -> Iterator[list[ast.stmt]]:
    """The lists of statements in a function: its body and those of its loops, branches and so on."""
    blocks = [function.body]
    for block in blocks:
        yield block
        for statement in block:
            if not isinstance(statement, DEFINITIONS):
                blocks += inner_blocks(statement)


def _names_of_value(statement: ast.stmt) -> set[str] | None:
    """
    The variables to which a statement assigns its value. Empty if it drops the value; None if it stores the value in an object.
    """
    targets = _assignment(statement)[0]
    if any(isinstance(node, CONTAINERS) for node in walk(*targets)):
        return None
    return names_of(targets)


def _unused_calls(statement: ast.stmt, calls: set[ast.AST]) -> Iterator[ast.AST]:
    """
    The calls whose values only contribute to the value of the statement. An argument of another call counts as used, unless
    that call is one of a builtin without side effects.
    """
    value = statement.value if isinstance(statement, ast.Expr) else _assignment(statement)[1]
    stack: list[ast.AST] = [] if value is None else [value]
    while stack:
        node = stack.pop()
        if node in calls:
            yield node
        elif isinstance(node, ast.comprehension) and isinstance(statement, ast.Expr):
            continue  # a loop uses the values that it runs over
        elif isinstance(node, ast.Call):
            if _is_call_of(node, PURE_FUNCTIONS):
                stack += node.args
        elif not isinstance(node, (ast.Lambda, ast.Yield, ast.YieldFrom)):
            stack += children(node)
