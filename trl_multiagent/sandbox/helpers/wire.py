"""
Messages and values that cross a process boundary of the sandbox.

A message is a 4-byte little-endian length and that many bytes of JSON. Numbers, strings, lists, True, False and None stand
for themselves; every other value is an object with one key, the name of its type, and a list of parts. The reader rebuilds
exact built-in types and nothing else, so no method written by a candidate ever reaches the process that decides.
"""

import builtins
import collections.abc
import datetime
import decimal
import fractions
import json
import operator
import os
import struct


MAX_DEPTH = 64
MAX_NODES = 200_000  # elements of one value, all levels together
MAX_ANSWER = 4 << 20  # bytes of a message written by a candidate
MAX_SOURCE = 1 << 20  # characters of a program
MAX_JOB = 64 << 20  # bytes of one written by trusted code
MAX_TEXT = 300  # characters of an exception's message
_loads = json.JSONDecoder().decode
_dumps = json.JSONEncoder(separators=(",", ":"), check_circular=False).encode
_TYPES = {name: value for name, value in vars(builtins).items() if isinstance(value, type)}
for _name in ("BaseException", "BaseExceptionGroup", "GeneratorExit", "KeyboardInterrupt", "SystemExit"):
    _TYPES.pop(_name, None)  # raised by checks, these would end more than a check
_MAPPINGS = (dict, collections.Counter, collections.OrderedDict)
_SAFE_INTEGER = 1 << 256  # larger ones travel in hexadecimal, which has no limit on the number of digits


def _text(read, make):
    def build(parts):
        if [type(part) for part in parts] != [str]:
            raise ValueError("not a text")
        return make(parts[0])

    return lambda value: [read(value)], build


def _fields(kind, *names):
    return lambda value: [getattr(value, name) for name in names], lambda parts: kind(*parts)


def _mapping(kind):
    def build(parts):
        return kind(dict(zip(parts[::2], parts[1::2], strict=True)))

    return lambda value: [part for item in value.items() for part in item], build


_PLAIN = {  # type: (its parts, the value that they make)
    str: _text(str.__str__, str),
    float: _text(float.__float__, float),
    int: _text(hex, lambda text: int(text, 16)),
    **{kind: (list, kind) for kind in (list, tuple, set, frozenset, collections.deque)},
    **{kind: _mapping(kind) for kind in _MAPPINGS},
    type({}.keys()): (list, lambda parts: dict.fromkeys(parts).keys()),
    type({}.values()): (list, lambda parts: dict(enumerate(parts)).values()),
    type({}.items()): (list, lambda parts: dict(parts).items()),
    bytes: _text(bytes.hex, bytes.fromhex),
    bytearray: _text(bytearray.hex, bytearray.fromhex),
    complex: _fields(complex, "real", "imag"),
    range: _fields(range, "start", "stop", "step"),
    decimal.Decimal: _text(str, decimal.Decimal),
    fractions.Fraction: (
        fractions.Fraction.as_integer_ratio,
        lambda parts: fractions.Fraction(*map(operator.index, parts)),
    ),
    **{kind: _text(kind.isoformat, kind.fromisoformat) for kind in (datetime.datetime, datetime.date, datetime.time)},
    datetime.timedelta: _fields(datetime.timedelta, "days", "seconds", "microseconds"),
}
_BUILD = {kind.__name__: build for kind, (_, build) in _PLAIN.items()} | {
    "iterator": iter,
    "type": lambda parts: _TYPES[parts[0]],
    "object": lambda parts: Opaque(),
}
MUTABLE = (list, set, bytearray, collections.deque, *_MAPPINGS)  # an argument's changes travel back
_RAISABLE = {name: kind for name, kind in _TYPES.items() if issubclass(kind, Exception)}
for _name in [name for name in _RAISABLE if name.startswith("Unicode") or "Group" in name]:
    del _RAISABLE[_name]  # a message alone does not make one


class WireError(Exception):
    """A message or a value that breaks the format."""


class Opaque:
    """Stands for an object that is not plain data: true, equal to nothing but itself."""


def pack(message) -> bytes:
    """The bytes that carry `message`, made of JSON's own types."""
    body = _dumps(message).encode("ascii")
    return struct.pack("<I", len(body)) + body


class Inbox:
    """Collects received bytes and gives back whole messages."""

    def __init__(self, limit: int):
        self.limit = limit
        self.data = bytearray()

    def next(self):
        """The next message, or None while it is incomplete."""
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

    def read(self, fd: int):
        """Waits for the next message; this process ends when the other side is gone."""
        while (message := self.next()) is None:
            chunk = os.read(fd, 1 << 16)
            if not chunk:
                os._exit(0)
            self.data += chunk
        return message


def encode(value, functions: list, note=None):
    """
    The value as JSON can carry it. Functions are appended to `functions` and travel as their index there; `note` is told of
    values that pretend to be equal to others.
    """
    left = MAX_NODES

    def plain(value, depth=0):
        nonlocal left
        kind = type(value)
        left -= len(value) >> 4 if kind is str else 1
        if left < 0 or depth > MAX_DEPTH:
            raise RuntimeError("the value is too large or nested too deeply to leave the sandbox")
        if kind in (str, float, bool) or value is None or (kind is int and -_SAFE_INTEGER < value < _SAFE_INTEGER):
            return value
        if kind is list:
            return [plain(item, depth + 1) for item in value]
        if kind is type and _TYPES.get(value.__name__) is value:
            return {"type": [value.__name__]}
        written_here = [base for base in kind.__mro__ if base.__module__ in ("solution", "unittest.mock")]
        if note and any(name in vars(base) for base in written_here for name in ("__eq__", "__lt__", "__sub__")):
            note("own equality")
        for base in kind.__mro__:  # a subclass travels as the plain type that it extends
            if base in _PLAIN:
                return {base.__name__: [plain(part, depth + 1) for part in _PLAIN[base][0](value)]}
        if callable(value):
            functions.append(value)
            return {"function": [len(functions) - 1]}
        if isinstance(value, collections.abc.Iterator):
            return {"iterator": [plain(item, depth + 1) for item in value]}
        return {"object": []}

    return plain(value)


def encode_call(function: int, args, kwargs, functions: list):
    """The message that asks the other side to call its function of that number."""
    named = {name: encode(value, functions) for name, value in kwargs.items()}
    return {"call": function, "args": [encode(value, functions) for value in args], "kwargs": named}


def decode_call(message, function):
    """Positional and keyword arguments of a call."""
    args = [decode(value, function) for value in message["args"]]
    return args, {name: decode(value, function) for name, value in message["kwargs"].items()}


def describe(error):
    """What travels of an exception: its name, its nearest built-in base, its message, whatever its methods do."""
    kind = type(error)
    base = next((base.__name__ for base in kind.__mro__ if base in _RAISABLE.values()), "Exception")
    try:
        # the message as it was given: a `KeyError` puts quotes around it
        message = error.args[0] if len(error.args) == 1 and type(error.args[0]) is str else str(error)
        return [kind.__name__, base, str.__str__(message)[:MAX_TEXT]]
    except BaseException as failure:
        return [kind.__name__ if isinstance(failure, Exception) else type(failure).__name__, base, ""]


def rebuild(raised):
    """An exception of that name, base and message."""
    if type(raised) is not list or [type(part) for part in raised] != [str, str, str]:
        raise WireError("an exception that breaks the format")
    name, base, message = raised
    kind = _RAISABLE.get(base, Exception)
    if name != base and name.isascii() and name.isidentifier():
        kind = type(name[:80], (kind,), {})
    return kind(message[:MAX_TEXT])


def decode(data, function):
    """The value that `encode` wrote; `function(n)` makes the stand-in for function number n of the other side."""
    try:
        return _decode(data, function)
    except (TypeError, ValueError, KeyError, IndexError, ArithmeticError, RecursionError) as error:
        raise WireError("a value that breaks the format") from error


def _decode(data, function):
    kind = type(data)
    if kind is not list and kind is not dict:
        return data
    if kind is list:
        return [_decode(item, function) for item in data]
    ((name, parts),) = data.items()
    if type(parts) is not list:
        raise WireError("a value that breaks the format")
    if name == "function":
        return function(int(*parts))
    return _BUILD[name]([_decode(part, function) for part in parts])
