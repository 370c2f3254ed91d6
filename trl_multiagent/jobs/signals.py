"""Ends a program with one line at Ctrl-C or SIGTERM. A training first ends its current step and saves a checkpoint."""

import contextlib
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


class Ended(KeyboardInterrupt):
    """
    A signal ends the program. If an `eval` raised `KeyboardInterrupt` itself, `python -m` would later end with
    SIGINT's status.
    """


class Stopped(KeyboardInterrupt):
    """A training has ended early, after a step, because of a signal. It may have saved a `checkpoint`."""

    def __init__(self, message: str, checkpoint: str | None = None):
        super().__init__(message)
        self.checkpoint = checkpoint


@dataclass
class Request:
    """The signals that this process has received."""

    signal: int | None = None  # the first one since `end_on_signal` began
    is_expected: bool = False  # whether the program handles signals, see `end_on_signal`
    waits: bool = False  # whether to only note a signal, because the current work, such as a training, ends by itself
    passed_on: int | None = None  # the first one that a launcher has passed on, after which it starts nothing else


REQUEST = Request()


@contextlib.contextmanager
def ending_later() -> Iterator[None]:
    """Prevents a signal from ending the program within the block. The block reads it from `REQUEST.signal`."""
    before, REQUEST.waits = REQUEST.waits, True
    try:
        yield
    finally:
        REQUEST.waits = before


@contextlib.contextmanager
def end_on_signal(prog: str, arguments: Callable[[], list[str]] | None = None, raises: bool = True) -> Iterator[None]:
    """
    Ends the program `prog` at Ctrl-C (exit status 130) or SIGTERM (143) with one line, which says how to resume. A
    training ends after its current step, anything else at once. A second Ctrl-C always ends the program at once.
    `arguments` returns the arguments that resume the program; by default, they name the checkpoint. Without `raises`,
    no error is raised, which an import could turn into another one.
    """

    def say(text: str) -> None:
        if os.environ.get("RANK", "0") == "0":
            print(f"{prog}: {text}", file=sys.stderr, flush=True)

    def ending(number: int, error: KeyboardInterrupt | None = None) -> str:
        after, verb, more = "", "Go on with", [] if arguments is None else arguments()
        if isinstance(error, Stopped):
            after = f" {error}"
            if arguments is None and error.checkpoint is None:
                verb = "Start again with"
            elif arguments is None:
                more = ["--resume_from_checkpoint", str(error.checkpoint)]
        command = os.environ.get(COMMAND_VARIABLE, "the same command")
        return f"ended by {NAMES[number]}{after}. {verb}: {command} {shlex.join(more)}".rstrip()

    def receive(number: int, frame: FrameType | None) -> None:
        is_first, REQUEST.signal = REQUEST.signal is None, REQUEST.signal or number
        if not is_first and number == signal.SIGINT:
            say("ended at once.")
            os._exit(128 + number)
        if not is_first or REQUEST.waits:
            return
        if raises and int(os.environ.get("WORLD_SIZE", "1")) == 1:
            raise Ended
        say(ending(number))
        os._exit(128 + number)  # clean-up could wait for other processes

    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread receives signals
        return
    handlers = {number: signal.signal(number, receive) for number in NAMES}
    before, REQUEST.is_expected = REQUEST.is_expected, True
    try:
        yield
    except KeyboardInterrupt as error:
        if REQUEST.signal is None:
            raise
        say(ending(REQUEST.signal, error))
        sys.exit(128 + REQUEST.signal)
    finally:
        # Within another block, a second signal, such as one that a launcher passes on, must not look like a first one
        REQUEST.is_expected, REQUEST.signal = before, REQUEST.signal if before else None
        for number, handler in handlers.items():
            signal.signal(number, handler)


def ignore_signals() -> None:
    """
    Prevents a traceback or a second line when the program itself has ended. A Ctrl-C still ends a slow exit of Python.
    """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, lambda number, frame: os._exit(128 + number))


@contextlib.contextmanager
def leaving_signals_to_children() -> Iterator[None]:
    """
    Makes a launcher wait for the program that it has started to end after Ctrl-C, which a terminal sends to both, or
    SIGTERM. The first signal that it gets is `REQUEST.passed_on`.
    """
    import psutil  # a requirement of accelerate

    def forward(number: int, frame: FrameType | None) -> None:
        REQUEST.passed_on = REQUEST.passed_on or number
        for process in psutil.Process().children():
            # SIGINT is passed on as SIGTERM: after a Ctrl-C, the child has its SIGINT, and a second one would end it
            # at once
            process.send_signal(signal.SIGTERM)

    before = {number: signal.signal(number, forward) for number in NAMES}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
