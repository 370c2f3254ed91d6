"""
Finds tests that cannot tell right answers from wrong ones.

The tests and the code before them in the prompt are read, not run. Some unusable tests only show when they run, such as one that
the reference solution fails; these are not found here.
"""

import ast
import builtins
import importlib.util
import symtable
import sys
import warnings
from collections.abc import Iterator

from trl_multiagent.environments.python_code.names import FUNCTIONS


# What `ast.parse` raises. Null bytes, lone surrogates and very deep nesting raise other errors than SyntaxError
PARSE_ERRORS = (SyntaxError, ValueError, RecursionError, MemoryError)
MODULE_NAMES = {*dir(builtins), "__file__", "__annotations__"}
LEAVING = (ast.Return, ast.Raise, ast.Break, ast.Continue)
BLOCKS: tuple[type[ast.stmt], ...] = (
    ast.If,
    ast.For,
    ast.AsyncFor,
    ast.While,
    ast.With,
    ast.AsyncWith,
    ast.Try,
    ast.Match,
)
if sys.version_info >= (3, 11):
    BLOCKS += (ast.TryStar,)
Block = ast.Module | ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def unusable_test(test: str, setup: str, entry_point: str) -> str:
    """
    Explains why a test cannot tell right answers from wrong ones. The result is empty if no reason was found.

    Args:
        test (`str`): Module source that defines `check(candidate)`.
        setup (`str`): Source that runs before the test in the same namespace.
        entry_point (`str`): Name of the function under test. The test may call it by this name or as `candidate`.
    """
    if problem := _compile_problem(test):
        return problem
    tree = ast.parse(test)
    known = {entry_point, "candidate"} | bound_names(setup)
    if problem := _check_function_problem(tree) or source_problem(test, known):
        return problem
    if all(isinstance(node.test, ast.Constant) and node.test.value for node in _asserts(tree)):
        return "has no assert that can fail"
    return _assert_problem(tree, entry_point)


def source_problem(source: str, known: set[str]) -> str:
    """
    Explains why a module cannot run: a syntax error, an undefined name, or a missing module. Empty if its text shows none of these.

    Args:
        source (`str`): Source of the module.
        known (`set[str]`): Names that are defined before the module runs.
    """
    if problem := _compile_problem(source):
        return problem
    known = known | bound_names(source)
    if "*" not in known:
        for name in _global_names_in(symtable.symtable(source, "<source>", "exec")):
            if name not in known and name not in MODULE_NAMES:
                return f"uses the name `{name}`, which is neither defined nor imported"
    tree = ast.parse(source)
    guarded = {id(inner) for node in ast.walk(tree) if isinstance(node, ast.Try) for inner in ast.walk(node)}
    for node in ast.walk(tree):
        if id(node) in guarded or not isinstance(node, ast.Import | ast.ImportFrom):
            continue
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif node.level or node.module is None:
            return "has a relative import, but is not part of a package"
        else:
            names = [node.module]
        for name in names:
            module = name.split(".")[0]
            if module not in sys.stdlib_module_names and importlib.util.find_spec(module) is None:
                return f"imports `{module}`, which is not installed"
    return ""


def _compile_problem(source: str) -> str:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # `x is 1` gives one, for example
            compile(source, "<source>", "exec", dont_inherit=True)  # finds errors that the parser does not
    except PARSE_ERRORS as error:
        return f"is not Python source: {error}"
    return ""


def bound_names(source: str) -> set[str]:
    """The names that a module defines at its top level, and `"*"` if it has an import such as `from math import *`."""
    table = symtable.symtable(source, "<source>", "exec")
    names = {symbol.get_name() for symbol in table.get_symbols() if symbol.is_assigned() or symbol.is_imported()}
    tables = [table]
    for inner in tables:
        tables += inner.get_children()
        names |= {s.get_name() for s in inner.get_symbols() if s.is_declared_global() and s.is_assigned()}
    stars = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ImportFrom))
    return names | {"*" for node in stars if node.names[0].name == "*"}


def _global_names_in(table: symtable.SymbolTable) -> Iterator[str]:
    """The global names that the code of a symbol table reads, inner scopes included."""
    for symbol in table.get_symbols():
        if symbol.is_global() and symbol.is_referenced():
            yield symbol.get_name()
    for inner in table.get_children():
        yield from _global_names_in(inner)


def _check_function_problem(tree: ast.Module) -> str:
    """Explains why `check(candidate)` cannot be called. Empty if it can."""
    definitions = [node for node in ast.walk(tree) if isinstance(node, FUNCTIONS) and node.name == "check"]
    at_top = [node for node in definitions if node in tree.body]
    if not at_top:
        return f"does not define `check(candidate)`{' at its top level' if definitions else ''}"
    check = at_top[-1]
    for node in tree.body[tree.body.index(check) + 1 :]:
        if isinstance(node, FUNCTIONS) or "check" not in {name for inner in ast.walk(node) for name in _bound(inner)}:
            continue
        return "defines `check`, and then assigns something else to the name"
    if isinstance(check, ast.AsyncFunctionDef):
        return "defines `check` as a coroutine, which would never be awaited: write `def check(candidate)`"
    arguments = check.args
    if len(arguments.posonlyargs + arguments.args) != 1 or arguments.vararg or arguments.kwonlyargs or arguments.kwarg:
        return "has a `check` that cannot be called: it must take one argument, the candidate"
    if any(isinstance(node, ast.Yield | ast.YieldFrom) for node in _own_nodes(check)):
        return "defines `check` as a generator, whose body would never run: take `yield` out of it"
    return ""


# Which asserts run, and which depend on the candidate


def _assert_problem(tree: ast.Module, entry_point: str) -> str:
    """Explains why no assert can judge an answer. Empty if at least one may."""
    check = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "check"][-1]
    statements = _reached_statements(tree, check)
    asserts = [node for node in statements if isinstance(node, ast.Assert) and not _is_true(node.test)]
    if not asserts:
        return "has no assert that is reached"
    argument = (check.args.posonlyargs + check.args.args)[0].arg
    dependent = _dependent_names(statements, {"candidate", entry_point, argument})
    controlled = _controlled_asserts(statements, dependent)
    if not any(node in controlled or _names_in(node) & dependent for node in asserts):
        return "has no assert that depends on the candidate"
    if any(isinstance(node, ast.Assert) and _is_false(node.test) for node in _straight_line(check.body)):
        return "has an assert of a false constant that every answer reaches"
    return ""


def _reached_statements(tree: ast.Module, check: ast.FunctionDef) -> list[ast.stmt]:
    """The statements that may run: those of the module, of `check`, and of the functions and classes that these name."""
    definitions: dict[str, list[Block]] = {}
    for node in ast.walk(tree):
        if isinstance(node, (*FUNCTIONS, ast.ClassDef)):
            definitions.setdefault(node.name, []).append(node)
    reached = []
    scopes: list[Block] = [tree, check]
    seen = {*scopes}
    for scope in scopes:
        for statement in _live(scope.body):
            reached.append(statement)
            nodes = [inner for part in _header(statement) for inner in ast.walk(part)]
            names = {node.id for node in nodes if isinstance(node, ast.Name)}
            names |= {node.attr for node in nodes if isinstance(node, ast.Attribute)}
            found = [node for name in names for node in definitions.get(name, [])]
            if isinstance(scope, ast.ClassDef) and isinstance(statement, FUNCTIONS):
                found.append(statement)  # calls of a method cannot be found by its name alone
            scopes += [node for node in dict.fromkeys(found) if node not in seen]
            seen.update(found)
    return reached


def _live(block: list[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements of a block and of its inner blocks, without those that never run."""
    for node in block:
        yield node
        for inner in _inner_blocks(node):
            yield from _live(inner)
        if _ends(node):
            return


def _straight_line(block: list[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements of a block that always run unless an exception is raised."""
    for node in block:
        yield node
        if _ends(node) or isinstance(node, BLOCKS):  # there may be a `return` in the block
            return


def _inner_blocks(node: ast.stmt) -> list[list[ast.stmt]]:
    """The blocks of a statement that may run, except for the bodies of functions and classes."""
    if isinstance(node, ast.If | ast.While) and isinstance(node.test, ast.Constant):
        return [node.body if node.test.value else node.orelse]
    if isinstance(node, ast.For) and isinstance(node.iter, ast.List | ast.Tuple) and not node.iter.elts:
        return [node.orelse]
    if not isinstance(node, BLOCKS):
        return []
    return _all_inner_blocks(node)


def _all_inner_blocks(statement: ast.stmt) -> list[list[ast.stmt]]:
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


def _ends(node: ast.stmt) -> bool:
    """Whether the statements after this one never run."""
    if isinstance(node, LEAVING):
        return True
    if isinstance(node, ast.If):
        blocks = _inner_blocks(node)
        both = isinstance(node.test, ast.Constant) or len(blocks) == 2
        return both and all(block and any(map(_ends, block)) for block in blocks)
    if isinstance(node, ast.While) and _is_true(node.test):
        return not any(isinstance(inner, ast.Break) for inner in _live(node.body))
    return False


def _header(node: ast.stmt) -> Iterator[ast.AST]:
    """The parts of a statement that are not statements themselves."""
    if isinstance(node, ast.Assert):
        yield node.test
        return
    for name, value in ast.iter_fields(node):
        for part in value if isinstance(value, list) else [value]:
            if isinstance(part, ast.ExceptHandler):
                yield from [part.type] if part.type else []
            elif isinstance(part, ast.match_case):
                yield from [part.pattern, *([part.guard] if part.guard else [])]
            elif isinstance(part, ast.AST) and not isinstance(part, ast.stmt) and name != "returns":
                yield part


def _names_in(node: ast.stmt) -> set[str]:
    """The names in a statement, read or bound. Names in inner statements are left out."""
    nodes = [inner for part in _header(node) for inner in ast.walk(part)]
    return {inner.id for inner in nodes if isinstance(inner, ast.Name)}


def _dependent_names(statements: list[ast.stmt], names: set[str]) -> set[str]:
    """
    The names whose values may depend on what the candidate returns. If a statement contains such a name, all names in the
    statement count. Names in different scopes are treated as the same.

    Args:
        statements (`list[ast.stmt]`): The statements that may run.
        names (`set[str]`): The names of the candidate.
    """
    flows: list[tuple[set[str], set[str]]] = []  # if a name in the first set is dependent, so are all in the second
    for node in statements:
        if isinstance(node, (*FUNCTIONS, ast.ClassDef)):
            flows.append((set().union(*map(_names_in, [node, *_live(node.body)])), {node.name}))
            flows.append(({node.name}, {inner.arg for inner in ast.walk(node) if isinstance(inner, ast.arg)}))
        else:
            inside = set().union(
                *map(_names_in, [node, *(inner for block in _inner_blocks(node) for inner in _live(block))])
            )
            flows.append((inside, inside - MODULE_NAMES))
    names, before = set(names), 0
    while before != len(names):
        before = len(names)
        for read, changed in flows:
            if read & names:
                names |= changed
    return names


def _controlled_asserts(statements: list[ast.stmt], dependent: set[str]) -> set[ast.stmt]:
    """
    The asserts that run or not depending on the candidate: those in branches, loops and `try` statements, and those after a
    block that may leave the function or loop.
    """
    asserts = [node for node in statements if isinstance(node, ast.Assert)]
    controlled: set[ast.stmt] = set()
    for node in statements:
        inside = [inner for block in _inner_blocks(node) for inner in _live(block)]
        if inside and any(_names_in(inner) & dependent for inner in [node, *inside]):
            controlled.update(inner for inner in inside if isinstance(inner, ast.Assert))
            if any(isinstance(inner, LEAVING) for inner in inside):
                controlled.update(inner for inner in asserts if inner.lineno > node.lineno)
    return controlled


def _bound(node: ast.AST) -> list[str]:
    """The names that a node binds itself; function definitions do not count."""
    if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
        return [node.id]
    if isinstance(node, ast.ClassDef):
        return [node.name]
    if isinstance(node, ast.alias):
        return [(node.asname or node.name).split(".")[0]]
    return []


def _own_nodes(function: ast.FunctionDef) -> Iterator[ast.AST]:
    """The nodes in a function's body, without those in inner functions, classes and lambdas."""
    stack: list[ast.AST] = [*function.body]
    while stack:
        node = stack.pop()
        yield node
        if not isinstance(node, (*FUNCTIONS, ast.ClassDef, ast.Lambda)):
            stack.extend(ast.iter_child_nodes(node))


def _asserts(tree: ast.AST) -> list[ast.Assert]:
    return [node for node in ast.walk(tree) if isinstance(node, ast.Assert)]


def _is_true(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and bool(node.value)


def _is_false(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and not node.value
