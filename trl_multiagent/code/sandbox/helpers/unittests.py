"""
Runs test methods of `unittest` in the verifier, on stand-ins for the program's objects.

A stand-in is asked for one of `OPERATIONS` by its number, which both processes know. The program cannot change what
the stand-in defines itself.
"""

import itertools
import operator
import random
import unittest
from collections.abc import Callable, Iterator
from typing import Any

from .process import CheckLost, Died, GiveUp, SandboxFault, outcome
from .wire import References


MAX_ITEMS = 100_000  # of one object that is iterated
# Other special attributes are looked up by libraries, which would believe what the program answers
READABLE = ("__name__", "__doc__", "__dict__")


def _items(value: Any) -> list:
    items = [*itertools.islice(value, MAX_ITEMS + 1)]
    if len(items) > MAX_ITEMS:
        raise RuntimeError(f"more than {MAX_ITEMS} items")
    return items


def _enter(value: Any) -> Any:
    return type(value).__enter__(value)


def _leave(value: Any) -> None:
    type(value).__exit__(value, None, None, None)  # what the body raised is not told


# The number of each is its place, from 1. Number 0 is the entry point
OPERATIONS: tuple[Callable, ...] = (
    getattr,
    setattr,
    delattr,
    len,
    operator.getitem,
    operator.setitem,
    operator.delitem,
    _items,
    str,
    next,
    _enter,
    _leave,
)


def _asks(operation: Callable, kind: type | None = None) -> Callable:
    """
    Returns a method that asks the program for the value of an operation, which must have the type `kind` if there is
    one.
    """
    number = 1 + OPERATIONS.index(operation)

    def method(stand_in: Any, *args: Any) -> Any:
        value = stand_in._StandIn__ask(number, (stand_in, *args), {})
        if kind is not None and type(value) is not kind:
            raise TypeError(f"the program's object gave no {kind.__name__}")
        return value

    return method


class StandIn:
    """
    Stands for an object of the program. It has no equality, order, arithmetic or truth of the program's: it is true,
    and equal to itself alone. `in` uses `__iter__`, and so compares here. `number` is the object's; `ask` is called
    with the number of an operation or of a function, and with its arguments.
    """

    __slots__ = ("__ask", "__mocks", "__number")
    __get, __set, __delete = _asks(getattr), _asks(setattr), _asks(delattr)
    __getitem__, __setitem__ = _asks(operator.getitem), _asks(operator.setitem)
    __delitem__ = _asks(operator.delitem)
    __len__, __str__, __items = _asks(len, int), _asks(str, str), _asks(_items, list)
    __next__, __enter__, __leave = _asks(next), _asks(_enter), _asks(_leave)

    def __init__(self, ask: Callable[[int, tuple, dict], Any], number: int):
        object.__setattr__(self, "_StandIn__ask", ask)
        object.__setattr__(self, "_StandIn__number", number)
        # Functions and mocks of the tests that are the object's attributes: the program must not answer for them
        object.__setattr__(self, "_StandIn__mocks", {})

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name.endswith("__") and name not in READABLE:
            raise AttributeError(name)
        if name.startswith("assert"):
            raise AttributeError(f"{name}: a program cannot decide an assertion")
        return self.__mocks[name] if name in self.__mocks else self.__get(name)

    def __setattr__(self, name: str, value: Any) -> None:
        self.__set(name, value)
        self.__mocks.pop(name, None)
        if callable(value) and type(value) is not StandIn:
            self.__mocks[name] = value

    def __delattr__(self, name: str) -> None:
        self.__mocks.pop(name, None)
        self.__delete(name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.__ask(self.__number, args, kwargs)

    def __bool__(self) -> bool:
        return True

    def __iter__(self) -> Iterator:
        return iter(self.__items())

    def __repr__(self) -> str:
        return "<object of the program>"

    def __exit__(self, *raised: object) -> None:  # without a value, so that it suppresses no exception
        self.__leave()

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError("an object of the program cannot be copied")


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
        """Makes the stand-in for an object of the present candidate. Its table of objects is `references`."""

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
