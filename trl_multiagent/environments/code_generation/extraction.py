"""
From completions to the code that the agents mean, and what can be read from its syntax tree.

Completions are parsed here, never run. The code of a completion is what it says at module level: functions, classes,
imports, and the assignments and control flow that these need. A script's own part (`if __name__ == ...`, prints, example
calls, asserts) is left out. Where a completion does not parse as a whole, its fenced blocks are read; where these do not
parse either, every stretch of lines that does.

Rules for clashes: the parts are put together in the order prompt, aux, main, and as everywhere in Python the last
definition counts. So main's entry point replaces one that aux wrote, and an `aux` that main defines itself is main's own
function: calling it is not collaboration.
"""

import ast
import functools
import itertools
import re
import textwrap
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from .altered import alteration
from .checks import PARSE_ERRORS
from .data import AUX, read_problem


MAX_CHARS = 32_000  # a longer completion counts as empty
MAX_ATTEMPTS = 64  # stretches of lines that are tried in one completion
MAX_REPAIRS = 4  # lines that are mended to read a function that does not parse

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
DEFINITIONS = (*FUNCTIONS, ast.ClassDef)
INLINE_SCOPES = (ast.Lambda, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
SCOPES = (*DEFINITIONS, *INLINE_SCOPES)
IMPORTS = (ast.Import, ast.ImportFrom)
CONTAINERS = (ast.Attribute, ast.Subscript)

FENCE = re.compile(r"^[ \t]*(?:```|~~~).*$", re.MULTILINE)
CODE_START = re.compile(
    r"(?:async|def|class|import|from|if|for|while|with|try)\b|@|[A-Za-z_][\w.\[\]'\", ]*(?::.*)?[-+*/|&]?="
)
DEFINITION_START = re.compile(r"(?:async\s+def|def|class)\b")
BLOCK_START = re.compile(r"(?:async|if|elif|else|for|while|with|try|except|finally|match|case|def|class)\b")
CONTINUATION = re.compile(r"(?:elif|else|except|finally)\b")


@dataclass(frozen=True)
class Analysis:
    """
    What the syntax trees of a team's answer say.

    Args:
        source (`str`): The whole program: the prompt's prefix, aux's part, main's part.
        setup (`str`): The prompt's prefix alone.
        aux_problem (`str`): Why aux's answer does not define `aux` with a return value; empty if it does.
        main_problem (`str`): Why main's answer does not define the entry point with a return value; empty if it does.
        syntax_problem (`str`): Whose part of the program does not parse, where and why; empty if all of it does.
        altered (`str`): The whole program with other values in place of those of `aux`; empty if `calls_aux` is false.
        calls_aux (`bool`):
            Main calls the aux agent's `aux`, in the entry point or in a function of main's that the entry point names.
        thin_wrapper (`bool`): The entry point does nothing but return what `aux` returns.
        ignored_values (`tuple[str, ...]`): For each call of `aux` whose value goes nowhere, how it gets lost.
    """

    source: str
    setup: str
    aux_problem: str
    main_problem: str
    syntax_problem: str
    altered: str = ""
    calls_aux: bool = False
    thin_wrapper: bool = False
    ignored_values: tuple[str, ...] = ()


def analyze(prompt: str, entry_point: str, aux_completion: str | None, main_completion: str) -> Analysis:
    """
    Reads a team's answer.

    Args:
        prompt (`str`): The problem, as in the dataset.
        entry_point (`str`): Name of the function that main writes.
        aux_completion (`str` or `None`): The aux agent's raw answer; `None` for a single agent.
        main_completion (`str`): The main agent's raw answer.
    """
    aux_code = extract_code(aux_completion or "", AUX)
    main_code = extract_code(main_completion, entry_point)
    aux_tree, _, aux_error = _parse(aux_code)
    main_tree, _, main_error = _parse(main_code)
    prefix = read_problem(prompt, entry_point).prefix
    facts = {
        "source": _program(prefix, aux_code, main_code),
        "setup": prefix,
        "aux_problem": _definition_problem(aux_code, aux_tree, AUX),
        "main_problem": _definition_problem(main_code, main_tree, entry_point),
        "syntax_problem": "; ".join(
            f"code for `{name}`, {error}" for name, error in ((AUX, aux_error), (entry_point, main_error)) if error
        ),
    }
    if AUX not in main_code or facts["syntax_problem"] or not _is_team(aux_tree, main_tree, entry_point):
        return Analysis(**facts)
    function = _function(main_tree, entry_point)
    reached, calls = _follow(main_tree, function)
    if not calls:
        return Analysis(**facts)
    return Analysis(
        **facts,
        altered=_program(prefix, aux_code, alteration(AUX), main_code),
        calls_aux=True,
        thin_wrapper=_is_thin_wrapper(function, calls),
        ignored_values=tuple(reason for scope in reached for reason in _ignored_values(scope, calls)),
    )


def _program(*parts: str) -> str:
    """Puts the parts together; what they import from `__future__` must come first in a module."""
    future, rest = [], []
    for part in parts:
        lines = part.split("\n")
        own = list(itertools.takewhile(lambda line: line.startswith("from __future__ "), lines))
        future += own
        rest.append("\n".join(lines[len(own) :]).strip("\n"))
    return "\n\n\n".join(part for part in ("\n".join(future), *rest) if part) + "\n"


def _parse(source: str) -> tuple[ast.Module | None, int, str]:
    """
    The tree, or None with the line of the error (0 if it has none) and what is wrong.

    Hostile text makes the parser raise more than SyntaxError.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes
            return ast.parse(source), 0, ""
    except SyntaxError as error:
        return None, error.lineno or 0, f"line {error.lineno}, column {error.offset}: {error.msg}"
    except PARSE_ERRORS as error:
        return None, 0, f"the parser gave up with {type(error).__name__}"


# From a completion to code


def extract_code(completion: str, name: str) -> str:
    """
    The code that a completion means.

    Args:
        completion (`str`): What the agent said: code, or prose around code, fenced or not.
        name (`str`): Name of the function that the agent was asked for.

    Returns:
        `str`: Source that parses, unless the only definition of `name` does not: that is then there as it was written.
    """
    if len(completion) > MAX_CHARS:
        return ""
    text = textwrap.dedent(completion.replace("\r\n", "\n").replace("\r", "\n"))
    tree = _parse(text)[0]
    if tree is not None:
        return _needed_source(text, tree, name)
    asked = re.compile(rf"^[ \t]*(?:async[ \t]+)?def[ \t]+{re.escape(name)}\b", re.MULTILINE)
    segments = FENCE.split(text)
    fenced = segments[1::2]
    good, broken = [], []
    attempts = itertools.count()
    for segment in fenced if any(asked.search(block) for block in fenced) else segments:
        for stretch, parses in _stretches(textwrap.dedent(segment), attempts):
            (good if parses else broken).append(stretch)
    text = "\n".join(good)
    code = _needed_source(text, ast.parse(text), name)
    broken = [stretch for stretch in broken if asked.search(stretch)]
    if broken and _function(_parse(code)[0], name) is None:
        code = f"{code}\n\n\n{broken[-1]}".strip("\n")
    return code


def _stretches(text: str, attempts: Iterator[int]) -> Iterator[tuple[str, bool]]:
    """Stretches of lines that may be code, in order, and whether each parses; at most `MAX_ATTEMPTS` are tried."""
    if _parse(text)[0] is not None:
        yield text, True
        return
    lines = text.split("\n")
    start = 0
    while start < len(lines):
        end = start + 1
        if CODE_START.match(lines[start]):
            end, parses = _stretch_end(lines, start, attempts)
            yield "\n".join(lines[start:end]), parses
        start = end


def _stretch_end(lines: list[str], start: int, attempts: Iterator[int]) -> tuple[int, bool]:
    """
    The end of the statement that starts at a line, and whether it parses up to there.

    A statement may end before any line that is not indented. It goes on past such a line while it does not parse, as
    brackets and long strings may begin lines at the margin, but not past the next definition.
    """
    head = start
    while head < len(lines) - 1 and lines[head].startswith("@"):
        head += 1
    margin = (index for index in range(head + 1, len(lines)) if lines[index].strip() and not lines[index][0].isspace())
    first_end = None
    for end in itertools.chain(margin, [len(lines)]):
        first_end = first_end or end
        if next(attempts) >= MAX_ATTEMPTS:
            break
        more = end < len(lines) and CONTINUATION.match(lines[end])
        if not more and _parse("\n".join(lines[start:end]))[0] is not None:
            return end, True
        if end < len(lines) and DEFINITION_START.match(lines[end]):
            break
    return first_end, False


def _needed_source(source: str, tree: ast.Module, name: str) -> str:
    """
    A module without its script part: definitions, imports, and the other statements as far as these need them.

    A statement at module level is needed if it writes a name that a definition, or a needed statement after it, reads.
    """
    kept = {node for node in tree.body if isinstance(node, (*DEFINITIONS, *IMPORTS))}
    needed = {name}.union(*(_bound_names(node) for node in kept), *(_read_names(node) for node in kept))
    for node in reversed(tree.body):
        if node not in kept and not _is_script(node) and needed & _written_names(node):
            kept.add(node)
            needed |= _read_names(node)
    lines = source.encode().split(b"\n")  # columns of a syntax tree count bytes
    future, rest = [], []
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and node.module == "__future__":
            future.append(ast.unparse(node))
        elif node in kept:
            rest.append(_segment(lines, node))
    return "\n".join(future + rest)


def _is_script(node: ast.stmt) -> bool:
    if isinstance(node, ast.If):
        return any(isinstance(inner, ast.Name) and inner.id == "__name__" for inner in ast.walk(node.test))
    if isinstance(
        node, ast.Expr
    ):  # may matter as a call on something: `TABLE.append(1)`, `sys.setrecursionlimit(9999)`
        return not (isinstance(node.value, ast.Call) and isinstance(node.value.func, ast.Attribute))
    return isinstance(node, ast.AnnAssign) and node.value is None


def _segment(lines: list[bytes], node: ast.stmt) -> str:
    """The text of a statement, decorators included."""
    first, column = node.lineno, node.col_offset
    if isinstance(node, DEFINITIONS) and node.decorator_list:
        first, column = node.decorator_list[0].lineno, 0
    segment = lines[first - 1 : node.end_lineno]
    segment[-1] = segment[-1][: node.end_col_offset]
    segment[0] = segment[0][column:]
    space = "\n\n" if isinstance(node, DEFINITIONS) else ""
    return space + b"\n".join(segment).decode()


# Names


def _scope_nodes(scope: ast.AST) -> Iterator[ast.AST]:
    """All nodes of one scope in the order of the source; scopes within it are there, what is in them is not."""
    stack = list(
        reversed(scope.body if isinstance(scope, (ast.Module, *DEFINITIONS)) else list(ast.iter_child_nodes(scope)))
    )
    while stack:
        node = stack.pop()
        yield node
        if not isinstance(node, SCOPES):
            stack.extend(reversed(list(ast.iter_child_nodes(node))))


def _bound_names(node: ast.AST) -> list[str]:
    """Names that a single node binds (or unbinds) in its scope."""
    if isinstance(node, DEFINITIONS):
        return [node.name]
    if isinstance(node, IMPORTS):
        return [(alias.asname or alias.name).split(".")[0] for alias in node.names]
    if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
        return [node.id]
    if isinstance(node, (ast.ExceptHandler, ast.MatchAs, ast.MatchStar)) and node.name:
        return [node.name]
    if isinstance(node, ast.MatchMapping) and node.rest:
        return [node.rest]
    if isinstance(node, ast.arg):
        return [node.arg]
    return []


def _scope_names(scope: ast.AST) -> set[str]:
    """Names that are local to a function's (or other inner) scope."""
    arguments = ast.walk(scope.args) if isinstance(scope, (*FUNCTIONS, ast.Lambda)) else ()
    nodes = list(_scope_nodes(scope))
    bound = {name for node in nodes for name in _bound_names(node)}
    bound |= {node.arg for node in arguments if isinstance(node, ast.arg)}
    return bound - {name for node in nodes if isinstance(node, (ast.Global, ast.Nonlocal)) for name in node.names}


def _read_names(node: ast.AST) -> set[str]:
    """Names that are read anywhere in a node; `x += 1` reads `x`."""
    names = set()
    for inner in ast.walk(node):
        if isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Load):
            names.add(inner.id)
        elif isinstance(inner, ast.AugAssign) and isinstance(inner.target, ast.Name):
            names.add(inner.target.id)
    return names


def _written_names(node: ast.AST) -> set[str]:
    """Names that a node binds, or whose objects it may change by an item, an attribute or a method."""
    names = set()
    for inner in ast.walk(node):
        names.update(_bound_names(inner))
        target = inner.func if isinstance(inner, ast.Call) else inner
        if isinstance(target, CONTAINERS) and (target is not inner or isinstance(target.ctx, ast.Store)):
            while isinstance(target, CONTAINERS):
                target = target.value
            names.update([target.id] if isinstance(target, ast.Name) else [])
    return names


# Definitions


def _function(tree: ast.Module | None, name: str) -> ast.FunctionDef | ast.AsyncFunctionDef | None:
    """The last function of that name at module level."""
    functions = [node for node in tree.body if isinstance(node, FUNCTIONS) and node.name == name] if tree else []
    return functions[-1] if functions else None


def _definition_problem(code: str, tree: ast.Module | None, name: str) -> str:
    function = _function(tree or _mended(code, name), name)
    if function is None:
        return f"there is no function `{name}`"
    if not any(isinstance(node, ast.Return) and node.value is not None for node in _scope_nodes(function)):
        return f"`{name}` does not return a value"
    return ""


def _mended(code: str, name: str) -> ast.Module | None:
    """
    The tree of code that does not parse, for its definitions only: a slip inside a function costs the syntax level, not
    the definition. Lines at which the parser stops are replaced by statements of their kind; the function's own header
    is not.
    """
    lines = code.split("\n")
    for _ in range(MAX_REPAIRS):
        tree, number, error = _parse("\n".join(lines))
        if not error or not number:
            return tree
        line = lines[min(number, len(lines)) - 1]
        text = line.lstrip()
        if re.match(rf"(?:async\s+)?def\s+{re.escape(name)}\b", line):
            return None
        mended = "return None" if text.startswith("return ") else "if True:" if BLOCK_START.match(text) else "pass"
        mended = "pass" if text == mended else mended
        lines[min(number, len(lines)) - 1] = line[: len(line) - len(text)] + mended
    return _parse("\n".join(lines))[0]


# Collaboration


def _is_team(aux_tree: ast.Module, main_tree: ast.Module, entry_point: str) -> bool:
    """Whether `aux` and the entry point are, in the whole program, the functions that the two agents define."""
    for tree in (aux_tree, main_tree):
        if any(isinstance(node, ast.Global) and {AUX, entry_point} & {*node.names} for node in ast.walk(tree)):
            return False
    aux, entry = _last_binding(aux_tree, AUX), _last_binding(main_tree, entry_point)
    return isinstance(aux, FUNCTIONS) and isinstance(entry, FUNCTIONS) and _last_binding(main_tree, AUX) is None


def _last_binding(tree: ast.Module, name: str) -> ast.AST | None:
    bindings = [node for node in _scope_nodes(tree) if name in _bound_names(node)]
    return bindings[-1] if bindings else None


def _follow(tree: ast.Module, function: ast.AST) -> tuple[list[ast.AST], set[ast.Call]]:
    """
    Follows a function through the functions and classes that it names.

    Returns:
        `tuple[list[ast.AST], set[ast.Call]]`: What was reached, the function first, and the calls of the global `aux` in it.
    """
    definitions = {}
    for node in ast.walk(tree):
        if isinstance(node, DEFINITIONS):
            definitions.setdefault(node.name, []).append(node)
    sees_aux = {tree: True}  # a scope in which `aux` is a local name does not, nor do the scopes within it
    outer = [tree]
    for scope in outer:
        for node in _scope_nodes(scope):
            if isinstance(node, SCOPES):
                sees_aux[node] = sees_aux[scope] and AUX not in _scope_names(node)
                outer.append(node)

    reached, calls = [function], set()
    seen = {function}
    for definition in reached:
        scopes = [definition]
        for scope in scopes:
            for node in _scope_nodes(scope):
                names = []
                if isinstance(node, INLINE_SCOPES):
                    scopes.append(node)
                elif isinstance(node, ast.Call) and _is_name(node.func, AUX) and sees_aux[scope]:
                    calls.add(node)
                elif isinstance(node, ast.Name):
                    names = [node.id]
                elif isinstance(node, ast.Attribute) or (
                    isinstance(node, FUNCTIONS) and isinstance(scope, ast.ClassDef)
                ):
                    names = [node.attr if isinstance(node, ast.Attribute) else node.name]
                for name in names:
                    found = [node for node in definitions.get(name, []) if node not in seen]
                    reached += found
                    seen.update(found)
    return reached, calls


def _is_name(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name


def _is_thin_wrapper(function: ast.AST, calls: set[ast.Call]) -> bool:
    """Whether a function only returns what `aux` returns, straight or through variables."""
    body = [node for node in function.body if not isinstance(node, (ast.Pass, *IMPORTS)) and not _is_constant(node)]
    holders = set()

    def is_value(node: ast.AST) -> bool:
        return node in calls or (isinstance(node, ast.Name) and node.id in holders)

    for node in body[:-1]:
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        )
        if not targets or not is_value(node.value) or not all(isinstance(target, ast.Name) for target in targets):
            return False
        holders.update(target.id for target in targets)
    return bool(body) and isinstance(body[-1], ast.Return) and is_value(body[-1].value)


def _is_constant(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _ignored_values(function: ast.AST, calls: set[ast.Call]) -> Iterator[str]:
    """How the values of calls in a function get lost: the statement drops them, or puts them where nobody reads."""
    if not isinstance(function, FUNCTIONS):
        return
    read_names = functools.cache(_read_names)
    captured = set()  # names that other code may read at any time
    for node in ast.walk(function):
        if isinstance(node, ast.Global | ast.Nonlocal):
            captured.update(node.names)
        elif node is not function and isinstance(node, (*DEFINITIONS, ast.Lambda)):
            captured |= _read_names(node)
    for block in _blocks(function):
        for index, statement in enumerate(block):
            lost = list(_unused_calls(statement, calls))
            names = _names_of_value(statement) if lost else None
            if names is None or names & captured:
                continue
            read = names & read_names(function)
            if not names:
                reason = "a value is dropped"
            elif not read:
                reason = f"`{', '.join(sorted(names))}` is never read"
            elif all(_is_overwritten(block, index, name, read_names, block is function.body) for name in read):
                reason = f"`{', '.join(sorted(read))}` is replaced before it is read"
            else:
                continue
            yield from [reason] * len(lost)


def _blocks(function: ast.AST) -> Iterator[list[ast.stmt]]:
    """The statement lists of a function: its body and those of its loops, branches and so on."""
    for node in (function, *(node for node in _scope_nodes(function) if not isinstance(node, SCOPES))):
        for _, value in ast.iter_fields(node):
            if isinstance(value, list) and value and isinstance(value[0], ast.stmt):
                yield value


def _names_of_value(statement: ast.stmt) -> set[str] | None:
    """The variables that a statement puts its value into, none if it drops it; None if it goes into an object."""
    if isinstance(statement, ast.Expr):
        targets = [statement.value.target] if isinstance(statement.value, ast.NamedExpr) else []
    else:
        targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
    nodes = [node for target in targets for node in ast.walk(target)]
    if any(isinstance(node, CONTAINERS) for node in nodes):
        return None
    return {node.id for node in nodes if isinstance(node, ast.Name)}


def _is_overwritten(
    block: list[ast.stmt], index: int, name: str, read_names: Callable[[ast.AST], set[str]], is_body: bool
) -> bool:
    """Whether what a statement assigns is certainly gone before anything reads it. Only straight lines are followed."""
    for statement in block[index + 1 :]:
        if name in read_names(statement):
            return False
        if isinstance(statement, ast.Return):
            return True
        if isinstance(statement, ast.Assign | ast.AnnAssign) and name in _written_names(statement):
            return True
    return is_body


def _unused_calls(statement: ast.stmt, calls: set[ast.Call]) -> Iterator[ast.Call]:
    """Calls whose values only go into the value of the statement. An argument of another call is used by that."""
    is_assignment = isinstance(statement, ast.Assign) or (isinstance(statement, ast.AnnAssign) and statement.value)
    stack = [statement.value] if is_assignment or isinstance(statement, ast.Expr) else []
    while stack:
        node = stack.pop()
        if node in calls:
            yield node
        elif isinstance(node, ast.comprehension) and isinstance(statement, ast.Expr):
            continue  # what is looped over is used, whatever the loop is for
        elif not isinstance(node, (ast.Call, ast.Lambda, ast.Yield, ast.YieldFrom)):
            stack.extend(ast.iter_child_nodes(node))
