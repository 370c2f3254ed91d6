"""
Ends a program with one line at Ctrl-C or SIGTERM. A training first ends its current step and saves a checkpoint. If
the code of a task keeps the step for longer than `STOP_SECONDS`, the checkpoint is from the step before.
"""

import ctypes
import os
import shlex
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType


COMMAND_VARIABLE = "TRL_MULTIAGENT_COMMAND"  # environment variable: the command that the user started
STOP_SECONDS = 10  # from a signal until a training waits no longer for the code of a task
NAMES: dict[int, str] = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM"}


class Stopped(KeyboardInterrupt):
    """A training has ended early, after a step, because of a signal. It may have saved a `checkpoint`."""

    def __init__(self, message: str, checkpoint: str | None = None):
        super().__init__(message)
        self.checkpoint = checkpoint


class Overdue(KeyboardInterrupt):
    """The code of a task has not ended in time after a signal."""


@dataclass
class Request:
    """The first signal that this process has received."""

    signal: int | None = None
    is_expected: bool = False  # whether the program handles signals, see `end_on_signal`
    waits: bool = False  # whether the current work, such as a training, ends by itself after a signal
    in_task: bool = False  # whether the main thread runs the code of a task
    is_overdue: bool = False  # whether `STOP_SECONDS` have passed since the signal


REQUEST = Request()
CLOSERS: list[Callable[[], None]] = []  # what has to be called before the program ends at once


@contextmanager
def closing_at_exit(close: Callable[[], None]) -> Iterator[None]:
    """Calls `close` if a signal ends the program within the block."""
    CLOSERS.append(close)
    try:
        yield
    finally:
        if close in CLOSERS:
            CLOSERS.remove(close)


@contextmanager
def in_task_code() -> Iterator[None]:
    """Raises [`Overdue`] once within the block if it has not ended `STOP_SECONDS` after a signal to a training."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before, REQUEST.in_task = REQUEST.in_task, True
    try:
        raise_if_overdue()
        yield
    finally:
        REQUEST.in_task = before


def raise_if_overdue() -> None:
    if REQUEST.is_overdue and REQUEST.in_task:
        REQUEST.is_overdue = False
        raise Overdue


@contextmanager
def handling(handler: Callable[[int, FrameType | None], None], numbers: Iterable[int] = NAMES) -> Iterator[None]:
    """
    Calls `handler` at signals within the block, by default at Ctrl-C and SIGTERM. Only the main thread receives them.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, handler_before in before.items():
            signal.signal(number, handler_before)


@contextmanager
def at_most(seconds: float | None, late: str) -> Iterator[None]:
    """Raises a `TimeoutError` that says `late` if the block takes longer. Only the main thread can be interrupted."""

    class Late(BaseException):  # which no `except Exception` in the block catches
        pass

    def ring(number: int, frame: FrameType | None) -> None:
        raise Late

    if seconds is None or threading.current_thread() is not threading.main_thread():
        yield
        return
    with handling(ring, [signal.SIGALRM]):
        signal.setitimer(signal.ITIMER_REAL, max(seconds, 1e-3))
        try:
            yield
        except Late:
            raise TimeoutError(late) from None
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)


@contextmanager
def ending_later() -> Iterator[None]:
    """Prevents a signal from ending the program within the block. The block reads it from `REQUEST.signal`."""
    before, REQUEST.waits = REQUEST.waits, True
    try:
        yield
    finally:
        REQUEST.waits = before


@contextmanager
def end_on_signal(prog: str, arguments: list[str] | None = None) -> Iterator[None]:
    """
    Ends the program `prog` at Ctrl-C (exit status 130) or SIGTERM (143) with one line, which says how to go on. A
    training ends after its current step, anything else at once, and a second Ctrl-C always at once. `arguments`
    resume the program; by default, they name the checkpoint.
    """

    def say(number: int, ended: Stopped | None = None) -> None:
        more, after, verb = arguments or [], f" {ended}" if ended else "", "Go on with"
        if arguments is None and ended is not None:
            more = ["--resume_from_checkpoint", ended.checkpoint] if ended.checkpoint else []
            verb = "Go on with" if more else "Start again with"
        command = os.environ.get(COMMAND_VARIABLE, "the same command")
        if os.environ.get("RANK", "0") == "0":
            line = f"{prog}: ended by {NAMES[number]}{after}. {verb}: {command} {shlex.join(more)}"
            print(line.rstrip(), file=sys.stderr, flush=True)

    def receive(number: int, frame: FrameType | None) -> None:
        is_second, REQUEST.signal = REQUEST.signal is not None, REQUEST.signal or number
        if not REQUEST.waits or (is_second and number == signal.SIGINT):
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a scheduler and a launcher send one each
            say(number)
            try:
                while CLOSERS:  # a signal in between finds fewer, and the last one none
                    CLOSERS.pop()()
            finally:
                os._exit(128 + number)  # other clean-up could wait for other processes
        if is_second:
            raise_if_overdue()
        else:
            timer.start()

    def hurry() -> None:
        REQUEST.is_overdue = True
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)  # also out of a system call

    timer = threading.Timer(STOP_SECONDS, hurry)
    timer.daemon = True

    before, REQUEST.is_expected = REQUEST.is_expected, True
    try:
        with handling(receive):
            try:
                yield
            finally:
                timer.cancel()
    except Stopped as ended:
        number = REQUEST.signal or signal.SIGTERM
        say(number, ended)
        sys.exit(128 + number)
    finally:
        REQUEST.is_expected, REQUEST.signal = before, REQUEST.signal if before else None
        REQUEST.is_overdue = False


@contextmanager
def leaving_signals_to_children() -> Iterator[None]:
    """
    Makes a launcher pass signals on to the programs that it has started, and wait for them to end. The first signal is
    `REQUEST.signal`.
    """
    import psutil  # a requirement of accelerate

    def forward(number: int, frame: FrameType | None) -> None:
        REQUEST.signal = REQUEST.signal or number
        for process in psutil.Process().children():
            # After a Ctrl-C in a terminal, a child has its SIGINT, and a second one would end it at once
            process.send_signal(signal.SIGTERM)

    with handling(forward):
        yield


def end_with_parent() -> None:
    """Makes Linux send SIGTERM to this process when its parent ends, even by SIGKILL."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
