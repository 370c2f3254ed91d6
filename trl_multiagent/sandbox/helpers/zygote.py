"""
Forks one candidate per program. The zygote never sees a check, a program or an answer.

Commands on its socket, one packet each: `F` with a descriptor forks a candidate that talks on it; `K` ends the candidate
and everything it left behind, and reports what it used; `S` reports how long it ran and how long it waited for a core.
"""

import gc
import importlib
import json
import os
import random
import resource
import signal
import socket
import sys
import time

from .candidate import FD, serve


# What a program may import: nothing can be opened after the lock-down, so these are loaded before it.
MODULES = """
abc array ast asyncio base64 binascii bisect calendar cmath collections collections.abc contextlib copy csv dataclasses
datetime decimal difflib enum fractions functools gc hashlib heapq html inspect io itertools json keyword locale math
numbers operator os pprint queue random re secrets shlex statistics string struct sys textwrap threading time timeit
traceback types typing unicodedata unittest urllib.parse uuid warnings weakref zlib _strptime
encodings.ascii encodings.latin_1 encodings.utf_16 encodings.utf_32 encodings.idna
""".split()


def main(control_fd: int, config: dict):
    """Body of the zygote's process."""
    control = socket.socket(fileno=control_fd)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for name in MODULES:
        importlib.import_module(name)
    time.strptime("2020", "%Y")
    random.seed(0)  # every candidate starts from the same state
    report = {"tier": "rlimits"}
    sys.argv = [""]
    limits = _limits(config)
    gc.collect()
    gc.freeze()
    gc.disable()
    control.send(json.dumps(report).encode())
    _serve(control, limits)


def _limits(config):
    with open("/proc/self/statm") as file:
        own_size = int(file.read().split()[0]) * resource.getpagesize()
    return [
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_NOFILE, 32),
        (resource.RLIMIT_CPU, int(config["cpu_seconds"]) + 1),
        (resource.RLIMIT_AS, own_size + config["memory_mb"] * (1 << 20)),
    ]


def _serve(control, limits):
    child = 0
    while True:
        packet, fds, _, _ = socket.recv_fds(control, 64, 1)
        if not packet:
            _end(child)
            os._exit(0)
        if packet == b"F":
            child = _fork(fds[0], limits)
        elif packet == b"K":
            control.send(json.dumps(_end(child)).encode())
            child = 0
        elif packet == b"S":
            control.send(json.dumps(_schedule(child)).encode())


def _fork(fd, limits):
    try:
        child = os.fork()
    except OSError:
        os.close(fd)  # without a hello the verifier knows that this is not the program's doing
        return 0
    if child:
        os.close(fd)
        return child
    try:
        if fd != FD:
            os.dup2(fd, FD)
        os.closerange(FD + 1, 64)
        os.setpgid(0, 0)
        for name, limit in limits:
            resource.setrlimit(name, (limit, limit))
        gc.enable()
        serve()
    finally:
        os._exit(0)


def _end(child):
    """Kills the candidate, reaps it, and says how it ended."""
    if not child:
        return {"forked": False}
    try:
        os.killpg(child, signal.SIGKILL)
    except ProcessLookupError:
        os.kill(child, signal.SIGKILL)  # it has not made its group yet
    _, status, usage = os.wait4(child, 0)
    return {
        "forked": True,
        "signal": os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0,
        "memory_kb": usage.ru_maxrss,
        "cpu_seconds": usage.ru_utime + usage.ru_stime,
    }


def _schedule(child):
    with open(f"/proc/{child}/schedstat") as file:
        ran, waited, _ = file.read().split()
    return {"ran": int(ran) / 1e9, "waited": int(waited) / 1e9}
