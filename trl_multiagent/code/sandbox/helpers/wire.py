"""
Messages and values that cross a process boundary of the sandbox: a 4-byte little-endian length and that many bytes of
JSON.

Numbers, strings, lists, True, False and None stand for themselves; every other value is an object with one key, the
name of its type, and a list of parts. A value is read from the fields of its built-in type, not through methods that a
subclass may have changed. The reader checks the parts before it makes a value of them, so that this takes time in
proportion to the message's size, and makes exact built-in types and nothing else.
"""

import builtins
import collections
import json
import os
import re
import struct
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from fractions import Fraction
from typing import Any


MAX_DEPTH = 200
MAX_NODES = 2_000_000  # elements of one value, all levels together
MAX_ANSWER = 4 << 20  # bytes of a message written by a candidate
MAX_SOURCE = 1 << 20  # characters of a program
MAX_JOB = 64 << 20  # bytes of a message written by trusted code
MAX_TEXT = 4000  # characters of an exception's message
MAX_ARGS = 9  # arguments of an exception
MAX_INTEGER = 1 << 22  # bits of an integer
MAX_RATIO = 1 << 15  # bits of a fraction's numerator and denominator; their greatest common divisor is computed
MAX_BOUND = 1 << 10  # bits of a range's start, stop and step
MAX_DIGITS = 1 << 16  # digits of a decimal number
# Elements of a set, or keys of a dictionary, with the same hash. Each of them is compared with all others
MAX_SAME_HASH = 100
MAX_STAND_INS = 200_000  # objects of one program that the checks can use
_DECIMAL = re.compile(
    rf"-?(\d{{1,{MAX_DIGITS}}}(\.\d{{1,{MAX_DIGITS}}})?(E[+-]?\d{{1,5}})?|Infinity|s?NaN\d{{0,9}})", re.A | re.I
)
_SAFE_INTEGER = 1 << 256  # larger ones are sent in hexadecimal, which is read in linear time
_MAPPINGS = (dict, collections.Counter, collections.OrderedDict)
_ATOMS = (str, int, float, bool, type(None))


# How values of a type are sent: a function that gives a value's parts, and one that makes the value of them
Codec = tuple[Callable[[Any], Any], Callable[[list], Any]]


def _number(text: str) -> int:
    if len(text) > 80:
        raise ValueError("a number of too many digits")
    return int(text)


_loads = json.JSONDecoder(parse_int=_number).decode
_dumps = json.JSONEncoder(separators=(",", ":"), check_circular=False).encode


class TooLarge(ValueError):
    """A value that exceeds a limit and is not sent or read."""


def _typed(parts: list, *types: type) -> list:
    """Returns the parts, which must have these types exactly."""
    if [type(part) for part in parts] != [*types]:
        raise ValueError("parts of other types")
    return parts


def _one(kind: type, read: Callable, make: Callable) -> Codec:
    """Returns a value made of a single part."""
    return lambda value: [read(value)], lambda parts: make(*_typed(parts, kind))


def _items(kind: Any) -> Codec:
    return lambda value: [*kind.__iter__(value)], kind


def _hashed(parts: list) -> list:
    """Returns the parts, which will be keys or elements of a set. Raises if too many have the same hash."""
    if len(parts) > MAX_SAME_HASH and max(collections.Counter(map(hash, parts)).values()) > MAX_SAME_HASH:
        raise TooLarge("too many keys have the same hash")
    return parts


def _mapping(kind: Any) -> Codec:
    def build(parts: list) -> Any:
        return kind(dict(zip(_hashed(parts[::2]), parts[1::2], strict=True)))

    return lambda value: [part for item in kind.items(value) for part in item], build


def _at_most(bits: int, numbers: list[int]) -> list[int]:
    if any(int.bit_length(number) > bits for number in numbers):
        raise TooLarge(f"an integer of more than {bits} bits")
    return numbers


def _fields(kind: type, *names: str) -> Callable[[Any], list]:
    """Returns a function that reads these fields of a built-in type."""
    return lambda value: [getattr(kind, name).__get__(value) for name in names]


def _integers(bits: int, kind: type, *names: str) -> Codec:
    """Returns a value made of integers of so many bits, which are its fields with these names."""
    read = _fields(kind, *names)
    return lambda value: _at_most(bits, read(value)), lambda parts: kind(
        *_at_most(bits, _typed(parts, *[int] * len(parts)))
    )


def _hexadecimal(value: int) -> str:
    return hex(*_at_most(MAX_INTEGER, [value]))


def _integer(text: str) -> int:
    if len(text) > MAX_INTEGER // 4 + 4:
        raise TooLarge("an integer of too many digits")
    return int(text, 16)


def _decimal(text: str) -> Decimal:
    if not _DECIMAL.fullmatch(text):
        raise TooLarge(f"not a decimal number of at most {MAX_DIGITS} digits")
    return Decimal(text)


def _decimal_text(value: Decimal) -> str:
    text = Decimal.__str__(value)
    _decimal(text)
    return text


def _moment(kind: Any, length: int) -> Codec:
    """Returns a date and time, or a time, with its zone and fold. Its text without a zone has this length."""

    def read(value: Any) -> list:
        zone, offset = kind.tzinfo.__get__(value), kind.utcoffset(value)
        if type(zone) is not timezone:  # a class of the program or of zoneinfo, which has no data here
            zone = None if offset is None else timezone(offset)
        return [kind.isoformat(value, timespec="microseconds")[:length], zone, kind.fold.__get__(value)]

    def build(parts: list) -> Any:
        text, zone, fold = parts
        return kind.fromisoformat(text).replace(tzinfo=zone, fold=fold)

    return read, build


def _defaults(parts: list) -> collections.defaultdict:
    factory, *items = parts
    if factory is not None and not callable(factory):
        raise ValueError("not a factory")
    return collections.defaultdict(factory, _BUILD["dict"](items))


_FUNCTIONS = (types.FunctionType, types.MethodType, types.BuiltinFunctionType)
_PLAIN: dict[type, Codec] = {  # type: (its parts, the value that they make)
    str: _one(str, str.__str__, str),
    float: _one(float, float.__float__, float),
    int: _one(str, _hexadecimal, _integer),
    **{kind: _items(kind) for kind in (list, tuple, collections.deque)},
    **{kind: (_items(kind)[0], lambda parts, kind=kind: kind(_hashed(parts))) for kind in (set, frozenset)},
    **{kind: _mapping(kind) for kind in _MAPPINGS},
    collections.defaultdict: (
        lambda value: [collections.defaultdict.default_factory.__get__(value), *_PLAIN[dict][0](value)],
        _defaults,
    ),
    type({}.keys()): (list, lambda parts: dict.fromkeys(_hashed(parts)).keys()),
    type({}.values()): (list, lambda parts: dict(enumerate(parts)).values()),
    type({}.items()): (
        lambda value: _PLAIN[dict][0](dict(value)),
        lambda parts: _BUILD["dict"](parts).items(),
    ),
    bytes: _one(str, bytes.hex, bytes.fromhex),
    bytearray: _one(str, bytearray.hex, bytearray.fromhex),
    complex: (_fields(complex, "real", "imag"), lambda parts: complex(*_typed(parts, float, float))),
    range: _integers(MAX_BOUND, range, "start", "stop", "step"),
    slice: (_fields(slice, "start", "stop", "step"), lambda parts: slice(*parts)),
    Decimal: _one(str, _decimal_text, _decimal),
    Fraction: _integers(MAX_RATIO, Fraction, "numerator", "denominator"),
    date: _one(str, date.isoformat, date.fromisoformat),
    datetime: _moment(datetime, len("2024-01-02T03:04:05.000006")),
    time: _moment(time, len("03:04:05.000006")),
    timedelta: _integers(MAX_BOUND, timedelta, "days", "seconds", "microseconds"),
    timezone: (timezone.__getinitargs__, lambda parts: timezone(*parts)),
}
_BUILD: dict[str, Callable[[list], Any]] = {kind.__name__: build for kind, (_, build) in _PLAIN.items()} | {
    "iterator": iter,
    "type": lambda parts: _TYPES[_typed(parts, str)[0]],
}
# Exceptions of these modules keep their class, because checks name them. A program could end the checks with an
# exception of another module, such as unittest
_RAISING = """
    asyncio.exceptions binascii configparser _csv dataclasses decimal json.decoder _queue re statistics struct zipfile
    zlib
""".split()
# If a call changes an argument of these types, the new value is sent back
MUTABLE = (list, set, bytearray, collections.deque, collections.defaultdict, *_MAPPINGS)
_BUILTIN = {name: kind for name, kind in vars(builtins).items() if isinstance(kind, type)}
_RAISABLE = {name: kind for name, kind in _BUILTIN.items() if issubclass(kind, Exception) and "Group" not in name}
_TYPES = {name: kind for name, kind in _BUILTIN.items() if not issubclass(kind, BaseException)} | _RAISABLE
_TYPES |= {kind.__name__: kind for kind in (*_PLAIN, type(None))}


class WireError(Exception):
    """A message or a value that does not follow the format."""


class References:
    """
    Objects that are used by number: this side's, and stand-ins for the other side's. `stand_in` makes a stand-in
    for the other side's object of that number; its last argument says whether it is a function. `objects` says whether
    objects that are no functions can be used, too. Otherwise one arrives as a new `object`, equal to itself alone.
    """

    def __init__(self, stand_in: Callable[["References", int, bool], Any], objects: bool):
        self.objects = objects
        self._make = stand_in
        self._own: list[Any] = []  # which keeps them alive, so that the ids below stay theirs
        self._numbers: dict[int, int] = {}  # by the id of an own object
        self._stand_ins: dict[int, Any] = {}  # by the number of the other side's object
        self._foreign: dict[int, int] = {}  # the number, by the id of the stand-in

    def number(self, value: Any) -> int:
        """Returns the number of an object of this side."""
        if id(value) not in self._numbers:
            self._numbers[id(value)] = len(self._own)
            self._own.append(value)
        return self._numbers[id(value)]

    def own_object(self, number: Any) -> Any:
        """Returns the object of this side with that number, which the other side wrote."""
        if type(number) is not int or not 0 <= number < len(self._own):
            raise WireError("an object that was not given")
        return self._own[number]

    def stand_in(self, number: int, is_function: bool) -> Any:
        """Returns the stand-in for an object of the other side."""
        if number not in self._stand_ins:
            if len(self._stand_ins) >= MAX_STAND_INS:
                raise TooLarge(f"more than {MAX_STAND_INS} objects")
            self._stand_ins[number] = self._make(self, number, is_function)
            self._foreign[id(self._stand_ins[number])] = number
        return self._stand_ins[number]

    def foreign_number(self, value: Any) -> int | None:
        """Returns the other side's number of an object, if `value` is the stand-in for it."""
        return self._foreign.get(id(value))


class NotData(Exception):
    """
    Something other than data was to be passed, such as a function or an object of a class that a program defines.
    """


class DataOnly(References):
    """What two processes use that pass nothing but data to each other."""

    def __init__(self) -> None:
        super().__init__(lambda *_: None, True)

    def number(self, value: Any) -> int:
        raise NotData(f"agents can pass only data to each other, not {type(value).__name__!r}")

    def stand_in(self, number: int, is_function: bool) -> Any:
        raise NotData(f"agents can pass only data to each other, not {'functions' if is_function else 'objects'}")


def pack(message: Any) -> bytes:
    """Returns the bytes that carry `message`, made of JSON's own types."""
    body = _dumps(message).encode("ascii")
    return struct.pack("<I", len(body)) + body


class Inbox:
    """Collects received bytes and gives back whole messages."""

    def __init__(self, limit: int):
        self.limit = limit
        self.data = bytearray()

    def next(self) -> Any:
        """Returns the next message, or None while it is incomplete."""
        if len(self.data) < 4:
            return None
        end = 4 + struct.unpack_from("<I", self.data)[0]
        if end > self.limit:
            raise WireError(f"a message of {end} bytes, the limit is {self.limit}")
        if len(self.data) < end:
            return None
        body = self.data[4:end]
        del self.data[:end]
        try:
            return _loads(body.decode("ascii"))
        except (ValueError, RecursionError) as error:
            raise WireError("a message that is not JSON") from error

    def read(self, fd: int) -> Any:
        """Waits for the next message. Ends this process when the other side has closed the connection."""
        while (message := self.next()) is None:
            chunk = os.read(fd, 1 << 16)
            if not chunk:
                os._exit(0)
            self.data += chunk
        return message


def encode(value: Any, references: References) -> Any:
    """
    Returns the value as JSON's types. Functions in it get a number in `references`, and so do other objects if these
    can be used.
    """
    left = MAX_NODES

    def plain(value: Any, depth: int = 0) -> Any:
        nonlocal left
        kind = type(value)
        left -= len(value) >> 4 if kind is str else 1
        if left < 0 or depth > MAX_DEPTH:
            raise TooLarge("nested too deeply, or too many elements")
        if kind in (str, float, bool) or value is None or (kind is int and -_SAFE_INTEGER < value < _SAFE_INTEGER):
            return value
        if kind is list:
            return [plain(item, depth + 1) for item in value]
        if kind is type and _TYPES.get(value.__name__) is value:
            return {"type": [value.__name__]}
        for base in kind.__mro__:  # a subclass is sent as the plain type that it extends
            if base in _PLAIN:
                return {base.__name__: [plain(part, depth + 1) for part in _PLAIN[base][0](value)]}
        if (number := references.foreign_number(value)) is not None:
            return {"yours": [number]}
        if isinstance(value, _FUNCTIONS) if references.objects else callable(value):
            return {"function": [references.number(value)]}
        is_iterator = isinstance(value, Iterator) and not callable(value)  # such as a `MagicMock`
        if is_iterator and not (references.objects and kind.__module__ == "solution"):
            return {"iterator": [plain(item, depth + 1) for item in value]}
        return {"object": [references.number(value)] if references.objects else []}

    try:
        return plain(value)
    except TooLarge as error:
        raise RuntimeError(f"the value is too large or nested too deeply to leave the sandbox: {error}") from None


def encode_call(function: int, args: Sequence, kwargs: Mapping, references: References) -> dict[str, Any]:
    """Returns the message that asks the other side to call its function of that number."""
    named = {name: encode(value, references) for name, value in kwargs.items()}
    return {"call": function, "args": [encode(value, references) for value in args], "kwargs": named}


def answer_call(question: dict, references: References) -> dict[str, Any]:
    """
    Makes a call that the other side asks for. Returns what is sent of it: its value, and which of its arguments, in
    the order of the question, it changed.
    """
    args = [decode(value, references) for value in question["args"]]
    kwargs = {name: decode(value, references) for name, value in question["kwargs"].items()}
    value = references.own_object(question["call"])(*args, **kwargs)
    answer = {"value": encode(value, references), "changed": []}
    sent = (*question["args"], *question["kwargs"].values())
    for number, argument in enumerate((*args, *kwargs.values())):
        if type(argument) in MUTABLE and (new := encode(argument, references)) != sent[number]:
            answer["changed"].append([number, new])
    return answer


def accept(answer: dict, args: Sequence, kwargs: Mapping[str, Any], references: References) -> Any:
    """
    Makes the changes of the arguments of a call on this side, too, and returns its value, or raises what it raised.
    """
    if "raised" in answer:
        raise rebuild(answer["raised"], {})
    arguments, value = (*args, *kwargs.values()), decode(answer["value"], references)
    for number, new in answer["changed"]:
        target, after = arguments[number], decode(new, references)
        if type(after) not in MUTABLE or not isinstance(target, type(after)):
            raise WireError("an argument changed its type")
        target.clear()
        (target.update if isinstance(target, (dict, set)) else target.extend)(after)
    return value


def describe(error: BaseException) -> list:
    """
    Returns what is sent of an exception: its name and module, the name of its nearest built-in base, and its
    arguments. It never raises, whatever the exception's own methods do.
    """
    kind = type(error)
    base = next((base.__name__ for base in kind.__mro__ if base in _RAISABLE.values()), "Exception")
    try:
        args = error.args[:MAX_ARGS]
        if any(type(arg) not in _ATOMS or (type(arg) is int and abs(arg) >= _SAFE_INTEGER) for arg in args):
            args = [str.__str__(str(error))]
        args = (arg[:MAX_TEXT] if type(arg) is str else arg for arg in args)
        return [f"{kind.__module__}.{kind.__name__}", base, *args]
    except BaseException as failure:
        return [kind.__name__ if isinstance(failure, Exception) else type(failure).__name__, base]


def rebuild(raised: Any, names: dict[str, Any]) -> Exception:
    """
    Returns the exception that `describe` described. Its class is one of `names`, which the checks define, or built in,
    or of some modules of the standard library, or a new one with that name and base.
    """
    if type(raised) is not list or [type(part) for part in raised[:2]] != [str, str]:
        raise WireError("an exception that breaks the format")
    name, base, *args = raised
    if len(args) > MAX_ARGS or any(type(arg) not in _ATOMS for arg in args):
        raise WireError("an exception that breaks the format")
    module, _, name = name.rpartition(".")
    kind, library = _RAISABLE.get(base, Exception), sys.modules.get(module) if module in _RAISING else None
    own = names.get(name) or getattr(library, name, None)
    if isinstance(own, type) and issubclass(own, kind) and own.__new__ is kind.__new__:
        kind = own
    elif name != base and name.isidentifier():
        kind = type(name[:80], (kind,), {})
    error = kind.__new__(kind, *args)
    if isinstance(error, SyntaxError):  # `__init__` sets its text
        SyntaxError.__init__(error, *args[:1])
    return error


def decode(data: Any, references: References) -> Any:
    """Returns the value that `encode` wrote."""
    try:
        return _decode(data, references, 0)
    except (TypeError, ValueError, KeyError, IndexError, ArithmeticError, RecursionError) as error:
        raise WireError("a value that breaks the format") from error


def _decode(data: Any, references: References, depth: int) -> Any:
    kind = type(data)
    if kind is not list and kind is not dict:
        return data
    if depth > MAX_DEPTH:
        raise ValueError("nested too deeply")
    if kind is list:
        return [_decode(item, references, depth + 1) for item in data]
    ((name, parts),) = data.items()
    if type(parts) is not list:
        raise ValueError("no list of parts")
    if name == "yours":
        return references.own_object(*_typed(parts, int))
    if name == "function" or (name == "object" and references.objects):
        return references.stand_in(*_typed(parts, int), name == "function")
    if name == "object":
        return object()
    if name == "iterator" and depth and isinstance(references, DataOnly):
        raise NotData("agents cannot pass iterators within other values, because they can be read only once")
    return _BUILD[name]([_decode(part, references, depth + 1) for part in parts])
