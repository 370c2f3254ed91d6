"""The trainer's side: starts the helper processes, hands programs to them in parallel, and collects verdicts."""

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
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from pathlib import Path

from trl_multiagent.sandbox.asserts import read_asserts

from .helpers.wire import MAX_JOB, MAX_SOURCE, Inbox, pack
from .program import Check, Program, SandboxError, Verdict


logger = logging.getLogger(__name__)

# From the weakest to the strongest, with the layers of protection that each needs
TIERS = {
    "rlimits": set(),
    "seccomp": {"seccomp"},
    "landlock": {"seccomp", "landlock"},
    "namespaces": {"seccomp", "namespaces"},
}
SEND_SECONDS = 60.0  # for a verifier to read a job
# A verifier that has made no progress for this long, plus 10 times a check's limit, is given up
SILENT_SECONDS = 180.0
PAUSE_SECONDS = 10.0  # the longest wait before silent verifiers are looked for
STUCK_SECONDS = 0.1  # a program that runs for longer gives its worker's place to another one;
FIRST_SECONDS = 1.0  # the same for the first programs, whose helpers are still starting
SPARE_SLOTS = 12  # pairs of helpers kept beyond the workers, for batches with stuck programs
# Signals that reach a verifier only from outside: nothing that it computes raises them
OUTSIDE_SIGNALS = {getattr(signal, f"SIG{name}") for name in ("KILL", "TERM", "INT", "HUP", "QUIT")}
# Modules register hooks that repair locks and reseed generators after a fork. They cost more than the fork itself, and helpers,
# which have one thread, do not need them.
_BOOT = """
import sys
sys.path.remove("")
import importlib, json, os
os.register_at_fork = lambda **hooks: None
sys.path.insert(0, sys.argv[1])
importlib.import_module("helpers." + sys.argv[2]).main(*map(json.loads, sys.argv[3:]))
"""


def _start_helper(name, fds, config, stdout=subprocess.DEVNULL):
    """Starts a fresh interpreter, which shares no memory, environment or open files with this process."""
    command = [sys.executable, "-s", "-S", "-B", "-c", _BOOT, str(Path(__file__).parent), name]
    options = {"cwd": "/", "start_new_session": True, "stdin": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    # symbols are bound once, here, and not in every candidate; threads do not reserve memory of their own
    # the order of a set of texts is the same in every run: -I, which would isolate the interpreter, ignores that variable
    options["env"] = {"LD_BIND_NOW": "1", "MALLOC_ARENA_MAX": "1", "PYTHONHASHSEED": "0"}
    return subprocess.Popen([*command, *map(json.dumps, (*fds, config))], pass_fds=fds, stdout=stdout, **options)


@dataclass(eq=False)
class _Task:
    """A program of the batch and its state."""

    program: Program
    verdict: Verdict | None = None
    failures: int = 0  # how often the sandbox failed while it ran this program
    lost: list = field(default_factory=list)  # steps at which a verifier ended: number of the step, status, text

    def job(self):
        """What the verifier is sent."""
        source = self.program.source[: MAX_SOURCE + 1]  # the verifier refuses a source of that length
        return vars(self.program) | vars(read_asserts(self.program.checks)) | {"source": source, "lost": self.lost}


class _Slot:
    """A verifier and its zygote, and the task that they are working on, if any."""

    def __init__(self, number, cores, config):
        self.number = number
        self.task = None
        self.inbox = Inbox(MAX_JOB)
        self.socket, verifier_end = socket.socketpair()
        self.socket.settimeout(SEND_SECONDS)
        control, zygote_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.fileno = self.socket.fileno
        # the verifier writes the number of the step that it has reached, -1 before a job, and a count that grows while it waits
        self.progress = open(os.memfd_create("progress"), "r+b", buffering=0)
        self.progress.write(struct.pack("qq", -1, 0))
        self.processes = []
        with verifier_end, control, zygote_end:
            for role, *ends in (("zygote", zygote_end), ("verifier", verifier_end, control, self.progress)):
                self.processes.append(_start_helper(role, [end.fileno() for end in ends], config))
                os.sched_setaffinity(self.processes[-1].pid, cores)

    def start(self, task):
        self.task = task
        self.started = self.heard = time.monotonic()
        self.seen = (-1, 0)
        os.pwrite(self.progress.fileno(), struct.pack("qq", *self.seen), 0)
        with contextlib.suppress(OSError):  # a verifier that is gone or does not read is noticed later, by its silence
            self.socket.sendall(pack(task.job()))

    def receive(self):
        """The verifier's message about the task, or None while it is incomplete."""
        with contextlib.suppress(OSError):
            if chunk := self.socket.recv(1 << 16):
                self.inbox.data += chunk
                return self.inbox.next()
        step, _ = self._progress()
        self.close()
        signaled = -self.processes[-1].returncode
        if step < 0 or signaled in OUTSIDE_SIGNALS:
            return {"fault": "the verifier is gone"}
        if signaled == signal.SIGPROF:
            return {"lost": [step, "timeout", "the checks did not finish on the program's answers"]}
        return {"lost": [step, "error", "the checks crashed on the program's answers"]}

    def is_silent(self, limit):
        """Whether the verifier has made no progress for `limit` seconds."""
        if self.seen != (now := self._progress()):
            self.seen, self.heard = now, time.monotonic()
        return time.monotonic() - self.heard > limit

    def silence(self):
        """The message that takes the place of a silent verifier's."""
        step, _ = self._progress()
        stopped = os.waitid(os.P_PID, self.processes[-1].pid, os.WSTOPPED | os.WNOHANG | os.WNOWAIT)
        if step < 0 or stopped:
            return {"fault": "the verifier does not answer"}
        return {"lost": [step, "timeout", "the checks did not stop waiting on the program's answers"]}

    def _progress(self):
        return struct.unpack("qq", os.pread(self.progress.fileno(), 16, 0))

    def close(self):
        self.socket.close()  # the verifier ends, then its zygote, then the candidate
        for process in reversed(self.processes):
            try:
                process.wait(timeout=0.5)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self.progress.close()


@dataclass(eq=False)
class Sandbox(contextlib.AbstractContextManager):
    """
    Runs untrusted Python programs against trusted checks, in processes that share no memory with this one. These helpers
    start at the first `run` and end with `close`, with this process, or when it is killed.

    Args:
        workers (`int`, *optional*): Programs that run at once. Defaults to the cores that this process may use, divided by
            `LOCAL_WORLD_SIZE`, the number of ranks on the node.
        check_timeout (`float`, *optional*, defaults to `10.0`): Seconds for each check, and for the program's definitions.
            Processor time counts, and time in which the program waits for something else than a core.
        max_timeouts (`int`, *optional*, defaults to `3`): Timed-out checks after which a program's other checks do not run.
        memory_mb (`int`, *optional*, defaults to `512`): Memory of one program, in MiB.
        retries (`int`, *optional*, defaults to `2`): How often a program is tried again when the sandbox itself fails.
        min_tier (`str`, *optional*, defaults to `"seccomp"`): Weakest protection to run with: `"rlimits"`, which keeps
            verdicts honest but not the machine safe, `"seccomp"`, `"landlock"` or `"namespaces"`.
        max_tier (`str`, *optional*, defaults to `"namespaces"`): Strongest protection to use; lower it only to measure.
    """

    workers: int | None = None
    check_timeout: float = 10.0
    max_timeouts: int = 3
    memory_mb: int = 512
    retries: int = 2
    min_tier: str = "seccomp"
    max_tier: str = "namespaces"

    def __post_init__(self):
        if self.workers is None:
            cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count()
            self.workers = max(1, cores // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
        least = {"workers": 1, "check_timeout": 1e-3, "max_timeouts": 1, "memory_mb": 64, "retries": 0}
        for name, value in least.items():
            if getattr(self, name) < value:
                raise ValueError(f"sandbox.{name} must be at least {value}, got {getattr(self, name)}")
        for name in ("min_tier", "max_tier"):
            if getattr(self, name) not in TIERS:
                raise ValueError(f"sandbox.{name} must be one of {', '.join(TIERS)}, got {getattr(self, name)!r}")
        self.tier = None
        self._lock = threading.Lock()
        self._slots: list[_Slot] = []
        self._owner = os.getpid()
        weakref.finalize(self, _close_all, self._slots, self._owner)

    def __exit__(self, *exception):
        self.close()

    def close(self):
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
        if self._owner != os.getpid():  # a forked copy starts its own helpers
            self.__post_init__()
        with self._lock:
            if self.tier is None:
                self._choose_tier()
            unique = list(dict.fromkeys(programs))
            try:
                verdicts = dict(zip(unique, self._run(unique), strict=True))
            except BaseException:
                self.close()  # programs that still run must not go on, and their verdicts must not be read later
                raise
            return [verdicts[program] for program in programs]

    def _choose_tier(self):
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
        self.tier = tier
        logger.info("sandbox tier %s (layers: %s), %d workers", tier, ", ".join(self._config["layers"]), self.workers)

    def _run(self, programs):
        for program in programs:
            try:
                read_asserts(program.checks), read_asserts(program.setup)
            except (SyntaxError, ValueError) as error:
                raise ValueError(f"a program's checks cannot be compiled: {type(error).__name__}: {error}") from error
        tasks = [_Task(program) for program in programs]
        waiting, failed = deque(tasks), deque()
        patience = STUCK_SECONDS if self._slots else FIRST_SECONDS
        while waiting or failed or self._running():
            if not waiting and not self._running():
                waiting.append(failed.popleft())  # programs that the sandbox failed to run are retried one at a time
            self._start_tasks(waiting, patience)
            for slot, message in self._messages(patience if waiting else PAUSE_SECONDS):
                task, slot.task = slot.task, None
                if "fault" in message:
                    self._discard(slot)
                    self._count_failure(task, message["fault"])
                    failed.append(task)
                elif "lost" in message:
                    self._discard(slot)
                    task.lost.append(message["lost"])
                    if len(task.lost) <= self.max_timeouts:
                        waiting.append(task)
                    else:
                        task.verdict = self._all_lost(task)
                else:
                    task.verdict = self._verdict(message)
                    patience = STUCK_SECONDS
        while len(self._slots) > self.workers + SPARE_SLOTS:
            self._discard(self._slots[-1])
        return [task.verdict for task in tasks]

    def _running(self):
        return [slot for slot in self._slots if slot.task is not None]

    def _start_tasks(self, waiting, patience):
        """Starts as many tasks as there are free workers. A task that seems stuck does not occupy one."""
        running = self._running()
        stuck = sum(time.monotonic() - slot.started >= patience for slot in running)
        free = min(self.workers - len(running) + stuck, 2 * self.workers + SPARE_SLOTS - len(running))
        while waiting and free > 0 and (slot := self._idle_slot()):
            slot.start(waiting.popleft())
            free -= 1

    def _idle_slot(self):
        """A slot without a task, or None if the machine has no room for another one while others run."""
        idle = [slot for slot in self._slots if slot.task is None]
        if not idle:
            number = min({*range(len(self._slots) + 1)} - {slot.number for slot in self._slots})
            attempts = 1 if self._running() else self.retries + 1
            try:
                idle.append(self._start(attempts, _Slot, number, self._cores(number), self._config))
            except SandboxError:
                if self._running():
                    return None  # the running programs may be the reason
                raise
            self._slots.append(idle[0])
        return min(idle, key=lambda slot: slot.number)

    def _messages(self, seconds):
        """Waits up to `seconds` for verifiers to finish; yields their slots and messages."""
        running = self._running()
        ready = wait(running, seconds)
        for slot in running:
            if slot in ready:
                message = slot.receive()
            elif slot.is_silent(SILENT_SECONDS + 10 * self.check_timeout):
                message = slot.silence()
            else:
                continue
            if message is not None:
                yield slot, message

    def _discard(self, slot):
        self._slots.remove(slot)
        slot.close()

    def _count_failure(self, task, reason):
        task.failures += 1
        if task.failures > self.retries:
            raise SandboxError(f"the sandbox failed {task.failures} times in a row: {reason}")

    def _cores(self, number):
        """
        Cores of a slot. A verifier and its program take turns, which is fastest on one core. Slots beyond the workers are used when
        programs are stuck; those may use all cores.
        """
        cores, rank = sorted(os.sched_getaffinity(0)), int(os.environ.get("LOCAL_RANK", "0"))
        return {cores[(rank * self.workers + number) % len(cores)]} if number < self.workers else cores

    def _start(self, attempts, start, *args):
        """Starts helpers; tries again after a pause if the machine refuses."""
        for attempt in range(attempts):
            try:
                return start(*args)
            except OSError as error:
                if attempt == attempts - 1:
                    raise SandboxError(f"the sandbox's helper processes cannot be started: {error}") from error
                time.sleep(0.5 * (attempt + 1))

    def _verdict(self, message):
        message["definitions"] = Check(*message["definitions"])
        message["checks"] = tuple(Check(*fields) for fields in message["checks"])
        message["suspicious"] = tuple(message["suspicious"])
        message["effective"] = tuple(message["effective"])
        return Verdict(**message, tier=self.tier)

    def _all_lost(self, task):
        """The verdict on a program whose answers have ended too many verifiers."""
        _, status, text = task.lost[-1]
        checks = tuple(Check(status, source, text) for source in read_asserts(task.program.checks).sources)
        calls = dict.fromkeys(task.program.watch, 0)
        return Verdict(Check("passed", ""), checks, calls, suspicious=("overloaded the checks",), tier=self.tier)


def _close_all(slots, owner):
    if os.getpid() == owner:  # a forked copy of this process does not own the helpers
        while slots:
            slots.pop().close()
