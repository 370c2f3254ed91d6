"""
Runs the checks and decides. The verifier never runs a candidate's code: it asks the candidate's process for the value
of calls, rebuilds exact built-in types from the answers, and evaluates the asserts itself.
"""

import functools
import gc
import json
import mmap
import os
import random
import resource
import signal
import socket
import sys
import time
import types
from collections import Counter
from collections.abc import Sequence
from typing import Any

from . import kernel, wire
from .ablation import Ablation
from .process import CheckLost, Clock, Died, GiveUp, Process, SandboxFault, StepLost, Timeout, outcome
from .unittests import TestMethods
from .wire import DataOnly, Inbox, References, WireError


MEMORY = 1 << 30  # bytes of the verifier's address space
ZYGOTE_SECONDS = 60.0  # for the zygote's answers
# The sandbox fails if a check takes longer on the wall clock than a minute plus this many times its limit: the machine
# then gave the program too little of a core
MAX_SLOWDOWN = 100
MAX_NOTES = 16  # suspicious acts of one program
MAX_ENDED_CANDIDATES = 10  # after so many, the rest of a program's checks does not run
CALL_ERRORS = (Exception, Timeout, Died)  # what a call of the candidate may raise


def main(job_fd: int, control_fd: int, progress_fd: int, config: dict) -> None:
    """Main loop of the verifier process, until the trainer closes its end."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    jobs, control = (socket.socket(fileno=fd) for fd in (job_fd, control_fd))
    control.settimeout(ZYGOTE_SECONDS)
    config |= {"jobs": jobs, "control": control, "progress": memoryview(mmap.mmap(progress_fd, 16)).cast("q")}
    config["own_times"] = os.open("/proc/self/schedstat", os.O_RDONLY)
    importable = [path for path in sys.path if os.path.isdir(path)]  # the checks may import from these folders
    if "folder" in config["layers"]:
        from .zygote import load_modules

        load_modules(config["layers"])  # their files are outside of the root that this process gets
        importable = []
    packet, root, _, _ = socket.recv_fds(control, 1 << 16, 1)
    started = json.loads(packet)
    kernel.lock_down("verifier", config["layers"], {resource.RLIMIT_AS: MEMORY}, importable, *root)
    gc.freeze()
    inbox = Inbox(wire.MAX_JOB)
    if "fault" in started:
        jobs.sendall(wire.pack(started))
    while True:
        job = inbox.read(job_fd)
        config["progress"][0] = 0
        _end_process_after(config["cpu_seconds"])
        try:
            result = evaluate(job, config)
        except SandboxFault as fault:
            result = {"fault": str(fault)}
        except Exception as error:  # out of memory, for example. The trainer ends this process
            result = {"lost_step": [config["progress"][0], *outcome(error)]}
        _end_process_after(0)
        jobs.sendall(wire.pack(result))


def _end_process_after(seconds: float) -> None:
    """
    Has the kernel end this process by SIGPROF after this much processor time; 0 cancels that. A program's answers may
    make the checks loop inside C code, where no Python code can stop them. The trainer then runs the program again
    without this step.
    """
    signal.setitimer(signal.ITIMER_PROF, seconds)


def evaluate(job: dict, config: dict) -> dict:
    """
    Runs a program once, or once for each experiment until one has no effect. Returns the fields of the last run's
    `Verdict`.
    """
    result = {}
    effective = []
    for experiment in job["experiments"] or [""]:
        evaluation = Evaluation(job | {"experiment": experiment}, config)
        result = evaluation.verdict()
        if not evaluation.lost_something():
            break
        effective.append(experiment)
    return result | {"effective": effective}


class Evaluation:
    """
    One run of a program against its checks.

    Args:
        job (`dict`): The fields of `Program` and of `Asserts`, `lost_steps`, and the `experiment` to make.
        config (`dict`): Settings of the sandbox, and the open files of this process.
    """

    def __init__(self, job: dict, config: dict):
        self.job = job
        self.config = config
        self.definitions = _result("not_run")
        self.results = [_result("not_run", source) for source in job["sources"]]
        self.watch = [] if job["helper"] else job["watch"]  # what the program's process counts calls of
        self.calls = Counter(dict.fromkeys(self.watch, 0))
        self.outside_calls: Counter = Counter()  # between checks, and by the program's definitions
        self.calls_of_checks: list[Counter] = [Counter() for _ in job["sources"]]
        self.outside_calls_before: list[Counter] = [Counter() for _ in job["sources"]]
        self.counter = self.outside_calls  # one of these: it belongs to the check that is running
        self.settled: set[int] = set()  # asserts that will not run again
        self.suspicious: set[str] = set()
        self.cpu_seconds = 0.0
        self.memory_mb = 0.0
        self.test_methods = TestMethods(self) if job["unittest"] else None
        self.process: Any = None  # the program's, while there is one
        self.helper: Any = None  # the process of the program's helper
        self.ablation = Ablation(job["experiment"], self._ask_helper) if job["helper"] else None
        self.begun = time.monotonic()
        self.clock = Clock(min(config["check_timeout"], job["check_timeout"] or config["check_timeout"]), config)
        self.lost_steps = {number: outcome for number, *outcome in job["lost_steps"]}
        self.step = config["progress"][0]  # number of asserts and calls that began and of asserts that ended
        self.timeouts = 0
        self.ended_candidates = 0  # by themselves, or because they broke the protocol
        self.pending = 0  # calls that wait for their answer, each from a function that the one before it called

    def verdict(self) -> dict:
        """Runs the checks and returns the fields of `Verdict`."""
        random.seed(self.job["code"])  # the same program gets the same verdict
        try:
            self.start_candidate()
            self._define_checks()
            if self.test_methods:
                self.test_methods.run()
            else:
                self._run_checks()
                self._pass_unreached_checks()
        except GiveUp:
            self._fail_unfinished_checks("not_run", "")
        except SandboxFault:
            raise
        except BaseException as error:  # from the code between the asserts
            self._fail_unfinished_checks(*outcome(error))
        finally:
            self.end_candidate()
        if self.ablation and self.ablation.asked and not self.lost_something():
            self._repeat_calls(self.ablation)
        self._add_calls_of_passed_checks()
        return {
            "definitions": vars(self.definitions),
            "checks": [vars(result) for result in self.results],
            "calls": self.calls,
            "seconds": time.monotonic() - self.begun,
            "cpu_seconds": self.cpu_seconds,
            "memory_mb": self.memory_mb,
            "suspicious": sorted(self.suspicious),
        }

    def _repeat_calls(self, ablation: Ablation) -> None:
        """Has a new process of the helper answer the calls of the control again."""
        ablation.unfit = True  # unless the helper answers again
        self.clock.limit *= 2 * len(self.results)  # for all calls together
        self.clock.start_candidate()
        self._begin_limit(self.clock.limit)
        try:
            self._start_helper()
            ablation.repeat()
        except CALL_ERRORS as error:
            self._record(error)
        finally:
            self.end_candidate()

    def _pass_unreached_checks(self) -> None:
        """
        Records that the checks ran to their end. A guard that was not reached passes, because reaching it is the
        failure. Other checks that were not reached pass if all that were reached did.
        """
        guards = self.job["guards"]
        reached = {result.status for index, result in enumerate(self.results) if index not in guards}
        for index, result in enumerate(self.results):
            if result.status == "not_run" and (index in guards or reached == {"passed", "not_run"}):
                result.status = "passed"

    def _fail_unfinished_checks(self, status: str, error: str) -> None:
        """
        Records that the checks did not run to their end. Those after it did not run, and those in a loop did not run
        in every iteration.
        """
        for index, result in enumerate(self.results):
            if result.status == "passed" and index not in self.settled:
                result.status, result.error = status, error
            elif result.status == "not_run":
                result.error = error

    def _add_calls_of_passed_checks(self) -> None:
        outside: Counter = Counter()
        for calls, before, result in zip(self.calls_of_checks, self.outside_calls_before, self.results, strict=True):
            if result.status == "passed":  # known only now: a check in a loop may pass at first and fail later
                self.calls.update(calls)
                outside |= before
        self.calls.update(outside)

    def _define_checks(self) -> None:
        """
        Runs the checks' module. If its asserts stand in a function `check`, or in test methods, they do not run yet.
        """
        entry_point = self.job["entry_point"]
        candidate = self.references.stand_in(0, not self.test_methods)
        if not self.test_methods:
            candidate.__name__ = entry_point
        sys.modules["checks"] = types.ModuleType("checks")  # dataclasses look up the module that defines them
        self.namespace = namespace = vars(sys.modules["checks"])
        if self.job["folder"]:
            gc.collect()  # closes files of the last program's checks, which take space as long as they are open
        namespace["__caught__"] = (*CALL_ERRORS, CheckLost)
        namespace |= {"__begin__": self.begin_check, "__end__": self._end_check, "__settle__": self.settled.update}
        exec(_compile(self.job["setup"]), namespace)
        namespace["candidate"] = namespace[entry_point] = candidate
        exec(_compile(self.job["code"]), namespace)

    def _run_checks(self) -> None:
        if self.job["has_check"]:
            check, candidate = self.namespace["check"], self.references.stand_in(0, True)
            self.namespace[self.job["entry_point"]] = candidate  # the entry point may be called `check` too
            check(candidate)

    def begin_check(self, index: int) -> None:
        if not self.pending:  # an assert in a function that the candidate calls belongs to the check that runs already
            self.counter = self.calls_of_checks[index]
            self._begin_limit(self.clock.limit)
        self._next_step(CheckLost)

    def _end_check(self, index: int, value: object, error: BaseException | None = None) -> None:
        status, text = ("passed" if value else "failed", "") if error is None else outcome(error)
        self.finish_check(index, status, text)

    def finish_check(self, index: int, status: str, error: str) -> None:
        """Records how a check ended, and ends its time limit."""
        result = self.results[index]
        if result.status in ("not_run", "passed"):  # in a loop, the first failure is kept
            result.status, result.error = status, error
        self.outside_calls_before[index] = Counter(self.outside_calls)
        if not self.pending:
            self.counter = self.outside_calls
        if status != "passed" and index in self.job["needed"]:
            raise GiveUp
        if not self.pending:
            self._begin_limit(self.config["check_timeout"])
        self._next_step(StepLost)

    def _begin_limit(self, own_seconds: float) -> None:
        """
        Starts the time limit of a check, or of the code between two; `own_seconds` limits this process's processor
        time.
        """
        self.clock.begin()
        _end_process_after(0.25 + 1.25 * own_seconds)  # later than the clock's limit, at which this process survives

    def _next_step(self, lost: type[StepLost]) -> None:
        """
        Counts a step, so that the trainer knows how far this process got. Raises `lost` if this step was lost earlier.
        """
        self.step += 1
        self.config["progress"][0] = self.step
        if self.step in self.lost_steps:
            self.timeouts += 1
            self.suspicious.add("overloaded the checks")
            raise lost(*self.lost_steps[self.step])

    def start_candidate(self) -> None:
        """Forks a candidate, which runs the program's definitions."""
        if len(self.job["source"]) > wire.MAX_SOURCE:
            self.definitions = _result("error", error=f"the source has more than {wire.MAX_SOURCE} characters")
            raise GiveUp
        make = self.test_methods.stand_in if self.test_methods else self._stand_in
        self.references = References(make, self.job["unittest"])
        interrupted = self.clock.computed, self.clock.idle
        self.clock.begin()
        try:
            self.clock.start_candidate()
            program = {name: self.job[name] for name in ("source", "entry_point", "unittest", "folder")}
            program |= {"watch": self.watch, "called": "", "is_helper": False}
            if self.ablation:
                self._start_helper()
                self.references.number(self.ablation.call)
                program["called"] = self.job["watch"][0]
            self.process = Process(self, 0, self.references)
            self._count_calls(self._define(self.process, program))
        except CALL_ERRORS as error:
            self._record(error)
            self.definitions.status, self.definitions.error = outcome(error)
            raise GiveUp from error
        self.definitions.status = "passed"
        self.clock.begin(*interrupted)

    def _start_helper(self) -> None:
        """Forks a candidate that runs the helper's definitions, and then answers calls of the watched function."""
        self.helper = Process(self, 1, DataOnly())
        program = {
            "source": self.job["helper"],
            "entry_point": self.job["watch"][0],
            "watch": (),
            "is_helper": True,
            "unittest": False,
            "folder": False,
            "called": "",
        }
        self._define(self.helper, program)

    def _define(self, process: Process, program: dict) -> Any:
        """Has a process run a program's definitions. Returns the calls of watched functions that it reports."""
        answer = self._converse(process, program)
        if "raised" in answer:
            raise wire.rebuild(answer["raised"], {})
        if [*answer] != ["defined"]:
            raise WireError("a message that breaks the protocol")
        return answer["defined"]

    def end_candidate(self, command: bytes = b"K") -> None:
        """Ends the candidate's process, and its helper's, and records what they used."""
        processes, self.process, self.helper = (self.process, self.helper), None, None
        for process in processes:
            if process:
                ending = process.end(command)
                self.memory_mb = max(self.memory_mb, ending["memory_mb"])
                self.cpu_seconds += ending["cpu_seconds"]

    def _record(self, error: BaseException) -> None:
        """Records what ended a call or the definitions, and ends a process that can no longer be used."""
        if isinstance(error, Timeout):
            self.timeouts += 1
            if self.job["check_timeout"]:  # a program that loops once probably loops again
                self.clock.limit /= 2
            self.end_candidate()
        elif isinstance(error, StepLost):
            self.end_candidate()
        elif isinstance(error, (Died, WireError)):
            self.ended_candidates += 1
            died = isinstance(error, Died)
            self.suspicious.add("ended its process" if died else "broke the protocol")
            self.end_candidate(b"D" if died else b"K")
        elif type(error).__name__ in ("SystemExit", "KeyboardInterrupt", "GeneratorExit"):
            self.suspicious.add("tried to exit")

    def call(self, function: int, args: Sequence, kwargs: dict) -> Any:
        """Asks the candidate for the value of one call."""
        too_long = self.clock.total > 2 * self.config["cpu_seconds"]
        if self.timeouts >= self.config["max_timeouts"] or self.ended_candidates >= MAX_ENDED_CANDIDATES or too_long:
            raise GiveUp
        self._next_step(CheckLost)
        if self.process is None:
            self.start_candidate()
        self.pending += 1
        try:
            if self.ablation and function == 0:
                return self.ablation.enter(lambda: self._ask(function, args, kwargs), args, kwargs)
            return self._ask(function, args, kwargs)
        except (*CALL_ERRORS, StepLost) as error:
            self._record(error)
            raise
        finally:
            self.pending -= 1

    def _ask(self, function: int, args: Sequence, kwargs: dict) -> Any:
        """
        Returns the value of a call of the program's function. Makes the call's changes of its arguments here, too.
        """
        answer = self._answer(self.process, wire.encode_call(function, args, kwargs, self.references))
        self._count_calls(answer.get("calls"))
        if "raised" in answer:
            raise self._raised(answer)
        return wire.accept(answer, args, kwargs, self.references)

    def _ask_helper(self, question: dict) -> dict:
        """Returns the helper's answer to a call, which is not decoded."""
        try:
            answer = self._answer(self.helper, question)
        except WireError as error:  # after which it cannot be asked again
            raise Died(str(error)) from error
        return {name: answer[name] for name in ("raised", "value", "changed") if name in answer}

    def _answer(self, process: Process, question: dict) -> dict:
        """
        Returns a process's answer to a call. It has the right parts; the values in them are checked when they are
        decoded. It cannot be written in advance, because it has to repeat an unpredictable number.
        """
        question = question | {"id": int.from_bytes(os.urandom(6), "little")}
        answer = self._converse(process, question)
        changed = answer.get("changed")
        arguments = range(len(question["args"]) + len(question["kwargs"]))
        well_formed = "raised" in answer or (
            "value" in answer
            and type(changed) is list
            and all(type(change) is list and len(change) == 2 and type(change[0]) is int for change in changed)
            and all(number in arguments for number, _ in changed)
        )
        if answer.get("id") != question["id"] or not well_formed:
            raise WireError("a message that breaks the protocol")
        return answer

    def _converse(self, process: Process, message: dict) -> dict:
        """Sends a message to a process, answers its calls, and returns its answer."""
        process.send(message)
        while "call" in (answer := process.receive()):
            try:
                reply = wire.answer_call(answer, process.references)
            except Exception as error:  # of a function that the checks passed to the candidate
                reply = {"raised": wire.describe(error)}
            if process not in (self.process, self.helper):
                raise Died("the program's process was ended in a call within this one")
            process.send(reply)
        return answer

    def lost_something(self) -> bool:
        """Returns whether a needed check did not pass, or the control found a state."""
        lost = any(self.results[k].status != "passed" for k in self.job["needed"] if k < len(self.results))
        return lost or bool(self.ablation and self.ablation.unfit)

    def _count_calls(self, counts: Any) -> None:
        """Adds calls of the watched functions, as the candidate reports them."""
        if type(counts) is not list or [type(count) for count in counts] != [int] * len(self.calls):
            raise WireError("a message that breaks the protocol")
        for name, count in zip(self.calls, counts, strict=True):
            self.counter[name] += count if count in range(1 << 31) else 0

    def _raised(self, answer: dict) -> Exception:
        error = wire.rebuild(answer["raised"], self.namespace)
        if isinstance(error, StopIteration) and "StopIteration" not in self.job["code"]:
            return RuntimeError(f"StopIteration: {error}")  # it would silently end a loop of the checks
        return error

    def _stand_in(self, references: References, number: int, is_function: bool) -> Any:
        """Returns the program's function of this number, for the checks."""
        return lambda *args, **kwargs: self.call(number, args, kwargs)

    def note(self, act: str) -> None:
        """Records a suspicious act."""
        if len(self.suspicious) < MAX_NOTES:
            self.suspicious.add(ascii(act[:80])[1:81].rstrip("'"))

    def look_when_due(self) -> None:
        """If a look is due, updates the clock and raises if the candidate has exceeded a limit."""
        if self.clock.until_next_look() > 0:
            return
        self.config["progress"][1] += 1  # shows the trainer that this process is alive
        threads = self.clock.look()
        if self.clock.spent >= self.clock.limit:
            raise Timeout(f"no answer within {self.clock.limit:g} s")
        if threads > 2 + kernel.MAX_THREADS:
            raise WireError(f"more than {kernel.MAX_THREADS} threads")
        if time.monotonic() - self.clock.begun > 60 + MAX_SLOWDOWN * self.clock.limit:
            raise SandboxFault("a program was not given enough of a core")


def _result(status: str, source: str = "", error: str = "") -> types.SimpleNamespace:
    """Returns the fields of the package's `Check`."""
    return types.SimpleNamespace(status=status, source=source, error=error)


@functools.lru_cache(maxsize=4096)
def _compile(source: str) -> types.CodeType:
    return compile(source, "<checks>", "exec", dont_inherit=True)
