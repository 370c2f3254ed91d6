import json
import logging

from trl_multiagent.code import program_runner
from trl_multiagent.code.program_runner import ProgramRunner
from trl_multiagent.code.sandbox import Check, Program, Verdict


CHECKS = "assert f(1) == 1\nassert f(2) == 2"
READS_A_FILE = Program("def f(x): return open('/etc/passwd')", "f", CHECKS)
HONEST = Program("def f(x): return x", "f", CHECKS)
HUNGRY = Program("def f(x): return bytearray(10**10)", "f", CHECKS)
ENDLESS = Program("def f(x):\n    while True: pass", "f", CHECKS)


SANDBOX = {"workers": 2, "check_timeout": 0.3, "max_timeouts": 1}


def test_counts_since_the_last_call(sandbox):
    runner = ProgramRunner(sandbox)
    names = ("executions_per_second", "experiment_seconds", "timeouts", "memory_kills", "suspicious")
    assert runner.metrics() == dict.fromkeys(names, 0.0)
    verdicts = runner.run([READS_A_FILE, HONEST, HUNGRY, ENDLESS, HONEST])
    assert [verdict.passed for verdict in verdicts] == [0, 2, 0, 0, 2]
    runner.run([HUNGRY])
    runner.run_experiments([HUNGRY])  # only its time is counted
    metrics = runner.metrics()
    assert metrics.pop("executions_per_second") > 0 and metrics.pop("experiment_seconds") > 0
    assert metrics == {"timeouts": 1.0, "memory_kills": 2.0, "suspicious": 1.0}
    assert set(runner.metrics().values()) == {0.0}


def test_the_rate_counts_equal_programs_of_a_batch_once(monkeypatch):
    clock = iter([10.0, 10.5, 20.0, 21.5])
    monkeypatch.setattr(program_runner.time, "monotonic", lambda: next(clock))

    class Instant:
        def run(self, programs):
            return [Verdict(Check("passed", ""), ())] * len(programs)

    runner = ProgramRunner(Instant())
    runner.run([HONEST, ENDLESS, HONEST])
    runner.run([HONEST, HUNGRY])
    assert runner.metrics()["executions_per_second"] == 4 / 2.0


def test_suspicious_programs_are_kept(sandbox, tmp_path):
    runner = ProgramRunner(sandbox, tmp_path / "run" / "kept")
    runner.run([HONEST])
    assert not (tmp_path / "run").exists()
    (verdict, _) = runner.run([READS_A_FILE, HONEST])
    (kept,) = (tmp_path / "run" / "kept").iterdir()
    record = json.loads(kept.read_text())
    assert record.pop("suspicious") == list(verdict.suspicious) == ["open"]
    assert record == {"passed": 0, **vars(READS_A_FILE), "watch": [], "needed": [], "experiments": []}


def test_the_number_of_kept_programs_is_bounded(sandbox, tmp_path, monkeypatch):
    monkeypatch.setattr(program_runner, "KEPT_PROGRAMS", 2)
    runner = ProgramRunner(sandbox, tmp_path)
    for _ in range(3):
        runner.run([READS_A_FILE])
    assert len(list(tmp_path.iterdir())) == 2
    assert runner.metrics()["suspicious"] == 3.0


def test_a_folder_that_cannot_be_written_costs_the_record_and_not_the_run(sandbox, tmp_path, caplog):
    (tmp_path / "file").write_text("")
    runner = ProgramRunner(sandbox, tmp_path / "file" / "kept")
    with caplog.at_level(logging.WARNING):
        assert runner.run([READS_A_FILE])[0].passed == 0
    assert "could not be stored" in caplog.text
