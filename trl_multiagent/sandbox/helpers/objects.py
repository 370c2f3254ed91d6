"""
Objects of a program, as test methods see them. What a stand-in is asked is a call of one of `OPERATIONS`, whose numbers both processes
know; what it defines itself, the program cannot change.
"""

import itertools
import operator
from collections.abc import Callable, Iterator
from typing import Any


MAX_ITEMS = 100_000  # of one object that is iterated
# Other special attributes are looked up by libraries, which would believe what the program answers
READABLE = ("__name__", "__doc__", "__dict__")

# Called with the operation's number or that of a function, and with its arguments
Ask = Callable[[int, tuple, dict], Any]


def _items(value: Any) -> list:
    items = [*itertools.islice(value, MAX_ITEMS + 1)]
    if len(items) > MAX_ITEMS:
        raise RuntimeError(f"more than {MAX_ITEMS} items")
    return items


def _enter(value: Any) -> Any:
    return type(value).__enter__(value)


def _leave(value: Any) -> None:
    type(value).__exit__(value, None, None, None)  # what the body raised is not told


# Number 0 is the entry point
OPERATIONS = (
    *(getattr, setattr, delattr, len, operator.getitem, operator.setitem, operator.delitem),
    *(_items, str, next, _enter, _leave),
)
GET, SET, DELETE, LENGTH, GET_ITEM, SET_ITEM, DELETE_ITEM, ITEMS, TEXT, NEXT, ENTER, LEAVE = range(1, 13)


class StandIn:
    """
    Stands for an object of the program. It has no equality, order, arithmetic or truth of the program's: it is true, and equal to itself
    alone. `in` uses `__iter__`, and so compares here.

    Args:
        ask (`Callable`): Asks the program.
        number (`int`): The object's number.
    """

    __slots__ = ("__ask", "__mocks", "__number")

    def __init__(self, ask: Ask, number: int):
        object.__setattr__(self, "_StandIn__ask", ask)
        object.__setattr__(self, "_StandIn__number", number)
        # Functions and mocks of the tests that are the object's attributes: the program must not answer for them
        object.__setattr__(self, "_StandIn__mocks", {})

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name.endswith("__") and name not in READABLE:
            raise AttributeError(name)
        if name.startswith("assert"):
            raise AttributeError(f"{name}: a program cannot decide an assertion")
        return self.__mocks[name] if name in self.__mocks else self.__ask(GET, (self, name), {})

    def __setattr__(self, name: str, value: Any) -> None:
        self.__ask(SET, (self, name, value), {})
        self.__mocks.pop(name, None)
        if callable(value) and type(value) is not StandIn:
            self.__mocks[name] = value

    def __delattr__(self, name: str) -> None:
        self.__mocks.pop(name, None)
        self.__ask(DELETE, (self, name), {})

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.__ask(self.__number, args, kwargs)

    def __len__(self) -> int:
        return _only(int, self.__ask(LENGTH, (self,), {}))

    def __bool__(self) -> bool:
        return True

    def __getitem__(self, key: Any) -> Any:
        return self.__ask(GET_ITEM, (self, key), {})

    def __setitem__(self, key: Any, value: Any) -> None:
        self.__ask(SET_ITEM, (self, key, value), {})

    def __delitem__(self, key: Any) -> None:
        self.__ask(DELETE_ITEM, (self, key), {})

    def __iter__(self) -> Iterator:
        return iter(_only(list, self.__ask(ITEMS, (self,), {})))

    def __next__(self) -> Any:
        return self.__ask(NEXT, (self,), {})

    def __str__(self) -> str:
        return _only(str, self.__ask(TEXT, (self,), {}))

    def __repr__(self) -> str:
        return "<object of the program>"

    def __enter__(self) -> Any:
        return self.__ask(ENTER, (self,), {})

    def __exit__(self, *raised: object) -> None:  # without a value, so that it suppresses no exception
        self.__ask(LEAVE, (self,), {})

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError("an object of the program cannot be copied")


def _only(kind: type, value: Any) -> Any:
    if type(value) is not kind:
        raise TypeError(f"the program's object gave no {kind.__name__}")
    return value
