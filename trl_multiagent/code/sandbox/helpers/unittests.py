"""Runs test methods of `unittest` in the verifier, on stand-ins for the program's objects."""

import random
import unittest
from typing import Any

from .objects import StandIn
from .process import CheckLost, Died, GiveUp, SandboxFault, outcome
from .wire import References


class TestMethods:
    """The test methods of one run, a `verifier.Evaluation`, which asks the candidate and keeps the results."""

    def __init__(self, evaluation: Any):
        self.evaluation = evaluation
        self.answered = False  # whether this test method called the program
        self.lost: BaseException | None = None  # what ended the candidate in this test method, or the run

    def run(self) -> None:
        """Runs every test method by itself, with the fixtures of its class."""
        evaluation, job, before = self.evaluation, self.evaluation.job, ""
        for index, name in enumerate(job["sources"]):
            test_class, method = name.split(".")
            if test_class != before:
                evaluation.end_candidate()  # so that a program cannot tell in one class what another one asked
            before = test_class
            if evaluation.process is None:
                evaluation.start_candidate()
            evaluation.namespace[job["entry_point"]] = evaluation.references.stand_in(0, False)
            self.answered, self.lost = False, None
            random.seed(0)
            result = _Result()
            try:
                evaluation.begin_check(index)
                test = evaluation.namespace[test_class](method)
                for kind in (dict, list, tuple, set, frozenset, str):
                    test.addTypeEqualityFunc(kind, None)  # a difference in text takes cubic time
                unittest.TestSuite([test]).run(result)
            except CheckLost as error:
                self.lost = error
            if isinstance(self.lost, (GiveUp, SandboxFault)):  # which `unittest` has caught
                raise self.lost
            evaluation.settled.add(index)
            evaluation.finish_check(index, *self._outcome(result))

    def _outcome(self, result: "_Result") -> tuple[str, str]:
        """
        Status and error of a test method. It passes only if `unittest` says so, and if the program answered and was
        not lost, because the test may have caught that.
        """
        if self.lost is not None:
            return outcome(self.lost)
        if result.problem:
            status, error = result.problem
            return status, outcome(error)[1]
        if not result.succeeded or not self.answered:
            return "failed", "the test does not use the program"
        return "passed", ""

    def stand_in(self, references: References, number: int, is_function: bool) -> Any:
        """Makes the stand-in for an object of the present candidate, whose table of objects is `references`."""

        def ask(number: int, args: tuple, kwargs: dict) -> Any:
            if self.lost is not None or references is not self.evaluation.references:
                raise Died("the program's process has ended, and its objects with it")
            try:
                return self.evaluation.call(number, args, kwargs)
            except BaseException as error:
                if not isinstance(error, Exception) or self.evaluation.process is None:
                    self.lost = error
                raise
            finally:
                self.answered = True

        return (lambda *args, **kwargs: ask(number, args, kwargs)) if is_function else StandIn(ask, number)


class _Result(unittest.TestResult):
    """The outcome of one test method. Not even a skipped test passes."""

    succeeded = False
    problem: tuple[str, BaseException] | None = None  # the first one, as a status and an exception

    def addSuccess(self, test: Any) -> None:
        self.succeeded = True

    def addError(self, test: Any, err: Any, status: str = "error") -> None:
        self.problem = self.problem or (status, err[1])

    def addFailure(self, test: Any, err: Any) -> None:
        self.addError(test, err, "failed")

    addExpectedFailure = addFailure

    def addSubTest(self, test: Any, subtest: Any, err: Any) -> None:
        if err is not None:
            self.addError(test, err)

    def addSkip(self, test: Any, reason: str) -> None:
        self.problem = self.problem or ("failed", unittest.SkipTest(reason))
