"""The event loop on which a process runs the `async` functions of its tasks."""

import asyncio
import contextlib
import functools
import os
import sys
import threading
import traceback
from collections.abc import Coroutine
from concurrent import futures
from typing import Any


CLOSING_SECONDS = 30  # that the clean-up of a task may take
ANSWER_SECONDS = 5  # within which the event loop answers, unless a task blocks it
THREAD = "async-rewards"


class Blocked(RuntimeError):
    """A task does not return to the event loop, which stands still. `frames`: the calls in which it stands."""

    def __init__(self) -> None:
        super().__init__("a task blocks the event loop")
        (thread,) = [thread for thread in threading.enumerate() if thread.name == THREAD]
        self.frames = traceback.extract_stack(sys._current_frames()[thread.ident or 0])


@functools.cache
def event_loop(process: int) -> asyncio.AbstractEventLoop:
    """
    Starts the event loop of a process in a daemon thread. A forked process needs its own loop, because threads are not
    forked.
    """
    loop = asyncio.new_event_loop()

    def run() -> None:
        while True:  # `sys.exit` in a task ends `run_forever`
            with contextlib.suppress(SystemExit, KeyboardInterrupt):
                loop.run_forever()

    threading.Thread(target=run, name=THREAD, daemon=True).start()
    return loop


def is_blocked(seconds: float | None = None) -> bool:
    """Returns whether the event loop of this process does not answer within `ANSWER_SECONDS`, or fewer `seconds`."""
    answered = threading.Event()
    event_loop(os.getpid()).call_soon_threadsafe(answered.set)
    return not answered.wait(min(seconds or ANSWER_SECONDS, ANSWER_SECONDS))


def run_on_loop(coroutine: Coroutine, limit: float | None = None) -> Any:
    """
    Runs a coroutine on the event loop of this process, and returns its result. If this thread is interrupted, the
    coroutine is cancelled, and has `CLOSING_SECONDS` to end. Raises [`Blocked`] if a task keeps the loop for longer
    than `limit` seconds.
    """
    future = asyncio.run_coroutine_threadsafe(coroutine, event_loop(os.getpid()))
    try:
        while not futures.wait([future], limit).done:
            if is_blocked(limit):
                raise Blocked
        return future.result()
    except BaseException:
        if future.cancel() and not is_blocked():
            futures.wait([future], CLOSING_SECONDS)
        raise
