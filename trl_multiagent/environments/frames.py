"""The traceback of an error in a task, as somebody who wrote the task wants to read it."""

import functools
from collections.abc import Callable
from types import TracebackType
from typing import Any, TypeVar, cast

from trl_multiagent.environments.task_errors import TaskError


Method = TypeVar("Method", bound=Callable)
# What runs a task. Its frames say nothing about a task's error
PACKAGES = "trainers rollout environments jobs team runs evaluation preferences".split()
CALLERS = tuple(f"trl_multiagent.{package}." for package in PACKAGES)
LIBRARIES = "trl transformers accelerate torch asyncio concurrent contextlib threading".split()


def shows_task(method: Method) -> Method:
    """
    Decorates what runs a task. The traceback of a task's error, and of numbers that are not finite, has the user's
    frames alone.
    """

    @functools.wraps(method)
    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            return method(*args, **kwargs)
        except (TaskError, FloatingPointError) as error:
            raise error.with_traceback(frames_of_task(error)) from error.__cause__

    return cast(Method, run)


def frames_of_task(error: BaseException) -> TracebackType | None:
    """Returns the frames of an error but for those of this package and its libraries, which run the task."""
    frames, frame, kept, is_inner = [], error.__traceback__, None, True
    while frame is not None:
        frames.append(frame)
        frame = frame.tb_next
    for frame in reversed(frames):
        module = frame.tb_frame.f_globals.get("__name__", "")
        is_caller = module.startswith(CALLERS)
        is_inner &= not is_caller  # what a task calls is shown whole
        if is_inner or not (is_caller or module.partition(".")[0] in LIBRARIES):
            kept = TracebackType(kept, frame.tb_frame, frame.tb_lasti, frame.tb_lineno)
    return kept
