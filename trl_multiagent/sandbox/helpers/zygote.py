"""
Forks one candidate per program. The zygote never sees a check, a program or an answer.

Commands on its socket, one packet each: `F` with a descriptor forks a candidate that talks on it; `K` ends the candidate
and everything it left behind, and reports what it used; `S` reports how long the candidate waited for a core.
"""

import gc
import json
import os
import random
import resource
import signal
import socket
import sys
import time

from . import kernel, modules
from .candidate import FD, serve, watch_acts


def main(control_fd: int, config: dict):
    """Body of the zygote's process."""
    control = socket.socket(fileno=control_fd)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    modules.load()
    time.strptime("2020", "%Y")
    with open("/proc/self/statm") as file:
        own_size = int(file.read().split()[0]) * resource.getpagesize()
    limits = [
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_NOFILE, 32),
        (resource.RLIMIT_CPU, int(config["cpu_seconds"]) + 1),
        (resource.RLIMIT_AS, own_size + config["memory_mb"] * (1 << 20)),
    ]
    try:
        _lock_down(config["layers"])
    except OSError as error:
        control.send(f"the zygote cannot be locked down: {error}".encode())
        raise
    watch_acts()
    sys.argv[:] = [""]
    for name in [name for name in sys.modules if name.partition(".")[0] == "helpers"]:
        del sys.modules[name]  # no program can import them
    gc.collect()
    gc.freeze()
    gc.disable()
    control.send(b"ready")
    _serve(control, limits, config["layers"])


def _lock_down(layers):
    if "namespaces" in layers:
        kernel.enter_namespaces()
    if "user" in layers:
        kernel.drop_user()
    kernel.drop_capabilities()
    kernel.hide_memory()
    kernel.die_with_parent() if "namespaces" in layers else kernel.adopt_orphans()
    if "landlock" in layers:
        kernel.restrict_files(["/proc"] if "seccomp" in layers else [])
    if "seccomp" in layers:
        kernel.filter_zygote()
    os.environ.clear()


def _serve(control, limits, layers):
    child = 0
    while True:
        packet, fds, _, _ = socket.recv_fds(control, 64, 1)
        if not packet:
            _end(child, layers)
            os._exit(0)
        if packet == b"F":
            child = _fork(fds[0], limits, layers)
        elif packet == b"K":
            control.send(json.dumps(_end(child, layers)).encode())
            child = 0
        elif packet == b"S":
            control.send(json.dumps(_waited(child)).encode())


def _fork(fd, limits, layers):
    try:
        child = os.fork()
    except OSError:
        os.close(fd)  # without a hello the verifier knows that this is not the program's doing
        return 0
    if child:
        os.close(fd)
        return child
    try:
        kernel.die_with_parent()
        if fd != FD:
            os.dup2(fd, FD)
        os.closerange(FD + 1, 64)
        os.setpgid(0, 0)
        for name, limit in limits:
            resource.setrlimit(name, (limit, limit))
        if "seccomp" in layers:
            kernel.filter_candidate()
        random.seed(0)  # every candidate starts from the same state
        gc.enable()
        serve()
    finally:
        os._exit(0)


def _end(child, layers):
    """Kills the candidate and whatever it forked, reaps it, and says how it ended."""
    if not child:
        return {"forked": False}
    if "namespaces" in layers:
        os.kill(-1, signal.SIGKILL)  # everything in the namespace but this process
    else:
        os.kill(child, signal.SIGKILL)
    _, status, usage = os.wait4(child, 0)
    if "seccomp" not in layers:
        _end_orphans()
    return {
        "forked": True,
        "signal": os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0,
        "memory_kb": usage.ru_maxrss,
        "cpu_seconds": usage.ru_utime + usage.ru_stime,
    }


def _end_orphans():
    """Ends what the candidate forked, where nothing kept it from forking: its orphans are this process's children."""
    while True:
        with open(f"/proc/self/task/{os.getpid()}/children") as file:
            orphans = [int(pid) for pid in file.read().split()]
        if not orphans:
            return
        for pid in orphans:
            os.kill(pid, signal.SIGKILL)
        for _ in orphans:
            os.waitpid(-1, 0)


def _waited(child):
    with open(f"/proc/{child}/schedstat") as file:
        return int(file.read().split()[1]) / 1e9
