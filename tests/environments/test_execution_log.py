import json
import logging

import pytest

from trl_multiagent.environments import execution_log
from trl_multiagent.environments.execution_log import ExecutionLog
from trl_multiagent.sandbox import Check, Program, Sandbox, Verdict


CHECKS = "assert f(1) == 1\nassert f(2) == 2"
READS_A_FILE = Program("def f(x): return open('/etc/passwd')", "f", CHECKS)
HONEST = Program("def f(x): return x", "f", CHECKS)
HUNGRY = Program("def f(x): return bytearray(10**10)", "f", CHECKS)
ENDLESS = Program("def f(x):\n    while True: pass", "f", CHECKS)


@pytest.fixture(scope="module")
def sandbox():
    with Sandbox(workers=2, check_timeout=0.3, max_timeouts=1) as sandbox:
        yield sandbox


def test_counts_since_the_last_call(sandbox):
    log = ExecutionLog(sandbox)
    names = ("executions_per_second", "experiment_seconds", "timeouts", "memory_kills", "suspicious")
    assert log.metrics() == dict.fromkeys(names, 0.0)
    verdicts = log.run([READS_A_FILE, HONEST, HUNGRY, ENDLESS, HONEST])
    assert [verdict.passed for verdict in verdicts] == [0, 2, 0, 0, 2]
    log.run([HUNGRY])
    log.run_experiments([HUNGRY])  # only its time is counted
    metrics = log.metrics()
    assert metrics.pop("executions_per_second") > 0 and metrics.pop("experiment_seconds") > 0
    assert metrics == {"timeouts": 1.0, "memory_kills": 2.0, "suspicious": 1.0}
    assert set(log.metrics().values()) == {0.0}


def test_the_rate_counts_equal_programs_of_a_batch_once(monkeypatch):
    clock = iter([10.0, 10.5, 20.0, 21.5])
    monkeypatch.setattr(execution_log.time, "monotonic", lambda: next(clock))

    class Instant:
        def run(self, programs):
            return [Verdict(Check("passed", ""), ())] * len(programs)

    log = ExecutionLog(Instant())
    log.run([HONEST, ENDLESS, HONEST])
    log.run([HONEST, HUNGRY])
    assert log.metrics()["executions_per_second"] == 4 / 2.0


def test_suspicious_programs_are_kept(sandbox, tmp_path):
    log = ExecutionLog(sandbox, tmp_path / "run" / "kept")
    log.run([HONEST])
    assert not (tmp_path / "run").exists()
    (verdict, _) = log.run([READS_A_FILE, HONEST])
    (kept,) = (tmp_path / "run" / "kept").iterdir()
    record = json.loads(kept.read_text())
    assert record.pop("suspicious") == list(verdict.suspicious) == ["open"]
    assert record == {"passed": 0, **vars(READS_A_FILE), "watch": [], "needed": [], "experiments": []}


def test_the_number_of_kept_programs_is_bounded(sandbox, tmp_path, monkeypatch):
    monkeypatch.setattr(execution_log, "KEPT_PROGRAMS", 2)
    log = ExecutionLog(sandbox, tmp_path)
    for _ in range(3):
        log.run([READS_A_FILE])
    assert len(list(tmp_path.iterdir())) == 2
    assert log.metrics()["suspicious"] == 3.0


def test_a_folder_that_cannot_be_written_costs_the_record_and_not_the_run(sandbox, tmp_path, caplog):
    (tmp_path / "file").write_text("")
    log = ExecutionLog(sandbox, tmp_path / "file" / "kept")
    with caplog.at_level(logging.WARNING):
        assert log.run([READS_A_FILE])[0].passed == 0
    assert "could not be kept" in caplog.text
