"""
Forks one candidate per program. It never sees a check, a program or an answer.

Commands on its socket, one packet each: `F` with a descriptor forks a candidate that talks on it; `K` ends the candidate
and everything it left behind, and reports what it used; `D` does so for one that seems to have ended, and gives it time to
do so; `S` reports how long the candidate waited for a core. All but `F` are answered by one packet of JSON.
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
from pathlib import Path

from . import kernel
from .candidate import serve, watch_acts


# What a program may import: nothing can be opened after the lock-down, so all of it is loaded before.
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
MAX_TASKS = 128 + 16 * os.cpu_count()  # threads of all programs that run at once
ABSENT = ("_hashlib", "_ssl", "ssl")  # OpenSSL is large, and asyncio and hashlib do without it


def main(control_fd: int, config: dict):
    """Body of the zygote's process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    control = socket.socket(fileno=control_fd)
    sys.modules.update(dict.fromkeys(ABSENT))
    for name in MODULES:
        try:
            importlib.import_module(name)
        except ModuleNotFoundError:
            continue  # an interpreter that was built without it
    sys.meta_path[:] = sys.meta_path[:2]  # built-in and frozen modules: no other import touches a file
    sys.path.clear()
    sys.argv[:] = [""]
    own_size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    limits = {resource.RLIMIT_AS: own_size + config["memory_mb"] * (1 << 20), resource.RLIMIT_NOFILE: 32}
    layers = config["layers"]
    try:
        kernel.lock_down("zygote", layers, limits, ["/proc"] if "seccomp" in layers else [])
    except OSError as error:
        _send(control, fault=f"the zygote cannot be locked down: {error}")
        raise
    os.environ.clear()
    watch_acts()
    for name in [name for name in sys.modules if name.partition(".")[0] == "helpers"]:
        del sys.modules[name]  # no program can import them
    random.seed(0)  # every candidate starts from the same state
    gc.collect()
    gc.freeze()
    gc.disable()
    _send(control, ready=True)
    _serve(control, config)


def _send(control, **message):
    control.send(json.dumps(message).encode())


def _serve(control, config):
    child = 0
    while True:
        packet, fds, _, _ = socket.recv_fds(control, 64, 1)
        if packet == b"F":
            child = _fork(fds[0], control, config)
        elif packet == b"S":
            _send(control, waited=int(Path(f"/proc/{child}/schedstat").read_text().split()[1]) / 1e9)
        elif child:
            used, child = _end(child, 0.2 if packet == b"D" else 0.0, config["layers"]), 0
            if packet:
                _send(control, **used)
        if not packet:
            os._exit(0)


def _fork(fd, control, config):
    try:
        if child := os.fork():
            os.close(fd)
            return child
        kernel.prctl(kernel.DIE_WITH_PARENT, signal.SIGKILL)
        os.setpgid(0, 0)
        if {"user", "namespaces"} & set(config["layers"]):  # otherwise the trainer's own threads would count
            resource.setrlimit(resource.RLIMIT_NPROC, (MAX_TASKS, MAX_TASKS))
        if "seccomp" in config["layers"]:
            kernel.filter_calls("candidate")
    except OSError as error:  # in either process: the next answer that the verifier reads tells it
        _send(control, fault=f"a candidate's process could not be started: {error}")
        os._exit(1)
    try:
        control.close()
        serve(fd)
    finally:
        os._exit(0)


def _end(child, patience, layers):
    """Kills the candidate and whatever it forked, reaps it, and says how it had ended by then."""
    end = time.monotonic() + patience
    while not (ended := os.wait4(child, os.WNOHANG))[0] and time.monotonic() < end:
        time.sleep(0.001)
    pid, status, usage = ended
    if not pid:
        os.kill(child, signal.SIGKILL)
        _, _, usage = os.wait4(child, 0)
    if "seccomp" not in layers:  # nothing kept it from forking: its orphans are this process's children
        children = Path(f"/proc/self/task/{os.getpid()}/children")
        while orphans := [int(pid) for pid in children.read_text().split()]:
            for orphan in orphans:
                os.kill(orphan, signal.SIGKILL)
            for _ in orphans:
                os.waitpid(-1, 0)
    return {
        "signal": os.WTERMSIG(status) if pid and os.WIFSIGNALED(status) else 0,
        "memory_mb": usage.ru_maxrss / 1024,
        "cpu_seconds": usage.ru_utime + usage.ru_stime,
    }
