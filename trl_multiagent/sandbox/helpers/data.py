"""Data: values that consist of numbers, texts and the like, and contain no code of the program. Agents may pass it to each other."""

import builtins
import collections
import contextlib
import copy
import copyreg
import datetime
import decimal
import fractions
import io
import pickle
import re
import types
from typing import Any


MAX_DATA = 1_000_000  # parts of a value
ATOMS = (int, float, bool, str, type(None))
DICTIONARIES = (dict, collections.Counter, collections.OrderedDict, collections.defaultdict)
CONTAINERS = (list, tuple, set, frozenset, collections.deque, *DICTIONARIES)
# Values that cannot change, besides `ATOMS`
_FIXED: tuple[type, ...] = (complex, bytes, bytearray, range)
_FIXED += (fractions.Fraction, decimal.Decimal, re.Pattern, re.Match)
_FIXED += (datetime.date, datetime.datetime, datetime.time, datetime.timedelta, datetime.timezone)
# Those of them that contain other values
_INSIDE = {"Fraction": ("numerator", "denominator"), "Match": ("string",), "Pattern": ("pattern",)}
_INSIDE |= dict.fromkeys(("datetime", "time"), ("tzinfo",))
_BUILTINS = {id(value) for value in vars(builtins).values()}
_VIEWS: tuple[type, ...] = (type({}.keys()), type({}.values()), type({}.items()))
# Of what values consist that cannot be pickled
_REDUCED: Any = dict.fromkeys(_VIEWS, lambda view: (list, ([*view],)))
_REDUCED[re.Match] = lambda found: (list, ([found.re, found.string, found.pos, found.endpos, found.regs],))
_REDUCED = copyreg.dispatch_table | _REDUCED
LIST_ITERATOR: Any = type(iter([]))


def is_data(value: Any) -> bool:
    """Returns whether a value consists of numbers, texts and the like in built-in containers, so that it contains no code of the program."""
    stack: list[Any] = [value]
    seen: set[int] = set()
    while stack and len(seen) < MAX_DATA:
        part = stack.pop()
        kind = type(part)
        if kind in ATOMS or id(part) in seen:
            continue
        seen.add(id(part))
        if kind in _FIXED:
            stack += (getattr(part, name) for name in _INSIDE.get(kind.__name__, ()))
        elif kind in CONTAINERS or kind in _VIEWS:
            stack += part
            stack += part.values() if kind in DICTIONARIES else ()
            stack += [part.default_factory] if kind is collections.defaultdict else ()
        elif kind is LIST_ITERATOR:
            stack += copy.copy(part)
        elif kind is types.BuiltinFunctionType:  # such as `len`; a method such as `[].append` belongs to an object
            if not isinstance(part.__self__, types.ModuleType):
                return False
        elif id(part) not in _BUILTINS:
            return False
    return not stack


def bytes_of(value: Any) -> bytes | None:
    """Returns a value as bytes, whether or not some of its parts are the same object; None if that is not possible."""
    file = io.BytesIO()
    pickler = pickle.Pickler(file)
    pickler.fast = True
    pickler.dispatch_table = _REDUCED
    with contextlib.suppress(Exception):
        pickler.dump(value)
        return file.getvalue()
    with contextlib.suppress(Exception):  # it contains itself
        return repr(value).encode()
    return None
