"""
Runs the checks and decides. The verifier never runs a candidate's code: it asks the candidate's process for the value of
calls, rebuilds exact built-in types from the answers, and evaluates the asserts itself.
"""

import contextlib
import functools
import gc
import json
import mmap
import os
import random
import resource
import select
import signal
import socket
import sys
import time
import types
from collections import Counter

from . import kernel, wire
from .wire import Inbox, WireError


POLLRDHUP = 0x2000
MEMORY = 1 << 30  # bytes of the verifier's address space
ZYGOTE_SECONDS = 60.0  # for its answers
POLL_SECONDS = 0.0005  # processor time of this process between two looks that counts as the cost of waiting
MAX_STRETCH = (
    100  # a check that takes a minute and this many times its limit on the clock was not given enough of a core
)
MAX_ERROR = 300  # characters of a check's error
MAX_NOTES = 16  # suspicious acts of one program
MAX_DEATHS = 10  # candidates of one program that may die before the rest of its checks is given up


class Timeout(BaseException):
    """The candidate did not answer in time."""


class Died(BaseException):
    """The candidate's process ended."""


class GiveUp(BaseException):
    """The rest of this program's checks is not run."""


class SandboxFault(BaseException):
    """The sandbox failed, not the program."""


class BrokenOff(BaseException):
    """Here, between two asserts, the checks ended the verifier in an earlier run. Arguments: status and text."""


class Lost(BrokenOff):
    """Here, in a call or an assert, the checks ended the verifier in an earlier run."""


def main(job_fd: int, control_fd: int, progress_fd: int, config: dict):
    """Body of the verifier's process: one job after the other, until the trainer closes its end."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    jobs, control = (socket.socket(fileno=fd) for fd in (job_fd, control_fd))
    control.settimeout(ZYGOTE_SECONDS)
    config |= {"jobs": jobs, "control": control, "progress": memoryview(mmap.mmap(progress_fd, 16)).cast("q")}
    config["own_times"] = os.open("/proc/self/schedstat", os.O_RDONLY)
    importable = [path for path in sys.path if os.path.isdir(path)]  # by checks
    kernel.lock_down("verifier", config["layers"], {resource.RLIMIT_AS: MEMORY}, importable)
    gc.freeze()
    inbox = Inbox(wire.MAX_JOB)
    started = json.loads(control.recv(1 << 16))
    if "fault" in started:
        jobs.sendall(wire.pack(started))
    while True:
        job = inbox.read(job_fd)
        config["progress"][0] = 0
        _end_process_after(config["cpu_seconds"])
        try:
            result = Run(job, config).run()
        except SandboxFault as fault:
            result = {"fault": str(fault)}
        except Exception as error:  # out of memory, for example. The trainer ends this process
            result = {"lost": [config["progress"][0], *_outcome(error)]}
        _end_process_after(0)
        jobs.sendall(wire.pack(result))


def _end_process_after(seconds):
    """
    Has the kernel end this process by SIGPROF after so many seconds of processor time, because a program's answers may make the
    checks loop inside C code. The trainer then runs the program again and leaves out this step.
    """
    signal.setitimer(signal.ITIMER_PROF, seconds)


class Run:
    """One program against its checks."""

    def __init__(self, job, config):
        self.job = job
        self.config = config
        self.timeout = min(config["check_timeout"], job["check_timeout"] or config["check_timeout"])
        self.definitions, *self.results = [["not_run", source, ""] for source in ("", *job["sources"])]
        self.calls = Counter(dict.fromkeys(job["watch"], 0))
        self.check_calls = None  # of the check that is running; None between checks
        self.outside_calls = Counter()  # between checks, and by the program's definitions
        self.calls_of = [Counter() for _ in job["sources"]]
        self.outside_calls_before = [Counter() for _ in job["sources"]]
        self.experiments = [*job["experiments"]]  # under way is the first
        self.effective = []  # experiments that lost a needed check
        self.to_reach = set(job["needed"])  # needed checks that have not ended yet
        self.settled = set()  # asserts that will not run again
        self.suspicious = set()
        self.verdict = {
            "definitions": self.definitions,
            "checks": self.results,
            "calls": self.calls,
            "effective": self.effective,
            "cpu_seconds": 0.0,
            "memory_mb": 0.0,
        }
        self.functions = []  # of the checks, by the number under which the candidate calls them
        self.socket = None
        self.begun = time.monotonic()
        self.clock = Clock(self.timeout, lambda: self._ask_zygote(b"S"), config["own_times"])
        self.lost = {step: outcome for step, *outcome in job["lost"]}
        self.step = 0  # number of asserts and calls that began and of asserts that ended
        self.timeouts = self.deaths = 0
        self.pending = 0  # calls that wait for their answer, each from a function that the one before it called

    def run(self):
        random.seed(self.job["code"])  # the same program gets the same verdict
        try:
            self._start()
            self._run_checks()
            reached = {result[0] for index, result in enumerate(self.results) if index not in self.job["guards"]}
            for index, result in enumerate(self.results):
                # nothing came by: right for a guard, and as good as passed where all others have
                if result[0] == "not_run" and (index in self.job["guards"] or reached == {"passed", "not_run"}):
                    result[0] = "passed"
        except GiveUp:
            self._stopped("not_run", "")
        except SandboxFault:
            raise
        except BaseException as error:  # in the code between the asserts
            self._stopped(*_outcome(error))
        finally:
            self._end()
        outside = Counter()
        for calls, before, result in zip(self.calls_of, self.outside_calls_before, self.results, strict=True):
            if result[0] == "passed":  # to the end: in a loop it may have passed at first, and failed later
                self.calls.update(calls)
                outside |= before
        self.calls.update(outside)
        return self.verdict | {"seconds": time.monotonic() - self.begun, "suspicious": sorted(self.suspicious)}

    def _stopped(self, status, text):
        """The checks did not come to their end: those after it did not run, and those in a loop not in every round."""
        if self.to_reach:
            self.effective += self.experiments[:1]
        for index, result in enumerate(self.results):
            if result[0] == "passed" and index not in self.settled:
                result[0], result[2] = status, text
            elif result[0] == "not_run":
                result[2] = text

    def _run_checks(self):
        candidate, entry_point = self._stand_in(0), self.job["entry_point"]
        candidate.__name__ = entry_point
        sys.modules["checks"] = types.ModuleType("checks")  # dataclasses look their module up
        self.namespace = namespace = vars(sys.modules["checks"])
        namespace["__caught__"] = (Exception, Timeout, Died, Lost)
        namespace |= {"__begin__": self._begin_check, "__end__": self._end_check, "__settle__": self.settled.update}
        exec(_compile(self.job["setup"]), namespace)
        namespace["candidate"] = namespace[entry_point] = candidate
        exec(_compile(self.job["code"]), namespace)
        if self.job["has_check"]:
            check = namespace["check"]
            namespace[entry_point] = candidate  # also where the program's function is called `check`
            check(candidate)

    def _begin_check(self, index):
        if not self.pending:  # no check of its own is one in a function that the candidate calls
            self.check_calls = Counter()
            self._begin_limit(self.timeout)
        self._next_step(Lost)

    def _end_check(self, index, value, error=None):
        result, passed = self.results[index], bool(value)
        if result[0] in ("not_run", "passed"):  # in a loop, the first failure stays
            result[0] = "passed" if passed else "failed"
            if error is not None:
                result[0], result[2] = _outcome(error)
        self.outside_calls_before[index] = Counter(self.outside_calls)
        if not self.pending:
            self.calls_of[index].update(self.check_calls)
            self.check_calls = None
        if index in self.job["needed"]:
            self.to_reach.discard(index)
            if not passed:
                self._lost_needed_check()
        if not self.pending:
            self._begin_limit(self.config["check_timeout"])
        self._next_step(BrokenOff)

    def _begin_limit(self, own):
        """Starts the limit of another check, or of the code between two; `own` is the seconds that this process may compute."""
        self.clock.begin()
        _end_process_after(0.25 + 1.25 * own)  # later than the clock's limit, which costs no process

    def _next_step(self, kind):
        """Counts a step, so that the trainer knows how far a verifier got. Raises where an earlier one ended."""
        self.step += 1
        self.config["progress"][0] = self.step
        if self.step in self.lost:
            self.timeouts += 1
            self.suspicious.add("overloaded the checks")
            raise kind(*self.lost[self.step])

    def _experiment(self):
        """The experiment under way, or an empty text."""
        return self.experiments[0] if self.experiments else ""

    def _lost_needed_check(self):
        """Ends the experiment under way, which is decided; without another one, the rest of the checks is not needed."""
        self.effective += self.experiments[:1]
        del self.experiments[:1]
        if not self.experiments or self.pending:
            self.to_reach.clear()
            raise GiveUp
        self._end()  # what one experiment left in the program's variables must not cost the next one a check

    def _start(self):
        """Forks a candidate and has it run the program's definitions."""
        if len(self.job["source"]) > wire.MAX_SOURCE:
            self.definitions[:] = "error", "", f"the source has more than {wire.MAX_SOURCE} characters"
            raise GiveUp
        try:
            self.socket, theirs = socket.socketpair()
            with theirs:
                socket.send_fds(self.config["control"], [b"F"], [theirs.fileno()])
        except OSError as error:
            raise SandboxFault("the zygote is gone") from error
        self.inbox = Inbox(wire.MAX_ANSWER)
        self.poll = select.poll()
        self.poll.register(self.config["jobs"], POLLRDHUP)
        interrupted = self.clock.computed, self.clock.idle
        self.clock.begin()
        self.clock.start_candidate()
        try:
            program = {name: self.job[name] for name in ("source", "entry_point", "watch")}
            self._send(program | {"experiment": self._experiment()})
            outcome = self._receive()
            if "raised" in outcome:
                raise wire.rebuild(outcome["raised"], {})
            if [*outcome] != ["defined"]:
                raise WireError("a message that breaks the protocol")
            self._count_calls(outcome["defined"], self.outside_calls)
        except (Exception, Timeout, Died) as error:
            self._record(error)
            self.definitions[0], self.definitions[2] = _outcome(error)
            raise GiveUp from error
        self.definitions[0] = "passed"
        self.clock.begin(*interrupted)

    def _end(self, command=b"K"):
        """Ends the candidate's process and records what it used. Returns the signal that had already ended it, or 0."""
        if self.socket is None:
            return 0
        self.socket.close()
        self.socket = None
        ending = self._ask_zygote(command)
        if ending["signal"] == signal.SIGKILL and "seccomp" in self.config["layers"]:
            raise SandboxFault("a candidate's process was killed from outside")  # it cannot send itself a signal
        self.verdict["memory_mb"] = max(self.verdict["memory_mb"], ending["memory_mb"])
        self.verdict["cpu_seconds"] += ending["cpu_seconds"]
        return ending["signal"]

    def _record(self, error):
        """Records what ended a call or the definitions, and ends a process that can no longer be used."""
        if isinstance(error, Timeout):
            self.timeouts += 1
            if self.job["check_timeout"]:  # a program that loops needs less time to show that it does so again
                self.timeout /= 2
                self.clock.limit = self.timeout
            self._end()
        elif isinstance(error, BrokenOff):
            self._end()
        elif isinstance(error, (Died, WireError)):
            self.deaths += 1
            self.suspicious.add("ended its process" if isinstance(error, Died) else "broke the protocol")
            if number := self._end(b"D" if isinstance(error, Died) else b"K"):
                error.args = (f"{error} ({signal.Signals(number).name})",)
        elif type(error).__name__ in ("SystemExit", "KeyboardInterrupt", "GeneratorExit"):
            self.suspicious.add("tried to exit")

    def _ask_zygote(self, command):
        control = self.config["control"]
        try:
            with contextlib.suppress(BrokenPipeError):  # what it said before it ended can still be read
                control.send(command)
            answer = json.loads(control.recv(1 << 16) or '{"fault": "the zygote is gone"}')
        except OSError as error:
            answer = {"fault": f"the zygote does not answer: {error}"}
        if "fault" in answer:
            raise SandboxFault(answer["fault"])
        return answer

    def _call(self, function, args, kwargs):
        """Asks the candidate for the value of one call."""
        too_long = self.clock.total > 2 * self.config["cpu_seconds"]
        if self.timeouts >= self.config["max_timeouts"] or self.deaths >= MAX_DEATHS or too_long:
            raise GiveUp
        self._next_step(Lost)
        question = wire.encode_call(function, args, kwargs, self.functions)
        question["id"] = int.from_bytes(os.urandom(6), "little")  # so that no answer can be written before it is read
        question["experiment"] = self._experiment()
        if self.socket is None:
            self._start()
        self.pending += 1
        try:
            self._send(question)
            process = self.socket
            while "call" in (answer := self._receive()):
                reply = self._call_back(answer)
                if self.socket is not process:
                    raise Died("the program's process was ended in a call within this one")
                self._send(reply)
            if answer.get("id") != question["id"]:
                raise WireError("a message that breaks the protocol")
            self._count_calls(
                answer.get("calls"), self.outside_calls if self.check_calls is None else self.check_calls
            )
            if "raised" in answer:
                raise self._raised(answer)
            if not _well_formed(answer, len(args) + len(kwargs)):
                raise WireError("a message that breaks the protocol")
            return self._accept(answer, (*args, *kwargs.values()))
        except (Exception, Timeout, Died, BrokenOff) as error:
            self._record(error)
            raise
        finally:
            self.pending -= 1

    def _accept(self, answer, arguments):
        """The value, after what the call changed in its arguments was changed here as well."""
        value = wire.decode(answer["value"], self._stand_in)
        for number, new in answer["changed"]:
            target, after = arguments[number], wire.decode(new, self._stand_in)
            if type(after) not in wire.MUTABLE or not isinstance(target, type(after)):
                raise WireError("an argument changed its type")
            target.clear()
            (target.update if isinstance(target, (dict, set)) else target.extend)(after)
        return value

    def _count_calls(self, counts, counter):
        """Adds calls of the watched functions, as the candidate reports them."""
        if (
            type(counts) is not list
            or len(counts) != len(self.calls)
            or any(type(count) is not int for count in counts)
        ):
            raise WireError("a message that breaks the protocol")
        for name, count in zip(self.calls, counts, strict=True):
            counter[name] += count if count in range(1 << 31) else 0

    def _raised(self, answer):
        error = wire.rebuild(answer["raised"], self.namespace)
        if isinstance(error, StopIteration) and "StopIteration" not in self.job["code"]:
            return RuntimeError(f"StopIteration: {error}")  # it would end loops of the checks that know nothing of it
        return error

    def _stand_in(self, number):
        return lambda *args, **kwargs: self._call(number, args, kwargs)

    def _call_back(self, request):
        """Calls a function that the checks passed to the candidate."""
        try:
            args, kwargs = wire.decode_call(request, self._stand_in)
            value = self.functions[request["call"]](*args, **kwargs)
            return {"value": wire.encode(value, self.functions)}
        except Exception as error:
            return {"raised": wire.describe(error)}

    def _send(self, message):
        left = memoryview(wire.pack(message))
        while left:
            try:
                left = left[self.socket.send(left, socket.MSG_DONTWAIT) :]
            except BlockingIOError:
                self._wait(select.POLLOUT)
            except OSError as error:
                raise Died("the program ended its process") from error

    def _receive(self):
        """The candidate's next message, without its notes."""
        while True:
            self._look_when_due()  # many messages may have arrived at once
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
            if len(self.suspicious) < MAX_NOTES:
                self.suspicious.add(ascii(message["suspicious"][:80])[1:81].rstrip("'"))

    def _wait(self, event):
        """Waits until the candidate's socket can be read or written, as long as the check may take."""
        self.poll.register(self.socket, event)
        while True:
            ready = self.poll.poll(max(0.0, self.clock.until_next_look()) * 1000)
            if any(fd == self.config["jobs"].fileno() for fd, _ in ready):
                os._exit(0)  # the trainer is gone; the zygote sees this and ends the candidate
            self._look_when_due()
            if ready:
                return

    def _look_when_due(self):
        """Finds out what the candidate has done, and ends a check that took too long."""
        if self.clock.until_next_look() > 0:
            return
        self.config["progress"][1] += 1  # shows the trainer that this process is alive
        threads = self.clock.look()
        if self.clock.spent >= self.timeout:
            raise Timeout(f"no answer within {self.timeout:g} s")
        if threads > 2 + kernel.MAX_THREADS:
            raise WireError(f"more than {kernel.MAX_THREADS} threads")
        if time.monotonic() - self.clock.begun > 60 + MAX_STRETCH * self.timeout:
            raise SandboxFault("a program was not given enough of a core")


class Clock:
    """
    The time that a check takes: processor time of the candidate and of this process, and the time in which both wait for
    something else than a core. Waiting for a core does not count, so the time does not depend on the machine's load. The clock
    advances when it is looked at.

    Args:
        limit (`float`): Seconds that a check may take. The time between looks is a small part of it.
        ask_candidate (`Callable[[], dict]`): What the candidate did since the last time (see `zygote.Usage`).
        own_times (`int`): Open `schedstat` file of this process.
    """

    def __init__(self, limit, ask_candidate, own_times):
        self.limit = limit
        self.interval = min(0.05, limit / 20)
        self.ask_candidate = ask_candidate
        self.own_times = own_times
        self.total = 0.0  # of all checks, and of what is between them
        self.begin()
        self.start_candidate()

    def begin(self, computed=0.0, idle=0.0):
        """Starts to time a check, or one that has already taken this long."""
        self.begun = time.monotonic()
        self.computed, self.idle = computed, idle

    def start_candidate(self):
        """Starts to observe a new candidate."""
        self.looked, self.own = time.monotonic(), self._own()

    @property
    def spent(self):
        return self.computed + self.idle

    def until_next_look(self):
        return self.looked + min(self.interval, max(0.002, self.limit - self.spent)) - time.monotonic()

    def look(self):
        """Advances the clock and returns the number of the candidate's threads."""
        own = self._own()
        candidate, now = self.ask_candidate(), time.monotonic()
        since = now - self.looked
        computed = candidate["computed"] + max(0.0, own[0] - self.own[0] - POLL_SECONDS)
        waited = candidate["waited"] + own[1] - self.own[1]
        # Looking takes some of the time. Where looks are further apart than planned, this process was stopped or had no core, and
        # the candidate may have been stopped as well.
        idle = min(max(0.0, 0.98 * since - computed) - waited, 2 * self.interval)
        self.total += max(0.0, computed + idle)
        part = min(1.0, (now - self.begun) / since)  # the rest belongs to the check before
        self.computed += part * computed
        self.idle = max(0.0, self.idle + part * idle)  # some waiting is known only at a later look
        self.looked, self.own = now, self._own()
        return candidate["threads"]

    def _own(self):
        """Processor time of this process, and the time that it has spent waiting for a core."""
        os.lseek(self.own_times, 0, os.SEEK_SET)
        return time.process_time(), int(os.read(self.own_times, 100).split()[1]) / 1e9


@functools.lru_cache(maxsize=4096)
def _compile(source):
    return compile(source, "<checks>", "exec", dont_inherit=True)


def _well_formed(answer, arguments):
    """Whether an answer has the right parts; the values in them are checked when they are decoded."""
    changed = answer.get("changed")
    return (
        "value" in answer
        and type(changed) is list
        and all(type(change) is list and len(change) == 2 and type(change[0]) is int for change in changed)
        and all(0 <= number < arguments for number, _ in changed)
    )


def _outcome(error):
    """Status and text of a check that raised."""
    if isinstance(error, BrokenOff):
        return error.args
    try:
        text = f"{type(error).__name__}: {str(error)[:MAX_ERROR]}".rstrip(": ")
    except Exception:  # a number of too many digits, or a method of the checks' own class
        text = type(error).__name__
    return "timeout" if isinstance(error, Timeout) else "error", text.encode("utf-8", "replace").decode()
