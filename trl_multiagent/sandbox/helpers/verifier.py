"""
Runs the checks and decides. The verifier never runs a candidate's code: it asks the candidate's process for the value of
calls, rebuilds exact built-in types from the answers, and evaluates the asserts itself.
"""

import builtins
import json
import mmap
import os
import random
import resource
import select
import signal
import socket
import struct
import sys
import time

from . import kernel
from .checks import compile_checks
from .wire import MAX_FRAME, MAX_JOB, Encoder, Inbox, WireError, decode, pack


STRETCH = 5  # on a loaded machine a limit grows up to this factor,
ENOUGH = 0.8  # until the candidate has had this part of its share of a core
POLLRDHUP = 0x2000
MEMORY = 2 << 30  # bytes of the verifier's address space
ANSWER_SECONDS = 60.0  # for the zygote
MAX_SOURCE = 1 << 20  # characters of a program
MAX_NOTES = 16  # suspicious acts of one program
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
    """The candidate's process ended, or closed its socket."""


class GiveUp(BaseException):
    """No further check of this program is run."""


class SandboxFault(BaseException):
    """The sandbox failed, not the program."""


class CandidateError(Exception):
    """Stands for an exception of the candidate that is no built-in one."""


def main(job_fd: int, control_fd: int, share_fd: int, config: dict):
    """Body of the verifier's process: one job after the other, until the trainer closes its end."""
    jobs = socket.socket(fileno=job_fd)
    control = socket.socket(fileno=control_fd)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    config["share"] = mmap.mmap(share_fd, 8, prot=mmap.PROT_READ)
    _lock_down(config["layers"])
    started = _receive_packet(control)
    jobs.sendall(pack({"ready": True} if started == b"ready" else {"fault": started.decode()}))
    inbox = Inbox(MAX_JOB)
    while True:
        while (job := inbox.next()) is None:
            chunk = jobs.recv(1 << 16)
            if not chunk:
                os._exit(0)
            inbox.data += chunk
        # answers that make the checks themselves spin end this process, whatever loop it is in; the trainer knows the signal
        signal.setitimer(signal.ITIMER_VIRTUAL, config["cpu_seconds"])
        try:
            result = _judge(job, jobs, control, config)
        except SandboxFault as fault:
            result = {"fault": str(fault)}
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        jobs.sendall(pack(result))


def _lock_down(layers):
    kernel.drop_capabilities()
    kernel.hide_memory()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    if "landlock" in layers:
        kernel.restrict_files([path for path in sys.path if os.path.isdir(path)])  # checks may import
    if "seccomp" in layers:
        kernel.filter_calls("verifier")


def _receive_packet(control):
    readable, _, _ = select.select([control], [], [], ANSWER_SECONDS)
    packet = control.recv(1 << 16) if readable else b""
    if not packet:
        raise SandboxFault("the zygote does not answer")
    return packet


def _judge(job, jobs, control, config):
    """Runs one job; the verdict in JSON's types."""
    try:
        checks = compile_checks(job["setup"], job["checks"])
    except (SyntaxError, ValueError) as error:
        return {"bad_checks": f"{type(error).__name__}: {error}"}
    run = Run(job, checks, jobs, control, config)
    run.run()
    mattered = {}
    for name, count in run.calls.items():
        mattered[name] = False
        if count:
            limit = min(config["check_timeout"], 1 + 10 * run.seconds)
            again = Run(
                job, checks, jobs, control, config | {"check_timeout": limit}, stub=name, expected=run.statuses
            )
            again.run()
            mattered[name] = again.differs
    return {
        "definitions": [run.definitions[0], "", run.definitions[1]],
        "checks": list(zip(run.statuses, checks.sources, run.errors, strict=True)),
        "calls": run.calls,
        "mattered": mattered,
        "seconds": run.seconds,
        "cpu_seconds": run.cpu_seconds,
        "memory_mb": run.memory_kb / 1024,
        "suspicious": sorted(run.suspicious),
    }


class Run:
    """
    One program against its checks.

    Args:
        stub (`str`, *optional*): A watched function whose values are replaced by a bare object.
        expected (`list[str]`, *optional*): Statuses of an earlier run; this one ends when a passed check no longer passes.
    """

    def __init__(self, job, checks, jobs, control, config, stub=None, expected=None):
        self.job = job
        self.checks = checks
        self.jobs = jobs
        self.control = control
        self.limit = config["check_timeout"]
        self.whole_limit = config["cpu_seconds"]
        self.max_timeouts = config["max_timeouts"]
        self.share = config["share"]
        self.sealed = "seccomp" in config["layers"]
        self.stub = stub
        self.expected = expected
        self.definitions = ["not_run", ""]
        self.statuses = ["not_run"] * len(checks.sources)
        self.errors = [""] * len(checks.sources)
        self.calls = dict.fromkeys(job["watch"], 0)
        self.check_calls = dict.fromkeys(job["watch"], 0)
        self.suspicious = set()
        self.socket = None
        self.clock = 0.0
        self.timeouts = 0
        self.deaths = 0
        self.seconds = 0.0
        self.cpu_seconds = 0.0
        self.memory_kb = 0

    def run(self):
        self.begun = time.monotonic()
        random.seed(self.job["checks"])  # the same program gets the same verdict
        try:
            self._start()
            if self._run_checks():
                for guard in self.checks.guards:
                    if self.statuses[guard] == "not_run":
                        self.statuses[guard] = "passed"
        except (CheckTimeout, CandidateDied, GiveUp):
            pass  # recorded where it happened
        finally:
            self._end()
        self.seconds = time.monotonic() - self.begun
        self.differs = any(
            old == "passed" != new for old, new in zip(self.expected or (), self.statuses, strict=False)
        )

    # -- the checks

    def _run_checks(self):
        """Whether the checks ran to their end."""

        def candidate(*args, **kwargs):
            return self._call(0, args, kwargs)

        namespace = {
            "__name__": "checks",
            "__builtins__": builtins,
            "__begin__": self._begin_check,
            "__end__": self._end_check,
            "__raised__": self._raised_in_check,
            "__caught__": (Exception, CheckTimeout, CandidateDied),
        }
        try:
            exec(self.checks.setup, namespace)
            namespace["candidate"] = namespace[self.job["entry_point"]] = candidate
            exec(self.checks.code, namespace)
            if self.checks.has_check:
                check = namespace["check"]
                namespace[self.job["entry_point"]] = candidate  # also where the program's function is called `check`
                check(candidate)
        except (Exception, CheckTimeout, CandidateDied) as error:
            # the code between the asserts failed: what comes after it does not run
            for index, status in enumerate(self.statuses):
                if status == "not_run":
                    self.errors[index] = _text(error)
            return False
        return True

    def _begin_check(self, index):
        self.check_calls = dict.fromkeys(self.calls, 0)
        self.clock = time.monotonic()

    def _end_check(self, index, value):
        if not value:
            self._settle(index, "failed", "")
        elif self.statuses[index] in ("not_run", "passed"):
            self.statuses[index] = "passed"
            for name, count in self.check_calls.items():
                self.calls[name] += count
        self.clock = time.monotonic()

    def _raised_in_check(self, index, error):
        self._settle(index, "timeout" if isinstance(error, CheckTimeout) else "error", _text(error))
        self.clock = time.monotonic()

    def _settle(self, index, status, error):
        if self.statuses[index] in ("not_run", "passed"):  # in a loop, the first failure stays
            self.statuses[index], self.errors[index] = status, error
        if self.expected and self.expected[index] == "passed":
            raise GiveUp  # the difference is found

    # -- the candidate's process

    def _start(self):
        """Forks a candidate and has it run the program's definitions."""
        if len(self.job["source"]) > MAX_SOURCE:
            self.definitions = ["error", f"the source has more than {MAX_SOURCE} characters"]
            raise GiveUp
        self.socket, theirs = socket.socketpair()
        with theirs:
            self._command(b"F", theirs.fileno())
        self.socket.setblocking(False)
        self.inbox = Inbox(MAX_FRAME)
        self.poll = select.poll()
        self.poll.register(self.socket, select.POLLIN)
        self.poll.register(self.jobs, POLLRDHUP)
        self.clock = time.monotonic()
        hello = False
        try:
            self._send({name: self.job[name] for name in ("source", "entry_point", "watch")} | {"stub": self.stub})
            hello = self._receive() == {"hello": True}
            outcome = self._receive()
            if "raised" in outcome:
                raise _remote_error(outcome["raised"])
            if outcome != {"defined": True}:
                raise WireError("a message that breaks the protocol")
        except (Exception, CheckTimeout, CandidateDied) as error:
            if not hello:
                raise SandboxFault("a candidate's process ended before it read its program") from error
            self._book(error)
            self.definitions = ["timeout" if isinstance(error, CheckTimeout) else "error", _text(error)]
            raise GiveUp from error
        self.definitions = ["passed", ""]
        self.clock = time.monotonic()

    def _command(self, command, *fds):
        try:
            socket.send_fds(self.control, [command], fds)
        except OSError as error:
            raise SandboxFault("the zygote is gone") from error

    def _end(self, command=b"K"):
        """Ends the candidate's process and books what it used; the signal that had ended it before, or 0."""
        if self.socket is None:
            return 0
        self.socket.close()
        self.socket = None
        self._command(command)
        ending = json.loads(_receive_packet(self.control))
        if not ending["forked"]:
            raise SandboxFault("a candidate's process could not be forked")
        if ending["signal"] == signal.SIGKILL and ending["cpu_seconds"] < self.whole_limit and self.sealed:
            raise SandboxFault("a candidate's process was killed from outside")  # it cannot send itself a signal
        self.memory_kb = max(self.memory_kb, ending["memory_kb"])
        self.cpu_seconds += ending["cpu_seconds"]
        return ending["signal"]

    def _book(self, error):
        """Counts what ended a call or the definitions, and ends a process that can no longer be used."""
        if isinstance(error, CheckTimeout):
            self.timeouts += 1
            self._end()
        elif isinstance(error, CandidateDied):
            self.deaths += 1
            self.suspicious.add("ended its process")
            if number := self._end(b"D"):
                error.args = (f"{error} ({signal.Signals(number).name})",)
        elif isinstance(error, WireError):
            self.deaths += 1
            self.suspicious.add("broke the protocol")
            self._end()
        elif str(error).startswith(("SystemExit", "KeyboardInterrupt", "GeneratorExit")):
            self.suspicious.add("tried to exit")

    def _call(self, function, args, kwargs):
        """Asks the candidate for the value of one call."""
        too_long = time.monotonic() - self.begun > 2 * self.whole_limit
        if self.timeouts >= self.max_timeouts or self.deaths >= MAX_DEATHS or too_long:
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
            self._start()
        try:
            self._send(question)
            answer = self._receive()
            while "call_back" in answer:
                self._send(self._call_back(answer, functions))
                answer = self._receive()
            if answer.get("id") != number:
                raise WireError("a message that breaks the protocol")
            return self._accept(answer, args)
        except (Exception, CheckTimeout, CandidateDied) as error:
            self._book(error)
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
        for name, count in zip(self.calls, answer.get("calls", ()), strict=True):
            if type(count) is not int:
                raise WireError("a count that is no number")
            self.check_calls[name] += count
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
        while True:
            message = self.inbox.next()
            if type(message) is dict and "suspicious" not in message:
                return message
            if type(message) is dict:
                if len(self.suspicious) < MAX_NOTES:
                    self.suspicious.add(str(message["suspicious"])[:80])
                continue
            if message is not None:
                raise WireError("a message that breaks the protocol")
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

    def _wait(self, event):
        if event != select.POLLIN:
            self.poll.modify(self.socket, event)
        limit = self.limit
        while True:
            left = self.clock + limit - time.monotonic()
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
        self._command(b"S")
        had = limit - json.loads(_receive_packet(self.control))
        (share,) = struct.unpack("d", self.share[:])
        if limit >= STRETCH * self.limit or had >= ENOUGH * share * self.limit:
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
