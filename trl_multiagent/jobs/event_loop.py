"""The event loop on which a process runs the `async` functions of its tasks."""

import asyncio
import contextlib
import functools
import threading


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

    threading.Thread(target=run, name="async-rewards", daemon=True).start()
    return loop
