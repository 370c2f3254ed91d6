"""Runs programs in parallel in helper processes, and returns verdicts."""

import contextlib
import json
import logging
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, TypeVar

from .helpers.wire import MAX_JOB, MAX_SOURCE, Inbox, pack
from .program import Check, Program, SandboxError, Verdict, read_asserts, read_checks


logger = logging.getLogger(__name__)

# From the weakest to the strongest, with the layers of protection that each needs
TIERS = {
    "rlimits": set(),
    "seccomp": {"seccomp"},
    "landlock": {"seccomp", "landlock"},
    "namespaces": {"seccomp", "namespaces"},
}
SEND_SECONDS = 60.0  # a verifier has to read its job within this time
# A verifier is given up when it has made no progress for this long plus 10 times a check's limit
SILENT_SECONDS = 180.0
PAUSE_SECONDS = 10.0  # the longest wait between two searches for silent verifiers
# A program that has run for longer no longer counts as one of the workers' programs, so that another one can start
SLOW_SECONDS = 0.1
FIRST_SLOW_SECONDS = 1.0  # the same limit for the first programs, while their helper processes are still starting
# The smallest and the largest value of each number
BOUNDS = {
    "workers": (1, 1024),
    "check_timeout": (1e-3, 86400),
    "max_timeouts": (1, 1000000),
    "memory_mb": (64, 1048576),
    "retries": (0, 100),
}
SPARE_SLOTS = 12  # slots kept beyond the workers, for batches with slow programs
# Signals that only another process can send to a verifier: no computation raises them
OUTSIDE_SIGNALS = {getattr(signal, f"SIG{name}") for name in ("KILL", "TERM", "INT", "HUP", "QUIT")}
# Modules register hooks that repair locks and reseed generators after a fork. The hooks cost more than the fork
# itself, and helper processes do not need them, because they have one thread
_BOOT = """
import sys
sys.path.remove("")
import importlib, json, os
os.register_at_fork = lambda **hooks: None
sys.path.insert(0, sys.argv[1])
importlib.import_module("helpers." + sys.argv[2]).main(*map(json.loads, sys.argv[3:]))
"""
T = TypeVar("T")


def _start_helper(name: str, fds: Sequence[int], config: dict, stdout: int = subprocess.DEVNULL) -> subprocess.Popen:
    """Starts a fresh interpreter, which shares no memory, environment or open files with this process."""
    command = [sys.executable, "-s", "-S", "-B", "-c", _BOOT, str(Path(__file__).parent), name]
    environment = {
        "LD_BIND_NOW": "1",  # symbols are bound once, here, and not again in each candidate
        "MALLOC_ARENA_MAX": "1",  # threads do not reserve memory of their own
        # A set of strings has the same order in every run. The option -I would isolate the interpreter better, but it
        # ignores this variable
        "PYTHONHASHSEED": "0",
    }
    return subprocess.Popen(
        [*command, *map(json.dumps, (*fds, config))],
        pass_fds=fds,
        cwd="/",
        env=environment,
        start_new_session=True,
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=subprocess.DEVNULL,
    )


@dataclass(eq=False)
class _Task:
    """A program of the batch and its state."""

    program: Program
    verdict: Verdict | None = None  # once there is one
    failures: int = 0  # how often the sandbox failed while it ran this program
    # The steps of the checks at which its answers ended a verifier, each with the status and the error of the check.
    # The next run leaves them out
    lost_steps: list[tuple[int, str, str]] = field(default_factory=list)

    def job(self) -> dict[str, Any]:
        """Returns the message that starts this program in a verifier."""
        source = self.program.source[: MAX_SOURCE + 1]  # the verifier refuses a source of this length
        asserts = vars(read_checks(self.program.checks, self.program.unittest))
        return vars(self.program) | asserts | {"source": source, "lost_steps": self.lost_steps}


class _Slot:
    """A verifier and its zygote, and the task that they are working on, if any."""

    def __init__(self, number: int, cores: set[int], config: dict):
        self.number = number
        self.has_folder = "folder" in config["layers"]
        self.task: _Task | None = None
        self.inbox = Inbox(MAX_JOB)
        self.socket, verifier_end = socket.socketpair()
        self.socket.settimeout(SEND_SECONDS)
        control, zygote_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.fileno = self.socket.fileno
        # Memory shared with the verifier, which writes the number of its current step, -1 before a job, and a count
        # that grows while it waits
        self.progress_file = open(os.memfd_create("progress"), "r+b", buffering=0)
        self.progress_file.write(struct.pack("qq", -1, 0))
        self.processes: list[subprocess.Popen] = []
        with verifier_end, control, zygote_end:
            for name, ends in (("zygote", [zygote_end]), ("verifier", [verifier_end, control, self.progress_file])):
                self.processes.append(_start_helper(name, [end.fileno() for end in ends], config))
                os.sched_setaffinity(self.processes[-1].pid, cores)

    def start(self, task: _Task) -> None:
        self.task = task
        self.started = self.last_progress_time = time.monotonic()
        self.last_progress = (-1, 0)
        os.pwrite(self.progress_file.fileno(), struct.pack("qq", *self.last_progress), 0)
        with contextlib.suppress(OSError):  # that a verifier has ended or does not read is noticed later
            self.socket.sendall(pack(task.job()))

    def receive(self) -> dict[str, Any] | None:
        """
        Returns the verifier's message, or one that takes its place when it has ended. None while the message is
        incomplete.
        """
        with contextlib.suppress(OSError):
            if chunk := self.socket.recv(1 << 16):
                self.inbox.data += chunk
                return self.inbox.next()
        step, _ = self._progress()
        self.close()
        signal_number = -self.processes[-1].returncode
        if step < 0 or signal_number in OUTSIDE_SIGNALS:
            return {"fault": "the verifier ended"}
        if signal_number == signal.SIGPROF:
            return {"lost_step": (step, "timeout", "the checks did not finish with the program's answers")}
        return {"lost_step": (step, "error", "the checks crashed on the program's answers")}

    def silent_message(self, limit: float) -> dict[str, Any] | None:
        """Returns the message that takes the place of a verifier's that has made no progress for `limit` seconds."""
        step, _ = progress = self._progress()
        if progress != self.last_progress:
            self.last_progress, self.last_progress_time = progress, time.monotonic()
        if time.monotonic() - self.last_progress_time <= limit:
            return None
        if step < 0:
            return {"fault": "the verifier does not answer"}
        return {"lost_step": (step, "timeout", "the checks kept waiting with the program's answers")}

    def _progress(self) -> tuple[int, int]:
        return struct.unpack("qq", os.pread(self.progress_file.fileno(), 16, 0))

    def close(self) -> None:
        self.socket.close()  # the verifier ends, then its zygote, then the candidate
        for process in reversed(self.processes):
            try:
                process.wait(timeout=0.5)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self.progress_file.close()


@dataclass(eq=False)
class Sandbox(contextlib.AbstractContextManager):
    """
    Runs untrusted Python programs against trusted checks, in processes that share no memory with this one. These
    helpers start at the first `run` and end with `close`, with this process, or when it is killed.

    Args:
        workers (`int`, *optional*): Programs that run at once. Defaults to the cores that this process may use,
            divided by `LOCAL_WORLD_SIZE`, the number of ranks on the node.
        check_timeout (`float`, *optional*, defaults to `10.0`): Seconds for each check, and for the program's
            definitions. Processor time counts, and time in which the program waits for something else than a core.
        max_timeouts (`int`, *optional*, defaults to `3`): Timed-out checks after which a program's other checks do not
            run.
        memory_mb (`int`, *optional*, defaults to `512`): Memory of one program, in MiB.
        retries (`int`, *optional*, defaults to `2`): How often a program is tried again when the sandbox itself fails.
        min_tier (`str`, *optional*, defaults to `"seccomp"`): Weakest protection to run with: `"rlimits"`, which keeps
            verdicts honest but not the machine safe, `"seccomp"`, `"landlock"` or `"namespaces"`.
        max_tier (`str`, *optional*, defaults to `"namespaces"`): Strongest protection to use; lower it only to
            measure.
    """

    workers: int | None = None
    check_timeout: float = 10.0
    max_timeouts: int = 3
    memory_mb: int = 512
    retries: int = 2
    min_tier: str = "seccomp"
    max_tier: str = "namespaces"

    def __post_init__(self) -> None:
        if self.workers is None:
            cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count()
            self.workers = max(1, cores // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
        for name, (low, high) in BOUNDS.items():
            if not low <= getattr(self, name) <= high:
                raise ValueError(f"sandbox.{name} must be at least {low}, at most {high}, got {getattr(self, name)}")
        for name in ("min_tier", "max_tier"):
            if getattr(self, name) not in TIERS:
                raise ValueError(f"sandbox.{name} must be one of {', '.join(TIERS)}, got {getattr(self, name)!r}")
        self.tier: str | None = None
        self._lock = threading.Lock()
        self._slots: list[_Slot] = []
        self._owner = os.getpid()
        weakref.finalize(self, _close_all, self._slots, self._owner)

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends all helper processes. The next `run` starts fresh ones."""
        _close_all(self._slots, self._owner)

    def run(self, programs: Sequence[Program]) -> list[Verdict]:
        """
        Runs a batch; equal programs run once.

        Returns:
            `list[Verdict]`: One verdict per program, in their order.

        Raises:
            SandboxError: if the sandbox itself keeps failing, or the machine does not allow `min_tier`.
            ValueError: if a program's trusted checks cannot be compiled.
        """
        if self._owner != os.getpid():  # a forked copy of this process starts helpers of its own
            self.__post_init__()
        with self._lock:
            if self.tier is None:
                self._choose_tier()
            unique = list(dict.fromkeys(programs))
            if any(program.folder for program in unique) and not self._has_folders:
                raise SandboxError(f"a program needs a folder, which the sandbox tier {self.tier!r} cannot give")
            try:
                verdicts = dict(zip(unique, self._run(unique), strict=True))
            except BaseException:
                self.close()  # programs that still run have to end, and their verdicts must not be read later
                raise
            return [verdicts[program] for program in programs]

    def has_folders(self) -> bool:
        """Returns whether this machine can give programs a folder: on the tier `namespaces`, if it has Landlock."""
        self.run([])
        return self._has_folders

    def _choose_tier(self) -> None:
        if sys.platform != "linux":
            raise SandboxError(f"the sandbox needs Linux, this is {sys.platform}")
        with self._start(self.retries + 1, _start_helper, "kernel", [], {}, subprocess.PIPE) as probe:
            output = probe.stdout.read()
        if probe.returncode != 0:
            raise SandboxError(f"probing the machine for the sandbox failed with exit status {probe.returncode}")
        allowed = set(json.loads(output))
        order = list(TIERS)
        tier = [name for name in order[: order.index(self.max_tier) + 1] if TIERS[name] <= allowed][-1]
        if order.index(tier) < order.index(self.min_tier):
            raise SandboxError(
                f"this machine allows the sandbox tier {tier!r} at most (layers: {sorted(allowed) or 'none'}), but "
                f"sandbox.min_tier is {self.min_tier!r}; lower it only if the programs can be trusted not to attack"
            )
        optional = {"user", "landlock"} if tier == "namespaces" else {"user", "userns"}
        self._config = {name: getattr(self, name) for name in ("check_timeout", "max_timeouts", "memory_mb")}
        self._config["cpu_seconds"] = (self.max_timeouts + 1) * self.check_timeout  # for one program
        self._config["layers"] = sorted(allowed & (TIERS[tier] | optional))
        self._has_folders = tier == "namespaces" and "folder" in allowed
        self.tier = tier
        logger.info("sandbox tier %s (layers: %s), %d workers", tier, ", ".join(self._config["layers"]), self.workers)

    def _run(self, programs: list[Program]) -> list[Verdict]:
        """
        Runs programs that all differ.

        A task waits, then runs in a slot, then has a verdict. If its answers end the verifier, it waits again. If the
        sandbox fails, it is retried when nothing else runs, because the machine may have been overloaded.
        """
        for program in programs:
            try:
                read_checks(program.checks, program.unittest)
                read_asserts(program.setup)
            except (SyntaxError, ValueError) as error:
                raise ValueError(f"a program's checks cannot be compiled: {type(error).__name__}: {error}") from error
        tasks = [_Task(program) for program in programs]
        waiting, to_retry = deque(tasks), deque[_Task]()
        slow_after = SLOW_SECONDS if self._slots else FIRST_SLOW_SECONDS
        while waiting or to_retry or self._running():
            if not waiting and not self._running():
                waiting.append(to_retry.popleft())
            self._start_tasks(waiting, slow_after)
            for slot, message in self._messages(slow_after if waiting else PAUSE_SECONDS):
                task, slot.task = slot.task, None
                if "fault" in message:
                    self._discard(slot)
                    task.failures += 1
                    if task.failures > self.retries:
                        raise SandboxError(f"the sandbox failed {task.failures} times in a row: {message['fault']}")
                    to_retry.append(task)
                elif "lost_step" in message:
                    self._discard(slot)
                    task.lost_steps.append(message["lost_step"])
                    if len(task.lost_steps) <= self.max_timeouts:
                        waiting.append(task)
                    else:
                        task.verdict = self._verdict_on_lost(task)
                else:
                    task.verdict = self._verdict(message)
                    slow_after = SLOW_SECONDS
        while len(self._slots) > self.workers + SPARE_SLOTS:
            self._discard(self._slots[-1])
        return [task.verdict for task in tasks]

    def _running(self) -> list[_Slot]:
        return [slot for slot in self._slots if slot.task is not None]

    def _start_tasks(self, waiting: deque[_Task], slow_after: float) -> None:
        """Starts as many tasks as workers are free. A slow program does not count as a worker's."""
        running = self._running()
        slow = sum(time.monotonic() - slot.started >= slow_after for slot in running)
        free = min(self.workers + slow, 2 * self.workers + SPARE_SLOTS) - len(running)
        while waiting and free > 0 and (slot := self._idle_slot(waiting[0].program.folder)):
            slot.start(waiting.popleft())
            free -= 1

    def _idle_slot(self, has_folder: bool) -> _Slot | None:
        """
        Returns a slot without a task. None if the machine refuses another one while programs run, which may be the
        reason.
        """
        idle = [slot for slot in self._slots if slot.task is None and slot.has_folder == has_folder]
        if not idle:
            number = min({*range(len(self._slots) + 1)} - {slot.number for slot in self._slots})
            attempts = 1 if self._running() else self.retries + 1
            config = self._config | {"layers": self._config["layers"] + ["folder"] * has_folder}
            try:
                idle.append(self._start(attempts, _Slot, number, self._cores(number), config))
            except SandboxError:
                if self._running():
                    return None
                raise
            self._slots.append(idle[0])
        return min(idle, key=lambda slot: slot.number)

    def _messages(self, seconds: float) -> Iterator[tuple[_Slot, dict[str, Any]]]:
        """Waits up to `seconds` for verifiers to finish or to end; yields their slots and messages."""
        running, limit = self._running(), SILENT_SECONDS + 10 * self.check_timeout
        ready = wait(running, seconds)
        for slot in running:
            message = slot.receive() if slot in ready else slot.silent_message(limit)
            if message is not None:
                yield slot, message

    def _discard(self, slot: _Slot) -> None:
        self._slots.remove(slot)
        slot.close()

    def _cores(self, number: int) -> set[int]:
        """
        Cores of a slot: one, because a verifier and its program take turns. Slots beyond the workers run beside slow
        programs, on any core.
        """
        cores, rank = sorted(os.sched_getaffinity(0)), int(os.environ.get("LOCAL_RANK", "0"))
        return {cores[(rank * self.workers + number) % len(cores)]} if number < self.workers else set(cores)

    def _start(self, attempts: int, start: Callable[..., T], *args: Any) -> T:
        """Starts helper processes. If the machine refuses, tries again after a pause."""
        attempt = 1
        while True:
            try:
                return start(*args)
            except OSError as error:
                if attempt == attempts:
                    raise SandboxError(f"the sandbox's helper processes cannot be started: {error}") from error
            time.sleep(0.5 * attempt)
            attempt += 1

    def _verdict(self, fields: dict[str, Any]) -> Verdict:
        fields |= {name: tuple(fields[name]) for name in ("suspicious", "effective")}
        fields["definitions"] = Check(**fields["definitions"])
        fields["checks"] = tuple(Check(**check) for check in fields["checks"])
        return Verdict(**fields, tier=self.tier)

    def _verdict_on_lost(self, task: _Task) -> Verdict:
        """Returns the verdict on a program that has ended too many verifiers with its answers."""
        _, status, error = task.lost_steps[-1]
        sources = read_checks(task.program.checks, task.program.unittest).sources
        checks = tuple(Check(status, source, error) for source in sources)
        calls = dict.fromkeys(task.program.watch, 0)
        return Verdict(Check("passed", ""), checks, calls, suspicious=("overloaded the checks",), tier=self.tier)


def _close_all(slots: list[_Slot], owner: int) -> None:
    if os.getpid() == owner:  # a forked copy of this process does not own the helper processes
        while slots:
            slots.pop().close()
