"""
Bug fixing: one agent writes tests that find the fault of a function, the other repairs the function.

The `tester` and the `fixer` see a Python function with one fault, of which the description is right. In the first turn
neither sees what the other writes. The tester answers with lines `assert f(...) == ...`, at most 8, with values that
are written out; the fixer answers with the repaired function. In later turns, the fixer learns which of the tester's
last tests its function fails, and the tester what its tests say of the faulty function. No prompt contains anything
about the hidden tests or the reference. One agent alone is the fixer.

Both share one reward, at most 4, or 2 for the fixer alone, which gets the first and the last term:

R = 2 · fix + 2 · tests - 0.5 · wrong - 0.25 · rewritten

- fix: (p - p0) / (n - p0), at least 0: of n hidden tests, the repaired program passes p and the faulty one p0.
- tests: mean of two shares, whether the tests find the fault (0 or 1) and the share of the other mutants that they
  find, times the share of tests that are right. A test finds a program if it passes for the reference, fails for the
  program, and its call is no example in the function's own text.
- wrong: the share of tests that fail for the reference.
- rewritten: the share of lines that the repair changes, less the share that the reference changes, at least 0.
"""

import ast
import difflib
import functools
import re
import warnings
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from trl_multiagent.code.dependencies import (
    FUNCTIONS,
    IMPORTS,
    PARSE_ERRORS,
    all_tables,
    binds_of,
    bound_names,
    called_name,
    depth,
)
from trl_multiagent.code.extraction import MAX_CHARS, join_sources, read_function
from trl_multiagent.code.sandbox import Check, Program, Sandbox, Verdict
from trl_multiagent.console import shown_line
from trl_multiagent.environments.base import PASSED, History, JointAction, Outcome, Prompts
from trl_multiagent.tasks.programs import ProgramEnvironment


TESTER, FIXER = "tester", "fixer"
REWARD_VERSION = 7
FIX, TESTS, WRONG_TESTS, REWRITE = 2.0, 2.0, -0.5, -0.25
CHECK_TIMEOUT = 1.0  # seconds for each test
MAX_TESTS = 8
LIST_MARK = re.compile(r"^(?:[-*•]|\d{1,2}[.)])\s+")
QUOTED = re.compile(r"^`(.+)`[^`]*$")
MAX_TEST_CHARS = 400
MAX_DIGITS = 30  # of an integer in a test
MAX_PLACES = 3  # characters of the places to which a test rounds: Python computes this power of ten
MAX_DEPTH = 20  # of a test's syntax tree
MAX_ENDS = 8  # closing parentheses in a call of a function's text that are tried as its end

# What a test may consist of, besides a single call of the function with literal arguments. No part of it can take long
# or have an effect
VALUES = (ast.Constant, ast.List, ast.Tuple, ast.Dict, ast.Set, ast.UnaryOp, ast.USub, ast.Not, ast.Load)
COMPARED = (ast.Compare, ast.Eq, ast.NotEq, ast.Is, ast.IsNot, ast.Lt, ast.LtE, ast.Gt, ast.GtE, ast.BinOp, ast.Sub)
ROUNDING = ("abs", "round", "sorted", "len", "list", "set")


# Prompts


UNSEEN = "You cannot see each other's answers."


def tester_prompt(item: dict) -> str:
    """Returns the tester's first prompt."""
    return f"""\
The Python function below has a fault. You write tests that find it, your partner repairs the function. {UNSEEN}

{item["faulty"]}

Write the tests:
- Each is one line such as `assert {item["entry_point"]}(...) == ...`, with values written out. There are at most 8.
- They pass if the function does what its description says, and at least one of them fails for the function above.
- Answer with these lines alone: no explanation, no code fence.

Your tests:
"""


def fixer_prompt(item: dict, alone: bool) -> str:
    """Returns the fixer's first prompt."""
    work = "Repair it." if alone else f"You repair it, your partner writes tests that find the fault. {UNSEEN}"
    return f"""\
The Python function below has a fault. {work}

{item["faulty"]}

Write the repaired function:
- Change as little as possible. What is right stays as it is.
- Answer with the Python code of the function alone: no explanation, no code fence, no tests.

Your function:
"""


def tester_feedback(tests: Sequence[str], checks: Sequence[Check]) -> str:
    """Returns the tester's prompt of a later turn: the results of its tests for the faulty function."""
    results = "Your last answer contains no test of the form `assert function(...) == ...`."
    if tests:
        shown = list_results(zip(tests, checks, strict=True))
        results = f"These are the results of your tests for the faulty function:\n{shown}"
    return f"{results}\n\nWrite better tests, in the same form.\n\nYour tests:\n"


def fixer_feedback(tests: Sequence[str], checks: Sequence[Check], alone: bool) -> str:
    """Returns the fixer's prompt of a later turn: which of the tester's tests its function fails."""
    failed = [(text, check) for text, check in zip(tests, checks, strict=True) if check.status != "passed"]
    of_all = f"of your partner's {len(tests)} tests. A test may be wrong."
    if alone:
        results = "Check your function once more."
    elif not tests:
        results = "Your partner wrote no tests."
    elif not failed:
        results = f"Your function passes all {of_all}"
    else:
        results = f"Your function fails {len(failed)} {of_all}\n{list_results(failed)}"
    return f"{results}\n\nWrite the repaired function again.\n\nYour function:\n"


def list_results(results: Iterable[tuple[str, Check]]) -> str:
    """Lists tests with their results, one per line."""
    lines = []
    for text, check in results:
        error = f", {shown_line(check.error)}" if check.error else ""
        lines.append(f"- `{shown_line(text)}`: {check.status}{error}")
    return "\n".join(lines)


# Turns and rewards


class BugResult(NamedTuple):
    """
    What an answer showed: the fixer's program, the tester's tests, and the results of these for the faulty program.
    """

    source: str
    tests: list[str]
    on_faulty: Sequence[Check]


class BugFixingEnvironment(ProgramEnvironment):
    """
    A `tester` writes tests that find the fault of a function, a `fixer` repairs it. With one agent, the `fixer` works
    alone. The rules and the reward are described at the top of this module.

    Items are rows of [`load_bug_dataset`].

    Args:
        num_agents (`int`, *optional*, defaults to `2`): 2 or 1.
        sandbox ([`Sandbox`], *optional*): Runs the programs; by default one with default settings.
        keep_suspicious (`str` or `Path`, *optional*): Folder for the programs with a suspicious verdict. By default
            they are not stored.
    """

    watched_metrics = {"fix": "no repair passes more hidden tests than the faulty function"}
    unseen = UNSEEN, "Your partner's answer is above."

    def __init__(self, num_agents: int = 2, sandbox: Sandbox | None = None, keep_suspicious: str | Path | None = None):
        if num_agents not in (1, 2):
            raise ValueError(f"`num_agents`: bug fixing takes 1 or 2 agents, not {num_agents}.")
        team = num_agents == 2
        self.roles = (TESTER, FIXER) if team else (FIXER,)
        super().__init__(sandbox, keep_suspicious)
        rewards = REWRITE + team * WRONG_TESTS, FIX + team * TESTS
        shares = dict.fromkeys(("passed", "fix", "rewritten", "tests", "wrong_tests", "finds_fault"), (0.0, 1.0))
        self.metric_ranges = {"reward": rewards, "total_reward": rewards, **shares}

    def __repr__(self) -> str:
        return f"BugFixingEnvironment(roles={self.roles}, reward_version={REWARD_VERSION})"

    def resume_settings(self) -> dict[str, Any]:
        return {"reward_version": REWARD_VERSION, **super().resume_settings()}

    def next_prompts(self, items: list[dict], histories: list[History]) -> list[Prompts]:
        """Returns the prompts of a whole turn. The tester's tests run on all repairs at the same time."""
        alone = TESTER not in self.roles
        last = [history[-1].outcome.info if history else None for history in histories]
        programs = [
            [program(item, result.source, *result.tests)] if result and result.tests else []
            for item, result in zip(items, last, strict=True)
        ]
        made: list[Prompts] = []
        for item, result, verdicts in zip(items, last, run_groups(self.runner.run_experiments, programs), strict=True):
            if result is None:
                texts = {TESTER: tester_prompt(item), FIXER: fixer_prompt(item, alone)}
            else:
                feedback = fixer_feedback(result.tests, verdicts[0].checks if verdicts else (), alone)
                texts = {TESTER: tester_feedback(result.tests, result.on_faulty), FIXER: feedback}
            made.append({role: texts[role] for role in self.roles})
        return made

    def score(self, items: list[dict], joint_actions: list[JointAction], histories: list[History]) -> list[Outcome]:
        """Scores joint actions. The `info` of an outcome is a [`BugResult`]."""
        pairs = list(zip(items, joint_actions, strict=True))
        sources = [read_repair(action[FIXER], item) for item, action in pairs]
        tests = [read_tests(action.get(TESTER, ""), item["entry_point"]) for item, action in pairs]
        fixes = self.runner.run([program(item, x, item["test"]) for item, x in zip(items, sources, strict=True)])
        known = [
            [program(item, source, *own) for source in (item["reference"], item["faulty"], *item["mutants"]) if own]
            for item, own in zip(items, tests, strict=True)
        ]
        results = run_groups(self.runner.run_experiments, known)
        outcomes = []
        for (item, action), source, own, fix, on_known in zip(pairs, sources, tests, fixes, results, strict=True):
            metrics = fix_metrics(item, source, fix)
            reward = FIX * metrics["fix"] + REWRITE * metrics["rewritten"]
            if TESTER in action:
                metrics |= tests_metrics(item, own, on_known)
                reward += TESTS * metrics["tests"] + WRONG_TESTS * metrics["wrong_tests"]
            info = BugResult(source, own, on_known[1].checks if own else ())
            outcomes.append(Outcome(reward, {**metrics, "total_reward": reward}, info, fix.columns()))
        return outcomes


def program(item: dict, source: str, *tests: str) -> Program:
    """Returns the program that runs tests on a source."""
    return Program(source, item["entry_point"], "\n".join(tests), check_timeout=CHECK_TIMEOUT)


def run_groups(run: Callable[[list[Program]], list[Verdict]], groups: list[list[Program]]) -> list[list[Verdict]]:
    """Runs the programs of all groups at the same time. Returns the verdicts of each group."""
    verdicts = iter(run([program for group in groups for program in group]))
    return [[next(verdicts) for _ in group] for group in groups]


# The repair


def read_repair(completion: str, item: dict) -> str:
    """
    Returns the faulty program with the function of a completion, which need not repeat what stands around it.
    """
    code = read_function(completion, item["entry_point"])
    own = binds_of(code.statements)
    before, after = list[str](), list[str]()
    part = before
    for node in ast.parse(item["faulty"]).body:
        text = ast.unparse(node)
        if isinstance(node, FUNCTIONS) and node.name == item["entry_point"]:
            part = after
        elif not (names := bound_names(all_tables(text)[0])) or names - own:
            part.append(text)
    return join_sources("\n".join(before), code.source, "\n".join(after))


def fix_metrics(item: dict, source: str, verdict: Verdict) -> dict[str, float]:
    """Returns the metrics of a repair from its results on the hidden tests."""
    gained = (verdict.passed - item["faulty_passes"]) / (verdict.total - item["faulty_passes"])
    extra = changed_share(source, item["faulty"]) - changed_share(item["reference"], item["faulty"])
    return {
        PASSED: float(verdict.passed == verdict.total),
        "fix": max(0.0, gained),
        "rewritten": max(0.0, extra),
    }


def changed_share(source: str, faulty: str) -> float:
    """
    Returns the share of lines, 0 to 1, in which a program differs from the faulty one. Formatting and docstrings do
    not count.
    """
    return 1.0 - difflib.SequenceMatcher(None, code_lines(source), code_lines(faulty), autojunk=False).ratio()


def code_lines(source: str) -> list[str]:
    """Returns the lines of a program without imports and docstrings; none if it is nested too deeply."""
    try:
        tree = ast.parse(source)
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and ast.get_docstring(node) is not None:
                node.body = node.body[1:] or [ast.Pass()]
        tree.body = [node for node in tree.body if not isinstance(node, IMPORTS)]
        return ast.unparse(tree).splitlines()
    except PARSE_ERRORS:
        return []


# The tests


def read_tests(completion: str, entry_point: str) -> list[str]:
    """
    Returns the tests in a tester's answer. An answer that is longer than a program may be counts as empty.

    A test is one line `assert` that calls the function once, with values that are written out. Others are left out:
    they could compute the answer with code of their own, and they run in the process that judges. Of several tests
    with the same arguments only the first counts, because one of many guesses is right.
    """
    tests = []
    calls = []
    for line in completion.splitlines() if len(completion) <= MAX_CHARS else ():
        try:
            test, call = read_test(QUOTED.sub(r"\1", LIST_MARK.sub("", line.strip())).strip("`"), entry_point)
        except PARSE_ERRORS:
            continue
        if call not in calls:
            tests.append(test)
            calls.append(call)
        if len(tests) == MAX_TESTS:
            break
    return tests


def read_test(line: str, entry_point: str) -> tuple[str, Any]:
    """
    Returns the test in a line, and the arguments of its call. The assert's message, which could be any expression, is
    left out. Raises one of `PARSE_ERRORS` if the line is no test.
    """
    if not line.startswith("assert") or len(line) > MAX_TEST_CHARS:
        raise ValueError(line)
    with warnings.catch_warnings(action="ignore"):  # such as those about escapes in strings
        (node,) = ast.parse(line).body
    if not isinstance(node, ast.Assert) or depth(node) > MAX_DEPTH or not is_plain(node.test, entry_point):
        raise ValueError(line)
    (call,) = calls_in(node.test, entry_point)
    return f"assert {ast.unparse(node.test)}", call


def is_plain(test: ast.expr, entry_point: str) -> bool:
    """Returns whether a test has nothing but literals, comparisons, and calls of the function or of `ROUNDING`."""
    names = set()
    for node in ast.walk(test):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            names.add(node.func)
            digits = map(ast.unparse, node.args[1:] if node.func.id == "round" else ())
            if node.func.id not in (entry_point, *ROUNDING) or len("".join(digits)) > MAX_PLACES:
                return False
        elif isinstance(node, ast.Constant) and isinstance(node.value, int) and abs(node.value) >= 10**MAX_DIGITS:
            return False
        elif not (isinstance(node, (*VALUES, *COMPARED)) or node in names):
            return False
    return True


def tests_metrics(item: dict, tests: Sequence[str], results: Sequence[Verdict]) -> dict[str, float]:
    """
    Returns the metrics of the tests from their results on the reference, the faulty program and the other mutants.
    """
    if not tests:
        return dict.fromkeys(("tests", "wrong_tests", "tests_written", "finds_fault"), 0.0)
    reference, *faulty = [[check.status == "passed" for check in verdict.checks] for verdict in results]
    # The result of a call that stands in the function's text may be copied from there
    name, given = item["entry_point"], examples(item["faulty"], item["entry_point"])
    is_example = [calls_in(ast.parse(test), name)[0] in given for test in tests]
    counting = [k for k, passed in enumerate(reference) if passed and not is_example[k]]
    found = [float(any(not passed[k] for k in counting)) for passed in faulty]
    others = found[1:] or found
    wrong = reference.count(False) / len(tests)
    return {
        "tests": (found[0] + sum(others) / len(others)) / 2 * (1 - wrong),
        "wrong_tests": wrong,
        "tests_written": float(len(tests)),
        "finds_fault": found[0],
    }


def calls_in(tree: ast.AST, *names: str) -> list[Any]:
    """Returns the arguments of all calls of functions. Raises `ValueError` if one is no literal."""
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and called_name(node) in names]
    try:
        return [[as_lists(ast.literal_eval(argument)) for argument in call.args] for call in calls]
    except TypeError as error:  # a list as an element of a set, for example
        raise ValueError(str(error)) from error


def as_lists(value: Any) -> Any:
    """Replaces tuples by lists, since functions hardly ever tell them apart."""
    return [as_lists(part) for part in value] if isinstance(value, list | tuple) else value


@functools.lru_cache(maxsize=1024)
def examples(text: str, name: str) -> list[Any]:
    """Returns the arguments of the calls with literals in the text of a function, such as those in its docstring."""
    found = []
    for match in re.finditer(rf"\b{re.escape(name)}\(", text):
        rest = text[match.start() : match.start() + MAX_TEST_CHARS]
        for end in [k + 1 for k, character in enumerate(rest) if character == ")"][:MAX_ENDS]:
            try:
                found += calls_in(ast.parse(rest[:end], mode="eval"), name)
                break
            except PARSE_ERRORS:
                continue
    return found
