"""
Frames and values that cross a process boundary of the sandbox.

A frame is a 4-byte little-endian length and that many bytes of JSON. A value crosses as JSON: what JSON has stands for
itself, every other plain type is an object with one key, its tag. The reader rebuilds exact built-in types and nothing
else, so no method written by a candidate ever reaches the process that decides.
"""

import builtins
import collections
import datetime
import decimal
import fractions
import json
import struct


MAX_DEPTH = 64
MAX_NODES = 200_000  # elements of one value, all levels together
MAX_FRAME = 1 << 20  # bytes of one answer
MAX_JOB = 64 << 20  # bytes of a job or a question, both written by trusted code

_loads = json.JSONDecoder().decode
_dumps = json.JSONEncoder(separators=(",", ":"), check_circular=False).encode
_BUILTIN_TYPES = {name: value for name, value in vars(builtins).items() if isinstance(value, type)}
_SAFE_INTEGER = 1 << 256  # larger ones travel in hexadecimal, which has no limit on the number of digits


class WireError(Exception):
    """A frame or a value that breaks the format."""


class Unsendable(ValueError):
    """The value is too large."""


def pack(message) -> bytes:
    """The frame that carries `message`, made of JSON's own types."""
    body = _dumps(message).encode("ascii")
    return struct.pack("<I", len(body)) + body


class Opaque:
    """Stands for an object that is not plain data: true, equal to nothing but itself, without attributes."""

    __slots__ = ()


class Inbox:
    """Collects received bytes and gives back whole messages."""

    def __init__(self, limit: int):
        self.limit = limit
        self.data = bytearray()

    def next(self):
        """The next message, or None while it is incomplete."""
        if len(self.data) < 4:
            return None
        (size,) = struct.unpack_from("<I", self.data)
        if size > self.limit:
            raise WireError(f"a frame of {size} bytes, the limit is {self.limit}")
        if len(self.data) < 4 + size:
            return None
        body = bytes(self.data[4 : 4 + size])
        del self.data[: 4 + size]
        try:
            return _loads(body.decode("ascii"))
        except (ValueError, RecursionError) as error:
            raise WireError("a frame that is not JSON") from error


class Encoder:
    """
    Turns values into what JSON can carry.

    Args:
        functions (`list`): Functions that a value holds are appended; they travel as their index in this list.
        note (`Callable[[str], None]`, *optional*): Is told of values that pretend to be equal to others.
    """

    def __init__(self, functions: list, note=None):
        self.functions = functions
        self.note = note
        self.left = MAX_NODES

    def encode(self, value, depth: int = 0):
        kind = type(value)
        self.left -= len(value) >> 4 if kind is str or kind is bytes or kind is bytearray else 1
        if self.left < 0 or depth > MAX_DEPTH:
            raise Unsendable("the value is too large or nested too deeply to leave the sandbox")
        if kind is str:
            return value
        if kind is int:
            return value if -_SAFE_INTEGER < value < _SAFE_INTEGER else {"int": hex(value)}
        if value is None or kind is bool or kind is float:
            return value
        if kind is list:
            return [self.encode(item, depth + 1) for item in value]
        if kind is tuple or kind is set or kind is frozenset or kind is collections.deque:
            return {kind.__name__: [self.encode(item, depth + 1) for item in value]}
        if kind is dict:
            return {"dict": [[self.encode(k, depth + 1), self.encode(v, depth + 1)] for k, v in value.items()]}
        if kind is bytes or kind is bytearray:
            return {kind.__name__: value.hex()}
        if kind is complex:
            return {"complex": [value.real, value.imag]}
        if kind is range:
            return {"range": [self.encode(part) for part in (value.start, value.stop, value.step)]}
        if kind is decimal.Decimal:
            return {"Decimal": str(value)}
        if kind is fractions.Fraction:
            return {"Fraction": [self.encode(value.numerator), self.encode(value.denominator)]}
        if kind is datetime.datetime or kind is datetime.date or kind is datetime.time:
            return {kind.__name__: value.isoformat()}
        if kind is datetime.timedelta:
            return {"timedelta": [value.days, value.seconds, value.microseconds]}
        if kind is type and _BUILTIN_TYPES.get(value.__name__) is value:
            return {"type": value.__name__}
        return self._encode_other(value, kind, depth)

    def _encode_other(self, value, kind, depth):
        written_here = [base for base in kind.__mro__ if base.__module__ in ("solution", "unittest.mock")]
        if self.note and any(name in vars(base) for base in written_here for name in _COMPARING):
            self.note("own equality")
        # a subclass travels as the plain value it extends, read by the plain type's own methods
        for base, plain in _PLAIN_PARTS.items():
            if issubclass(kind, base):
                return self.encode(plain(value), depth)
        if callable(value):
            self.functions.append(value)
            return {"function": len(self.functions) - 1}
        if hasattr(kind, "__next__") or kind in _VIEWS:
            return {"iterator": [self.encode(item, depth + 1) for item in value]}
        return {"object": None}


_PLAIN_PARTS = {
    int: lambda value: int.__add__(value, 0),
    float: lambda value: float.__add__(value, 0.0),
    str: str.__str__,
    list: lambda value: list(list.__iter__(value)),
    tuple: lambda value: tuple(tuple.__iter__(value)),
    dict: lambda value: dict(dict.items(value)),
    set: lambda value: set(set.__iter__(value)),
    frozenset: lambda value: frozenset(frozenset.__iter__(value)),
}
_COMPARING = ("__eq__", "__lt__", "__sub__", "__abs__")
_VIEWS = (type({}.keys()), type({}.values()), type({}.items()))


def decode(data, function):
    """
    Rebuilds a value.

    Args:
        data: What JSON gave.
        function (`Callable[[int], Callable]`): Makes the stand-in for function number n of the other side.

    Raises:
        WireError: if `data` was not written by an `Encoder`.
    """
    try:
        return _decode(data, function, 0)
    except (TypeError, ValueError, KeyError, ArithmeticError, RecursionError) as error:
        raise WireError("a value that breaks the format") from error


def _decode(data, function, depth):
    kind = type(data)
    if kind is not list and kind is not dict:
        return data
    if depth > MAX_DEPTH:
        raise WireError("a value nested too deeply")
    if kind is list:
        return [_decode(item, function, depth + 1) for item in data]
    ((tag, content),) = data.items()
    if tag == "dict":
        return {_decode(k, function, depth + 1): _decode(v, function, depth + 1) for k, v in content}
    if tag == "function":
        return function(int(content))
    if tag == "type":
        return _BUILTIN_TYPES[content]
    if tag == "object":
        return Opaque()
    if type(content) is list:
        return _FROM_LIST[tag]([_decode(item, function, depth + 1) for item in content])
    if type(content) is str:
        return _FROM_TEXT[tag](content)
    raise WireError("a value that breaks the format")


_FROM_LIST = {
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
    "deque": collections.deque,
    "iterator": iter,
    "complex": lambda parts: complex(*parts),
    "range": lambda parts: range(*parts),
    "Fraction": lambda parts: fractions.Fraction(*parts),
    "timedelta": lambda parts: datetime.timedelta(*parts),
}
_FROM_TEXT = {
    "int": lambda text: int(text, 16),
    "bytes": bytes.fromhex,
    "bytearray": bytearray.fromhex,
    "Decimal": decimal.Decimal,
    "datetime": datetime.datetime.fromisoformat,
    "date": datetime.date.fromisoformat,
    "time": datetime.time.fromisoformat,
}
