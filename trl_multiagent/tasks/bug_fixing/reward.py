"""The joint reward of bug fixing. `recipes/bug_fixing/README.md` has it as a table."""

import ast
import difflib
import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

from trl_multiagent.code.dependencies import IMPORTS, PARSE_ERRORS
from trl_multiagent.code.extraction import MAX_CHARS as MAX_COMPLETION
from trl_multiagent.code.extraction import join_sources, read_completion
from trl_multiagent.code.program_runner import ProgramRunner
from trl_multiagent.code.sandbox import Check, Program, Verdict
from trl_multiagent.environments.base import PASSED, JointAction, Outcome
from trl_multiagent.tasks.bug_fixing.calls import calls_in, examples
from trl_multiagent.tasks.bug_fixing.data import CHECK_TIMEOUT, run_groups
from trl_multiagent.tasks.bug_fixing.prompts import FIXER, TESTER


REWARD_VERSION = 2
FIX, TESTS, WRONG_TESTS, REWRITE = 2.0, 2.0, -0.5, -0.25
MAX_TESTS = 8
MAX_CHARS = 400  # of a test
MAX_DIGITS = 30  # of an integer in a test
MAX_DEPTH = 20  # of a test's syntax tree

# What a test may consist of, besides a single call of the function with literal arguments. No part of it can take long
# or have an effect
VALUES = (ast.Constant, ast.List, ast.Tuple, ast.Dict, ast.Set, ast.UnaryOp, ast.USub, ast.Not, ast.Load)
COMPARED = (ast.Compare, ast.Eq, ast.NotEq, ast.Is, ast.IsNot, ast.Lt, ast.LtE, ast.Gt, ast.GtE, ast.BinOp, ast.Sub)
ROUNDING = ("abs", "round", "sorted", "len", "list", "set")


class BugResult(NamedTuple):
    """
    What an answer showed: the fixer's program, the tester's tests, and the results of these for the faulty program.
    """

    source: str
    tests: list[str]
    on_faulty: Sequence[Check]


def score_answers(runner: ProgramRunner, items: list[dict], joint_actions: list[JointAction]) -> list[Outcome]:
    """
    Scores joint actions of a tester and a fixer, and returns one outcome for each, whose `info` is a [`BugResult`].

    R = 2 · fix + 2 · tests - 0.5 · wrong - 0.25 · rewritten

    - fix: (p - p0) / (n - p0), at least 0: of n hidden tests, the repaired program passes p and the faulty one p0.
    - tests: mean of two shares, whether the tests find the fault (0 or 1) and the share of the other mutants that they
      find, times the share of tests that are right. A test finds a program if it passes for the reference, fails for
      the program, and its call is no example in the function's own text.
    - wrong: the share of tests that fail for the reference.
    - rewritten: the share of lines that the repair changes, less the share that the reference changes, at least 0.

    A fixer that works alone gets the first and the last term.
    """
    pairs = list(zip(items, joint_actions, strict=True))
    sources = [read_repair(action[FIXER], item) for item, action in pairs]
    tests = [read_tests(action.get(TESTER, ""), item["entry_point"]) for item, action in pairs]
    fixes = runner.run([program(item, source, item["test"]) for item, source in zip(items, sources, strict=True)])
    known = [
        [program(item, source, *own) for source in (item["reference"], item["faulty"], *item["mutants"]) if own]
        for item, own in zip(items, tests, strict=True)
    ]
    results = run_groups(runner.run_experiments, known)
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


def read_repair(completion: str, item: dict) -> str:
    """
    Returns the repaired function in a completion, behind the imports of the faulty program, which it need not repeat.
    """
    imports = [ast.unparse(node) for node in ast.parse(item["faulty"]).body if isinstance(node, IMPORTS)]
    return join_sources("\n".join(imports), read_completion(completion, item["entry_point"], item["reference"]).source)


def read_tests(completion: str, entry_point: str) -> list[str]:
    """
    Returns the tests in a tester's answer. An answer that is longer than a program may be counts as empty.

    A test is one line `assert` that calls the function once, with values that are written out. Others are left out:
    they could compute the answer with code of their own, and they run in the process that judges. Of several tests
    with the same arguments only the first counts, because one of many guesses is right.
    """
    tests: list[str] = []
    calls: list[Any] = []
    for line in completion.splitlines() if len(completion) <= MAX_COMPLETION else ():
        try:
            test, call = _read_test(line.strip(), entry_point)
        except PARSE_ERRORS:
            continue
        if call not in calls:
            tests.append(test)
            calls.append(call)
        if len(tests) == MAX_TESTS:
            break
    return tests


def _read_test(line: str, entry_point: str) -> tuple[str, Any]:
    """
    Returns the test in a line, and the arguments of its call. The assert's message, which could be any expression, is
    left out. Raises one of `PARSE_ERRORS` if the line is no test.
    """
    if not line.startswith("assert") or len(line) > MAX_CHARS:
        raise ValueError(line)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # such as those about escapes in strings
        (node,) = ast.parse(line).body
    if not isinstance(node, ast.Assert) or _depth(node) > MAX_DEPTH or not _is_plain(node.test, entry_point):
        raise ValueError(line)
    (call,) = calls_in(node.test, entry_point)
    return f"assert {ast.unparse(node.test)}", call


def _depth(node: ast.AST) -> int:
    return 1 + max(map(_depth, ast.iter_child_nodes(node)), default=0)


def _is_plain(test: ast.expr, entry_point: str) -> bool:
    names: set[ast.expr] = set()
    for node in ast.walk(test):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            names.add(node.func)
            if node.func.id not in (entry_point, *ROUNDING):
                return False
        elif isinstance(node, ast.Constant) and isinstance(node.value, int) and abs(node.value) >= 10**MAX_DIGITS:
            return False
        elif not (isinstance(node, (*VALUES, *COMPARED)) or node in names):
            return False
    return True


def fix_metrics(item: dict, source: str, verdict: Verdict) -> dict[str, float]:
    """Returns the metrics of a repair from its results on the hidden tests."""
    gained = (verdict.passed - item["faulty_passes"]) / (verdict.total - item["faulty_passes"])
    extra = changed_share(source, item["faulty"]) - changed_share(item["reference"], item["faulty"])
    is_right = float(verdict.passed == verdict.total)
    return {PASSED: is_right, "fix": max(0.0, gained), "rewritten": max(0.0, extra)}


def changed_share(source: str, faulty: str) -> float:
    """
    Returns the share of lines, 0 to 1, in which a program differs from the faulty one. Formatting and docstrings do
    not count.
    """
    return 1.0 - difflib.SequenceMatcher(None, _code_lines(source), _code_lines(faulty), autojunk=False).ratio()


def _code_lines(source: str) -> list[str]:
    try:
        tree = ast.parse(source)
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and ast.get_docstring(node) is not None:
                node.body = node.body[1:] or [ast.Pass()]
        tree.body = [node for node in tree.body if not isinstance(node, IMPORTS)]
        return ast.unparse(tree).splitlines()
    except PARSE_ERRORS:  # nested too deeply, for example
        return []


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
