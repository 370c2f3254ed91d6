"""
Errors in the code of a task: reward functions, templates, the methods of an environment.

Each becomes a [`TaskError`] that names the function. A distributed run reports it on all processes.
"""

import contextlib
import functools
import math
import pickle
from collections.abc import Collection, Iterator, Mapping, Set
from typing import Any, NoReturn

from trl_multiagent.console import one_line
from trl_multiagent.limits import short


FOR_ONE_AGENT = ". A completion is a dict by role: `role_reward(role, function)` takes a function for one agent"


class TaskError(ValueError):
    """
    The code of a task failed, or returned an invalid value. The message names the function.

    Args:
        message (`str`): The problem, and how to solve it.
        position (`int`, *optional*): If a reward is not finite, the index of its joint action in the batch.
    """

    def __init__(self, message: str, position: int | None = None):
        super().__init__(message)
        self.position = position


class UnavailableError(TaskError):
    """
    A resource outside of the task is missing, such as another model's answer. A recipe shows only the message and ends
    with status 2.
    """


class Terminated(SystemExit):
    """A signal ends the program, whatever code of a task runs."""


@contextlib.contextmanager
def task_code(name: str) -> Iterator[None]:
    """
    Turns every exception that a task's function raises inside into a [`TaskError`] with the function's `name`.

    This includes `SystemExit`, which would otherwise end the process without an error. `KeyboardInterrupt` and
    [`Terminated`] stay as they are.
    """
    try:
        yield
    except (TaskError, KeyboardInterrupt, Terminated):
        raise  # the message of the former already names the function
    except SystemExit as error:
        raise_in_place(f"{name} called sys.exit({'' if error.code is None else repr(error.code)}).", error)
    except ImportError as error:
        raise_in_place(f"{name} needs a library that is missing: {describe(error)}", error, UnavailableError)
    except BaseException as error:
        # A reward of TRL reads a completion as a text, or as a list of messages, `completion[0]`
        text = describe(error)
        is_of_trl = "reward" in name and (error.args == (0,) or "'dict'" in text)
        raise_in_place(f"{name} raised {text}{FOR_ONE_AGENT if is_of_trl else ''}", error)


def raise_in_place(problem: str, error: BaseException, kind: type[TaskError] = TaskError) -> NoReturn:
    """Raises a task's error in place of another, with its traceback, which ends in the task, its cause and notes."""
    made = kind(problem).with_traceback(error.__traceback__)
    made.__notes__ = getattr(error, "__notes__", [])
    raise made from error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def describe(error: BaseException) -> str:
    """
    Returns the type and the message of an error, on one line, with advice if a program tries to start an event loop in
    a running one, as scripts do that were written for a notebook or a terminal.
    """
    if isinstance(error, pickle.UnpicklingError):  # torch's own message names a way to run the code
        return "a pickle is damaged or could run code"
    try:
        text = one_line(str(error))
    except Exception:  # the error's `__str__` fails
        text = ""
    if "from a running event loop" in text or "loop is already running" in text:
        text = f"{text.rstrip('.')}: `await` the coroutine instead"
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def function_name(function: Any) -> str:
    """
    Returns the name of a function, of the function inside a `functools.partial`, or of the class of another object.
    """
    while isinstance(function, functools.partial):
        function = function.func
    return getattr(function, "__name__", type(function).__name__)


def as_rewards(name: str, rewards: Any, count: int) -> list[dict[str, float] | float | None]:
    """
    Converts the return value of the reward function `name` to numbers, or dicts of numbers by role. `None` in place of
    a number means that the function does not apply. Raises [`TaskError`] if the value is not a list with `count` of
    these, or a number is not finite.
    """
    numbers: list[dict[str, float] | float | None] = []
    for position, value in enumerate(as_list(name, rewards, count, "numbers, one per joint action")):
        where = f"for joint action {position + 1} of {count}"
        if isinstance(value, Mapping):
            numbers.append({str(role): as_reward(name, x, where, position) for role, x in value.items()})
        else:
            numbers.append(None if value is None else as_reward(name, value, where, position))
    return numbers


def as_reward(name: str, reward: Any, where: str, position: int, may_be_nan: bool = False) -> float:
    """Converts a reward of the function `name` to `float`. Raises [`TaskError`] if it is not a finite number."""
    number = as_number(reward)
    if number is None:
        raise TaskError(f"{name} returned the reward {show(reward)} {where}; it must be a number.")
    if not math.isfinite(number) and not (may_be_nan and math.isnan(number)):
        raise TaskError(f"{name} returned the reward {number} {where}", position)
    return number


def as_list(name: str, values: Any, count: int, what: str) -> list[Any]:
    """
    Returns the entries of a list, tuple, array or tensor that the function `name` returned. Raises [`TaskError`] if
    the value is anything else, or does not have `count` entries. `what`: they are, in the message.
    """
    returned = ""
    if isinstance(values, Collection) and not isinstance(values, str | bytes | Mapping | Set):
        with contextlib.suppress(TypeError):  # a tensor without a dimension
            entries = list(values)
            if len(entries) == count:
                return entries
            returned = f"a list of {len(entries)}"
    raise TaskError(f"{name} returned {returned or show(values)}; it must return a list of {count} {what}.")


def as_number(value: Any) -> float | None:
    """
    Converts a number, a `bool`, or an array or tensor with one number to `float`. Returns `None` for anything else.
    """
    if isinstance(value, str | bytes | bytearray):  # `float` would convert them
        return None
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):  # the last one is torch's
        return None


def show(value: Any) -> str:
    """Returns a value and its type, as one short line for a message."""
    return "None" if value is None else f"{short(value)} ({type(value).__name__})"
