"""The trainer's side: starts the helper processes, hands programs to them in parallel, and collects verdicts."""

import json
import logging
import os
import selectors
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Sequence
from pathlib import Path

from .helpers.wire import MAX_JOB, Inbox, pack
from .program import Check, Program, SandboxError, Verdict


logger = logging.getLogger(__name__)

START_SECONDS = 60.0  # for a pair of helpers to come up
BOOT = "import sys; sys.path.insert(0, sys.argv[1]); from helpers.main import main; main()"


class _Slot:
    """A verifier and its zygote."""

    def __init__(self, config):
        self.job = None
        self.inbox = Inbox(MAX_JOB)
        self.socket, verifier_end = socket.socketpair()
        control, zygote_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.processes = []
        try:
            with verifier_end, control, zygote_end:
                self._spawn("zygote", [zygote_end.fileno()], config)
                self._spawn("verifier", [verifier_end.fileno(), control.fileno()], config)
        except OSError:
            self.close()
            raise

    def _spawn(self, role, fds, config):
        command = [sys.executable, "-I", "-S", "-B", "-c", BOOT, str(Path(__file__).parent)]
        self.processes.append(
            subprocess.Popen(
                [*command, role, json.dumps(fds), json.dumps(config)],
                pass_fds=fds,
                env={},
                cwd="/",
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        )

    def send(self, job):
        self.socket.settimeout(START_SECONDS)
        self.socket.sendall(pack(job))

    def receive(self):
        """The next message, or None while it is incomplete; EOFError when the helper is gone."""
        chunk = self.socket.recv(1 << 16)
        if not chunk:
            raise EOFError
        self.inbox.data += chunk
        return self.inbox.next()

    def close(self):
        self.socket.close()
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.wait()


class Sandbox:
    """
    Runs untrusted Python programs against trusted checks, in processes that share no memory with this one.

    Args:
        workers (`int`, *optional*):
            Programs that run at once. Defaults to this process's share of the node's cores.
        check_timeout (`float`, *optional*, defaults to `10.0`):
            Seconds for each check, and for the program's definitions.
        max_timeouts (`int`, *optional*, defaults to `3`):
            Timed-out checks after which the rest of a program's checks is not run.
        memory_mb (`int`, *optional*, defaults to `512`):
            Memory of one program, in MiB.
        retries (`int`, *optional*, defaults to `2`):
            How often a program is tried again after a failure of the sandbox itself, before `SandboxError` is raised.
    """

    def __init__(
        self,
        workers: int | None = None,
        check_timeout: float = 10.0,
        max_timeouts: int = 3,
        memory_mb: int = 512,
        retries: int = 2,
    ):
        self.workers = workers if workers is not None else _share_of_cores()
        self.check_timeout = check_timeout
        self.max_timeouts = max_timeouts
        self.memory_mb = memory_mb
        self.retries = retries
        self._slots: list[_Slot] = []
        self._lock = threading.Lock()
        self._finalizer = weakref.finalize(self, _close_all, self._slots, os.getpid())

    def __enter__(self) -> "Sandbox":
        return self

    def __exit__(self, *exception):
        self.close()

    def close(self):
        """Ends all helper processes. The next `run` starts fresh ones."""
        _close_all(self._slots, os.getpid())

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
            unique = list(dict.fromkeys(programs))
            try:
                verdicts = dict(zip(unique, self._run(unique), strict=True))
            except BaseException:
                self.close()  # whatever was running must not go on, nor be read as an answer later
                raise
            return [verdicts[program] for program in programs]

    def _run(self, programs):
        verdicts = [None] * len(programs)
        waiting = list(range(len(programs)))[::-1]
        attempts = [0] * len(programs)
        idle = list(self._slots)
        running = {}
        with selectors.DefaultSelector() as selector:
            while waiting or running:
                while waiting and len(running) < self.workers:
                    slot = idle.pop() if idle else self._start_slot()
                    index = waiting.pop()
                    running[slot] = index
                    selector.register(slot.socket, selectors.EVENT_READ, slot)
                    program = programs[index]
                    slot.deadline = time.monotonic() + self._hard_limit()
                    try:
                        slot.send(vars(program))
                    except OSError:
                        pass  # the helper is gone: the selector reports it
                left = min(slot.deadline for slot in running) - time.monotonic()
                events = selector.select(max(left, 0))
                ready = {key.data for key, _ in events}
                for slot, index in list(running.items()):
                    lost = slot.deadline < time.monotonic()
                    if slot in ready:
                        try:
                            message = slot.receive()
                        except (EOFError, OSError):
                            lost = True
                        else:
                            if message is None:
                                continue
                            lost = "fault" in message
                    elif not lost:
                        continue
                    selector.unregister(slot.socket)
                    del running[slot]
                    if lost:
                        self._drop(slot)
                        attempts[index] += 1
                        if attempts[index] > self.retries:
                            raise SandboxError(f"the sandbox failed {attempts[index]} times on one program")
                        waiting.append(index)
                        continue
                    idle.append(slot)
                    verdicts[index] = _verdict(message)
        return verdicts

    def _hard_limit(self):
        return 5 * (self.max_timeouts + 2) * self.check_timeout + 30

    def _start_slot(self):
        config = {
            "check_timeout": self.check_timeout,
            "max_timeouts": self.max_timeouts,
            "memory_mb": self.memory_mb,
            "cpu_seconds": (self.max_timeouts + 2) * self.check_timeout,
        }
        failure = None
        for attempt in range(self.retries + 1):
            time.sleep(0.2 * attempt)
            try:
                slot = _Slot(config)
            except OSError as error:
                failure = error
                continue
            self._slots.append(slot)
            slot.socket.settimeout(START_SECONDS)
            try:
                while (message := slot.receive()) is None:
                    pass
            except (EOFError, OSError) as error:
                failure = error
                self._drop(slot)
                continue
            if "ready" in message:
                return slot
            failure = message
            self._drop(slot)
        raise SandboxError(f"the sandbox's helper processes do not start: {failure!r}")

    def _drop(self, slot):
        self._slots.remove(slot)
        slot.close()


def _share_of_cores():
    """Cores this process may use, divided by the ranks that share the node."""
    return max(1, len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def _close_all(slots, pid):
    if os.getpid() == pid:  # a forked copy of this process does not own the helpers
        for slot in slots:
            slot.close()
    slots.clear()


def _verdict(message):
    if "bad_checks" in message:
        raise ValueError(f"a program's checks cannot be compiled: {message['bad_checks']}")
    status, error = message["definitions"]
    return Verdict(
        definitions=Check(status, "", error),
        checks=tuple(Check(*fields) for fields in message["checks"]),
        calls=message["calls"],
        seconds=message["seconds"],
    )
