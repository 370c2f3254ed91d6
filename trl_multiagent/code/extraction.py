"""
Extracts the code from completions.

Completions are parsed here, never run. The code of a completion consists of its functions, classes and imports at
module level, and of the other statements that these need, including calls that fill a table. The statements of a
script (`if __name__ == ...`, prints, example calls, asserts, input) are left out. If a completion does not parse as a
whole, its fenced blocks are read. If these do not parse either, every run of lines that parses is read.

A completion defines a function if the last statement that binds its name is a `def` that returns a value other than a
bare `None`, or yields. The rule is the same for `aux` and for the entry point. A `def` without a body beside one with
a result, such as the prompt repeated, is left out.
"""

import ast
import itertools
import re
import textwrap
import unicodedata
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from trl_multiagent.code.dependencies import (
    DEFINITIONS,
    FUNCTIONS,
    IMPORTS,
    PARSE_ERRORS,
    SETTING,
    Module,
    Statement,
    own_nodes,
)


MAX_CHARS = 32_000  # a longer completion counts as empty
MAX_ATTEMPTS = 64  # runs of lines that are parsed in one completion
MAX_PARSED = 4 * MAX_CHARS  # total characters of these runs

FENCE = re.compile(r"^[ \t]*(?:```|~~~).*$", re.MULTILINE)
CODE_START = re.compile(
    r"(?:async|def|class|import|from|if|for|while|with|try)\b|@|[A-Za-z_][\w.\[\]'\", ]*(?::.*)?[-+*/|&]?="
)
INDENTED_START = re.compile(r"([ \t]+)(?:(?:async\s+)?def|class|import|from|@)\b")
VISIBLE = {"Zs": " ", "Zl": "\n", "Zp": "\n", "Cf": "", "Cc": ""}  # what takes the place of invisible characters
DEFINITION_START = re.compile(r"(?:async\s+def|def|class)\b")
RESULT = re.compile(r"^[ \t]+(?:return\b(?!\s*(?:None\s*)?(?:#|$))|yield\b)", re.MULTILINE)
CONTINUATION = re.compile(r"(?:elif|else|except|finally)\b")


def _parse(source: str) -> tuple[ast.Module | None, str]:
    """Returns the tree and an empty text, or None and the error message."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes
            return ast.parse(source), ""
    except SyntaxError as error:
        return None, f"line {error.lineno}, column {error.offset}: {error.msg}"
    except PARSE_ERRORS as error:
        return None, f"the parser gave up with {type(error).__name__}"


@dataclass(frozen=True)
class Code:
    """The code in a completion."""

    source: str  # its text. It parses, unless the only definition of the function does not
    error: str  # the place and the reason of the syntax error; empty if the text parses
    statements: list[Statement]  # those of the text, without a definition that does not parse
    defined: bool  # whether it defines the function that the agent was asked for
    problem: str  # why the function is missing or has no result; empty if it is defined with a result
    needed: list[Statement]  # the statements that the function needs, including its own definition
    # Of the completion's visible characters, the share that belongs to these and to imports. Code fences do not count,
    # nor do examples and tests of the function, as far as they are no longer than the function
    share: float
    found: bool  # whether the completion contains any code, and not only prose that happens to parse, such as a word


def extract_code(completion: str, name: str) -> str:
    """
    Returns the code in an agent's answer, which parses unless the only definition of the function `name` does not: it
    then contains this definition as the agent wrote it. The answer is code, or prose around code, fenced or not.
    """
    return read_completion(completion, name).source


def join_sources(*parts: str) -> str:
    """Joins sources to one module. Imports from `__future__` come first, as Python demands."""
    future, rest = [], []
    for part in parts:
        lines = part.split("\n")
        own = list(itertools.takewhile(lambda line: line.startswith("from __future__ "), lines))
        future += own
        rest.append("\n".join(lines[len(own) :]).strip("\n"))
    return "\n\n\n".join(part for part in ("\n".join(future), *rest) if part) + "\n"


def parse_completion(completion: str) -> ast.Module:
    """
    Returns the syntax tree of an answer: of all of it, or else of the code in its fences, or else of the runs of lines
    that are code. Of a class that does not parse as a whole, the parts that do are read as if they stood outside of
    it.
    """
    text = textwrap.dedent(_with_line_feeds(completion[:MAX_CHARS]))
    tree = _parse(text)[0]
    if tree is not None:
        return tree
    segments, budget = FENCE.split(text), _Budget()
    good = []
    for segment in segments[1::2] if len(segments) > 1 else segments:
        for stretch, parses in _stretches(textwrap.dedent(segment), budget):
            header, _, body = stretch.partition("\n")
            inner = _stretches(textwrap.dedent(body), budget) if not parses and header.startswith("class ") else ()
            good += [stretch] if parses else [part for part, is_code in inner if is_code]
    return _parse("\n".join(good))[0] or ast.Module([], [])


def read_completion(completion: str, name: str) -> Code:
    """Reads an agent's answer to the request for the function `name`."""
    text = _with_line_feeds(completion) if len(completion) <= MAX_CHARS else ""
    code = _read_text(text, name)
    visible = "".join(one if one in "\n\t" else VISIBLE.get(unicodedata.category(one), one) for one in text)
    # The first attempt keeps invisible characters, since a string may contain them
    return _read_text(visible, name) if code.problem and visible != text else code


def _with_line_feeds(text: str) -> str:
    return text.replace("\r\n", "\n").replace("\r", "\n").removeprefix("\ufeff")


def _read_text(text: str, name: str) -> Code:
    text = textwrap.dedent(text)
    visible = _visible_length(FENCE.sub("", text))
    asked = re.compile(rf"^(?:async[ \t]+)?def[ \t]+{re.escape(name)}\b.*", re.MULTILINE)
    tree = _parse(text)[0]
    broken = ""  # the last definition of the function that does not parse
    if tree is None:
        segments, good, budget = FENCE.split(text), [], _Budget()
        fenced = [textwrap.dedent(segment) for segment in segments[1::2]]
        for segment in fenced if any(map(asked.search, fenced)) else segments:
            for stretch, parses in _stretches(textwrap.dedent(segment), budget):
                if parses:
                    good.append(stretch)
                elif asked.search(stretch):
                    broken = stretch
        text = "\n".join(good)
        tree = ast.parse(text)
    lines = text.encode(errors="surrogatepass").split(b"\n")  # a syntax tree counts columns in bytes
    module = _read_module(tree, lines, name)
    places = [k for k, one in enumerate(module.statements) if isinstance(one.node, (*DEFINITIONS, *IMPORTS))]
    imports = [k for k in places if isinstance(module.statements[k].node, IMPORTS)]
    roots = {name, SETTING}
    kept = sorted(
        {*places, *module.needs(roots.union(*(module.statements[k].binds for k in places)), only_last=False)}
    )
    future = [
        k for k in imports if getattr(module.statements[k].node, "module", "") == "__future__"
    ]  # has to come first
    parts = [ast.unparse(module.statements[k].node) for k in future]
    source = "\n".join(parts + [_segment(lines, module.statements[k].node) for k in kept if k not in future])
    needed = module.needs(roots, only_last=True)
    own = _text_length(lines, module, {*needed, *imports})
    defined, has_result, error = *_find_function(module, name), ""
    if broken and not defined:
        source = f"{source}\n\n\n{broken}".strip("\n")
        error, needed, own = _parse(source)[1], [], _visible_length(broken)
        header = asked.search(broken)
        assert header is not None
        defined = _parse(f"{header.group()} ...")[0] is not None
        has_result = defined and RESULT.search(broken) is not None
    problem = f"`{name}` does not return a value" if defined else f"there is no function `{name}`"
    examples = _text_length(lines, module, [k for k, one in enumerate(module.statements) if module.is_example(one)])
    return Code(
        source,
        error,
        [module.statements[place] for place in kept],
        defined,
        "" if has_result else problem,
        [module.statements[place] for place in needed],
        share=min(1.0, own / max(1, visible - min(own, examples))) if defined else 0.0,
        found=bool(error) or any(map(_is_code, tree.body)),
    )


def _read_module(tree: ast.Module, lines: list[bytes], name: str) -> Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        statements = [Statement(node, _segment(lines, node)) for node in tree.body]
    stubs = {
        one: _is_stub(one.node) for one in statements if isinstance(one.node, FUNCTIONS) and one.node.name == name
    }
    if not all(stubs.values()):
        statements = [one for one in statements if not stubs.get(one)]
    return Module(statements, name)


def _is_stub(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Returns whether a function has no body but a docstring, `...` or `pass`."""
    body = (node.value if isinstance(node, ast.Expr) else node for node in function.body)
    return all(isinstance(node, (ast.Constant, ast.Pass)) for node in body)


def _find_function(module: Module, name: str) -> tuple[bool, bool]:
    """Returns whether the last statement that binds a name defines it as a function, and whether that has a result."""
    for place in module.binders.get(name, [])[-1:]:
        for node in own_nodes(module.statements[place].node):
            if isinstance(node, FUNCTIONS) and node.name == name:
                return True, any(map(_is_result, own_nodes(*node.body)))
    return False, False


def _is_result(node: ast.AST) -> bool:
    if isinstance(node, ast.Return):
        return node.value is not None and not (isinstance(node.value, ast.Constant) and node.value.value is None)
    return isinstance(node, ast.Yield | ast.YieldFrom)


def _is_code(node: ast.stmt) -> bool:
    value = getattr(node, "value", node)  # `Note: this` is an annotation without a value
    return value is not None and (not isinstance(node, ast.Expr) or isinstance(value, ast.Call))


@dataclass
class _Budget:
    """Limits the number and the length of the texts that are parsed for one completion."""

    attempts: int = MAX_ATTEMPTS
    characters: int = MAX_PARSED

    def parses(self, lines: list[str]) -> bool:
        text = "\n".join(lines)
        self.attempts -= 1
        self.characters -= len(text)
        return not self.spent and _parse(text)[0] is not None

    @property
    def spent(self) -> bool:
        return self.attempts < 0 or self.characters < 0


def _stretches(text: str, budget: _Budget) -> Iterator[tuple[str, bool]]:
    """
    Yields the runs of lines that may be code, in order, each with whether it parses. Code between prose may be
    indented.
    """
    lines = text.split("\n")
    if budget.parses(lines):
        yield text, True
        return
    start = 0
    while start < len(lines):
        end = start + 1
        if CODE_START.match(lines[start]):
            end, parses = _stretch_end(lines, start, budget)
            yield "\n".join(lines[start:end]), parses
        elif not budget.spent and (indented := INDENTED_START.match(lines[start])):
            while end < len(lines) and (not lines[end].strip() or lines[end].startswith(indented.group(1))):
                end += 1
            yield from _stretches(textwrap.dedent("\n".join(lines[start:end])), budget)
        start = end


def _stretch_end(lines: list[str], start: int, budget: _Budget) -> tuple[int, bool]:
    """
    Returns the index of the line after the statement that starts at a line, and whether the statement parses.

    A statement may end before any line that is not indented. If it does not parse up to there, it is extended to the
    next such line, because lines inside brackets and long strings need no indentation. It is not extended past the
    next definition.
    """
    head = start
    while not budget.spent and head < len(lines) - 1 and lines[head].startswith("@"):
        head += 1
    margin = (index for index in range(head + 1, len(lines)) if lines[index].strip() and not lines[index][0].isspace())
    ends = itertools.chain(margin, [len(lines)])
    first_end = next(ends)
    for end in itertools.chain([first_end], ends):
        if budget.spent:
            break
        more = end < len(lines) and CONTINUATION.match(lines[end])
        if not more and budget.parses(lines[start:end]):
            return end, True
        if end < len(lines) and DEFINITION_START.match(lines[end]):
            break
    return first_end, False


def _start(node: ast.stmt) -> tuple[int, int]:
    """Line (from 1) and column of a statement, decorators included."""
    if isinstance(node, DEFINITIONS) and node.decorator_list:
        return node.decorator_list[0].lineno, 0
    return node.lineno, node.col_offset


def _segment(lines: list[bytes], node: ast.stmt) -> str:
    """Returns the text of a statement."""
    first, column = _start(node)
    segment = lines[first - 1 : node.end_lineno]
    segment[-1] = segment[-1][: node.end_col_offset]
    segment[0] = segment[0][column:]
    space = "\n\n" if isinstance(node, DEFINITIONS) else ""
    return space + b"\n".join(segment).decode(errors="surrogatepass")


def _text_length(lines: list[bytes], module: Module, places: Iterable[int]) -> int:
    """
    Returns the number of visible characters in the lines of some statements, to which indented comments that follow
    belong. Identical statements count once.
    """
    texts = set()
    for node in (module.statements[place].node for place in places):
        last = node.end_lineno or 0
        while last < len(lines) and re.match(rb"[ \t]+#|\s*$", lines[last]):
            last += 1
        texts.add(b"\n".join(lines[_start(node)[0] - 1 : last]).strip().decode(errors="surrogatepass"))
    return _visible_length("".join(texts))


def _visible_length(text: str) -> int:
    return len("".join(text.split()))
