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
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path

from trl_multiagent.asserts import read_asserts

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
START_SECONDS = 60.0  # for a helper to come up, or to take a job
STUCK_SECONDS = 0.1  # a program that runs longer gives its worker's place to another one,
FIRST_SECONDS = 1.0  # unless it is one of the first, and the first helpers are yet to come up
SPARE_SLOTS = 12  # pairs of helpers kept beyond the workers, for batches with stuck programs
# Modules want to repair locks and reseed after a fork, which costs more than the fork itself; a helper has one thread
_BOOT = """
import importlib, json, os, sys
os.register_at_fork = lambda **hooks: None
sys.path.insert(0, sys.argv[1])
importlib.import_module("helpers." + sys.argv[2]).main(*map(json.loads, sys.argv[3:]))
"""


def _start_helper(name, fds, config, stdout=subprocess.DEVNULL):
    """Starts a fresh interpreter: nothing of this process is in its memory, its environment or its open files."""
    command = [sys.executable, "-I", "-S", "-B", "-c", _BOOT, str(Path(__file__).parent), name]
    options = {"cwd": "/", "start_new_session": True, "stdin": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    # no candidate has to look up a library's functions; threads do not reserve memory of their own
    options["env"] = {"LD_BIND_NOW": "1", "MALLOC_ARENA_MAX": "1"}
    return subprocess.Popen([*command, *map(json.dumps, (*fds, config))], pass_fds=fds, stdout=stdout, **options)


class _Slot:
    """A verifier and its zygote, and the job that they are at."""

    def __init__(self, number, cores, config, share):
        self.number = number
        self.inbox = Inbox(MAX_JOB)
        self.socket, verifier_end = socket.socketpair()
        self.socket.settimeout(START_SECONDS)
        control, zygote_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.fileno = self.socket.fileno
        self.progress = open(os.memfd_create("progress"), "r+b", buffering=0)  # the check that it is at, or -1
        self.progress.write(struct.pack("q", -1))
        self.processes = []
        with verifier_end, control, zygote_end:
            for role, *ends in (("zygote", zygote_end), ("verifier", verifier_end, control, share, self.progress)):
                self.processes.append(_start_helper(role, [end.fileno() for end in ends], config))
                os.sched_setaffinity(self.processes[-1].pid, cores)

    def start(self, index, program, spoilt):
        self.index = index
        self.started = time.monotonic()
        with contextlib.suppress(OSError):  # the verifier is gone: its socket reports the end of file
            source = program.source[: MAX_SOURCE + 1]  # one character too many is refused
            asserts = vars(read_asserts(program.checks))
            self.socket.sendall(pack(vars(program) | asserts | {"source": source, "spoilt": spoilt}))

    def receive(self):
        """The verifier's message about the job, or None while it is incomplete."""
        with contextlib.suppress(OSError):
            if chunk := self.socket.recv(1 << 16):
                self.inbox.data += chunk
                return self.inbox.next()
        (check,) = struct.unpack("q", os.pread(self.progress.fileno(), 8, 0))
        self.close()
        if self.processes[-1].returncode == -signal.SIGVTALRM:
            return {"spoilt": [check, "timeout", "on the program's answers the checks came to no end"]}
        return {"fault": "the verifier is gone"}

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
            Waiting for a core does not count, up to 5 times this limit.
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
        # past the first limit of processor time a program or its checks are ended; past the second, of wall time, the
        # sandbox has failed and not the program
        self._whole_limit = (self.max_timeouts + 1) * self.check_timeout
        self._hard_limit = START_SECONDS + 10 * self._whole_limit
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
                self.close()  # whatever was running must not go on, nor be read as an answer later
                raise
            return [verdicts[program] for program in programs]

    def _choose_tier(self):
        if sys.platform != "linux":
            raise SandboxError(f"the sandbox needs Linux, this is {sys.platform}")
        with self._start(_start_helper, "kernel", [], {}, subprocess.PIPE) as probe:
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
        besides = {"user", "landlock"} if tier == "namespaces" else {"user"}
        # the part of a core that each running program can count on; verifiers read it, candidates do not have it
        self._share = open(os.memfd_create("share"), "r+b", buffering=0)
        self._config = {name: getattr(self, name) for name in ("check_timeout", "max_timeouts", "memory_mb")}
        self._config |= {"cpu_seconds": self._whole_limit, "layers": sorted(allowed & (TIERS[tier] | besides))}
        self.tier = tier
        logger.info("sandbox tier %s (layers: %s), %d workers", tier, ", ".join(self._config["layers"]), self.workers)

    def _run(self, programs):
        for program in programs:
            try:
                read_asserts(program.checks), read_asserts(program.setup)
            except (SyntaxError, ValueError) as error:
                raise ValueError(f"a program's checks cannot be compiled: {type(error).__name__}: {error}") from error
        verdicts, failures = [None] * len(programs), [0] * len(programs)
        waiting, again = list(reversed(range(len(programs)))), []
        spoilt = {}  # programs whose answers were too much for a verifier: the check or -1 for all, and what became of it
        idle, running, crowd = list(self._slots), set(), self.workers
        patience = STUCK_SECONDS if self._slots else FIRST_SECONDS
        # programs that seem stuck do not hold up the others: more helpers are started for those
        most = 2 * self.workers + SPARE_SLOTS
        while waiting or running or again:
            if not running and not waiting:  # what failed is tried again when nothing else runs
                waiting, again = again, []
            now = time.monotonic()
            fresh = [slot for slot in running if now - slot.started < patience]
            for _ in range(min(self.workers - len(fresh), most - len(running), len(waiting))):
                if not idle:
                    number = min({*range(len(self._slots) + 1)} - {slot.number for slot in self._slots})
                    idle.append(self._start(_Slot, number, self._cores(number), self._config, self._share))
                    self._slots.append(idle[0])
                idle.sort(key=lambda slot: -slot.number)
                slot, index = idle.pop(), waiting.pop()
                slot.start(index, programs[index], spoilt.get(index, (None, "", "")))
                running.add(slot)
                fresh.append(slot)
            crowd = max(crowd, len(running))  # who shared a core before is not owed a whole one now
            os.pwrite(self._share.fileno(), struct.pack("d", min(1.0, self.workers / crowd)), 0)
            wake = [slot.started + self._hard_limit for slot in running]
            wake += [slot.started + patience for slot in fresh if waiting]
            ready = wait(running, max(0.0, min(wake) - time.monotonic()))
            late = [slot for slot in running if time.monotonic() - slot.started > self._hard_limit]
            for slot in {*ready, *late}:
                message = slot.receive() if slot in ready else {"fault": "the verifier does not answer"}
                if message is None:
                    continue
                running.remove(slot)
                if "fault" not in message and "spoilt" not in message:
                    verdicts[slot.index] = self._verdict(message)
                    idle.append(slot)
                    patience = STUCK_SECONDS
                    continue
                self._slots.remove(slot)
                slot.close()
                again.append(slot.index)
                if "spoilt" in message and spoilt.get(slot.index, [0])[0] >= 0:
                    spoilt[slot.index] = [-1, *message["spoilt"][1:]] if slot.index in spoilt else message["spoilt"]
                    continue
                failures[slot.index] += 1
                if failures[slot.index] > self.retries:
                    reason = message.get("fault", message)
                    raise SandboxError(f"the sandbox failed {self.retries + 1} times in a row: {reason}")
        while len(self._slots) > self.workers + SPARE_SLOTS:
            self._slots.pop().close()
        return verdicts

    def _cores(self, number):
        """A verifier and its program take turns, which is fastest on one core; where programs are stuck, others may move."""
        cores, rank = sorted(os.sched_getaffinity(0)), int(os.environ.get("LOCAL_RANK", "0"))
        return {cores[(rank * self.workers + number) % len(cores)]} if number < self.workers else cores

    def _start(self, start, *args):
        """Starts helpers; where the machine refuses, again after a while."""
        for attempt in range(self.retries + 1):
            try:
                return start(*args)
            except OSError as error:
                if attempt == self.retries:
                    raise SandboxError(f"the sandbox's helper processes cannot be started: {error}") from error
                time.sleep(0.5 * (attempt + 1))

    def _verdict(self, message):
        message["definitions"] = Check(*message["definitions"])
        message["checks"] = tuple(Check(*fields) for fields in message["checks"])
        message["suspicious"] = tuple(message["suspicious"])
        message["effective"] = tuple(message["effective"])
        return Verdict(**message, tier=self.tier)


def _close_all(slots, owner):
    if os.getpid() == owner:  # a forked copy of this process does not own the helpers
        while slots:
            slots.pop().close()
