"""
Extracts the code from completions.

Completions are parsed here, never run. The code of a completion consists of its functions, classes and imports at
module level, and of the other statements that these need, including calls that fill a table. The statements of a
script (`if __name__ == ...`, prints, example calls, asserts, input) are left out. If a completion does not parse as a
whole, its fenced blocks are read. If these do not parse either, every run of lines that parses is read.
"""

import ast
import itertools
import re
import textwrap
import unicodedata
import warnings
from collections.abc import Iterator
from dataclasses import dataclass

from trl_multiagent.code.definitions import NOTHING, find_result
from trl_multiagent.code.names import (
    DEFINITIONS,
    IMPORTS,
    PARSE_ERRORS,
    Module,
    Statement,
    kept_and_needed,
)


MAX_CHARS = 32_000  # a longer completion counts as empty
MAX_ATTEMPTS = 64  # runs of lines that are parsed in one completion
MAX_PARSED = 4 * MAX_CHARS  # total characters of these runs
MAX_REPAIRS = 4  # lines that are replaced in a function that does not parse

FENCE = re.compile(r"^[ \t]*(?:```|~~~).*$", re.MULTILINE)
CODE_START = re.compile(
    r"(?:async|def|class|import|from|if|for|while|with|try)\b|@|[A-Za-z_][\w.\[\]'\", ]*(?::.*)?[-+*/|&]?="
)
INDENTED_START = re.compile(r"([ \t]+)(?:(?:async\s+)?def|class|import|from|@)\b")
DEFINITION_START = re.compile(r"(?:async\s+def|def|class)\b")
BLOCK_START = re.compile(r"(?:async|if|elif|else|for|while|with|try|except|finally|match|case|def|class)\b")
CONTINUATION = re.compile(r"(?:elif|else|except|finally)\b")


def _parse(source: str) -> tuple[ast.Module | None, int, str]:
    """
    Returns the tree, 0 and an empty text; or None, the line of the error (0 if the parser names none) and the error
    message.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes
            return ast.parse(source), 0, ""
    except SyntaxError as error:
        return None, error.lineno or 0, f"line {error.lineno}, column {error.offset}: {error.msg}"
    except PARSE_ERRORS as error:
        return None, 0, f"the parser gave up with {type(error).__name__}"


@dataclass(frozen=True)
class Code:
    """The code in a completion."""

    source: str  # its text. It parses, unless the only definition of the function does not
    error: str  # the place and the reason of the syntax error; empty if the text parses
    module: Module  # the analysed code. If the text does not parse, its broken lines are replaced first
    result: str | None  # what the function that the agent was asked for gives its callers, see `find_result`
    problem: str  # why the function is missing or has no result; empty if it is defined with a result
    needed: list[Statement]  # the statements that the function needs, including its own definition
    share: float  # of the completion's visible characters, 0 to 1, that belong to these and to imports of the prompt
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
    text = textwrap.dedent(completion[:MAX_CHARS].replace("\r\n", "\n").replace("\r", "\n").removeprefix("\ufeff"))
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


def read_completion(completion: str, name: str, prompt: str = "") -> Code:
    """
    Reads an agent's answer to the request for the function `name`. It may repeat the imports of `prompt`, the source
    before the function.
    """
    given = {imported for node in ast.parse(prompt).body for imported in _imports(node)}
    if len(completion) > MAX_CHARS:
        completion = ""
    text = completion.replace("\r\n", "\n").replace("\r", "\n").removeprefix("\ufeff")
    code = _read_text(text, name, given)
    if code.error or code.problem:
        visible = _without_invisible(text)
        if visible != text:  # the first attempt keeps invisible characters, since a string may contain them
            code = _read_text(visible, name, given)
    return code


def _without_invisible(text: str) -> str:
    """Replaces unusual spaces and line ends by ordinary ones, and removes other invisible characters."""
    replaced: dict[int, str | None] = {}
    for character in {*text} - {"\n", "\t", " "}:
        kind = unicodedata.category(character)
        if kind == "Zs":
            replaced[ord(character)] = " "
        elif kind in ("Zl", "Zp") or character == "\x85":
            replaced[ord(character)] = "\n"
        elif kind in ("Cf", "Cc"):
            replaced[ord(character)] = None
    return text.translate(replaced)


def _imports(node: ast.stmt) -> set[tuple[str | None, ...]]:
    """Returns what an import binds: the module, and the names there and here. Empty for other statements."""
    if not isinstance(node, IMPORTS):
        return set()
    module = node.module if isinstance(node, ast.ImportFrom) else None
    return {(module, alias.name, alias.asname) for alias in node.names}


def _read_text(text: str, name: str, given: set[tuple[str | None, ...]]) -> Code:
    text = textwrap.dedent(text)
    whole = text
    tree = _parse(text)[0]
    broken: list[str] = []
    if tree is None:
        asked = re.compile(rf"^[ \t]*(?:async[ \t]+)?def[ \t]+{re.escape(name)}\b", re.MULTILINE)
        bound = re.compile(rf"^[ \t]*{re.escape(name)}[ \t]*(?::.*)?=[^=]", re.MULTILINE)
        segments = FENCE.split(text)
        fenced = segments[1::2]
        good: list[str] = []
        budget = _Budget()
        in_fence = any(asked.search(block) or bound.search(block) for block in fenced)
        for segment in fenced if in_fence else segments:
            for stretch, parses in _stretches(textwrap.dedent(segment), budget):
                (good if parses else broken).append(stretch)
        text = "\n".join(good)
        tree = ast.parse(text)
        broken = [stretch for stretch in broken if asked.search(stretch)]
    lines = _byte_lines(text)
    module = _read_module(tree, lines)
    kept, needed = kept_and_needed(module, name)
    source = _kept_source(lines, module, kept)
    code = Module([module.statements[place] for place in kept])
    if broken and find_result(code, name) is None:
        source = f"{source}\n\n\n{broken[-1]}".strip("\n")
        lines = _byte_lines(source)
        repaired = _repaired(source, name)
        code = module = _read_module(ast.parse(repaired), _byte_lines(repaired))
        needed = kept_and_needed(module, name)[1]
    error = _parse(source)[2] if broken else ""
    found = bool(error) or any(_is_code(statement) for statement in tree.body)
    result = find_result(code, name)
    problem = ""
    if result is None:
        problem = f"there is no function `{name}`"
    elif result == NOTHING:
        problem = f"`{name}` does not return a value"
    repeated = [k for k, statement in enumerate(module.statements) if set() < _imports(statement.node) <= given]
    own = sorted({*needed, *repeated})
    share = 0.0 if problem else min(1.0, _text_length(lines, module, own) / _visible_length(whole))
    return Code(source, error, code, result, problem, [module.statements[place] for place in needed], share, found)


def _read_module(tree: ast.Module, lines: list[bytes]) -> Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return Module([Statement(node, _segment(lines, node)) for node in tree.body])


def _is_code(statement: ast.stmt) -> bool:
    """
    False for statements that prose can look like: expressions that call nothing, and annotations without a value.
    """
    if isinstance(statement, ast.AnnAssign):
        return statement.value is not None
    effects = (ast.Call, ast.Await, ast.Yield, ast.YieldFrom, ast.NamedExpr)
    return not isinstance(statement, ast.Expr) or any(isinstance(node, effects) for node in ast.walk(statement))


def _byte_lines(text: str) -> list[bytes]:
    """
    Returns the lines in UTF-8, since a syntax tree counts columns in bytes. Broken text may contain lone surrogates.
    """
    return text.encode(errors="surrogatepass").split(b"\n")


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


def _kept_source(lines: list[bytes], module: Module, kept: list[int]) -> str:
    """Returns the text of the statements to keep, with imports from `__future__` first."""
    future, rest = [], []
    for place in kept:
        node = module.statements[place].node
        if isinstance(node, ast.ImportFrom) and node.module == "__future__":
            future.append(ast.unparse(node))
        else:
            rest.append(_segment(lines, node))
    return "\n".join(future + rest)


def _start(node: ast.stmt) -> tuple[int, int]:
    """Line (from 1) and column of a statement, decorators included."""
    if isinstance(node, DEFINITIONS) and node.decorator_list:
        return node.decorator_list[0].lineno, 0
    return node.lineno, node.col_offset


def _text(lines: list[bytes], start: tuple[int, int], last: int, end: int | None) -> str:
    """Returns the text from a line and column to the column `end` of the line `last`."""
    first, column = start
    segment = lines[first - 1 : last]
    segment[-1] = segment[-1][:end]
    segment[0] = segment[0][column:]
    return b"\n".join(segment).decode(errors="surrogatepass")


def _segment(lines: list[bytes], node: ast.stmt) -> str:
    """Returns the text of a statement."""
    space = "\n\n" if isinstance(node, DEFINITIONS) else ""
    return space + _text(lines, _start(node), node.end_lineno or node.lineno, node.end_col_offset)


def _text_length(lines: list[bytes], module: Module, places: list[int]) -> int:
    """
    Returns the number of visible characters in some statements. A statement extends to the end of its last line, or to
    the next statement on that line. Indented comments that follow belong to it. Identical statements count once.
    """
    starts = [_start(statement.node) for statement in module.statements] + [(len(lines) + 1, 0)]
    texts = set()
    for place in places:
        last, end = module.statements[place].node.end_lineno or 0, None
        if starts[place + 1][0] == last:
            end = starts[place + 1][1]
        else:
            while last < len(lines) and re.match(rb"[ \t]+#|\s*$", lines[last]):
                last += 1
        texts.add(_text(lines, starts[place], last, end).strip())
    return _visible_length("".join(texts))


def _visible_length(text: str) -> int:
    return len("".join(_without_invisible(text).split()))


# Definitions in broken code


def _repaired(code: str, name: str) -> str:
    """
    Code that does not parse, with its broken lines replaced by similar statements; empty if that is not possible. Only
    the definitions in it are of use: a syntax error inside a function loses the reward for syntax, but not the reward
    for the definition. The function's own header is not replaced.
    """
    lines = code.split("\n")
    for _ in range(MAX_REPAIRS):
        _, number, error = _parse("\n".join(lines))
        if not error or not number:
            break
        line = lines[min(number, len(lines)) - 1]
        text = line.lstrip()
        if re.match(rf"(?:async\s+)?def\s+{re.escape(name)}\b", line):
            return ""
        result = re.match(r"return\b|yield\b", text)
        repaired = f"{result.group()} ..." if result else "if True:" if BLOCK_START.match(text) else "pass"
        repaired = "pass" if text == repaired else repaired
        lines[min(number, len(lines)) - 1] = line[: len(line) - len(text)] + repaired
    code = "\n".join(lines)
    return "" if _parse(code)[2] else code
