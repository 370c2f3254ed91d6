"""
Runs the checks and decides. The verifier never runs a candidate's code: it asks the candidate's process for the value of
calls, rebuilds exact built-in types from the answers, and evaluates the asserts itself.
"""

import builtins
import json
import os
import random
import select
import signal
import socket
import time

from .checks import compile_checks
from .wire import MAX_FRAME, MAX_JOB, Encoder, Inbox, WireError, decode, pack


STRETCH = 5  # on a loaded machine a limit grows up to this factor, until the candidate has had its share of a core
POLLRDHUP = 0x2000
HELLO_SECONDS = 30.0
MAX_DEATHS = 10  # candidates of one program that may die before the rest of its checks is given up


# built-in exceptions that are made from a message alone
_RAISABLE = {
    name: kind
    for name, kind in vars(builtins).items()
    if isinstance(kind, type)
    and issubclass(kind, Exception)
    and not name.startswith("Unicode")
    and "Group" not in name
}


class CheckTimeout(BaseException):
    """The candidate did not answer in time."""


class CandidateDied(BaseException):
    """The candidate's process ended, or broke the protocol."""


class GiveUp(BaseException):
    """No further check of this program is run."""


class SandboxFault(BaseException):
    """The sandbox failed, not the program."""


class CandidateError(Exception):
    """Stands for an exception of the candidate that is no built-in one."""


def main(job_fd: int, control_fd: int, config: dict):
    """Body of the verifier's process: one job after the other, until the trainer closes its end."""
    jobs = socket.socket(fileno=job_fd)
    control = socket.socket(fileno=control_fd)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    report = json.loads(_receive_packet(control))
    jobs.sendall(pack({"ready": report}))
    inbox = Inbox(MAX_JOB)
    while True:
        while (job := inbox.next()) is None:
            chunk = jobs.recv(1 << 16)
            if not chunk:
                os._exit(0)
            inbox.data += chunk
        try:
            result = Run(job, jobs, control, config).run()
        except SandboxFault as fault:
            result = {"fault": str(fault)}
        jobs.sendall(pack(result))


def _receive_packet(control):
    readable, _, _ = select.select([control], [], [], HELLO_SECONDS)
    packet = control.recv(1 << 16) if readable else b""
    if not packet:
        raise SandboxFault("the zygote does not answer")
    return packet


class Run:
    """One program against its checks."""

    def __init__(self, job, jobs, control, config):
        self.job = job
        self.jobs = jobs
        self.control = control
        self.limit = config["check_timeout"]
        self.max_timeouts = config["max_timeouts"]
        self.socket = None
        self.definitions = ["not_run", ""]
        self.statuses = []
        self.errors = []
        self.current = None
        self.calls = {}
        self.pending_calls = {}
        self.deadline_start = 0.0
        self.timeouts = 0
        self.deaths = 0
        self.memory_kb = 0
        self.cpu_seconds = 0.0

    def run(self):
        start = time.monotonic()
        try:
            checks = compile_checks(self.job["setup"], self.job["checks"])
        except (SyntaxError, ValueError) as error:
            return {"bad_checks": f"{type(error).__name__}: {error}"}
        self.statuses = ["not_run"] * len(checks.sources)
        self.errors = [""] * len(checks.sources)
        self.calls = dict.fromkeys(self.job["watch"], 0)
        random.seed(self.job["checks"])  # the same program gets the same verdict
        try:
            self._start()
            completed = self._run_checks(checks)
            if completed:
                for guard in checks.guards:
                    if self.statuses[guard] == "not_run":
                        self.statuses[guard] = "passed"
        except (CheckTimeout, CandidateDied, GiveUp):
            pass  # recorded where it happened
        finally:
            self._end()
        return {
            "definitions": self.definitions,
            "checks": list(zip(self.statuses, checks.sources, self.errors, strict=True)),
            "calls": self.calls,
            "seconds": time.monotonic() - start,
        }

    # -- the checks

    def _run_checks(self, checks):
        def candidate(*args, **kwargs):
            return self._call(0, args, kwargs)

        namespace = {
            "__name__": "checks",
            "__builtins__": builtins,
            "__begin__": self._begin,
            "__end__": self._finish,
            "__raised__": self._raised,
            "__caught__": (Exception, CheckTimeout, CandidateDied),
        }
        self.deadline_start = time.monotonic()
        try:
            exec(checks.setup, namespace)
            namespace["candidate"] = namespace[self.job["entry_point"]] = candidate
            exec(checks.code, namespace)
            if checks.has_check:
                check = namespace["check"]
                namespace[self.job["entry_point"]] = candidate  # also where the program's function is called `check`
                check(candidate)
        except Exception as error:
            # the code between the asserts failed: what comes after it does not run
            self.errors = [
                error_text or _text(error) if status == "not_run" else error_text
                for status, error_text in zip(self.statuses, self.errors, strict=True)
            ]
            return False
        return True

    def _begin(self, index):
        self.current = index
        self.pending_calls = dict.fromkeys(self.calls, 0)
        self.deadline_start = time.monotonic()

    def _finish(self, index, value):
        if not value:
            self.statuses[index] = "failed"
        elif self.statuses[index] == "not_run":
            self.statuses[index] = "passed"
        if self.statuses[index] == "passed":
            for name, count in self.pending_calls.items():
                self.calls[name] += count
        self.deadline_start = time.monotonic()

    def _raised(self, index, error):
        if self.statuses[index] in ("not_run", "passed"):
            self.statuses[index] = "timeout" if isinstance(error, CheckTimeout) else "error"
            self.errors[index] = _text(error)
        self.deadline_start = time.monotonic()

    # -- the candidate's process

    def _start(self):
        """Forks a candidate and has it run the program's definitions."""
        own, theirs = socket.socketpair()
        socket.send_fds(self.control, [b"F"], [theirs.fileno()])
        theirs.close()
        own.setblocking(False)
        self.socket = own
        self.inbox = Inbox(MAX_FRAME)
        self.poll = select.poll()
        self.poll.register(own, select.POLLIN)
        self.poll.register(self.jobs, POLLRDHUP)
        self.deadline_start = time.monotonic()
        program = {name: self.job[name] for name in ("source", "entry_point", "watch")}
        hello = False
        try:
            self._send(program)
            hello = self._receive() == {"hello": True}
            if not hello:
                raise CandidateDied("the answer breaks the protocol")
            message = self._receive()
        except CheckTimeout:
            self.definitions = ["timeout", _text(CheckTimeout(self.limit))]
            self._end()
            raise
        except CandidateDied as error:
            if not hello:
                raise SandboxFault("a candidate's process ended before it read its program") from error
            self.definitions = ["error", _text(error)]
            raise
        if "raised" in message:
            self.definitions = ["error", _remote_text(message["raised"])]
            self._end()
            raise GiveUp
        self.definitions = ["passed", ""]
        self.deadline_start = time.monotonic()

    def _end(self):
        """Ends the candidate's process and books what it used."""
        if self.socket is None:
            return {}
        self.socket.close()
        self.socket = None
        self.control.send(b"K")
        ending = json.loads(_receive_packet(self.control))
        if not ending["forked"]:
            raise SandboxFault("a candidate's process could not be forked")
        self.memory_kb = max(self.memory_kb, ending["memory_kb"])
        self.cpu_seconds += ending["cpu_seconds"]
        return ending

    def _call(self, function, args, kwargs):
        """Asks the candidate for the value of one call."""
        if self.timeouts >= self.max_timeouts or self.deaths >= MAX_DEATHS:
            raise GiveUp
        functions = []
        encode = Encoder(functions).encode
        number = int.from_bytes(os.urandom(6), "little")  # an answer cannot be written before its question is read
        question = {
            "id": number,
            "function": function,
            "args": [encode(value) for value in args],
            "kwargs": {name: encode(value) for name, value in kwargs.items()},
        }
        if self.socket is None:
            try:
                self._start()
            except (CheckTimeout, CandidateDied) as error:
                raise GiveUp from error
        try:
            self._send(question)
            answer = self._receive()
            while "call_back" in answer:
                self._send(self._call_back(answer, functions))
                answer = self._receive()
            if answer.get("id") != number:
                raise CandidateDied("the answer breaks the protocol")
            return self._accept(answer, args)
        except WireError as error:
            self.deaths += 1
            self._end()
            raise CandidateDied(str(error)) from error
        except CheckTimeout:
            self.timeouts += 1
            self._end()
            raise
        except CandidateDied as error:
            self.deaths += 1
            ending = self._end()
            if ending["signal"]:
                raise CandidateDied(f"{error} ({signal.Signals(ending['signal']).name})") from error
            raise

    def _accept(self, answer, args):
        if "raised" in answer:
            raise _remote_error(answer["raised"])

        def stand_in(index):
            return lambda *args, **kwargs: self._call(index, args, kwargs)

        value = decode(answer["value"], stand_in)
        for index, data in answer.get("changed", {}).items():
            target, after = args[int(index)], decode(data, stand_in)
            if type(target) is not type(after):
                raise WireError("an argument changed its type")
            if type(after) in (list, bytearray):
                target[:] = after
            else:
                target.clear()
                target.update(after)
        for name, count in answer.get("calls", {}).items():
            self.pending_calls[name] = self.pending_calls.get(name, 0) + int(count)
        return value

    def _call_back(self, request, functions):
        try:
            function = functions[int(request["call_back"])]
            args = [decode(value, None) for value in request["args"]]
            kwargs = {name: decode(value, None) for name, value in request["kwargs"].items()}
            return {"value": Encoder([]).encode(function(*args, **kwargs))}
        except Exception as error:
            return {"raised": _text(error)}

    # -- sending and receiving against the clock

    def _send(self, message):
        frame = memoryview(pack(message))
        while frame:
            try:
                frame = frame[self.socket.send(frame, socket.MSG_NOSIGNAL) :]
            except BlockingIOError:
                self._wait(select.POLLOUT)
            except OSError as error:
                raise CandidateDied("the program ended its process") from error

    def _receive(self):
        while (message := self.inbox.next()) is None:
            self._wait(select.POLLIN)
            try:
                chunk = self.socket.recv(1 << 16)
            except BlockingIOError:
                continue
            except OSError as error:
                raise CandidateDied("the program ended its process") from error
            if not chunk:
                raise CandidateDied("the program ended its process")
            self.inbox.data += chunk
        if type(message) is not dict:
            raise WireError("a message that breaks the protocol")
        return message

    def _wait(self, event):
        if event != select.POLLIN:
            self.poll.modify(self.socket, event)
        limit = self.limit
        while True:
            left = self.deadline_start + limit - time.monotonic()
            if left <= 0:
                limit = self._stretched(limit)
                continue
            ready = self.poll.poll(left * 1000 + 1)
            if any(fd == self.jobs.fileno() for fd, _ in ready):
                os._exit(0)  # the trainer is gone; the zygote sees this and ends the candidate
            if ready:
                break
        if event != select.POLLIN:
            self.poll.modify(self.socket, select.POLLIN)

    def _stretched(self, limit):
        """The limit that still holds, given how long the candidate waited for a core; raises CheckTimeout if none."""
        self.control.send(b"S")
        schedule = json.loads(_receive_packet(self.control))
        had = min(limit, limit - schedule["waited"])
        if limit >= STRETCH * self.limit or had >= self.limit / STRETCH:
            raise CheckTimeout(self.limit)
        return limit + self.limit / STRETCH


def _text(error):
    if isinstance(error, CheckTimeout):
        return f"Timeout: no answer within {error.args[0]:g} s"
    if isinstance(error, CandidateDied):
        return f"Died: {error}"
    if isinstance(error, CandidateError):
        return str(error)
    return f"{type(error).__name__}: {str(error)[:300]}".rstrip(": ")


def _remote_text(raised):
    name, message = raised
    text = f"{name}: {message}" if message else name
    return text[:400].encode("utf-8", "replace").decode()


def _remote_error(raised):
    """The exception that a call raised, as the built-in of that name where there is one."""
    if type(raised) is not list or len(raised) != 2 or not all(type(part) is str for part in raised):
        raise WireError("an exception that breaks the format")
    name, message = raised
    kind = _RAISABLE.get(name)
    return kind(message) if kind else CandidateError(_remote_text(raised))
