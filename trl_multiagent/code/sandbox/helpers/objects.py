"""
Objects of a program, as test methods see them. What a stand-in is asked is a call of one of `OPERATIONS`, whose
numbers both processes know; what it defines itself, the program cannot change.
"""

import itertools
import operator
from collections.abc import Callable, Iterator
from typing import Any


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
    *(getattr, setattr, delattr, len, operator.getitem, operator.setitem, operator.delitem),
    *(_items, str, next, _enter, _leave),
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
