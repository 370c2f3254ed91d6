"""
What the processes of two agents pass to each other, and what an experiment changes of it.

The program and its helper run in processes of their own, and all that one has of the other passes through here. It is
the same in all experiments, the control included, but for the values that are replaced. So a program cannot tell that
an experiment is under way, except by these values.
"""

import collections
import contextlib
import decimal
import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from . import wire
from .process import GiveUp
from .wire import DataOnly


# The docstring of `Program` says what each experiment changes
MAX_CALLS = 20_000  # compared calls of a helper
MAX_WRAPPINGS = 100  # containers around a value that are taken off
MAX_CONVERTED = 1_000_000  # parts of a value that is converted
# What `list(...)` and the like make of a value
_CONVERTED = (list, tuple, dict, set, frozenset, str, int, float, bool, complex, decimal.Decimal)
_CONTAINERS = (list, tuple, set, frozenset, collections.deque)
_NOTHING = object()


class Ablation:
    """
    What passes between a program and its helper in one run.

    Args:
        experiment (`str`): The experiment that the run makes.
        ask (`Callable[[dict], dict]`): Gives the helper's answer to a call, both in the form of `wire`.
    """

    def __init__(self, experiment: str, ask: Callable[[dict], dict]):
        self.experiment = experiment
        self.ask = ask
        self.references = DataOnly()
        self.unfit = False  # whether the control found that experiments show nothing
        self.asked: list[tuple[dict, str]] = []  # during the control, the calls and the texts of the answers
        self.results: dict[str, str] = {}  # these by the texts of the calls
        self.constant: Any = _NOTHING  # the helper's first value
        self.first: Any = _NOTHING  # the first one in this call of the entry point

    def call(self, /, *args: Any, **kwargs: Any) -> Any:
        """
        Calls the helper. Returns what the program gets for its value, and changes the arguments as the program finds
        them changed.
        """
        question = wire.encode_call(0, args, kwargs, self.references)
        answer = self.ask(question)
        if self.experiment == "control":
            self._compare(question, answer)
        if "raised" in answer and self.experiment == "nothing":
            return None
        if self.experiment in ("nothing", "constant"):  # the arguments stay as they are
            answer = answer | {"changed": []}
        return self._give(wire.accept(answer, args, kwargs, self.references))

    def _give(self, value: Any) -> Any:
        """Returns what the program gets in place of a value."""
        is_iterator = isinstance(value, Iterator)
        value = list(value) if is_iterator else value
        if self.constant is _NOTHING:
            self.constant = value
        given = {"nothing": None, "constant": self.constant}.get(self.experiment, value)
        if self.first is _NOTHING:
            self.first = given
        return iter(given if isinstance(given, Iterable) else ()) if is_iterator else given

    def enter(self, call: Callable[[], Any], args: Sequence, kwargs: Mapping) -> Any:
        """Calls the entry point, as a check does. Returns what the check gets."""
        if self.experiment == "alone":
            answer = self.ask(wire.encode_call(0, args, kwargs, self.references))
            value = wire.accept(answer, args, kwargs, self.references)
            return args[0] if value is None and args else value  # the helper may have changed its argument
        self.first = _NOTHING
        value = call()
        if self.unfit:
            raise GiveUp
        if self.experiment not in ("first", "control") or self.first is _NOTHING:
            return value
        value = list(value) if isinstance(value, Iterator) else value
        instead = _in_form_of(value, self.first)  # the control computes it, too, to take as long
        return instead if self.experiment == "first" else value

    def _compare(self, question: dict, answer: dict) -> None:
        """Keeps an answer. Looks for two for the same arguments, which only a helper that keeps a state gives."""
        text = json.dumps(answer)  # in which values that are equal in Python, such as 0.0 and -0.0, differ
        self.asked.append((question, text))
        if self.results.setdefault(json.dumps(question), text) != text or len(self.asked) > MAX_CALLS:
            self.unfit = True

    def repeat(self) -> None:
        """
        Makes all calls of the control again, in the opposite order and then in the first one. A helper that keeps a
        state gives other answers: no call is then at the place where it was.
        """
        calls = (*reversed(self.asked), *self.asked)
        self.unfit = any(json.dumps(self.ask(question)) != text for question, text in calls)


def _in_form_of(value: Any, first: Any) -> Any:
    """
    Returns the helper's first value, in the form that equals the entry point's `value` if there is one: converted, or
    taken out of a container. An entry point that only does this has not done any work.
    """
    forms = [list(first) if isinstance(first, Iterator) else first]
    for _ in range(MAX_WRAPPINGS):
        if (inside := _unwrapped(forms[-1])) is _NOTHING:
            break
        forms.append(inside)
    # A fraction or a counter equals what `float` or `dict` makes
    kinds = (float, dict, type(value)) if type(value) in _CONVERTED else (float, dict)
    for form, kind in itertools.product(tuple(forms), kinds):
        with contextlib.suppress(TypeError, ValueError, ArithmeticError):  # there is no such conversion
            if not isinstance(form, range) or len(form) <= MAX_CONVERTED:
                forms.append(kind(form))
    return next((form for form in forms if not _differ(form, value)), forms[0])


def _unwrapped(value: Any) -> Any:
    """Returns the only value in a container."""
    if isinstance(value, Mapping):
        value = [*value.values()]
    return next(iter(value)) if isinstance(value, _CONTAINERS) and len(value) == 1 else _NOTHING


def _differ(one: Any, other: Any) -> bool:
    try:
        return bool(one != other)
    except ArithmeticError:  # a signalling NaN
        return True
