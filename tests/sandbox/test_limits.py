"""Deadlines, memory, and what the kernel keeps a program from."""

import os
import subprocess
import sys
import time

import pytest

from trl_multiagent.sandbox import Program, Sandbox, SandboxError
from trl_multiagent.sandbox.sandbox import TIERS


CHECKS = "def check(candidate):\n" + "".join(f"    assert candidate({n}) == {n}\n" for n in range(6))


def statuses(verdict):
    return [check.status for check in verdict.checks]


@pytest.fixture(scope="module")
def sandbox():
    with Sandbox(workers=2, check_timeout=0.5, max_timeouts=2, memory_mb=128) as sandbox:
        yield sandbox


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


def test_an_answer_that_makes_the_checks_spin_costs_one_check(sandbox):
    source = "def f(x): return range(10**12) if x == 1 else x"
    once = Program(source, "f", "assert f(0) == 0\nassert 0.5 not in f(1)\nassert f(2) == 2")
    twice = Program(source, "f", "assert f(0) == 0\nassert sum(f(1)) == 1\nassert 0.5 not in f(1)")
    between = Program(source, "f", "assert f(0) == 0\ntotal = sum(f(1))\nassert f(2) == 2")
    honest = Program("def f(x): return x", "f", CHECKS)
    verdicts = sandbox.run([once, twice, between, honest])
    assert statuses(verdicts[0]) == ["passed", "timeout", "passed"]
    assert statuses(verdicts[1]) == ["passed", "timeout", "timeout"]
    assert statuses(verdicts[2]) == ["passed", "not_run"] and "no end" in verdicts[2].checks[1].error
    assert all(verdict.suspicious == ("overloaded the checks",) for verdict in verdicts[:3])
    assert verdicts[3].passed == 6


def test_stuck_programs_do_not_hold_up_the_others():
    check = "def check(candidate):\n    assert candidate(1) == 1\n"
    loops = [Program(f"def f(x):\n    while {n}: pass", "f", check) for n in range(1, 9)]
    honest = [Program(f"def f(x): return x + {n} - {n}", "f", check) for n in range(56)]
    with Sandbox(workers=2, check_timeout=2.0, max_timeouts=1) as sandbox:
        sandbox.run(honest[:2])
        start = time.monotonic()
        verdicts = sandbox.run(loops + honest)
        elapsed = time.monotonic() - start
    # one after the other, 2 workers would take half of the sum, all at once an eighth of it, and the time to start helpers; a
    # busy machine makes every part longer
    assert elapsed < 0.3 * sum(verdict.seconds for verdict in verdicts)
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
def test_what_a_program_may_not_do(tier):
    checks = "\n".join(f"assert f({kind!r}) != 'done'" for kind in KINDS)
    with Sandbox(workers=1, max_tier=tier) as sandbox:
        verdict = sandbox.run([Program(ACTS, "f", checks)])[0]
        if sandbox.tier != tier:
            pytest.skip(f"this machine has no tier {tier}")
    assert [kind for kind, check in zip(KINDS, verdict.checks, strict=True) if check.status != "passed"] == []
    assert verdict.tier == tier
    assert {"open", "os.listdir", "os.fork"} <= set(verdict.suspicious)


def test_the_weakest_tier_keeps_verdicts_honest_but_must_be_asked_for():
    program = Program(ACTS, "f", "assert f('read') == 'done'\nassert f('write') == 'done'\nassert f('x') == 'no'")
    with Sandbox(workers=1, max_tier="rlimits") as sandbox, pytest.raises(SandboxError, match="min_tier"):
        sandbox.run([program])
    with Sandbox(workers=1, max_tier="rlimits", min_tier="rlimits") as sandbox:
        verdict = sandbox.run([program])[0]
    assert verdict.tier == "rlimits"
    assert "failed" in statuses(verdict)


def test_what_is_forked_on_the_weakest_tier_is_ended():
    source = "import os, time\ndef f(x):\n    pid = os.fork()\n    if not pid:\n        os.setsid(); time.sleep(50)\n    return pid"
    with Sandbox(workers=1, max_tier="rlimits", min_tier="rlimits") as sandbox:
        verdict = sandbox.run([Program(source, "f", "assert f(0) > 0\nassert f(1) < 0")])[0]
        assert statuses(verdict) == ["passed", "failed"]
        (zygote, _) = sandbox._slots[0].processes
        children = [int(pid) for pid in open(f"/proc/{zygote.pid}/task/{zygote.pid}/children").read().split()]
        assert children == []


def test_the_environment_is_empty(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "secret")
    source = "import os\ndef f(): return [dict(os.environ), os.getcwd()]"
    with Sandbox(workers=1) as sandbox:
        assert sandbox.run([Program(source, "f", "assert f() == [{}, '/']")])[0].passed == 1


def test_modules_that_wait_in_memory_can_be_imported(sandbox):
    source = "import statistics, asyncio, unittest.mock, inspect, csv\ndef f(x): return statistics.mean([x])"
    verdict = sandbox.run([Program(source, "f", CHECKS)])[0]
    assert (verdict.passed, verdict.suspicious) == (6, ())
    missing = sandbox.run([Program("import numpy\ndef f(x): return x", "f", CHECKS)])[0]
    assert missing.definitions.error == "ModuleNotFoundError: No module named 'numpy'"


def test_arguments_are_checked_and_cores_are_shared(monkeypatch):
    for wrong in ({"workers": 0}, {"check_timeout": 0}, {"max_timeouts": 0}, {"min_tier": "best"}, {"memory_mb": 1}):
        with pytest.raises(ValueError, match=f"sandbox.{next(iter(wrong))}"):
            Sandbox(**wrong)
    cores = len(os.sched_getaffinity(0))
    assert Sandbox().workers == cores
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert Sandbox().workers == max(1, cores // 2)
    assert list(TIERS) == ["rlimits", "seccomp", "landlock", "namespaces"]


def test_a_program_that_closes_its_socket_has_ended(sandbox):
    verdict = sandbox.run([Program("import os, time\ndef f(x):\n    os.close(3)\n    time.sleep(9)", "f", CHECKS)])[0]
    assert set(statuses(verdict)) == {"error"}
    assert "ended its process" in verdict.suspicious


def test_a_flood_of_frames_is_bounded(sandbox):
    source = """
import os, struct, json
def f(x):
    n = 0
    while True:
        n += 1
        body = json.dumps({"suspicious": str(n)} if x else {"call_back": 0, "args": [], "kwargs": {}}).encode()
        os.write(3, struct.pack("<I", len(body)) + body)
"""
    verdict = sandbox.run([Program(source, "f", CHECKS)])[0]
    assert "passed" not in statuses(verdict)
    assert len(verdict.suspicious) < 20


def test_waiting_for_a_core_is_not_held_against_a_program():
    spin = [sys.executable, "-I", "-S", "-c", "while True: pass"]
    # sessions of their own, because the kernel may share the cores out by session
    busy = [subprocess.Popen(spin, start_new_session=True) for _ in range(3 * os.cpu_count())]
    try:
        source = "import time\ndef f(x):\n    end = time.process_time() + 0.7\n    while time.process_time() < end: pass\n    return x"
        with Sandbox(workers=1, check_timeout=1.0) as sandbox:
            verdict = sandbox.run([Program(source, "f", "assert f(1) == 1")])[0]
        assert verdict.passed == 1
        assert verdict.seconds > 1.0
    finally:
        for process in busy:
            process.kill()
            process.wait()
