"""An event loop in a thread of its own, on which an environment runs its `async` reward functions."""

import asyncio
import contextlib
import os
import threading
import weakref
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any


class EventLoop:
    """
    An event loop that starts with its first coroutine and ends with this object, or with the process. What belongs to one
    loop, such as an `asyncio.Semaphore` or an `httpx.AsyncClient`, can therefore be used in every call.

    A copy, also a pickled one, starts a loop of its own, and so does a forked process, because threads are not forked.
    """

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: weakref.finalize | None = None

    def __reduce__(self) -> tuple[type["EventLoop"], tuple[()]]:
        return EventLoop, ()

    def submit(self, coroutine: Coroutine[Any, Any, Any]) -> Future:
        """Starts a coroutine and returns its future result."""
        if self._loop is None or self._pid != os.getpid() or not self._thread.is_alive():
            self._loop = self._start()
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def abandon(self) -> None:
        """Abandons the loop, because a coroutine blocks it. The next coroutine starts another one."""
        self._detach()
        self._loop = None

    def _detach(self) -> None:
        if self._stop is not None:
            self._stop.detach()

    def _start(self) -> asyncio.AbstractEventLoop:
        self._detach()  # in a forked process, the former loop belongs to the parent
        loop = asyncio.new_event_loop()
        self._pid = os.getpid()
        self._thread = threading.Thread(target=_run, args=(loop,), name="async-rewards", daemon=True)
        self._thread.start()
        self._stop = weakref.finalize(self, _stop, loop, self._thread, self._pid)  # also when Python exits
        return loop


def _run(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    try:
        loop.run_forever()
    finally:
        tasks = asyncio.all_tasks(loop)
        for task in tasks:
            task.cancel()
        loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()


def _stop(loop: asyncio.AbstractEventLoop, thread: threading.Thread, pid: int) -> None:
    if pid != os.getpid():
        return
    with contextlib.suppress(RuntimeError):  # the loop is closed already
        loop.call_soon_threadsafe(loop.stop)
    if thread is not threading.current_thread():  # garbage may be collected in any thread
        thread.join(timeout=1.0)
