"""
Forks a candidate per program, and one for its helper if it has one. It never sees a check, a program or an answer.

Commands on its socket, one packet each, with the candidate's number after the letter:

- `F`, with a descriptor: forks a candidate that communicates on it. One that has this number already is ended.
- `K`: ends the candidate and all processes that it started, and reports what it used.
- `D`: the same for a candidate that seems to be ending by itself, which gets a moment to do so.
- `S`, without a number: reports what the candidates have done since the last `S`.

If programs have a folder, `F` empties it first. All but `F` are answered by one packet of JSON.
"""

import contextlib
import functools
import gc
import importlib
import json
import math
import os
import random
import resource
import signal
import socket
import stat
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import kernel
from .candidate import report_suspicious_acts, serve


# What a program may import. No file can be opened after the lock-down, so all of it is loaded before
MODULES = """
abc argparse array ast asyncio base64 binascii bisect bz2 calendar cmath cmd codecs collections.abc colorsys
concurrent.futures.thread configparser contextlib contextvars copy copyreg csv dataclasses datetime decimal difflib
doctest enum fnmatch fractions functools getopt getpass glob graphlib gzip hashlib heapq hmac html.parser http inspect
io ipaddress itertools json keyword linecache locale logging lzma math numbers operator os pathlib pickle platform
pprint queue random re reprlib sched secrets select shlex shutil signal socket stat statistics string struct subprocess
sys tempfile textwrap threading time timeit tokenize traceback types typing unicodedata unittest unittest.mock
urllib.parse uuid warnings weakref xml.etree.ElementTree zipfile zlib zoneinfo _strptime encodings.ascii
encodings.base64_codec encodings.cp1252 encodings.hex_codec encodings.idna encodings.latin_1 encodings.punycode
encodings.raw_unicode_escape encodings.rot_13 encodings.unicode_escape encodings.utf_16 encodings.utf_16_be
encodings.utf_16_le encodings.utf_32 encodings.utf_8_sig
""".split()
FOR_FOLDERS = ["sqlite3", "encodings.cp437"]  # the same for programs with a folder
OWN_NICENESS = os.getpriority(os.PRIO_PROCESS, 0)  # read here, because the filter of system calls refuses it later
ADDED_NICENESS = 5  # of a program that does not answer at once; with more threads it is higher
ABSENT = ("_hashlib", "_ssl", "ssl")  # OpenSSL is large, and asyncio and hashlib work without it


def main(control_fd: int, config: dict) -> None:
    """Body of the zygote's process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    control, layers = socket.socket(fileno=control_fd), config["layers"]
    load_modules(layers)
    sys.meta_path[:] = sys.meta_path[:2]  # built-in and frozen modules: no other import touches a file
    sys.path.clear()
    sys.argv[:] = [""]
    own_size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    limits = {resource.RLIMIT_AS: own_size + config["memory_mb"] * (1 << 20), resource.RLIMIT_NOFILE: 32}
    try:
        kernel.lock_down("zygote", layers, limits, ["/proc"] if "seccomp" in layers else [])
    except OSError as error:
        _send(control, fault=f"the zygote cannot be locked down: {error}")
        raise
    max_tasks = _max_tasks()
    os.environ.clear()
    report_suspicious_acts()
    for name in [name for name in sys.modules if name.partition(".")[0] == "helpers"]:
        del sys.modules[name]  # no program may import them
    random.seed(0)  # every candidate starts from the same state
    gc.collect()
    gc.freeze()
    gc.disable()
    roots = [os.open("/", os.O_PATH)] if "folder" in layers else []  # for the verifier
    socket.send_fds(control, [b'{"ready": true}'], roots)
    for root in roots:
        os.close(root)
    _serve(control, layers, max_tasks)


def load_modules(layers: list[str]) -> None:
    """Imports what programs may import."""
    for name in ABSENT:
        sys.modules[name] = None  # type: ignore[assignment]  # an import of it raises
    for name in [*MODULES, *FOR_FOLDERS * ("folder" in layers)]:
        with contextlib.suppress(ModuleNotFoundError):  # the interpreter was built without it
            importlib.import_module(name)
    sqlite: Any = sys.modules.get("sqlite3")
    if sqlite is not None:  # a program and its checks take turns, so a locked database stays locked while one waits
        sqlite.connect = functools.partial(sqlite.connect, timeout=0)


def _max_tasks() -> int:
    """
    RLIMIT_NPROC of candidates. The kernel counts the processes and threads of a user. If the zygote shares its user
    with other processes, the limit cannot bound a single program: it then only reserves a quarter for others, and the
    verifier ends a program in which it finds too many threads.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NPROC)
    own = 4  # this process, the one that waits for it outside its namespace, and two candidates
    resource.setrlimit(resource.RLIMIT_NPROC, (own if hard < 0 else min(own, hard), hard))
    try:
        if not (child := os.fork()):
            os._exit(0)
        os.waitpid(child, 0)
        limit = own + kernel.MAX_THREADS
    except BlockingIOError:
        limit = soft if soft < 0 else soft * 3 // 4
    resource.setrlimit(resource.RLIMIT_NPROC, (soft, hard))
    return limit if hard < 0 or 0 <= limit < hard else hard


def _send(control: socket.socket, **message: Any) -> None:
    control.send(json.dumps(message).encode())


def _serve(control: socket.socket, layers: list[str], max_tasks: int) -> None:
    candidates: dict[bytes, Usage] = {}  # by number
    while True:
        packet, fds, _, _ = socket.recv_fds(control, 64, 1)
        command, number = packet[:1], packet[1:]
        if command == b"F":
            if number in candidates:
                _end_candidate(candidates, number, layers)
            if "folder" in layers:
                _empty_folder()
            candidates[number] = Usage(_fork(fds[0], control, layers, max_tasks))
        elif command == b"S":
            used = [usage.since_last_time() for usage in candidates.values()]
            _send(control, **{name: sum(one[name] for one in used) for name in ("computed", "waited", "threads")})
        elif command:
            _send(control, **_end_candidate(candidates, number, layers, 0.2 if command == b"D" else 0.0))
        else:
            for number in [*candidates]:
                _end_candidate(candidates, number, layers)
            os._exit(0)


@dataclass
class Thread:
    """What is known about a thread of a candidate, in seconds."""

    ran: float = 0.0
    waited: float = 0.0  # for a core, until it was last scheduled
    turns: int = 0  # how often it was scheduled
    held: float = 0.0  # stopped by another process, or waiting for memory
    pending: float = 0.0  # waiting to be scheduled now; the kernel counts this time only afterwards

    @property
    def lost(self) -> float:
        return self.waited + self.held + self.pending


class Usage:
    """What a candidate has used: processor time, and time spent waiting for a core."""

    def __init__(self, pid: int):
        self.pid = pid
        # The kernel's number for the clock of a process's processor time, which includes threads that ended
        self.clock = ~pid << 3 | 2
        self.ran = 0.0
        self.looked = time.monotonic()
        self.threads: dict[str, Thread] = {}
        self.niceness = OWN_NICENESS

    def since_last_time(self) -> dict[str, float]:
        """Seconds of processor time, seconds spent waiting for a core, and the number of threads."""
        now, total = time.monotonic(), time.clock_gettime(self.clock)
        elapsed, ran, self.looked, self.ran = now - self.looked, total - self.ran, now, total
        threads, lost = {}, []
        names = self._names()
        for name in names[: kernel.MAX_THREADS + 2]:  # the verifier ends a program with more
            before = self.threads.get(name, Thread())
            try:
                threads[name] = thread = self._thread(name, before, elapsed)
            except (FileNotFoundError, ProcessLookupError):
                continue  # it has ended
            lost.append(thread.lost - before.lost)
        self.threads = threads
        self._lower_priority(len(names))
        # Threads wait at the same time. While one runs, others may wait for it
        waited = min(max(lost, default=0.0), max(0.0, elapsed - ran))
        return {"computed": ran, "waited": waited, "threads": len(names)}

    def _names(self) -> list[str]:
        try:
            return os.listdir(f"/proc/{self.pid}/task")
        except FileNotFoundError:  # /proc is mounted with hidepid: all time counts
            return []

    def _thread(self, name: str, before: Thread, elapsed: float) -> Thread:
        folder = f"/proc/{self.pid}/task/{name}"
        ran, waited, turns = map(int, _read(f"{folder}/schedstat").split())
        state = _read(f"{folder}/stat").rpartition(b")")[2].split()[0]
        thread = Thread(ran / 1e9, waited / 1e9, turns, before.held)
        had_turn = turns != before.turns
        if state == b"R":  # it is waiting, or it runs on another core
            known = thread.ran - before.ran + thread.waited - before.waited
            thread.pending = max(0.0, elapsed - known) + (0.0 if had_turn else before.pending)
        elif state in b"DTt" and not had_turn and name == str(self.pid):  # the others' waits can be made
            thread.held += elapsed
        return thread

    def _lower_priority(self, threads: int) -> None:
        """Lowers the priority of a slow program. All its threads together then get as much of a core as one thread."""
        # one step of niceness lowers a thread's weight by about a fifth
        niceness = min(19, OWN_NICENESS + ADDED_NICENESS + round(math.log(max(1, threads), 1.25)))
        if niceness > self.niceness:
            os.setpriority(os.PRIO_PGRP, self.pid, niceness)
            self.niceness = niceness


def _read(path: str) -> bytes:
    fd = os.open(path, os.O_RDONLY)
    try:
        return os.read(fd, 4096)
    finally:
        os.close(fd)


def _empty_folder() -> None:
    """Empties the working directory. Paths have one part, because whole ones may be longer than the kernel allows."""
    for entry in os.listdir():
        if stat.S_ISDIR(os.lstat(entry).st_mode):
            os.chmod(entry, 0o700)
            os.chdir(entry)
            _empty_folder()
            os.chdir("..")
            os.rmdir(entry)
        else:
            os.unlink(entry)


def _fork(fd: int, control: socket.socket, layers: list[str], max_tasks: int) -> int:
    try:
        if child := os.fork():
            os.close(fd)
            os.setpgid(child, child)
            return child
        kernel.prctl(kernel.DIE_WITH_PARENT, signal.SIGKILL)
        resource.setrlimit(resource.RLIMIT_NPROC, (max_tasks, max_tasks))
        if "folder" in layers:
            kernel.restrict_files([], ["."])  # the zygote may also read /proc
            kernel.filter_calls("folder candidate")
        elif "seccomp" in layers:
            kernel.filter_calls("candidate")
    except OSError as error:  # in either process. The verifier reads this as its next answer
        _send(control, fault=f"a candidate's process could not be started: {error}")
        os._exit(1)
    try:
        control.close()
        serve(fd)
    finally:
        os._exit(0)


def _end_candidate(
    candidates: dict[bytes, Usage], number: bytes, layers: list[str], seconds: float = 0.0
) -> dict[str, float]:
    """
    Waits up to `seconds` for a candidate to end by itself, then kills it and whatever it forked. Returns what it used,
    and the signal that had ended it before.
    """
    child, end = candidates.pop(number).pid, time.monotonic() + seconds
    while not (ended := os.wait4(child, os.WNOHANG))[0] and time.monotonic() < end:
        time.sleep(0.001)
    pid, status, usage = ended
    if not pid:
        os.kill(child, signal.SIGKILL)
        _, _, usage = os.wait4(child, 0)
    if "seccomp" not in layers:  # it was able to fork, and its orphans are now this process's children
        children = Path(f"/proc/self/task/{os.getpid()}/children")
        known = {other.pid for other in candidates.values()}
        while orphans := {*map(int, children.read_text().split())} - known:
            for orphan in orphans:
                os.kill(orphan, signal.SIGKILL)
            for orphan in orphans:
                os.waitpid(orphan, 0)
    return {
        "signal": os.WTERMSIG(status) if pid and os.WIFSIGNALED(status) else 0,
        "memory_mb": usage.ru_maxrss / 1024,
        "cpu_seconds": usage.ru_utime + usage.ru_stime,
    }
