"""Ends a program with one line at Ctrl-C or SIGTERM. A training first ends its current step and saves a checkpoint."""

import contextlib
import ctypes
import os
import shlex
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FrameType


COMMAND_VARIABLE = "TRL_MULTIAGENT_COMMAND"  # environment variable: the command that the user started
NAMES: dict[int, str] = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM"}


class Stopped(KeyboardInterrupt):
    """A training has ended early, after a step, because of a signal. It may have saved a `checkpoint`."""

    def __init__(self, message: str, checkpoint: str | None = None):
        super().__init__(message)
        self.checkpoint = checkpoint


@dataclass
class Request:
    """The first signal that this process has received."""

    signal: int | None = None
    is_expected: bool = False  # whether the program handles signals, see `end_on_signal`
    waits: bool = False  # whether the current work, such as a training, ends by itself after a signal


REQUEST = Request()


@contextlib.contextmanager
def handling(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Calls `handler` at Ctrl-C and SIGTERM within the block. Only the main thread receives signals."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handler) for number in NAMES}
    try:
        yield
    finally:
        for number, handler_before in before.items():
            signal.signal(number, handler_before)


@contextlib.contextmanager
def ending_later() -> Iterator[None]:
    """Prevents a signal from ending the program within the block. The block reads it from `REQUEST.signal`."""
    before, REQUEST.waits = REQUEST.waits, True
    try:
        yield
    finally:
        REQUEST.waits = before


@contextlib.contextmanager
def end_on_signal(prog: str, arguments: Callable[[], list[str]] | None = None) -> Iterator[None]:
    """
    Ends the program `prog` at Ctrl-C (exit status 130) or SIGTERM (143) with one line, which says how to go on. A
    training ends after its current step, anything else at once, and a second Ctrl-C always at once. `arguments`
    returns the arguments that resume the program; by default, they name the checkpoint.
    """

    def say(number: int, ended: Stopped | None = None) -> None:
        more = [] if arguments is None else arguments()
        if arguments is None and ended is not None and ended.checkpoint is not None:
            more = ["--resume_from_checkpoint", ended.checkpoint]
        after = "" if ended is None else f" {ended}"
        verb = "Go on with" if more or after == "" or arguments is not None else "Start again with"
        command = os.environ.get(COMMAND_VARIABLE, "the same command")
        if os.environ.get("RANK", "0") == "0":
            line = f"{prog}: ended by {NAMES[number]}{after}. {verb}: {command} {shlex.join(more)}"
            print(line.rstrip(), file=sys.stderr, flush=True)

    def receive(number: int, frame: FrameType | None) -> None:
        is_second, REQUEST.signal = REQUEST.signal is not None, REQUEST.signal or number
        if not REQUEST.waits or (is_second and number == signal.SIGINT):
            say(number)
            os._exit(128 + number)  # clean-up could wait for other processes

    before, REQUEST.is_expected = REQUEST.is_expected, True
    try:
        with handling(receive):
            yield
    except Stopped as ended:
        number = REQUEST.signal or signal.SIGTERM
        say(number, ended)
        sys.exit(128 + number)
    finally:
        REQUEST.is_expected, REQUEST.signal = before, REQUEST.signal if before else None


@contextlib.contextmanager
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
