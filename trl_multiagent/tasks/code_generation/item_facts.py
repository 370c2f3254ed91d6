"""
Determines facts about an item that do not depend on the agents' answers: the parts of its prompt, the number of its
tests that trivial answers pass, and the processor time of its reference solution. One program in the sandbox
determines the last two.
"""

import ast
import contextlib
import doctest
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from trl_multiagent.code.dependencies import PARSE_ERRORS, called_name, first_line
from trl_multiagent.code.sandbox import Program, Verdict, read_asserts


CONSTANTS = ("True", "False", "None", "0", "1", "-1", "0.0", "''", "[]", "()", "{}")
STEPS = ("len(a[0])", "a[0] + 1", "a[0] - 1")  # of the arguments `a`; for the tests after the first one
MAX_OWN_CONSTANTS = 24  # at most this many constants are taken from the item's own examples and tests
MAX_ARGUMENTS = 6
SOLUTION = "__solution__"  # name of the reference solution in the program; the entry point may be called `max`

# The part of the program that is the same for all items, so that it is read and compiled once
_SETUP = f"""
import copy

def passed(candidate):
    reached, failed = set(), set()
    def end(index, value, error=None):
        reached.add(index)
        if error is not None or not value:
            failed.add(index)
    names = {{"__begin__": lambda index: None, "__end__": end, "__caught__": Exception}}
    names["__settle__"] = lambda indices: None
    try:
        exec(SETUP, names)
        names["candidate"] = names[ENTRY_POINT] = candidate
        exec(CODE, names)
        if HAS_CHECK:
            names["check"](candidate)
    except Exception:
        return len(reached - failed)
    return TOTAL - len(failed) if not failed else len(reached - failed) + len(GUARDS - reached)

def answer(otherwise):
    return lambda *args, **kwargs: (EXAMPLES.get(repr(args)) or (lambda: otherwise(*args, **kwargs)))()

def constant(make):
    return answer(lambda *args, **kwargs: make())

def argument(index):
    return answer(lambda *args, **kwargs: [*args, *kwargs.values()][index])

CONSTANTS = [{", ".join(f"lambda: {constant}" for constant in CONSTANTS)}]

STEPS = [{", ".join(f"lambda *a: {step}" for step in STEPS)}]

def first_call(reference, otherwise):
    def call(*args, **kwargs):
        key = repr((args, kwargs))
        if not FIRST:
            FIRST[key] = []  # stays empty if the reference solution raises
            FIRST[key].append(reference(*args, **kwargs))
        return copy.deepcopy(FIRST[key][0]) if FIRST.get(key) else otherwise(*args, **kwargs)
    return call

def best(reference):
    answers = [*map(constant, CONSTANTS), *map(argument, range({MAX_ARGUMENTS}))]
    own = [*map(constant, OWN_CONSTANTS)]
    # The constants of a single test pass the tests of any problem. So do two tests' if the first is looked up
    looked_up = answers + own if TOTAL > 2 else [*answers]
    if TOTAL > 2:  # a step that passes all tests is the solution
        looked_up += [step for step in STEPS if passed(step) < TOTAL]
    if TOTAL > 1:
        answers += own + [first_call(reference, otherwise) for otherwise in looked_up]
    return max(0, *map(passed, answers))
"""
_CHECKS = """
CODE = compile({code!r}, "<checks>", "exec")
SETUP = compile({setup!r}, "<setup>", "exec")
TOTAL, GUARDS = {total}, {guards}
ENTRY_POINT, HAS_CHECK = {entry_point!r}, {has_check}
EXAMPLES = {{{examples}}}
OWN_CONSTANTS = [{own}]
FIRST = {{}}

def check(candidate):
    trivial = best(candidate) if {tries_trivial} else 0
    reference = passed(candidate)
{asserts}
"""


@dataclass(frozen=True)
class Problem:
    """The parts of a problem's prompt."""

    prefix: str  # source before the entry point: imports, constants and helper functions
    signature: str  # header of the entry point on one line, from `def` to the colon


@lru_cache(maxsize=8192)
def read_problem(prompt: str, entry_point: str) -> Problem:
    """
    Splits a prompt into the source before the entry point, and the entry point's signature. Raises `ValueError` if the
    prompt does not parse or does not define the entry point as a function at its top level.
    """
    prompt = prompt.replace("\r\n", "\n")
    try:
        tree = ast.parse(prompt)
    except PARSE_ERRORS:
        try:
            tree = ast.parse(f"{prompt.rstrip()}\n    pass\n")  # a signature without a docstring has no body yet
        except PARSE_ERRORS as error:
            raise ValueError(f"it is not Python source: {error}") from None
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == entry_point]
    if not functions:
        raise ValueError(f"it does not define the entry point `{entry_point}`")
    function = functions[-1]
    returns = f" -> {ast.unparse(function.returns)}" if function.returns else ""
    return Problem(
        prefix="\n".join(prompt.split("\n")[: first_line(function)]).strip("\n"),
        signature=f"def {entry_point}({ast.unparse(function.args)}){returns}:",
    )


@dataclass(frozen=True)
class ItemFacts:
    """Facts about one item."""

    total: int  # number of tests, which are the asserts that can fail
    # Number of tests that the best trivial answer passes. Trivial answers return a constant or an argument; for the
    # examples in the prompt they return the result given there, and for the first test's call the right result. Beside
    # the first test's result, a step from the first argument counts, too, unless it solves the task
    trivial: int = 0
    reference: int | None = None  # number of tests that the reference solution passes; `None` if there is no solution
    reference_seconds: float | None = None  # its processor time on all tests; `None` if it passes none

    def share(self, passed: int) -> float:
        """
        Returns the share, 0 to 1, of an answer that passes this many tests, of the tests that trivial answers do not
        pass.
        """
        return max(0, passed - self.trivial) / max(1, self.total - self.trivial)


def facts_program(item: dict, tries_trivial: bool) -> Program:
    """
    Makes the program that determines [`ItemFacts`] of a row. Its source is the reference solution. It has two checks
    for each of the item's tests: the first n checks pass if the best trivial answer passes n tests, and then the same
    for the reference solution. Without `tries_trivial`, no trivial answer is tried, and `trivial` is 0.
    """
    entry_point, prompt, test = item["entry_point"], item["prompt"], item["test"]
    asserts = read_asserts(test)
    total = len(asserts.sources)
    examples, own = {}, []
    if tries_trivial:
        examples = dict(prompt_examples(prompt, entry_point))
        examples |= shown_tests(prompt, test, entry_point)
        constants = dict.fromkeys([*examples.values(), *_test_constants(test)])
        own = [constant for constant in constants if constant not in CONSTANTS][:MAX_OWN_CONSTANTS]
    lines = [f"    assert {name} > {number}" for name in ("trivial", "reference") for number in range(total)]
    source = f"def {SOLUTION}(*args, **kwargs):\n    pass\n"
    if item.get("canonical_solution"):
        gap = "" if prompt[-1:].isspace() else "\n"
        text = f"{prompt}{gap}{item['canonical_solution']}\n{SOLUTION} = {entry_point}\n"
        failure = f"    def {SOLUTION}(*args, **kwargs):\n        raise\n"  # passes no test, but trivial answers may
        source = f"try:\n    exec({text!r})\nexcept Exception:\n{failure}"
    checks = _CHECKS.format(
        code=asserts.code,
        setup=read_problem(prompt, entry_point).prefix,
        total=total,
        guards=set(asserts.guards) or "set()",
        entry_point=entry_point,
        has_check=asserts.has_check,
        examples=", ".join(f"{arguments!r}: lambda: {result}" for arguments, result in examples.items()),
        own=", ".join(f"lambda: {constant}" for constant in own),
        tries_trivial=tries_trivial,
        asserts="\n".join(lines),
    )
    return Program(source=source, entry_point=SOLUTION, checks=checks, setup=_SETUP)


def read_facts(item: dict, verdict: Verdict) -> ItemFacts:
    """Returns the facts about an item, from the verdict on its [`facts_program`]."""
    total = verdict.total // 2
    trivial = sum(check.status == "passed" for check in verdict.checks[:total])
    if not item.get("canonical_solution"):
        return ItemFacts(total, trivial)
    reference = verdict.passed - trivial
    return ItemFacts(total, trivial, reference, verdict.cpu_seconds if reference else None)


def prompt_examples(prompt: str, entry_point: str) -> Iterator[tuple[str, str]]:
    """
    Finds the doctests in a prompt that have only literals as values. Yields the `repr` of the tuple of arguments and
    the `repr` of the result.
    """
    try:
        examples = doctest.DocTestParser().get_examples(prompt)
    except ValueError:  # malformed doctests
        return
    for example in examples:
        with contextlib.suppress(*PARSE_ERRORS, TypeError):  # of what is no expression or no literal
            call = ast.parse(example.source.strip(), mode="eval").body
            value = repr(ast.literal_eval(example.want.partition("\n")[0]))
            if isinstance(call, ast.Call) and called_name(call) == entry_point and not call.keywords:
                yield repr(tuple(map(ast.literal_eval, call.args))), value


def shown_tests(prompt: str, test: str, entry_point: str) -> Iterator[tuple[str, str]]:
    """
    Finds the tests that the prompt shows, their arguments in any form followed by the result, such as "For N = 150 the
    output should be 6". In a call of the entry point, texts may lack quotes, as in "f(aa) => False". Yields the same
    as `prompt_examples`.
    """
    for node in ast.walk(ast.parse(test)):
        match node:
            case ast.Compare(ast.Call(ast.Name("candidate"), arguments, []), [ast.Eq() | ast.Is()], [result]):
                with contextlib.suppress(*PARSE_ERRORS):  # of what is no literal
                    values = tuple(map(ast.literal_eval, (*arguments, result)))
                    key, value = repr(values[:-1]), repr(values[-1])
                    bare = map(_bare, (prompt, f"{entry_point}{key}", value))
                    if arguments and (_shows(prompt, *map(repr, values)) or _shows(*bare)):
                        yield key, value


def _shows(prompt: str, *parts: str) -> bool:
    """Returns whether a prompt contains these texts soon after each other, in any spacing."""
    text, words = f" {_words(prompt)} ", [*map(_words, parts)]
    if not all(f" {part} " in text for part in words):  # most parts, for which no pattern has to be compiled
        return False
    *places, end = (f"(?<= ){re.escape(part)}(?= )" for part in words)
    return bool(re.search(".{0,40}?".join(places) + ".{0,120}?" + end, text))


def _bare(text: str) -> str:
    """Returns a text without quotes, and without the comma in a tuple of one value."""
    return re.sub("['\"]", "", text.replace(",)", ")"))


def _words(text: str) -> str:
    """Returns the words, numbers and signs of a text, with a space between them."""
    return " ".join(re.findall(r"-?\d+(?:\.\d+)?|\w+|[^\w\s]", re.sub("\"\"\"|'''", " ", text).replace('"', "'")))


def _test_constants(test: str) -> list[str]:
    """Returns the literals in a test, most frequent first, without those that are arguments of the candidate."""
    found: Counter[str] = Counter()
    stack: list[ast.AST] = [ast.parse(test)]
    while stack:
        node = stack.pop()
        if called_name(node) == "candidate":
            continue
        try:
            found[repr(ast.literal_eval(node))] += 1
        except PARSE_ERRORS:  # it is no literal, but its parts may be some
            stack += ast.iter_child_nodes(node)
    return [value for value, _ in found.most_common()]
