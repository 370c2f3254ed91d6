"""A candidate's process, as the verifier sees it: messages to it and from it."""

import contextlib
import json
import os
import select
import signal
import socket
from typing import Any

from . import wire
from .endings import Died, SandboxFault
from .wire import Inbox, References, WireError


POLLRDHUP = 0x2000


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
            if type(message) is not dict:
                raise WireError("a message that breaks the protocol")
            if "suspicious" not in message:
                return message
            if type(message["suspicious"]) is not str:
                raise WireError("a message that breaks the protocol")
            self.evaluation.note(message["suspicious"])

    def _wait(self, event: int) -> None:
        """Waits until the socket can be read or written, or the check's time limit has passed."""
        self.poll.register(self.socket, event)
        while True:
            ready = self.poll.poll(max(0.0, self.evaluation.clock.until_next_look()) * 1000)
            if any(fd == self.evaluation.config["jobs"].fileno() for fd, _ in ready):
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
