"""
What the processes of two agents pass to each other, and what an experiment changes of it.

The program and its helper run in processes of their own, and all that one has of the other is this exchange. It is the
same in all experiments, the control included, but for the values that are replaced. So a program cannot tell that an
experiment is under way, except by these values. The control computes what experiments would put in their place, too,
so that it takes as long as they do.
"""

import collections
import contextlib
import decimal
import fractions
import io
import itertools
import json
import pickle
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from . import wire
from .endings import GiveUp
from .wire import DataOnly


# The docstring of `Program` says what each experiment changes
CONSTANT = ("constant", "second", "third")
WITHOUT_CHANGES = ("nothing", "echo", "apart")  # those in which the program's arguments stay as they are
MAX_VALUES = 8  # how many different values are kept
STATE = "the helper keeps a state"
MAX_CALLS = 20_000  # whose answers are compared
MAX_WRAPPINGS = 100  # containers around a value that are taken off
MAX_PARTS = 100  # of a value that may contain arguments
MAX_REST = 100  # arguments
MAX_CONVERTED = 1_000_000  # parts of a value that is converted
# What `list(...)` and the like make of a value
_CONVERTED = (list, tuple, dict, set, frozenset, str, int, float, bool, complex, decimal.Decimal)
_EMPTY: dict[type, Any] = {str: "?", bytes: b"?", list: [0], tuple: (0,), set: {0}, frozenset: {0}, dict: {0: 0}}
_CONTAINERS = (list, tuple, set, frozenset, collections.deque)
_NOTHING = object()


class Exchange:
    """
    The exchange of one run.

    Args:
        experiment (`str`): The experiment that the run makes.
        ask (`Callable[[dict], dict]`): Gives the helper's answer to a call, both in the form of `wire`.
    """

    def __init__(self, experiment: str, ask: Callable[[dict], dict]):
        self.experiment = experiment
        self.ask = ask
        self.references = DataOnly()
        self.unfit = ""  # why, as the control found, experiments show nothing
        self.asked: list[tuple[dict, str]] = []  # during the control, the calls and the texts of the answers
        self.results: dict[str, str] = {}  # these by the texts of the calls
        self.entries = 0  # calls of the entry point
        self.given_out = 0  # values since the last one of these
        self.first: Any = _NOTHING  # of these
        self.replayed: list[Any] = []  # those during the first one
        self.number = -1  # of the last value
        self.values: list[Any] = []  # different ones, in the order in which the helper gave them
        # The arguments of the last call, and after them those of the one before, each before and after the call
        self.arguments: dict[tuple[bool, int], tuple[Any, Any]] = {}
        self.template: _Template | None = None  # of the helper's values

    def call(self, /, *args: Any, **kwargs: Any) -> Any:
        """
        Calls the helper. Returns what the program gets for its value, and changes the arguments as the program finds
        them changed.
        """
        question = wire.encode_call(0, args, kwargs, self.references)
        before, copies = (_read(question, self.references) for _ in range(2))
        after = copies if self.experiment in WITHOUT_CHANGES else [*args, *kwargs.values()]
        if self.experiment in ("echo", "control"):
            self._remember(_forms(before, kwargs), _forms(after, kwargs))
        answer = self.ask(question)
        if self.experiment == "control":
            self._compare(question, answer)
        if "raised" in answer:
            if self.experiment in ("nothing", "echo"):
                return self._filled() if self.experiment == "echo" else None
            raise wire.rebuild(answer["raised"], {})
        return self._give(wire.accept(answer, after, self.references))

    def enter(self, call: Callable[[], Any], args: Sequence, kwargs: Mapping) -> Any:
        """Calls the entry point, as a check does. Returns what the check gets."""
        if self.experiment == "alone":
            answer = self.ask(wire.encode_call(0, args, {**kwargs}, self.references))
            if "raised" in answer:
                raise wire.rebuild(answer["raised"], {})
            value = wire.accept(answer, (*args, *kwargs.values()), self.references)
            return args[0] if value is None and args else value  # the helper may have changed its argument
        self.entries += 1
        self.first, self.given_out = _NOTHING, 0
        value = call()
        if self.unfit:
            raise GiveUp
        if self.experiment not in ("first", "control") or self.first is _NOTHING:
            return value
        value = list(value) if isinstance(value, Iterator) else value
        instead = _in_form_of(value, self.first)
        return instead if self.experiment == "first" else value

    def _compare(self, question: dict, answer: dict) -> None:
        """Keeps an answer. Looks for two for the same arguments, which only a helper that keeps a state gives."""
        text = json.dumps(answer)  # in which values that are equal in Python, such as 0.0 and -0.0, differ
        self.asked.append((question, text))
        if self.results.setdefault(json.dumps(question), text) != text:
            self.unfit = STATE
        if len(self.asked) > MAX_CALLS:
            self.unfit = "the helper is called too often to compare its answers"

    def repeat(self) -> None:
        """
        Makes all calls of the control again, in the opposite order and then in the first one. A helper that keeps a
        state gives other answers: no call is then at the place where it was.
        """
        calls = (*reversed(self.asked), *self.asked)
        self.unfit = "" if all(json.dumps(self.ask(question)) == text for question, text in calls) else STATE

    def _remember(self, before: list, after: list) -> None:
        """Keeps the arguments of a call."""
        last = {(True, k): both for (is_last, k), both in self.arguments.items() if not is_last}
        self.arguments = {(False, k): both for k, both in enumerate(zip(before, after, strict=True))} | last

    def _give(self, value: Any) -> Any:
        """Returns what the program gets in place of a value."""
        is_iterator = isinstance(value, Iterator)
        value = list(value) if is_iterator else value
        self.number += 1
        others = [known for known in self.values if _differ(known, value)]
        if len(others) == len(self.values) < MAX_VALUES:
            self.values.append(value)
        if self.experiment in ("echo", "control"):
            self._learn(value[: MAX_PARTS // 2] if is_iterator else value)  # it may have no end
        self.given_out += 1
        if self.entries == 1:
            self.replayed.append(value)
        given = self._replaced(value, others)
        if self.first is _NOTHING:
            self.first = given
        return iter(given if isinstance(given, Iterable) else ()) if is_iterator else given

    def _replaced(self, value: Any, others: list) -> Any:
        """Returns what takes the place of a value in the experiment. `others` are known ones that differ from it."""
        if self.experiment in CONSTANT:
            rank = CONSTANT.index(self.experiment)
            return self.values[rank] if len(self.values) > rank else None
        if self.experiment == "replay" and self.entries > 1:
            return self.replayed[self.given_out - 1] if self.given_out <= len(self.replayed) else None
        if self.experiment == ("another", "swapped")[self.number.bit_count() % 2]:
            # Neither at every call nor at every second one, because values that are exchanged regularly would stay
            # equal wherever they were equal before
            return others[-1] if others else _altered(value)
        if self.experiment in ("echo", "control"):
            filled = self._filled()
            return filled if self.experiment == "echo" else value
        return None if self.experiment in ("nothing", "mute") else value

    def _learn(self, value: Any) -> None:
        """
        Keeps the first value that contains arguments as a template. Where several arguments fit, later values decide.
        """
        with contextlib.suppress(ValueError, TypeError):  # the value is none; see `_Template`
            # A constant beside an argument of this call, such as True, may equal one of the call before
            template = _Template(value, {place: both for place, both in self.arguments.items() if not place[0]})
            template = template if template.places else _Template(value, self.arguments)
            places = template.places
            if places and (self.template is None or len(places) < len(self.template.places)):
                self.template = template
            elif self.template and len(places) == len(self.template.places):
                common = [one & other for one, other in zip(places, self.template.places, strict=True)]
                self.template.places = common if all(common) else self.template.places

    def _filled(self) -> Any:
        """
        Returns the known template with the present arguments; the first of them if there is no template that fits,
        None if there are none.
        """
        arguments = {place: argument for place, (argument, _) in self.arguments.items()}
        first = arguments.get((False, 0))
        with contextlib.suppress(LookupError, TypeError, ValueError):  # the present arguments do not fit
            if self.template:
                return self.template.filled(arguments)
        return None if first is _NOTHING else first


class _Template(pickle.Pickler):
    """
    A value with places for the arguments. Raises `ValueError` or `TypeError` for values that have too many parts, or
    cannot be pickled.
    """

    def __init__(self, value: Any, arguments: dict[tuple[bool, int], tuple[Any, Any]]):
        self.file = io.BytesIO()
        super().__init__(self.file)
        self.arguments = arguments
        self.places: list[set[tuple[bool, int]]] = []  # the arguments that fit, in the order of the value's parts
        self.parts = 0
        self.dump(value)

    def persistent_id(self, part: Any) -> int | None:
        self.parts += 1
        if self.parts > MAX_PARTS:
            raise ValueError("no template")
        equal = {k for k, both in self.arguments.items() if not all(_differ(part, argument) for argument in both)}
        self.places += [equal] if equal else []
        return len(self.places) - 1 if equal else None

    def filled(self, arguments: dict[tuple[bool, int], Any]) -> Any:
        """Returns the value with other arguments."""
        reading = pickle.Unpickler(io.BytesIO(self.file.getvalue()))

        def load(place: int) -> Any:
            fitting = [arguments[k] for k in sorted(self.places[place]) if arguments.get(k, _NOTHING) is not _NOTHING]
            return fitting[0]

        reading.persistent_load = load  # type: ignore[method-assign]
        return reading.load()


def _read(question: dict, references: DataOnly) -> list:
    """Returns the arguments of a call, positional ones first, with lists in place of iterators."""
    args, kwargs = wire.decode_call(question, references)
    return [list(one) if isinstance(one, Iterator) else one for one in (*args, *kwargs.values())]


def _forms(arguments: list, names: Collection[str]) -> list:
    """
    Returns the arguments of a call, of which the last ones have names, each with what it contains if that is a single
    value, and with the tuple of a list or the list of a tuple. The first argument, if there is one, is the first. Then
    come all of them together, those with names, and the others, each followed by all from there on.
    """
    named = dict(zip(names, arguments[len(arguments) - len(names) :], strict=True))
    forms = [*(arguments[:1] or [_NOTHING]), tuple(arguments), named]
    forms += [x for k in range(1, len(arguments)) for x in (arguments[k], tuple(arguments[k:])[:MAX_REST])]
    other: dict[type, Callable] = {list: tuple, tuple: list}
    return [x for one in forms for x in (one, _unwrapped(one), other.get(type(one), lambda _: _NOTHING)(one))]


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


def _altered(value: Any) -> Any:
    """Returns a different value, of the same type if that is simple."""
    kind = type(value)
    if kind is bool:
        return not value
    if kind in (int, float, complex, fractions.Fraction):
        other = -3 * value - 1  # changes sign and parity; applied twice, it does not give the old value
        return other if other != value else value + 1
    if kind in _EMPTY:
        return kind() if value else kind(_EMPTY[kind])
    return "?" if value is None else None
