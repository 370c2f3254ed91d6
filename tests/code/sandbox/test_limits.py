"""Deadlines, memory, and what the kernel keeps a program from."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from trl_multiagent.code.sandbox import Program, Sandbox, SandboxError
from trl_multiagent.code.sandbox import sandbox as sandbox_module
from trl_multiagent.code.sandbox.sandbox import TIERS


CHECKS = "def check(candidate):\n" + "".join(f"    assert candidate({n}) == {n}\n" for n in range(6))


def statuses(verdict):
    return [check.status for check in verdict.checks]


SANDBOX = {"workers": 2, "check_timeout": 0.5, "max_timeouts": 2, "memory_mb": 128}


def test_timed_out_checks_are_counted_and_the_rest_is_not_run(sandbox):
    loop = "def f(x):\n    while x in (1, 3, 4): pass\n    return x"
    sleep = "import time\ndef f(x):\n    if x == 2: time.sleep(60)\n    return x"
    looping, sleeping = sandbox.run([Program(loop, "f", CHECKS), Program(sleep, "f", CHECKS)])
    assert statuses(looping) == ["passed", "timeout", "passed", "timeout", "not_run", "not_run"]
    assert looping.checks[1].error == "Timeout: no answer within 0.5 s"
    assert statuses(sleeping) == ["passed", "passed", "timeout", "passed", "passed", "passed"]
    assert looping.timeouts == 2


def test_definitions_have_a_deadline(sandbox):
    for source in ("while True: pass", "def f(x, y=sum(range(10**14))): return x"):
        verdict = sandbox.run([Program(source, "f", CHECKS)])[0]
        assert (verdict.definitions.status, set(statuses(verdict))) == ("timeout", {"not_run"})


def test_a_program_that_dies_only_loses_the_check_that_it_died_in(sandbox):
    verdict = sandbox.run([Program("import os\ndef f(x):\n    if x == 1: os._exit(0)\n    return x", "f", CHECKS)])[0]
    assert statuses(verdict) == ["passed", "error"] + ["passed"] * 4
    assert "ended its process" in verdict.suspicious


def test_memory_is_limited(sandbox):
    verdict = sandbox.run([Program("def f(x):\n    if x: bytearray(10**9)\n    return x", "f", CHECKS)])[0]
    assert statuses(verdict) == ["passed"] + ["error"] * 5
    assert verdict.out_of_memory
    assert verdict.checks[1].error == "MemoryError"
    assert verdict.memory_mb < 200


def test_answers_are_limited(sandbox):
    source = "def f(x):\n    a = []\n    for _ in range(10**5): a = [a]\n    return ['z' * 10**8, a, range(10)][x % 3]"
    verdict = sandbox.run([Program(source, "f", CHECKS)])[0]
    assert statuses(verdict)[:2] == ["error", "error"]
    assert all("too large or nested too deeply" in check.error for check in verdict.checks[:2])


def test_an_answer_that_makes_the_checks_spin_costs_one_check():
    source = "def f(x): return range(10**12) if x == 1 else x"
    once = Program(source, "f", "assert f(0) == 0\nassert 0.5 not in f(1)\nassert f(2) == 2")
    twice = Program(source, "f", "assert f(0) == 0\nassert sum(f(1)) == 1\nassert 0.5 not in f(1)")
    between = Program(source, "f", "assert f(0) == 0\ntotal = sum(f(1))\nassert f(2) == 2")
    honest = Program("def f(x): return x", "f", CHECKS)
    power = Program("def f(x): return 10**8 if x else x", "f", "assert 7 ** f(1) == 2\nassert f(0) == 0")
    with Sandbox(workers=2, check_timeout=0.2, max_timeouts=2) as sandbox:
        verdicts = sandbox.run([once, twice, between, honest, power])
    assert statuses(verdicts[4]) == ["timeout", "passed"]
    assert statuses(verdicts[0]) == ["passed", "timeout", "passed"]
    assert statuses(verdicts[1]) == ["passed", "timeout", "timeout"]
    assert statuses(verdicts[2]) == ["passed", "not_run"] and "did not finish" in verdicts[2].checks[1].error
    assert all(verdict.suspicious == ("overloaded the checks",) for verdict in verdicts[:3])
    assert verdicts[3].passed == 6


def test_a_program_that_makes_the_checks_spin_at_another_place_each_time_gets_nothing():
    source = "import time\ndef f(x): return range(10**15) if x else time.time_ns() // 1000 % 40"
    checks = "for n in range(f(0)):\n    f(0)\nassert sum(f(1)) == 2\nassert f(1) == 2"
    with Sandbox(workers=1, check_timeout=0.1, max_timeouts=2, retries=0) as sandbox:
        verdict = sandbox.run([Program(source, "f", checks)])[0]
    assert "passed" not in statuses(verdict)
    assert verdict.suspicious == ("overloaded the checks",)


def test_checks_that_an_answer_makes_wait_are_lost(monkeypatch):
    monkeypatch.setattr(sandbox_module, "SILENT_SECONDS", 0.5)
    monkeypatch.setattr(sandbox_module, "PAUSE_SECONDS", 0.1)
    checks = "import time\nassert time.sleep(f(1))\nassert f(2) == 2"
    program = Program("def f(x): return 10**6 if x == 1 else x", "f", checks)
    with Sandbox(workers=1, check_timeout=0.1, retries=0) as sandbox:  # ten times of which are waited for, too
        assert statuses(sandbox.run([program])[0]) == ["timeout", "passed"]


WRITE = """
import json, os, socket, struct, time
def frame(message):
    body = json.dumps(message).encode()
    return struct.pack("<I", len(body)) + body
ask = {"call": 0, "args": [100_000], "kwargs": {}}
def unread(n):
    while True: os.write(3, frame(ask))
def unread_later(n):
    for _ in range(1000): os.write(3, frame(ask))
    time.sleep(99)
def half(n):
    os.write(3, frame(ask)[:n])
    time.sleep(99)
def drip(n):
    while True:
        for number in frame({"suspicious": "x"}):
            os.write(3, bytes([number]))
            time.sleep(0.001)
def out_of_band(n):
    connection = socket.socket(fileno=3)
    while True:
        connection.send(b"x", socket.MSG_OOB)
        time.sleep(0.01)
def flood(n):
    while True: os.write(3, frame({"suspicious": str(n := n + 1)}))
def f(kind, g, n=0): return globals()[kind](n)
"""


def test_whatever_a_program_does_with_its_socket_a_check_ends_at_its_limit():
    kinds = {"unread": 0, "unread_later": 0, "half": 2, "drip": 0, "out_of_band": 0, "flood": 0}
    programs = [
        Program(WRITE, "f", f"assert f({kind!r}, lambda n: 'x' * n, {n}) == 1021") for kind, n in kinds.items()
    ]
    programs.append(Program(WRITE, "f", "assert f('half', lambda n: 'x' * n, 30) == 1021"))
    with Sandbox(workers=1, check_timeout=0.4, max_timeouts=1) as sandbox:
        verdicts = sandbox.run(programs)
    # nothing is waited for longer than a check may take, but for a core
    assert {status for verdict in verdicts for status in statuses(verdict)} <= {"timeout", "error"}
    assert max(verdict.seconds for verdict in verdicts) < 30
    assert max(len(verdict.suspicious) for verdict in verdicts) < 20


def test_a_process_that_ends_in_a_call_within_a_call_is_not_talked_to(sandbox):
    source = "import os\ndef f(ask, x=0):\n    if x: os._exit(0)\n    return ask(lambda: f(ask, 1))"
    (verdict,) = sandbox.run(
        [Program(source, "f", "assert f(lambda call: call()) == 1\nassert f(lambda call: 2) == 2")]
    )
    assert statuses(verdict) == ["error", "passed"]
    assert "ended its process" in verdict.suspicious


SLEEPERS = """
import threading, time
def f(x):
    threading.stack_size(32768)
    started = 0
    try:
        while started < 4000:
            threading.Thread(target=time.sleep, args=(30,), daemon=True).start()
            started += 1
    except RuntimeError:
        pass
    time.sleep(30)
    return started
"""
POOL = """
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
def f(n):
    with ThreadPoolExecutor(16) as pool:
        return list(pool.map(abs, range(n)))
"""


def test_threads_of_one_program_take_none_from_others():
    hostile = [Program(f"{SLEEPERS}  # {n}", "f", "assert f(1) == 1021") for n in range(4)]
    honest = [Program(f"{POOL}  # {n}", "f", "assert f(100) == list(range(100))") for n in range(4)]
    sandboxes = [Sandbox(workers=2, check_timeout=1.0, max_timeouts=1, max_tier="seccomp") for _ in range(2)]
    with sandboxes[0], sandboxes[1], ThreadPoolExecutor(2) as ranks:
        for verdicts in ranks.map(lambda sandbox: sandbox.run(hostile + honest), sandboxes):
            assert [verdict.passed for verdict in verdicts] == [0] * 4 + [1] * 4


def test_stuck_programs_do_not_hold_up_the_others():
    check = "def check(candidate):\n    assert candidate(1) == 1\n"
    stuck = [Program(f"import time\ndef f(x): time.sleep({n})", "f", check) for n in range(60, 68)]
    honest = [Program(f"def f(x): return x + {n} - {n}", "f", check) for n in range(56)]
    with Sandbox(workers=2, check_timeout=0.5, max_timeouts=1) as sandbox:
        sandbox.run(honest[:2])
        verdicts = sandbox.run(stuck + honest)
        assert len(sandbox._slots) > 4  # several stuck programs ran at once, and others beside them
    assert [verdict.passed for verdict in verdicts] == [0] * 8 + [1] * 56


ACTS = """
import os, sys
def act(kind):
    if kind == "read": return os.open("/etc/passwd", os.O_RDONLY)
    if kind == "write": return os.open("/tmp/sandbox_was_here", os.O_CREAT | os.O_WRONLY)
    if kind == "list": return os.listdir("/etc")
    if kind == "fork": return os.fork()
    if kind == "exec": return os.execv("/bin/true", ["true"])
    if kind == "kill": return os.kill(os.getppid(), 0)
    if kind == "socket": return __import__("socket").socket()
    if kind == "unix": return __import__("socket").socket(1)
    if kind == "memfd": return os.memfd_create("x")
    if kind == "limit": return __import__("resource").setrlimit(7, (99, 99))
    if kind == "descriptors": return sum(1 for n in range(4, 60) if os.fstat(n))
def f(kind):
    try:
        act(kind)
    except (OSError, ImportError, ValueError) as error:
        return type(error).__name__
    return "done"
"""
KINDS = ("read", "write", "list", "fork", "exec", "kill", "socket", "unix", "memfd", "limit", "descriptors")


@pytest.mark.parametrize("tier", ["seccomp", "landlock", "namespaces"])
def test_what_a_program_may_not_do(tier, monkeypatch):
    checks = "\n".join(f"assert f({kind!r}) != 'done'" for kind in KINDS)
    monkeypatch.setenv("HF_TOKEN", "secret")
    bare = Program("import os\ndef f(): return [dict(os.environ), os.getcwd()]", "f", "assert f() == [{}, '/']")
    with Sandbox(workers=1, max_tier=tier) as sandbox:
        verdict, environment = sandbox.run([Program(ACTS, "f", checks), bare])
        assert environment.passed == 1
        if sandbox.tier != tier:
            pytest.skip(f"this machine has no tier {tier}")
    assert [kind for kind, check in zip(KINDS, verdict.checks, strict=True) if check.status != "passed"] == []
    assert verdict.tier == tier
    assert {"open", "os.listdir", "os.fork"} <= set(verdict.suspicious)


def test_the_weakest_tier_keeps_verdicts_honest_but_must_be_asked_for():
    source = (
        "import os, time\ndef f(x):\n    pid = os.fork()\n    if not pid:\n        os.setsid(); "
        "time.sleep(50)\n    return pid"
    )
    program = Program(source, "f", "assert f(0) > 0\nassert f(1) < 0")
    with Sandbox(workers=1, max_tier="rlimits") as sandbox, pytest.raises(SandboxError, match="min_tier"):
        sandbox.run([program])
    with Sandbox(workers=1, max_tier="rlimits", min_tier="rlimits") as sandbox:
        verdict = sandbox.run([program])[0]
        assert statuses(verdict) == ["passed", "failed"] and verdict.tier == "rlimits"
        (zygote, _) = sandbox._slots[0].processes  # what it forked is ended
        assert Path(f"/proc/{zygote.pid}/task/{zygote.pid}/children").read_text() == ""


def test_arguments_are_checked():
    for wrong in ({"workers": 0}, {"check_timeout": 0}, {"max_timeouts": 0}, {"min_tier": "best"}, {"memory_mb": 1}):
        with pytest.raises(ValueError, match=f"sandbox.{next(iter(wrong))}"):
            Sandbox(**wrong)
    assert list(TIERS) == ["rlimits", "seccomp", "landlock", "namespaces"]


def test_a_program_that_closes_its_socket_has_ended(sandbox):
    verdict = sandbox.run([Program("import os, time\ndef f(x):\n    os.close(3)\n    time.sleep(9)", "f", CHECKS)])[0]
    assert set(statuses(verdict)) == {"error"}
    assert "ended its process" in verdict.suspicious


CLONE = """
import ctypes
def f(flags):
    libc, stack = ctypes.CDLL(None), ctypes.create_string_buffer(2**16)
    top = ctypes.c_void_p(ctypes.addressof(stack) + 2**15 & ~15)
    return libc.clone(ctypes.cast(libc.abs, ctypes.c_void_p), top, flags, None) > 0
"""


def test_threads_share_the_descriptors_and_do_not_wait_for_each_other(sandbox):
    checks = (
        "assert f(0x10D00)\nassert not f(0x10900)\nassert not f(0x14D00)"  # a usual one, no CLONE_FILES, CLONE_VFORK
    )
    assert sandbox.run([Program(CLONE, "f", checks)])[0].passed == 3


def test_memory_is_not_shared(sandbox):
    program = """
import ctypes
mmap = ctypes.CDLL(None).mmap
mmap.restype, mmap.argtypes = ctypes.c_ssize_t, [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
def f(flags):
    return mmap(None, 4096, 3, flags, -1, 0) != -1
"""
    assert sandbox.run([Program(program, "f", "assert f(0x22)\nassert not f(0x21)")])[0].passed == 2  # private, shared


@pytest.fixture
def busy():
    """Other programs that want the core of a sandbox's first worker."""
    spin = [sys.executable, "-I", "-S", "-c", "while True: pass"]
    # sessions of their own, because the kernel may share the cores out by session
    processes = [subprocess.Popen(spin, start_new_session=True) for _ in range(2)]
    for process in processes:
        os.sched_setaffinity(process.pid, {min(os.sched_getaffinity(0))})
    yield
    for process in processes:
        process.kill()
        process.wait()


def test_waiting_for_a_core_is_not_held_against_a_program(busy):
    source = (
        "import time\ndef f(x):\n    end = time.process_time() + 0.35\n    while time.process_time() < "
        "end: pass\n    return x"
    )
    with Sandbox(workers=1, check_timeout=0.5) as sandbox:
        verdict = sandbox.run([Program(source, "f", "assert f(1) == 1")])[0]
    assert verdict.passed == 1
    assert verdict.seconds > 0.5


WAKING = """
import threading, time
threading.stack_size(2**16)
def wake():
    while True: time.sleep(0.03 - time.monotonic() % 0.03)  # all at once
def f(x):
    for _ in range(60): threading.Thread(target=wake, daemon=True).start()
    time.sleep(4)
    return x
"""


def test_threads_that_wait_for_a_core_give_a_program_no_time_to_sleep(busy):
    with Sandbox(workers=1, check_timeout=0.5) as sandbox:
        assert statuses(sandbox.run([Program(WAKING, "f", "assert f(1) == 1")])[0]) == ["timeout"]
