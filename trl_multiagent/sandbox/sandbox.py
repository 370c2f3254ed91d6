"""The trainer's side: starts the helper processes, hands programs to them in parallel, and collects verdicts."""

import itertools
import json
import logging
import os
import selectors
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Sequence
from pathlib import Path

from .helpers.checks import compile_checks
from .helpers.wire import MAX_JOB, Inbox, pack
from .program import Check, Program, SandboxError, Verdict


logger = logging.getLogger(__name__)

# From the weakest to the strongest; each is what its layers of protection are called together
TIERS = {
    "rlimits": set(),
    "seccomp": {"seccomp"},
    "landlock": {"seccomp", "landlock"},
    "namespaces": {"seccomp", "namespaces"},
}
START_SECONDS = 60.0  # for a helper to come up, or to take a job
STUCK_SECONDS = 0.3  # a program that runs longer gives its worker's place to another one
SPARE_SLOTS = 12  # pairs of helpers kept beyond the workers, for batches with stuck programs
KEPT_PROGRAMS = 1000  # suspicious programs written to disk at most
_BOOT = "import sys; sys.path.insert(0, sys.argv[1]); from helpers.main import main; main()"


def _start_helper(role, fds, config, **streams):
    """Starts a fresh interpreter: nothing of this process is in its memory, its environment or its open files."""
    arguments = [str(Path(__file__).parent), role, json.dumps(fds), json.dumps(config)]
    command = [sys.executable, "-I", "-S", "-B", "-c", _BOOT, *arguments]
    streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL} | streams
    return subprocess.Popen(command, pass_fds=fds, env={}, cwd="/", start_new_session=True, **streams)


class _Slot:
    """A verifier and its zygote, and the job that they are at."""

    def __init__(self, config, share):
        self.inbox = Inbox(MAX_JOB)
        self.socket, verifier_end = socket.socketpair()
        self.socket.settimeout(START_SECONDS)
        control, zygote_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.processes = []
        with verifier_end, control, zygote_end:
            try:
                self.processes.append(_start_helper("zygote", [zygote_end.fileno()], config))
                self.processes.append(
                    _start_helper("verifier", [verifier_end.fileno(), control.fileno(), share], config)
                )
            except OSError:
                self.close()
                raise

    def start(self, index, program):
        self.index = index
        self.started = time.monotonic()
        self.socket.sendall(pack(vars(program)))

    def receive(self):
        """The next message, or None while it is incomplete; EOFError when the verifier is gone."""
        chunk = self.socket.recv(1 << 16)
        if not chunk:
            raise EOFError
        self.inbox.data += chunk
        message = self.inbox.next()
        return self.inbox.next() if message == {"ready": True} else message

    def overran(self):
        """Whether the verifier ended itself because the checks never came to an end."""
        try:
            return self.processes[1].wait(timeout=1.0) == -signal.SIGVTALRM
        except subprocess.TimeoutExpired:
            return False

    def close(self):
        self.socket.close()  # the verifier ends, then its zygote, then the candidate
        for process in reversed(self.processes):
            try:
                process.wait(timeout=0.5)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


class Sandbox:
    """
    Runs untrusted Python programs against trusted checks, in processes that share no memory with this one.

    Helper processes start at the first `run` and end with `close`, with this process, or when it is killed.

    Args:
        workers (`int`, *optional*):
            Programs that run at once. Defaults to this process's share of the node's cores: those it may use, divided by
            `LOCAL_WORLD_SIZE`, the number of ranks on the node.
        check_timeout (`float`, *optional*, defaults to `10.0`):
            Seconds for each check, and for the program's definitions. Waiting for a core does not count, up to 5 times
            this limit. Where more programs are stuck than there are workers, each can count on its share of a core only.
        max_timeouts (`int`, *optional*, defaults to `3`):
            Timed-out checks after which the rest of a program's checks is not run.
        memory_mb (`int`, *optional*, defaults to `512`):
            Memory of one program, in MiB.
        retries (`int`, *optional*, defaults to `2`):
            How often a program is tried again after a failure of the sandbox itself, before `SandboxError` is raised.
        min_tier (`str`, *optional*, defaults to `"seccomp"`):
            Weakest protection to run with: `"rlimits"`, `"seccomp"`, `"landlock"` or `"namespaces"`. Where the machine
            does not allow it, `SandboxError` is raised. `"rlimits"` keeps verdicts honest, but not the machine safe.
        max_tier (`str`, *optional*, defaults to `"namespaces"`):
            Strongest protection to use; lower it only to measure.
        keep_suspicious (`str` or `Path`, *optional*):
            Folder that suspicious programs are written to, one JSON file each.
    """

    def __init__(
        self,
        workers: int | None = None,
        check_timeout: float = 10.0,
        max_timeouts: int = 3,
        memory_mb: int = 512,
        retries: int = 2,
        min_tier: str = "seccomp",
        max_tier: str = "namespaces",
        keep_suspicious: str | Path | None = None,
    ):
        if workers is not None and workers < 1:
            raise ValueError(f"sandbox.workers must be at least 1, got {workers}")
        if check_timeout <= 0 or max_timeouts < 1 or memory_mb < 64:
            raise ValueError(
                "sandbox.check_timeout must be positive, sandbox.max_timeouts at least 1 and sandbox.memory_mb at least 64, "
                f"got {check_timeout}, {max_timeouts} and {memory_mb}"
            )
        for name, tier in (("min_tier", min_tier), ("max_tier", max_tier)):
            if tier not in TIERS:
                raise ValueError(f"sandbox.{name} must be one of {', '.join(TIERS)}, got {tier!r}")
        self.workers = workers if workers is not None else _share_of_cores()
        self.check_timeout = check_timeout
        self.max_timeouts = max_timeouts
        self.memory_mb = memory_mb
        self.retries = retries
        self.min_tier = min_tier
        self.max_tier = max_tier
        self.keep_suspicious = Path(keep_suspicious) if keep_suspicious is not None else None
        self.tier = None
        self._kept = itertools.count()
        self._totals = {"executions": 0, "seconds": 0.0, "timeouts": 0, "memory_kills": 0, "suspicious": 0}
        # the part of a core that each running program can count on; verifiers read it, candidates do not have it
        self._share = open(os.memfd_create("share"), "r+b", buffering=0)
        self._slots: list[_Slot] = []
        self._lock = threading.Lock()
        self._owner = os.getpid()
        weakref.finalize(self, _close_all, self._slots, self._owner)

    def __enter__(self) -> "Sandbox":
        return self

    def __exit__(self, *exception):
        self.close()

    def close(self):
        """Ends all helper processes. The next `run` starts fresh ones."""
        _close_all(self._slots, self._owner)

    def metrics(self) -> dict[str, float]:
        """
        What happened since the last call of this method.

        Returns:
            `dict[str, float]`: `executions_per_second` (programs run, equal ones counted once, over the time spent in
            `run`), and the numbers of `timeouts` (checks), `memory_kills` and `suspicious` (programs).
        """
        totals, self._totals = self._totals, dict.fromkeys(self._totals, 0)
        seconds, executions = totals.pop("seconds"), totals.pop("executions")
        rate = executions / seconds if seconds else 0.0
        return {"executions_per_second": rate} | {name: float(count) for name, count in totals.items()}

    def run(self, programs: Sequence[Program]) -> list[Verdict]:
        """
        Runs a batch.

        Args:
            programs (`Sequence[Program]`): Any number of programs; equal ones run once.

        Returns:
            `list[Verdict]`: One verdict per program, in their order.

        Raises:
            SandboxError: if the sandbox itself keeps failing. It says nothing about the programs.
            ValueError: if a program's trusted checks cannot be compiled.
        """
        with self._lock:
            if self._owner != os.getpid():  # a forked copy starts its own helpers
                self._slots.clear()
                self._owner = os.getpid()
                weakref.finalize(self, _close_all, self._slots, self._owner)
            if self.tier is None:
                self._choose_tier()
            start = time.monotonic()
            unique = list(dict.fromkeys(programs))
            try:
                verdicts = dict(zip(unique, self._run(unique), strict=True))
            except BaseException:
                self.close()  # whatever was running must not go on, nor be read as an answer later
                raise
            self._account(verdicts, time.monotonic() - start)
            return [verdicts[program] for program in programs]

    def _choose_tier(self):
        if sys.platform != "linux":
            raise SandboxError(f"the sandbox needs Linux, this is {sys.platform}")
        with _start_helper("probe", [], {}, stdout=subprocess.PIPE) as probe:
            output, _ = probe.communicate(timeout=START_SECONDS)
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
        beyond = {"landlock", "namespaces"} - TIERS[self.max_tier] if self.max_tier != "namespaces" else set()
        self._layers = sorted(allowed - beyond if tier != "rlimits" else allowed & {"user"})
        self.tier = tier
        logger.info("sandbox tier %s (layers: %s), %d workers", tier, ", ".join(self._layers), self.workers)

    def _run(self, programs):
        verdicts = [None] * len(programs)
        waiting = list(reversed(range(len(programs))))
        failures = [0] * len(programs)
        idle = list(self._slots)
        running = set()
        crowd = self.workers
        # programs that seem stuck do not hold up the others: more helpers are started for those
        most = 2 * self.workers + SPARE_SLOTS
        with selectors.DefaultSelector() as selector:
            while waiting or running:
                now = time.monotonic()
                fresh = [slot for slot in running if now - slot.started < STUCK_SECONDS]
                for _ in range(min(self.workers - len(fresh), most - len(running), len(waiting))):
                    slot = idle.pop() if idle else self._start_slot()
                    selector.register(slot.socket, selectors.EVENT_READ, slot)
                    running.add(slot)
                    index = waiting.pop()
                    try:
                        slot.start(index, programs[index])
                    except OSError:
                        pass  # the verifier is gone: its socket reports the end of file
                crowd = max(crowd, len(running))  # who shared a core before is not owed a whole one now
                os.pwrite(self._share.fileno(), struct.pack("d", min(1.0, self.workers / crowd)), 0)
                wake = [slot.started + self._hard_limit for slot in running]
                if waiting:
                    wake += [slot.started + STUCK_SECONDS for slot in running if now - slot.started < STUCK_SECONDS]
                ready = {key.data for key, _ in selector.select(max(0, min(wake) - time.monotonic()))}
                now = time.monotonic()
                late = {slot for slot in running if now - slot.started > self._hard_limit}
                for slot in ready | late:
                    try:
                        message = slot.receive() if slot in ready else {"fault": "the verifier does not answer"}
                        if message is None:
                            continue
                    except (EOFError, OSError):
                        message = {"fault": "the verifier is gone", "overran": slot.overran()}
                    selector.unregister(slot.socket)
                    running.remove(slot)
                    index = slot.index
                    if "fault" not in message:
                        verdicts[index] = self._verdict(message)
                        idle.append(slot)
                        continue
                    self._slots.remove(slot)
                    slot.close()
                    if message.get("overran"):
                        verdicts[index] = self._overrun(programs[index])
                        continue
                    failures[index] += 1
                    if failures[index] > self.retries:
                        raise SandboxError(f"the sandbox failed {failures[index]} times in a row: {message['fault']}")
                    waiting.append(index)
        while len(self._slots) > self.workers + SPARE_SLOTS:
            self._slots.pop().close()
        return verdicts

    @property
    def _whole_limit(self):
        return (self.max_timeouts + 1) * self.check_timeout

    @property
    def _hard_limit(self):
        return START_SECONDS + 10 * self._whole_limit  # past it, the sandbox has failed and not the program

    def _start_slot(self):
        config = {
            "check_timeout": self.check_timeout,
            "max_timeouts": self.max_timeouts,
            "memory_mb": self.memory_mb,
            "cpu_seconds": self._whole_limit,
            "layers": self._layers,
        }
        for attempt in range(self.retries + 1):
            try:
                slot = _Slot(config, self._share.fileno())
            except OSError as error:
                if attempt == self.retries:
                    raise SandboxError(f"the sandbox's helper processes cannot be started: {error}") from error
                time.sleep(0.5 * (attempt + 1))
            else:
                self._slots.append(slot)
                return slot

    def _verdict(self, message):
        if "bad_checks" in message:
            raise ValueError(f"a program's checks cannot be compiled: {message['bad_checks']}")
        message["definitions"] = Check(*message["definitions"])
        message["checks"] = tuple(Check(*fields) for fields in message["checks"])
        message["suspicious"] = tuple(message["suspicious"])
        return Verdict(**message, tier=self.tier)

    def _overrun(self, program):
        error = f"Timeout: on the program's answers the checks took more than {self._whole_limit:g} s"
        sources = compile_checks(program.setup, program.checks).sources
        return Verdict(
            definitions=Check("passed", ""),
            checks=tuple(Check("timeout", source, error) for source in sources),
            calls=dict.fromkeys(program.watch, 0),
            mattered=dict.fromkeys(program.watch, False),
            suspicious=("made the checks spin",),
            tier=self.tier,
        )

    def _account(self, verdicts, seconds):
        totals = self._totals
        totals["executions"] += len(verdicts)
        totals["seconds"] += seconds
        for program, verdict in verdicts.items():
            totals["timeouts"] += verdict.timeouts
            totals["memory_kills"] += verdict.out_of_memory
            totals["suspicious"] += bool(verdict.suspicious)
            if verdict.suspicious and self.keep_suspicious is not None and next(self._kept) < KEPT_PROGRAMS:
                self._keep(program, verdict)

    def _keep(self, program, verdict):
        record = {"suspicious": verdict.suspicious, "passed": verdict.passed, **vars(program)}
        try:
            self.keep_suspicious.mkdir(parents=True, exist_ok=True)
            path = self.keep_suspicious / f"program_{time.time_ns()}_{self._owner}.json"
            path.write_text(json.dumps(record, indent=2))
        except OSError as error:  # a full disk, say; the verdict stands
            logger.warning("a suspicious program could not be kept: %s", error)


def _share_of_cores():
    """Cores that this process may use, divided by the ranks that share the node."""
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count()
    return max(1, cores // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def _close_all(slots, owner):
    if os.getpid() == owner:  # a forked copy of this process does not own the helpers
        while slots:
            slots.pop().close()
