"""
Extracts the code from answers.

Answers are parsed here, never run. The code of an answer consists of its functions, classes and imports at
module level, and of the other statements that these need, including loops and calls that fill a table. The statements
of a script (`if __name__ == ...`, prints, example calls, asserts, input) are left out. If an answer does not parse
as a whole, its fenced blocks are read, or all of it if no block defines the function, and every run of lines that
parses is code.

An answer defines a function if a statement binds its name to anything but a literal. A `def`, a lambda or a method
of this name has to return a value other than a bare `None`, or to yield. Other values, such as those of calls, are not
read, and count. If nothing binds the name, the last class with such a method does. The rule is the same for `aux` and
for the entry point. A `def` without a body, such as the prompt repeated, is left out, and so is a repetition that was
cut off.
"""

import ast
import itertools
import re
import textwrap
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from trl_multiagent.code.dependencies import (
    DEFINITIONS,
    FUNCTIONS,
    IMPORTS,
    PARSE_ERRORS,
    SETTING,
    Module,
    Statement,
    binds_of,
    can_be_written,
    first_line,
    is_foreign,
    own_nodes,
)


PARTNER = "aux"  # a function of another agent, whose header an answer may repeat
MAX_CHARS = 32_000  # a longer answer counts as empty
MAX_PARSED = 4 * MAX_CHARS  # total characters of the runs of lines that are parsed in one answer
MIN_PARSED = MAX_PARSED // 64  # characters that a run counts for, however short it is

INVISIBLE = "\u00ad\u200b\u200c\u200d\u200e\u200f\u2060\ufeff"
FENCE = re.compile(r"^[ \t]*(?:```|~~~).*$", re.MULTILINE)
CLOSING = re.compile(r"^((?:(?!```).)*[^\s`])```[ \t]*$", re.MULTILINE)  # a fence at the end of the last line of code
# A fence with code behind it
OPENING = re.compile(r"^([ \t]*```)\w*[ \t]*(?=(?:async|def|class|import|from)[ \t]|@\w)", re.MULTILINE)
# A block ends at a fence with the indentation of its first one. A docstring in it may have others
BLOCK = re.compile(r"^([ \t]*)(```|~~~).*\n([\s\S]*?)(?:^\1\2[ \t]*$|\Z)", re.MULTILINE)
CODE_START = re.compile(
    r"(?:async|def|class|import|from|if|for|while|with|try|return)\b|@|[A-Za-z_][\w.]*\["
    r"|[A-Za-z_][\w.\[\]'\", ]*(?::.*)?[-+*/|&]?="
)
CALL = re.compile(r"[A-Za-z_][\w.]*\(")  # an example in prose, if it does not follow a statement
DEFINITION = re.compile(r"^[ \t]*(?:async[ \t]+def|def|class)\b", re.MULTILINE)
FIRST = re.compile(  # what an indented block of code may begin with, but hardly prose
    r"(?:async|def|class)\b|@|import [\w.]+(?:,| as |\s*$)|from [\w.]+ import |[A-Za-z_]\w*(?::\s*[^\s=]+)?\s*=(?!=)"
)
INNER = re.compile(r"(?:async|def|class)\b|@")  # of these, those that a function with wrong indentation does not hold
# A statement may end before such a line
MARGIN = re.compile(r"(?!elif\b|else\b|except\b|finally\b|#)\S")
NO_STATEMENT = re.compile(r"[ \t]+#|\s*$")  # an indented comment, or nothing
LITERALS = (ast.Constant, ast.List, ast.Tuple, ast.Dict, ast.Set)
RESULT = re.compile(r"^[ \t]+(?:return\b(?!\s*(?:None\s*)?(?:#|$))|yield\b)", re.MULTILINE)


def _parse(source: str) -> tuple[ast.Module | None, str]:
    """Returns the tree and an empty text, or None and the error message."""
    try:
        with warnings.catch_warnings(action="ignore"):  # invalid escapes
            return ast.parse(source), ""
    except SyntaxError as error:
        return None, f"line {error.lineno}, column {error.offset}: {error.msg}"
    except PARSE_ERRORS as error:
        return None, f"the parser gave up with {type(error).__name__}"


@dataclass(frozen=True)
class Code:
    """The code in an answer."""

    source: str  # its text. It parses, unless the only definition of the function does not
    error: str  # the place and the reason of the syntax error; empty if the text parses
    statements: list[Statement]  # the text's statements, without a definition that does not parse
    defined: bool  # whether it defines the function that the agent was asked for
    function: ast.AST | None  # its `def`, or what is bound to its name without one
    is_opaque: bool  # whether no `def` or class binds it, so that only a run shows whether it can be called
    problem: str  # why the function is missing or has no result; empty if it is defined with a result
    needed: list[Statement]  # the statements that the function needs, including its own definition
    # Of the answer's visible characters, the share that belongs to these and to imports. Code fences do not count,
    # nor do examples and tests of the function, as far as they are no longer than the function
    share: float
    found: bool  # whether the answer contains any code, and not only prose that happens to parse, such as a word


def join_sources(*parts: str) -> str:
    """Joins sources to one module. Imports from `__future__` come first, as Python demands."""
    future, rest = [], []
    for part in parts:
        lines = part.split("\n")
        own = list(itertools.takewhile(lambda line: line.startswith("from __future__ "), lines))
        future += own
        rest.append("\n".join(lines[len(own) :]).strip("\n"))
    return "\n\n\n".join(part for part in ("\n".join(future), *rest) if part) + "\n"


def read_module(answer: str) -> tuple[ast.Module, ast.stmt | None]:
    """
    Returns the syntax tree of an answer: of all of it, or else of the runs of lines that are code, in its fences if it
    has any. Of a class that does not parse as a whole, the parts that do are read as if they stood outside of it. Also
    returns the statement with which the answer ends, see [`_end_of`].
    """
    good, text = [], _text_of(answer[:MAX_CHARS])
    for run, parses in _runs(text, DEFINITION):
        if not parses and run.startswith("class "):
            good += [part for part, is_code in _runs(textwrap.dedent(run.partition("\n")[2]), DEFINITION) if is_code]
        elif parses:
            good.append(run)
    source = "\n".join(good)
    tree = _parse(source)[0] or ast.Module([], [])
    return tree, _end_of(tree, source, text)


def read_function(answer: str, name: str, has_partner: bool = False) -> Code:
    """
    Reads an agent's answer to the request for the function `name`: code, or prose around code, fenced or not. If the
    agent `has_partner`, who writes the function `aux`, its own `aux` does not count if it was cut off.
    """
    text = _text_of(answer) if len(answer) <= MAX_CHARS else ""
    visible = _visible_length(FENCE.sub("", text))
    asked = re.compile(rf"^(?:async[ \t]+)?def[ \t]+{re.escape(name)}\b.*", re.MULTILINE)
    binding = rf"^[ \t]*(?:(?:async[ \t]+)?def[ \t]+{name}\b|{name}[ \t]*(?::[ \t]*[\w.]+(?:\[.*\])?[ \t]*)?=(?!=))"
    runs = _runs(text, re.compile(binding, re.MULTILINE))
    # The last `def` of the function that does not parse
    broken = next((run for run, parses in reversed(runs) if not parses and asked.search(run)), "")
    good = "\n".join(run for run, parses in runs if parses)
    tree = _parse(good)[0] or ast.Module([], [])
    lines = good.encode(errors="surrogatepass").split(b"\n")  # a tree counts columns in bytes
    named = {x: _segment(lines, x) for x in tree.body if isinstance(x, FUNCTIONS) and x.name in (name, PARTNER)}
    end = _end_of(tree, good, text)
    fragments = [x for x in named if is_fragment(x, named, end)]
    if has_partner and isinstance(end, FUNCTIONS) and end.name == PARTNER and not _has_result(end):
        fragments.append(end)
    last = max((x.lineno for x in named if x.name == name and x not in fragments), default=len(lines))
    statements = [  # imports on one line each, as `join_sources` expects
        Statement(x, ast.unparse(x) if isinstance(x, IMPORTS) else _segment(lines, x))
        for x in tree.body
        if x not in fragments
    ]
    # Tests behind the function may import it
    tests = [x for x in statements if isinstance(x.node, ast.ImportFrom) and x.node.lineno > last and name in x.binds]
    statements = [x for x in statements if x not in tests]
    is_bound = any(name in statement.binds for statement in statements if not statement.is_script)
    if not is_bound and (method := _read_method(tree, name)):
        lines.append(method.encode())
        node = ast.increment_lineno(ast.parse(method).body[0], len(lines) - 1)
        statements.append(Statement(node, method))
    module = Module(statements, name)
    nodes = [statement.node for statement in statements]
    roots = {name, SETTING}
    needed = module.needs(roots, only_last=True)
    places = [k for k, node in enumerate(nodes) if isinstance(node, (*DEFINITIONS, *IMPORTS))]
    # What would end the program, although the function does not need it, such as a test with `import pytest`
    faulty = {k for k in {*places} - {*needed} if is_foreign(nodes[k]) or not can_be_written(nodes[k])}
    left_out = module.with_readers(faulty) - {*needed}
    places = [k for k in places if k not in left_out]
    imports = [k for k in places if isinstance(nodes[k], IMPORTS)]
    others = module.needs(roots | binds_of(statements[k] for k in places), only_last=False)
    # What binds nothing may call a test of the partner's function
    kept = {*places, *needed, *(k for k in others if statements[k].binds)} - left_out
    # Imports from `__future__` have to come first
    order = sorted(kept, key=lambda k: (getattr(nodes[k], "module", "") != "__future__", k))
    source = "\n".join(statements[k].text for k in order)
    own = _text_length(lines, [nodes[k] for k in {*needed, *imports}])
    binder = nodes[module.binders[name][-1]] if module.binders[name] else None
    value, error = getattr(binder, "value", binder), ""
    defined = binder is not None and not isinstance(value, LITERALS)
    function = next((one for k in reversed(needed) for one in _definitions(nodes[k], name)), value)
    has_result = defined and _has_result(function)
    is_opaque = defined and not isinstance(binder, DEFINITIONS)
    if broken and not defined:
        source = f"{source}\n\n\n{broken}".strip("\n")
        error, needed, own = _parse(source)[1], [], _visible_length(broken)
        (header, *_) = asked.findall(broken)
        defined = _parse(f"{header} ...")[0] is not None
        has_result = defined and RESULT.search(broken) is not None
    problem = f"`{name}` does not return a value" if defined else f"there is no function `{name}`"
    examples = _text_length(lines, [nodes[k] for k in module.examples])
    return Code(
        source,
        error,
        [statements[k] for k in sorted(kept)],
        defined,
        function,
        is_opaque,
        "" if has_result else problem,
        [statements[k] for k in needed],
        share=min(1.0, own / max(1, visible - min(own, examples))) if defined else 0.0,
        found=bool(error) or any(map(_is_code, tree.body)),
    )


def _text_of(answer: str) -> str:
    """
    Returns an answer with every fence in a line of its own, and without invisible characters at the ends of its lines,
    or a blank before its first one.
    """
    lines = answer.replace("\r\n", "\n").replace("\r", "\n").split("\n")
    text = OPENING.sub(r"\1\n", "\n".join(line.strip(INVISIBLE) for line in lines))
    text = CLOSING.sub(r"\1\n```", text)
    return textwrap.dedent(text).lstrip(" \t\xa0")


def _end_of(tree: ast.Module, source: str, text: str) -> ast.stmt | None:
    """
    Returns the last statement of the code in an answer, also in a class, if the answer's text ends with it, or with a
    comment in it, so that it may have been cut off.
    """
    node = tree.body[-1] if tree.body else None
    while isinstance(node, ast.ClassDef):
        node = node.body[-1]
    last = source.split("\n")[node.end_lineno - 1] if node is not None and node.end_lineno else ""
    line = next((line for line in reversed(text.split("\n")) if not NO_STATEMENT.match(line)), "")
    return node if line.strip() == last.strip() else None


def is_fragment(function: Any, texts: Mapping[Any, str], end: Any) -> bool:
    """
    Returns whether a function is not meant as one: it has no body but a docstring, `...` or `pass`, such as the prompt
    repeated, or it is the `end` of the answer and a repetition that was cut off, because its text begins another's, or
    it has no result, and another of its name has one. `texts`: of all functions.
    """
    body = (statement.value if isinstance(statement, ast.Expr) else statement for statement in function.body)
    if all(isinstance(statement, (ast.Constant, ast.Pass)) for statement in body):
        return True
    others = [x for x in texts if function is end and x is not function and x.name == function.name]
    begins = any(len(texts[x]) > len(texts[function]) and texts[x].startswith(texts[function]) for x in others)
    return begins or (not _has_result(function) and any(map(_has_result, others)))


def _definitions(node: ast.AST, name: str) -> list[Any]:
    """Returns the definitions of a function in a statement, such as a class or an `if`, last first."""
    inside = node.body if isinstance(node, ast.ClassDef) else [node]
    return [x for x in own_nodes(*inside) if isinstance(x, FUNCTIONS) and x.name == name]


def _read_method(tree: ast.Module, name: str) -> str:
    """Returns a statement that binds a function to the method of the last class that has it."""
    for node in reversed(tree.body):
        if isinstance(node, ast.ClassDef) and (methods := _definitions(node, name)):
            first = [argument.arg for argument in methods[0].args.args[:1]]
            makes = methods[0].decorator_list or first == ["self"]
            return f"{name} = {node.name}{'()' if makes else ''}.{name}"
    return ""


def _has_result(function: ast.AST | None) -> bool:
    if isinstance(function, FUNCTIONS):
        return any(map(_is_result, own_nodes(*function.body)))
    return not isinstance(function, ast.Lambda) or _is_result(ast.Return(function.body))


def _is_result(node: ast.AST) -> bool:
    if isinstance(node, ast.Return):
        return node.value is not None and not (isinstance(node.value, ast.Constant) and node.value.value is None)
    return isinstance(node, ast.Yield | ast.YieldFrom)


def _is_code(node: ast.stmt) -> bool:
    value = getattr(node, "value", node)  # `Note: this` is an annotation without a value
    return value is not None and (not isinstance(node, ast.Expr) or isinstance(value, ast.Call))


def _runs(text: str, wanted: re.Pattern[str]) -> list[tuple[str, bool]]:
    """
    Returns the runs of lines that may be code, in order, each with whether it parses: the whole text, or its
    statements without what is between them. If a fenced block has what is `wanted`, only the fenced blocks are read;
    if nothing at the margin has it, also definitions that are indented below prose.
    """
    fenced = "\n".join(map(textwrap.dedent, FENCE.split(text)[1::2]))
    code = fenced if wanted.search(fenced) else FENCE.sub("", text)
    blocks = "\n".join(textwrap.dedent(block[3]) for block in BLOCK.finditer(text))
    chosen = blocks if wanted.search(blocks) else code
    for whole in (text, chosen, code):
        if _parse(whole)[0] is not None:
            return [(whole, True)]
    lines = chosen.split("\n")

    def reads(runs: list[tuple[str, bool]]) -> bool:
        return any(parses and wanted.search(run) for run, parses in runs)

    runs = [*_split(lines)]
    moved = [] if reads(runs) else [*_split(_at_margin(lines))]
    return moved if reads(moved) else runs


def _at_margin(lines: list[str]) -> list[str]:
    """
    Moves indented definitions to the margin, with all that is indented behind them: those below prose or imports, and
    those that are indented less than the lines before them, whose first line has lost its indentation. Before the
    first definition at the margin, imports and constants are moved, too.
    """
    moved: list[str] = []
    least, shift, may_follow, first = 0, 0, False, FIRST
    for line in lines:
        text = line.lstrip()
        indent = len(line) - len(text)
        if text and indent < max(shift, 1):  # the margin
            line, least, shift = text, 0, 0
            may_follow = text.startswith(("@", "import ", "from ")) or not CODE_START.match(text)
            first = INNER if DEFINITION.match(text) else first
        elif text and not shift:
            is_less = indent < least and not moved[-1].endswith(":")  # a header would have no body
            if (may_follow or is_less) and first.match(text):
                shift = indent
            least = min(least or indent, indent)
        moved.append(line[shift:])
    return moved


def _split(lines: list[str]) -> Iterator[tuple[str, bool]]:
    """
    Yields the statements of a text, with whether they parse.

    A statement may end before any line at the margin. If it does not parse up to there, it is extended to the next
    such line, because lines inside brackets and long strings need no indentation. It is not extended past the next
    definition. A comment at the margin belongs to a statement, or is a heading of prose if it does not parse with it.
    The number and the length of the runs that are parsed is limited.
    """
    left = MAX_PARSED

    def parses(run: str) -> bool:
        nonlocal left
        left -= max(len(run), MIN_PARSED)
        return left >= 0 and _parse(run)[0] is not None

    starts = [k for k, line in enumerate(lines) if MARGIN.match(line) and not (k and lines[k - 1].startswith("@"))]
    starts.append(len(lines))
    number = end = 0
    while number < len(starts) - 1:
        start, following = starts[number], number + 1
        if CODE_START.match(lines[start]) or (number == end and CALL.match(lines[start])):
            for last in range(following, len(starts)):
                run = "\n".join(lines[start : starts[last]])
                if parses(run):
                    yield run, True
                    following = end = last
                    break
                if left < 0 or starts[last] == len(lines) or DEFINITION.match(lines[starts[last]]):
                    whole = "\n".join(lines[start : starts[following]])
                    headings = [*re.finditer("^#", whole, re.MULTILINE)]
                    good = next(filter(parses, (whole[: match.start()] for match in reversed(headings))), None)
                    yield good or whole, good is not None
                    break
        number = following


def _segment(lines: list[bytes], node: ast.stmt) -> str:
    """Returns the text of a statement."""
    segment = lines[first_line(node) : node.end_lineno]
    segment[-1] = segment[-1][: node.end_col_offset]
    if first_line(node) == node.lineno - 1:
        segment[0] = segment[0][node.col_offset :]
    space = "\n\n" if isinstance(node, DEFINITIONS) else ""
    return space + b"\n".join(segment).decode(errors="surrogatepass")


def _text_length(lines: list[bytes], nodes: Iterable[ast.stmt]) -> int:
    """
    Returns the number of visible characters in the lines of some statements, to which indented comments that follow
    belong. Identical statements count once.
    """
    texts = set()
    for first, last in {(first_line(node), node.end_lineno or 0) for node in nodes}:
        while last < len(lines) and re.match(rb"[ \t]+#|\s*$", lines[last]):
            last += 1
        texts.add(b"\n".join(lines[first:last]).strip().decode(errors="surrogatepass"))
    return _visible_length("".join(texts))


def _visible_length(text: str) -> int:
    return len("".join(text.split()))
