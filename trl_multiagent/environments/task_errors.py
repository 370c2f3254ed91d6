"""
Errors in the code of a task: reward functions, templates, the methods of an environment.

Whatever goes wrong there ends in a [`TaskError`] that names the function, so that a run of several processes can report it
on all of them.
"""

import contextlib
import functools
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Set
from typing import Any


class TaskError(ValueError):
    """
    The code of a task failed, or returned something that cannot be used. The message names the function.

    Args:
        message (`str`): What went wrong, and what to do.
        position (`int`, *optional*): The joint action of the batch whose number is not finite.
    """

    def __init__(self, message: str, position: int | None = None):
        super().__init__(message)
        self.position = position


class TaskInterrupt(KeyboardInterrupt):
    """Ctrl-C, with the function that it interrupted."""


@contextlib.contextmanager
def task_code(name: str) -> Iterator[None]:
    """
    Around a call of a task's function: whatever it raises leaves as a [`TaskError`].

    That includes `SystemExit`, which would end the process as if all were well. `KeyboardInterrupt` leaves as a
    [`TaskInterrupt`], so that Ctrl-C works.

    Args:
        name (`str`): The function, for the message.
    """
    try:
        yield
    except (TaskError, TaskInterrupt):
        raise  # it names the function already
    except KeyboardInterrupt as error:
        raise TaskInterrupt(f"{name} was interrupted") from error
    except SystemExit as error:
        raise TaskError(f"{name} called sys.exit({'' if error.code is None else repr(error.code)}).") from error
    except BaseException as error:
        raise TaskError(f"{name} raised {describe(error)}") from error


def describe(error: BaseException) -> str:
    """The type and the message of an error, on one line."""
    try:
        text = " ".join(str(error).split())
    except Exception:  # the error's own method fails
        text = ""
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def function_name(function: Callable) -> str:
    """The name of a function, of the one in a `functools.partial`, or of a callable object's class."""
    while isinstance(function, functools.partial):
        function = function.func
    return getattr(function, "__name__", type(function).__name__)


def as_rewards(name: str, rewards: Any, count: int) -> list[float | None]:
    """
    What a reward function returned, as numbers.

    Args:
        name (`str`): The function, for the message.
        rewards (`Any`): A list, tuple, array or tensor with one number per joint action; `None` where it does not apply.
        count (`int`): The number of joint actions.

    Raises:
        TaskError: it is something else, or a number is not finite.
    """
    wanted = f"it must return a list of {count} numbers, one per joint action"
    values = None
    if isinstance(rewards, Collection) and not isinstance(rewards, str | bytes | Mapping | Set):
        with contextlib.suppress(TypeError):  # a tensor without a dimension
            values = list(rewards)
    if values is None:
        raise TaskError(f"{name} returned {show(rewards)}; {wanted}.")
    if len(values) != count:
        raise TaskError(f"{name} returned {len(values)} rewards for {count} joint actions; {wanted}.")
    numbers = []
    for position, value in enumerate(values):
        number = None if value is None else as_number(value)
        if value is not None and number is None:
            raise TaskError(f"{name} returned {show(value)} for joint action {position + 1} of {count}; {wanted}.")
        if number is not None and not math.isfinite(number):
            raise TaskError(f"{name} returned {number} for joint action {position + 1} of {count}", position)
        numbers.append(number)
    return numbers


def as_number(value: Any) -> float | None:
    """A number, `bool`, or array or tensor of one number as `float`; `None` for anything else."""
    if isinstance(value, str | bytes | bytearray):  # `float` would read them
        return None
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):  # the last one is torch's
        return None


def show(value: Any) -> str:
    """A value and its type, in one short line."""
    if value is None:
        return "None"
    text = " ".join(repr(value).split())
    return f"{text if len(text) <= 80 else text[:80] + '...'} ({type(value).__name__})"
