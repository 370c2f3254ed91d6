"""The sandbox's own failures: killed helpers, refused forks, a full disk, an interrupted or killed trainer."""

import errno
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest

from trl_multiagent.code.sandbox import Program, Sandbox, SandboxError
from trl_multiagent.code.sandbox import sandbox as sandbox_module


CHECK = "def check(candidate):\n    assert candidate(1) == 1\n"


def honest(count, seconds=0.0):
    pause = f"    time.sleep({seconds})\n" if seconds else ""
    return [Program(f"import time\ndef f(x):\n{pause}    return x + {n} - {n}", "f", CHECK) for n in range(count)]


def start(script):
    """Starts a script that has the sandbox's names."""
    code = "from trl_multiagent.code.sandbox import Program, Sandbox\n" + textwrap.dedent(script)
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([sys.executable, "-c", code], start_new_session=True, **pipes)


def helpers(mark):
    """Processes of sandboxes whose configuration holds this text."""
    found = []
    for process in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if mark in process.read_text():
                found.append(int(process.parent.name))
        except OSError:
            continue  # it ended meanwhile
    return found


def wait_until(condition, seconds=20.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.05)


def refuse(*args, **kwargs):
    raise OSError(errno.EAGAIN, "Resource temporarily unavailable")


def test_killed_helpers_cost_no_verdict():
    programs = honest(24, seconds=0.05)
    stop = threading.Event()
    killed = 0
    with Sandbox(workers=2, retries=8) as sandbox:

        def kill():
            nonlocal killed
            while killed < 6 and not stop.wait(0.4):
                if sandbox._slots:
                    victim = sandbox._slots[killed % len(sandbox._slots)].processes[killed % 2]
                    victim.kill()
                    killed += 1

        killer = threading.Thread(target=kill)
        killer.start()
        try:
            verdicts = sandbox.run(programs)
        finally:
            stop.set()
            killer.join()
        assert killed > 0
        assert [verdict.passed for verdict in verdicts] == [1] * 24
        assert sandbox.run(programs[:2])[0].passed == 1  # helpers killed while idle are replaced


def test_a_machine_without_room_for_more_helpers_makes_do_with_those_that_run(monkeypatch):
    loops = [Program(f"def f(x):\n    while {n}: pass", "f", CHECK) for n in range(1, 5)]
    with Sandbox(workers=1, check_timeout=0.3, max_timeouts=1) as sandbox:
        sandbox.run(honest(1))
        monkeypatch.setattr(sandbox_module.subprocess, "Popen", refuse)
        assert [verdict.passed for verdict in sandbox.run(loops + honest(3))] == [0] * 4 + [1] * 3


def test_what_failed_is_tried_again_alone(monkeypatch):
    """One that fails alone, too, is an error and never a score."""
    running, receive, tolerated = [], sandbox_module._Slot.receive, 1

    def fail_at_first(slot):
        message = receive(slot)
        if message is not None:
            running.append((slot.task.failures, len(sandbox._running())))
            message = message if slot.task.failures >= tolerated else {"fault": "for a test"}
        return message

    monkeypatch.setattr(sandbox_module._Slot, "receive", fail_at_first)
    with Sandbox(workers=3, retries=1) as sandbox:
        assert [verdict.passed for verdict in sandbox.run(honest(6, seconds=0.01))] == [1] * 6
    assert [others for failures, others in running if failures] == [1] * 6
    tolerated = 2
    with Sandbox(workers=1, retries=1) as sandbox, pytest.raises(SandboxError, match="2 times in a row: for a test"):
        sandbox.run(honest(1))


def descendants(pid):
    children = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return children + [each for child in children for each in descendants(child)]


@pytest.mark.parametrize("number", [1, 3])  # the candidate alone, and the verifier and the zygote as well
def test_processes_that_are_stopped_for_a_while_lose_nothing(number):
    source = "import time\ndef f(x):\n    time.sleep(0.3)\n    sum(range(10**6))\n    time.sleep(0.3)\n    return x"
    with Sandbox(workers=1, check_timeout=1.0) as sandbox:
        sandbox.run(honest(1))
        (slot,) = sandbox._slots
        stopped = []

        def stop():
            wait_until(lambda: descendants(slot.processes[0].pid))
            time.sleep(0.2)
            own = [slot.processes[1].pid, slot.processes[0].pid, descendants(slot.processes[0].pid)[-1]]
            stopped.extend(own[-number:])
            for pid in stopped:
                os.kill(pid, signal.SIGSTOP)
            time.sleep(1.2)
            for pid in stopped:
                os.kill(pid, signal.SIGCONT)

        stopper = threading.Thread(target=stop)
        stopper.start()
        (verdict,) = sandbox.run([Program(source, "f", CHECK)])
        stopper.join()
        assert stopped and verdict.passed == 1 and verdict.seconds > 1.2


def test_helpers_that_do_not_start_are_an_error(monkeypatch):
    refused = []
    with Sandbox(workers=1) as sandbox:
        assert sandbox.run(honest(1))[0].passed == 1
        sandbox.close()
        monkeypatch.setattr(sandbox_module.sys, "executable", "/bin/false")
        with pytest.raises(SandboxError, match="3 times"):
            sandbox.run(honest(1))
        sandbox.close()
        monkeypatch.setattr(sandbox_module.time, "sleep", lambda seconds: None)
        monkeypatch.setattr(sandbox_module.subprocess, "Popen", lambda *args, **_: refuse(refused.append(args)))
        with pytest.raises(SandboxError, match="temporarily unavailable"):
            sandbox.run(honest(1))
        assert len(refused) == 3
        monkeypatch.undo()
        assert sandbox.run(honest(1))[0].passed == 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_no_orphan_when_the_trainer_is_interrupted_or_killed(number):
    seconds = 1000 + os.getpid() % 1000 + number / 100
    process = start(
        f"""
        with Sandbox(workers=2, check_timeout={seconds}) as sandbox:
            print("ready", flush=True)
            sandbox.run([Program(f"def f(x):\\n    while {{n}}: pass", "f", "assert f(1)") for n in (1, 2, 3)])
        """
    )
    mark = f'"check_timeout": {seconds}'
    assert process.stdout.readline() == "ready\n"
    wait_until(lambda: len(helpers(mark)) >= 6)
    time.sleep(0.5)
    os.killpg(process.pid, number)  # as a terminal does
    _, errors = process.communicate(timeout=300)
    assert ("KeyboardInterrupt" in errors) == (number == signal.SIGINT)
    wait_until(lambda: not helpers(mark), seconds=5.0)


def test_an_interrupted_sandbox_can_be_used_again():
    loop = Program("def f(x):\n    while True: pass", "f", CHECK)
    with Sandbox(workers=1, check_timeout=30.0) as sandbox:
        threading.Timer(1.0, os.kill, [os.getpid(), signal.SIGINT]).start()
        with pytest.raises(KeyboardInterrupt):
            sandbox.run([loop])
        assert sandbox._slots == []
        assert sandbox.run(honest(1))[0].passed == 1


def test_a_forked_copy_of_the_trainer_has_helpers_of_its_own():
    with Sandbox(workers=1) as sandbox:
        sandbox.run(honest(1))
        own = [process.pid for slot in sandbox._slots for process in slot.processes]
        child = os.fork()
        if not child:
            correct = sandbox.run(honest(3))[2].passed == 1
            sandbox.close()
            os._exit(0 if correct else 1)
        assert os.waitpid(child, 0)[1] == 0
        assert sandbox.run(honest(2))[1].passed == 1
        assert {*own} <= {process.pid for slot in sandbox._slots for process in slot.processes}


def test_each_worker_has_a_core_and_ranks_have_different_ones(monkeypatch):
    cores = sorted(os.sched_getaffinity(0))
    assert Sandbox().workers == len(cores)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert Sandbox().workers == max(1, len(cores) // 2)
    for rank, core in enumerate(cores[:3]):
        monkeypatch.setenv("LOCAL_RANK", str(rank))
        with Sandbox(workers=1) as sandbox:
            sandbox.run(honest(3))
            slot = sandbox._slots[0]
            assert [os.sched_getaffinity(process.pid) for process in slot.processes] == [{core}] * 2
