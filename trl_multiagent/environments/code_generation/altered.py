"""
Whether a helper's values matter: the program runs once more, with other values in their place.

The function below becomes part of that program. Nothing is decided in it: a check that passed and no longer does shows that
the values mattered.
"""

import inspect


def alter_values(function):
    """The function with another value in place of each that it returns to others; its calls of itself stay as they are."""
    running = 0
    of_empty = {str: "?", bytes: b"?", list: [0], tuple: (0,), set: {0}, frozenset: {0}, dict: {0: 0}}

    def altered(value):
        kind = type(value)
        if kind is bool:
            return not value
        if kind in (int, float):
            return -3 * value - 1  # another sign and parity, and not the old value again when altered twice
        if kind in of_empty:
            return kind() if value else kind(of_empty[kind])
        return object()

    def call(*args, **kwargs):
        nonlocal running
        running += 1
        try:
            value = function(*args, **kwargs)
        finally:
            running -= 1
        return value if running else altered(value)

    return call


_SOURCE = inspect.getsource(alter_values)


def alteration(name: str) -> str:
    """
    Source that alters the values of the function `name`. It stands between the function and what calls it, so that no
    reference to the function itself is left.
    """
    return f"{_SOURCE}\n\n{name} = alter_values({name})\n"
