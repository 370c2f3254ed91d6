"""The joint reward of bug fixing. `recipes/bug_fixing/README.md` has it as a table."""

import ast
import difflib
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from trl_multiagent.environments.base import PASSED, JointAction, Outcome
from trl_multiagent.environments.bug_fixing.calls import calls_in, examples
from trl_multiagent.environments.bug_fixing.data import CHECK_TIMEOUT
from trl_multiagent.environments.bug_fixing.prompts import FIXER, TESTER
from trl_multiagent.environments.python_code.extraction import MAX_CHARS as MAX_COMPLETION
from trl_multiagent.environments.python_code.extraction import join_sources, read_completion
from trl_multiagent.environments.python_code.names import IMPORTS, PARSE_ERRORS
from trl_multiagent.environments.python_code.program_runner import ProgramRunner
from trl_multiagent.sandbox import Program, Verdict


REWARD_VERSION = 2
FIX, TESTS, WRONG_TESTS, REWRITE = 2.0, 2.0, -0.5, -0.25
MAX_TESTS = 8
MAX_CHARS = 400  # of a test
MAX_DIGITS = 30  # of an integer in a test
MAX_DEPTH = 20  # of a test's syntax tree

# What a test may consist of, besides a single call of the function with literal arguments. No part of it can take long or have an effect
VALUES = (ast.Constant, ast.List, ast.Tuple, ast.Dict, ast.Set, ast.UnaryOp, ast.USub, ast.Not, ast.Load)
COMPARED = (ast.Compare, ast.Eq, ast.NotEq, ast.Is, ast.IsNot, ast.Lt, ast.LtE, ast.Gt, ast.GtE, ast.BinOp, ast.Sub)
ROUNDING = ("abs", "round", "sorted", "len", "list", "set")


def read_tests(completion: str, entry_point: str) -> list[str]:
    """
    Returns the tests in a completion.

    A test is one line `assert` that calls the function once, with values that are written out. Others are left out: they could compute the
    answer with code of their own, and they run in the process that judges. Of several tests with the same arguments only the first counts,
    because one of many guesses is right.

    Args:
        completion (`str`): The tester's answer. One that is longer than a program may be counts as empty.
        entry_point (`str`): The function.
    """
    tests: list[str] = []
    calls: list[Any] = []
    for line in completion.splitlines() if len(completion) <= MAX_COMPLETION else ():
        line = line.strip()
        if not line.startswith("assert") or len(line) > MAX_CHARS:
            continue
        try:
            test, call = _read_test(line, entry_point)
        except PARSE_ERRORS:
            continue
        if call not in calls:
            tests.append(f"assert {test}")
            calls.append(call)
        if len(tests) == MAX_TESTS:
            break
    return tests


def _read_test(line: str, entry_point: str) -> tuple[str, Any]:
    """
    Returns the expression that a line asserts, and the arguments of its call. The message, which could be any expression, is left out.

    Raises:
        One of `PARSE_ERRORS`: the line is no test.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # such as those about escapes in strings
        (node,) = ast.parse(line).body
    if not isinstance(node, ast.Assert) or _depth(node) > MAX_DEPTH or not _is_plain(node.test, entry_point):
        raise ValueError(line)
    (call,) = calls_in(node.test, entry_point)
    return ast.unparse(node.test), call


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


def is_example(test: str, item: dict) -> bool:
    """Returns whether the call in a test stands in the function's text, so that its result may be copied from there."""
    return calls_in(ast.parse(test), item["entry_point"])[0] in examples(item["faulty"], item["entry_point"])


def changed_share(source: str, faulty: str) -> float:
    """Returns the share of lines, 0 to 1, in which a program differs from the faulty one. Formatting and docstrings do not count."""
    lines, faulty_lines = _code_lines(source), _code_lines(faulty)
    return 1.0 - difflib.SequenceMatcher(None, lines, faulty_lines, autojunk=False).ratio()


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


@dataclass(frozen=True)
class BugResult:
    """
    What an answer showed.

    Args:
        source (`str`): The fixer's program.
        tests (`list[str]`): The tester's tests.
        on_faulty (`Verdict`, *optional*): Their results for the faulty program; `None` if there are none.
    """

    source: str
    tests: list[str]
    on_faulty: Verdict | None


class BugReward:
    """
    The joint reward of a tester and a fixer.

    R = 2 · fix + 2 · tests - 0.5 · wrong - 0.25 · rewritten

    - fix: (p - p0) / (n - p0), at least 0: of n hidden tests, the repaired program passes p and the faulty one p0.
    - tests: mean of two shares, whether the tests find the fault (0 or 1) and the share of the other mutants that they find, times the share
      of tests that are right. A test finds a program if it passes for the reference, fails for the program, and its call is no example in
      the function's own text.
    - wrong: the share of tests that fail for the reference.
    - rewritten: the share of lines that the repair changes, less the share that the reference changes, at least 0.

    A fixer that works alone gets the first and the last term.

    Args:
        runner ([`ProgramRunner`]): Runs the programs.
    """

    def __init__(self, runner: ProgramRunner):
        self.runner = runner

    def score(self, items: list[dict], joint_actions: list[JointAction]) -> list[Outcome]:
        """Scores joint actions, and returns one outcome for each, whose `info` is a [`BugResult`]."""
        sources = [
            read_completion(action[FIXER], item["entry_point"], item["reference"]).source
            for item, action in zip(items, joint_actions, strict=True)
        ]
        sources = [with_imports(source, item) for source, item in zip(sources, items, strict=True)]
        fixes = self.runner.run(
            [
                Program(source, item["entry_point"], item["test"], check_timeout=CHECK_TIMEOUT)
                for source, item in zip(sources, items, strict=True)
            ]
        )
        tests = [
            read_tests(action[TESTER], item["entry_point"]) if TESTER in action else []
            for item, action in zip(items, joint_actions, strict=True)
        ]
        known = self._results_for_known_programs(items, tests)
        outcomes = []
        for item, action, source, fix, own, results in zip(
            items, joint_actions, sources, fixes, tests, known, strict=True
        ):
            metrics = fix_metrics(item, source, fix)
            reward = FIX * metrics["fix"] + REWRITE * metrics["rewritten"]
            if TESTER in action:
                metrics |= tests_metrics(item, own, results)
                reward += TESTS * metrics["tests"] + WRONG_TESTS * metrics["wrong_tests"]
            info = BugResult(source, own, results[1] if own else None)
            outcomes.append(Outcome(reward, {**metrics, "total_reward": reward}, info, fix.columns()))
        return outcomes

    def run_tests(self, item: dict, source: str, tests: Sequence[str]) -> Program:
        """Returns the program that runs the tester's tests on a program."""
        return Program(source, item["entry_point"], "\n".join(tests), check_timeout=CHECK_TIMEOUT)

    def _results_for_known_programs(self, items: list[dict], tests: list[list[str]]) -> list[list[Verdict]]:
        """Runs the tests on the reference, the faulty program and the other mutants, in this order."""
        programs, counts = [], []
        for item, own in zip(items, tests, strict=True):
            sources = [item["reference"], item["faulty"], *item["mutants"]] if own else []
            programs += [self.run_tests(item, source, own) for source in sources]
            counts.append(len(sources))
        verdicts = iter(self.runner.run_references(programs))
        return [[next(verdicts) for _ in range(count)] for count in counts]


def with_imports(source: str, item: dict) -> str:
    """Puts the imports of the faulty program in front of a repair, which need not repeat them."""
    imports = [ast.unparse(node) for node in ast.parse(item["faulty"]).body if isinstance(node, IMPORTS)]
    return join_sources("\n".join(imports), source)


def fix_metrics(item: dict, source: str, verdict: Verdict) -> dict[str, float]:
    """Returns the metrics of a repair from its results on the hidden tests."""
    gained = (verdict.passed - item["faulty_passes"]) / (verdict.total - item["faulty_passes"])
    extra = changed_share(source, item["faulty"]) - changed_share(item["reference"], item["faulty"])
    return {
        PASSED: float(verdict.passed == verdict.total),
        "fix": max(0.0, gained),
        "rewritten": max(0.0, extra),
    }


def tests_metrics(item: dict, tests: Sequence[str], results: Sequence[Verdict]) -> dict[str, float]:
    """Returns the metrics of the tests from their results on the reference, the faulty program and the other mutants."""
    if not tests:
        return {"tests": 0.0, "wrong_tests": 0.0, "tests_written": 0.0, "finds_fault": 0.0}
    reference, *faulty = [[check.status == "passed" for check in verdict.checks] for verdict in results]
    counting = [k for k, test in enumerate(tests) if reference[k] and not is_example(test, item)]
    found = [float(any(not passed[k] for k in counting)) for passed in faulty]
    others = found[1:] or found
    wrong = reference.count(False) / len(tests)
    return {
        "tests": (found[0] + sum(others) / len(others)) / 2 * (1 - wrong),
        "wrong_tests": wrong,
        "tests_written": float(len(tests)),
        "finds_fault": found[0],
    }
