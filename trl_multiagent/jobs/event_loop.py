"""The event loop on which a process runs the `async` functions of its tasks."""

import asyncio
import contextlib
import functools
import gc
import os
import sys
import threading
import traceback
from collections.abc import Callable, Coroutine
from concurrent import futures
from types import CodeType, CoroutineType, GeneratorType
from typing import Any


CLOSING_SECONDS = 30  # that the clean-up of a task may take
ANSWER_SECONDS = 5  # within which the event loop answers, unless a task blocks it
THREAD = "async-rewards"
WAITED_FOR = dict[int, futures.Future]()  # what a thread of this process waits for now
ASYNCIO, LIBRARIES = os.path.dirname(asyncio.__file__), "-packages"  # in the names of files
MEETINGS = {"locks.py", "queues.py", "taskgroups.py", "tasks.py"}  # of asyncio, where a task waits for another one


class Blocked(RuntimeError):
    """A task does not return to the event loop, which stands still. `frames`: the calls in which it stands."""

    def __init__(self) -> None:
        super().__init__("a task blocks the event loop")
        (thread,) = [thread for thread in threading.enumerate() if thread.name == THREAD]
        self.frames = traceback.extract_stack(sys._current_frames()[thread.ident or 0])


class Loop(asyncio.SelectorEventLoop):
    """The event loop of a process. It counts callbacks, and a call in a thread is a task."""

    num_callbacks = 0

    def call_soon(self, *arguments: Any, **settings: Any) -> asyncio.Handle:  # type: ignore[override]
        self.num_callbacks += 1
        return super().call_soon(*arguments, **settings)

    def run_in_executor(self, *arguments: Any) -> asyncio.Future:  # type: ignore[override]
        return self.create_task(in_thread(super().run_in_executor(*arguments)))


class Part(asyncio.Task):
    """
    A task that runs beside another one. `counts`: whether it keeps the other one waiting even if nothing awaits it.
    """

    counts = False

    def __init__(self, *arguments: Any, **settings: Any):
        self.awaited_by: dict[Callable, Any] = {}
        super().__init__(*arguments, **settings)

    def add_done_callback(self, callback: Callable, **settings: Any) -> None:
        module = str(getattr(callback, "func", callback).__module__)
        if module.startswith("asyncio.") or isinstance(getattr(callback, "__self__", None), asyncio.Task):
            self.awaited_by[callback] = asyncio.current_task()
        super().add_done_callback(callback, **settings)

    def remove_done_callback(self, callback: Callable) -> int:
        self.awaited_by.pop(callback, None)
        return super().remove_done_callback(callback)


def is_awaited(task: Any) -> bool:
    """Returns whether a task is the first one, or counts, or such a task awaits it."""
    return not isinstance(task, Part) or task.counts or any(map(is_awaited, task.awaited_by.values()))


def waits_outside(task: asyncio.Task, folder: str) -> bool:
    """
    Returns whether a task waits for time, a thread, a process, a connection or a library, and others for it. `folder`:
    of code that is no library's.
    """
    if type(getattr(task, "_fut_waiter", None)) is not asyncio.Future or not is_awaited(task):
        return False  # the former: of an agent's answer, or of other tasks
    awaited: Any = task.get_coro()
    codes = list[CodeType]()
    while True:
        if isinstance(awaited, CoroutineType):
            codes.append(awaited.cr_code)
            awaited = awaited.cr_await
        elif isinstance(awaited, GeneratorType):
            codes.append(awaited.gi_code)
            awaited = awaited.gi_yieldfrom
        elif type(awaited).__name__ == "coroutine_wrapper":  # what `__await__` of a coroutine returns
            (awaited,) = gc.get_referents(awaited)
        else:
            break
    own = [code.co_filename for code in codes if not code.co_filename.startswith(ASYNCIO)]
    if not codes or (own and LIBRARIES in own[-1] and not own[-1].startswith(folder)):
        return True
    inner = codes[-1]
    is_other = inner.co_filename.startswith(ASYNCIO) and os.path.basename(inner.co_filename) not in MEETINGS
    return is_other or inner.co_name in ("sleep", "in_thread")


async def in_thread(future: asyncio.Future) -> Any:
    """Waits for a call in a thread."""
    return await future


@functools.cache
def event_loop(process: int) -> Loop:
    """
    Starts the event loop of a process in a daemon thread. A forked process needs its own loop, because threads are not
    forked.
    """
    loop = Loop()

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


def run_on_loop(coroutine: Coroutine, limit: float | None) -> Any:
    """
    Runs a coroutine on the event loop of this process, and returns its result. If this thread is interrupted, the
    coroutine is cancelled, and has `CLOSING_SECONDS` to end. Raises [`Blocked`] if a task keeps the loop for longer
    than `limit` seconds.
    """
    future = asyncio.run_coroutine_threadsafe(coroutine, event_loop(os.getpid()))
    WAITED_FOR[threading.get_ident()] = future
    try:
        while not futures.wait([future], limit).done:
            if is_blocked(limit):
                raise Blocked
        return future.result()
    except BaseException:
        if future.cancel() and not is_blocked():
            futures.wait([future], CLOSING_SECONDS)
        raise
    finally:
        WAITED_FOR.pop(threading.get_ident(), None)  # a signal's handler may wait in the same thread
