"""
The values that a setting may have.

Types come from annotations. Everything else is declared beside the setting as a literal dict of [`Limits`]: in the ClassVar `limits`
of a configuration class, which may also limit inherited arguments, and in [`~environments.task.setting`] for a section. Recipes read
the literals from the source and check them before anything slow is imported; the configuration classes check them again.
"""

import dataclasses
import math
import operator
import re
import types
import typing
from collections.abc import Iterator, Mapping
from enum import Enum
from numbers import Integral, Real
from typing import Any, TypedDict

from pydantic import ConfigDict, TypeAdapter, ValidationError


class Limits(TypedDict, total=False):
    """
    The limits of one setting's values. Numbers of lists and dicts are checked one by one.

    Args:
        gt, ge, lt, le (`float`): Bounds of a number: greater than, at least, less than, at most.
        also (`tuple`): Numbers outside of the bounds that are allowed too.
        ne (`float`): A number that is not allowed.
        choices (`tuple`): The only allowed values.
        keys (`tuple`): The only allowed keys of a dict.
        required (`str`): Why the value must not be null.
        refused (`str`): Why only the default is allowed.
        no_effect (`str`): Why the setting has no effect.
        needs (`str`): Another setting of the same class, without which this one has no effect.
        differs (`str`): What is different from the library that defines the setting.
    """

    gt: float
    ge: float
    lt: float
    le: float
    ne: float
    also: tuple
    choices: tuple
    keys: tuple
    required: str
    refused: str
    no_effect: str
    needs: str
    differs: str


BOUNDS = {
    "gt": (operator.gt, "greater than"),
    "ge": (operator.ge, "at least"),
    "lt": (operator.lt, "less than"),
    "le": (operator.le, "at most"),
    "ne": (operator.ne, "other than"),
}
LARGEST_INTEGER = 2**63 - 1


def problem_with(value: Any, limits: Mapping[str, Any], default: Any = None) -> str | None:
    """
    Checks the value of a setting. Numbers must be finite, and texts must not be blank.

    Args:
        value (`Any`): The value.
        limits ([`Limits`]): The setting's limits.
        default (`Any`, *optional*): The setting's default value.

    Returns:
        `str` or `None`: What is wrong, as the end of a sentence that starts with the name of the setting.
    """
    if value is None and "required" in limits:
        return f"is null, but {limits['required']}: give it a value."
    if value is None or (value == default and type(value) is type(default)):
        return None
    if "refused" in limits:
        same = value == default or not (asks_for_something(value) or asks_for_something(default))
        return None if same else f"is {short(value)}, which is not supported: {limits['refused']}."
    if isinstance(value, str) and "keys" in limits and not value.lstrip().startswith("{"):  # TRL also takes JSON
        return f"is {short(value)}, it must be a mapping with keys such as {limits['keys'][0]!r}."
    if isinstance(value, Mapping) and "keys" in limits:
        unknown = [key for key in value if key not in limits["keys"]]
        if unknown:
            return f"has {short(unknown[0])}, it may only have {', '.join(map(repr, limits['keys']))}."
    for key, x in leaves(value):
        where = "" if key is None else f" for {key!r}"
        if isinstance(x, float) and not math.isfinite(x):
            return f"is {x}{where}, it must be a finite number."
        if isinstance(x, int) and abs(x) > LARGEST_INTEGER:
            return f"is {short(x)}{where}, which is too large."
        if isinstance(x, str) and not x.strip():
            return f"is {x!r}{where}, a blank text: give it a value, or leave it out."
        if "choices" in limits and not any(x is y or (x == y and type(x) is not bool) for y in limits["choices"]):
            return f"is {short(x)}{where}, it must be {describe_limits(limits)}."
        if BOUNDS.keys() & limits.keys() and x not in limits.get("also", ()):
            is_number = isinstance(x, Real) and not isinstance(x, bool)
            if not is_number or not all(BOUNDS[name][0](x, limits[name]) for name in BOUNDS if name in limits):
                return f"is {short(x)}{where}, it must be {describe_limits(limits)}."
    return None


def asks_for_something(value: Any) -> bool:
    """Whether a value switches something on. Parsers of command lines read `no` as False."""
    return bool(value) and value != "no"


def leaves(value: Any, key: Any = None) -> Iterator[tuple[Any, Any]]:
    """The values in nested lists and dicts, without `None`, each after the innermost key of a dict that leads to it."""
    if isinstance(value, Mapping):
        for name, x in value.items():
            yield from leaves(x, name)
    elif isinstance(value, list | tuple):
        for x in value:
            yield from leaves(x, key)
    elif value is not None:
        yield key, value


def describe_limits(limits: Mapping[str, Any]) -> str:
    """The allowed values in words: `greater than 0 and at most 1`, `one of 'align', 'cross'`."""
    if "choices" in limits:
        return f"{'one of ' * (len(limits['choices']) > 1)}{', '.join(map(repr, limits['choices']))}"
    bounds = " and ".join(f"{words} {limits[name]}" for name, (_, words) in BOUNDS.items() if name in limits)
    return " or ".join([bounds, *map(str, limits.get("also", ()))])


def short(value: Any) -> str:
    """A value as one short line for a message."""
    if isinstance(value, int) and abs(value) > LARGEST_INTEGER:
        return f"an integer of {value.bit_length()} bits"
    text = " ".join(repr(value).split())
    return text if len(text) <= 80 else f"{text[:80]}..."


# Configuration classes


def limits_of(cls: type) -> dict[str, Limits]:
    """The limits of the arguments of a configuration class, with those of its base classes."""
    limits: dict[str, Limits] = {}
    for base in reversed(cls.__mro__):
        limits |= vars(base).get("limits", {})
    return limits


def check_arguments(args: Any) -> None:
    """
    Checks the arguments in an instance of a configuration class.

    Raises:
        ValueError: a value is not allowed.
    """
    limits, hints = limits_of(type(args)), typing.get_type_hints(type(args))
    for field in dataclasses.fields(args):
        value, own = getattr(args, field.name), limits.get(field.name, {})
        default = None if field.default is dataclasses.MISSING else field.default
        problem = problem_with(value, own, default)
        options = typing.get_args(hints[field.name]) or (hints[field.name],)
        if problem is None and {"choices", *BOUNDS} & own.keys():
            if value is None and types.NoneType not in options:
                problem = f"is None, it must be {describe_limits(own)}."
            elif (
                int in options and float not in options and not isinstance(value, Integral | None) and value != default
            ):
                problem = f"is {short(value)}, it must be an integer."
        if problem is not None:
            raise ValueError(f"`{field.name}` {problem}")


# Types


def read_value(value: Any, hint: Any) -> Any:
    """
    Checks the type of a value that comes from YAML or a command line. A single value becomes a list where only a list is allowed.

    Raises:
        TypeError: the value does not have the type of the hint.
    """
    if value is False and any(isinstance(option, type) and issubclass(option, Enum) for option in options_of(hint)):
        return "no"  # YAML reads a bare `no` as false
    if (
        float in options_of(hint)
        and isinstance(value, str)
        and re.fullmatch(r"[+-]?(\d+\.?\d*|\.\d+)[eE][+-]?\d+", value)
    ):
        return float(value)  # YAML reads 1e-5, without a point, as text
    adapter = TypeAdapter(hint, config=ConfigDict(strict=True, arbitrary_types_allowed=True))
    for candidate in [value] if isinstance(value, list | dict | None) else [value, [value]]:
        try:
            adapter.validate_python(candidate)
        except ValidationError:
            continue
        return candidate
    raise TypeError


def options_of(hint: Any) -> tuple[Any, ...]:
    """The types in a union, or the type itself."""
    return typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)


def describe_type(hint: Any) -> str:
    """A type hint in words: `int or null`."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(map(describe_type, arguments))
    if origin is typing.Literal:
        return ", ".join(map(repr, arguments))
    if origin is not None:
        return f"{origin.__name__}[{', '.join(map(describe_type, arguments))}]"
    return "null" if hint is types.NoneType else hint.__name__
