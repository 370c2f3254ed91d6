"""
A candidate's process, as the verifier sees it: messages to it and from it, the time that a check takes, and what ends
a call or a run before its time. None of these exceptions is an `Exception`, so that checks do not catch them by
chance.
"""

import contextlib
import json
import os
import select
import signal
import socket
import time
from typing import Any

from . import wire
from .wire import Inbox, References, WireError


POLLRDHUP = 0x2000
MAX_ERROR = 300  # characters of a check's error
POLL_SECONDS = 0.0005  # processor time that the verifier needs for waiting between two looks


class Timeout(BaseException):
    """The candidate did not answer in time."""


class Died(BaseException):
    """The candidate's process ended."""


class GiveUp(BaseException):
    """The rest of this program's checks does not run."""


class SandboxFault(BaseException):
    """The sandbox failed, not the program."""


class StepLost(BaseException):
    """
    This step ended the verifier in an earlier run. It is part of the code between two asserts, which cannot go on
    without it. Its arguments are a check's status and error.
    """


class CheckLost(StepLost):
    """This step ended the verifier in an earlier run. It is part of an assert, which fails."""


def outcome(error: BaseException) -> tuple[str, str]:
    """Status and error text of a check that raised."""
    if isinstance(error, StepLost):
        return error.args
    try:
        text = f"{type(error).__name__}: {str(error)[:MAX_ERROR]}".rstrip(": ")
    except Exception:  # `str` failed: an integer with too many digits, or a method of a class of the checks
        text = type(error).__name__
    return "timeout" if isinstance(error, Timeout) else "error", text.encode("utf-8", "replace").decode()


class Clock:
    """
    The time that a check takes: the processor time of the candidate and of this process, and the time in which both
    wait for something other than a core. Waiting for a core does not count, so the time does not depend on the
    machine's load. `look` advances the clock.

    Args:
        limit (`float`): Seconds that a check may take. The time between looks is a small part of it.
        config (`dict`): Has the socket of the zygote, which says what the candidate did since the last look (see
            `zygote.Usage`), and the open `schedstat` file of this process.
    """

    def __init__(self, limit: float, config: dict):
        self.limit = limit
        self.interval = min(0.05, limit / 20)
        self.config = config
        self.total = 0.0  # of all checks and of the code between them
        self.begin()
        self.start_candidate()

    def begin(self, computed: float = 0.0, idle: float = 0.0) -> None:
        """Starts to time a check, which may have taken some time before."""
        self.begun = time.monotonic()
        self.computed, self.idle = computed, idle

    def start_candidate(self) -> None:
        """Starts to time a new candidate."""
        self.looked, self.own = time.monotonic(), self._own()

    @property
    def spent(self) -> float:
        return self.computed + self.idle

    def until_next_look(self) -> float:
        return self.looked + min(self.interval, max(0.002, self.limit - self.spent)) - time.monotonic()

    def look(self) -> int:
        """Advances the clock and returns the number of the candidate's threads."""
        own = self._own()
        candidate, now = ask_zygote(self.config["control"], b"S"), time.monotonic()
        since = now - self.looked
        computed = candidate["computed"] + max(0.0, own[0] - self.own[0] - POLL_SECONDS)
        waited = candidate["waited"] + own[1] - self.own[1]
        # Looking itself takes about 2 % of the time. If looks are further apart than planned, this process was stopped
        # or had no core, and the candidate may have been stopped too
        idle = min(max(0.0, 0.98 * since - computed) - waited, 2 * self.interval)
        self.total += max(0.0, computed + idle)
        part = min(1.0, (now - self.begun) / since)  # the rest belongs to the previous check
        self.computed += part * computed
        # Some time that looked idle turns out at a later look to be waiting for a core
        self.idle = max(0.0, self.idle + part * idle)
        self.looked, self.own = now, self._own()
        return candidate["threads"]

    def _own(self) -> tuple[float, float]:
        """Seconds of processor time of this process, and seconds that it waited for a core."""
        times = self.config["own_times"]
        os.lseek(times, 0, os.SEEK_SET)
        return time.process_time(), int(os.read(times, 100).split()[1]) / 1e9


class Process:
    """
    One process that runs untrusted code.

    Args:
        evaluation (`verifier.Evaluation`): The run that it belongs to. It has the clock, and keeps the suspicious
            acts.
        number (`int`): 0 for the program, 1 for its helper.
        references (`References`): What this side and the process use of each other.
    """

    def __init__(self, evaluation: Any, number: int, references: References):
        self.evaluation = evaluation
        self.control = evaluation.config["control"]
        self.number = b"%d" % number
        self.references = references
        self.inbox = Inbox(wire.MAX_ANSWER)
        try:
            self.socket, theirs = socket.socketpair()
            with theirs:
                socket.send_fds(self.control, [b"F" + self.number], [theirs.fileno()])
        except OSError as error:
            raise SandboxFault("the zygote ended") from error
        self.poll = select.poll()
        self.poll.register(evaluation.config["jobs"], POLLRDHUP)

    def end(self, command: bytes) -> dict:
        """Ends the process, with a command of the zygote. Returns what it used."""
        self.socket.close()
        ending = ask_zygote(self.control, command + self.number)
        if ending["signal"] == signal.SIGKILL and "seccomp" in self.evaluation.config["layers"]:
            # A candidate cannot send signals, not even to itself
            raise SandboxFault("a candidate's process was killed from outside")
        return ending

    def send(self, message: dict) -> None:
        """Sends a message."""
        left = memoryview(wire.pack(message))
        while left:
            try:
                left = left[self.socket.send(left, socket.MSG_DONTWAIT) :]
            except BlockingIOError:
                self._wait(select.POLLOUT)
            except OSError as error:
                raise Died("the program ended its process") from error

    def receive(self) -> dict:
        """Returns the process's next message, without its notes."""
        while True:
            self.evaluation.look_when_due()  # a program that sends many messages must not avoid its time limit
            while (message := self.inbox.next()) is None:
                self._wait(select.POLLIN)
                try:
                    chunk = self.socket.recv(1 << 16, socket.MSG_DONTWAIT)
                except BlockingIOError:  # bytes out of band
                    raise WireError("a message that breaks the protocol") from None
                except OSError:
                    chunk = b""
                if not chunk:
                    raise Died("the program ended its process")
                self.inbox.data += chunk
            if type(message) is not dict or type(message.get("suspicious", "")) is not str:
                raise WireError("a message that breaks the protocol")
            if "suspicious" not in message:
                return message
            self.evaluation.note(message["suspicious"])

    def _wait(self, event: int) -> None:
        """Waits until the socket can be read or written, or the check's time limit has passed."""
        self.poll.register(self.socket, event)
        while True:
            ready = self.poll.poll(max(0.0, self.evaluation.clock.until_next_look()) * 1000)
            if self.evaluation.config["jobs"].fileno() in dict(ready):
                os._exit(0)  # the trainer has ended; the zygote then ends the candidates
            self.evaluation.look_when_due()
            if ready:
                return


def ask_zygote(control: socket.socket, command: bytes) -> dict:
    """Sends a command to the zygote. Returns its answer."""
    try:
        with contextlib.suppress(BrokenPipeError):  # a message that it sent before it ended can still be read
            control.send(command)
        answer = json.loads(control.recv(1 << 16) or '{"fault": "the zygote ended"}')
    except OSError as error:
        answer = {"fault": f"the zygote does not answer: {error}"}
    if "fault" in answer:
        raise SandboxFault(answer["fault"])
    return answer
