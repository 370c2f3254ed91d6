"""Files that cannot be written end a run with one line, and the last checkpoint stands."""

import resource
from pathlib import Path

import pytest
import torch
from datasets import Dataset

from trl_multiagent import AgentTeam
from trl_multiagent.report import trace_files
from trl_multiagent.runs.run import end_with_one_line
from trl_multiagent.trainers.base.checkpoints import WriteError

from tiny import team_of, tiny_team, tiny_trainer, write_problems


SCRIPT = Path(__file__).parents[1] / "helpers" / "bad_endings.py"


@pytest.fixture
def recipe_arguments(tiny_model, tmp_path):
    data = tmp_path / "humaneval.jsonl"
    write_problems(data, 2)
    return [
        *("--override", f"agent_model.name={tiny_model}", f"dataset.name={data}", f"output.save_path={tmp_path}/team"),
        *("output.save_final_model=true", f"magrpo.output_dir={tmp_path}/run", "magrpo.max_steps=1"),
        *("magrpo.max_completion_length=4", "magrpo.save_strategy=no", "magrpo.disable_tqdm=true"),
    ]


@pytest.mark.parametrize("failure", ["a file in the way", "a full disk"])
def test_a_team_that_cannot_be_saved_ends_all_processes_with_one_line(forked, recipe_arguments, tmp_path, failure):
    done = forked.run(SCRIPT, failure, tmp_path, *recipe_arguments, processes=2, cwd=tmp_path)
    assert 0 not in done.codes, done.stderr[-3000:]
    first = (tmp_path / "0.txt").read_text()
    assert f"The team could not be written in {tmp_path}/team (" in first and "\n" not in first
    assert "are free there). There is no checkpoint." in first
    assert ("NotADirectoryError" if failure == "a file in the way" else "No space left on device") in first
    second = (tmp_path / "1.txt").read_text()
    assert second.startswith("Process 0 on ") and first in second


def test_a_wrong_network_interface_is_named(forked, recipe_arguments, tmp_path):
    """And no setting of the recipe."""
    network = {"GLOO_SOCKET_IFNAME": "nowhere"}
    done = forked.run(SCRIPT, "network", tmp_path, *recipe_arguments, processes=2, cwd=tmp_path, environment=network)
    assert set(done.codes) <= {3, -9}, done.stderr
    line = (tmp_path / "0.txt").read_text()
    assert line.startswith("The processes of this run cannot be connected: ") and "nowhere" in line
    assert "GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME" in line and "magrpo" not in line and "\n" not in line


def test_processes_with_different_settings_end_with_one_line(forked, recipe_arguments, tmp_path):
    """Before a model is loaded."""
    rank = "magrpo.seed=${oc.decode:${oc.env:RANK}}"
    done = forked.run(SCRIPT, "differ", tmp_path, *recipe_arguments, rank, processes=2, cwd=tmp_path)
    assert set(done.codes) <= {3, -9}, done.stderr
    for process in range(2):
        line = (tmp_path / f"{process}.txt").read_text()
        assert line.startswith("The processes of this run differ: seed: 0 on process 0, 1 on process 1.")
    assert not (tmp_path / "run").exists()


# The trainer alone


@pytest.fixture(autouse=True)
def working_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def same_weights(team, folder):
    saved = AgentTeam.from_pretrained(str(folder)).state_dict()
    return all(torch.equal(x, saved[name]) for name, x in team.state_dict().items())


FULL = OSError(28, "No space left on device")


def full(*args, **kwargs):
    raise FULL


@pytest.mark.parametrize("step", ["_save_optimizer_and_scheduler", "publish", "_load_best_model"])
def test_the_last_checkpoint_fails(tmp_path, monkeypatch, step):
    arguments = {"save_strategy": "steps", "eval_strategy": "steps", "metric_for_best_model": "reward"}
    arguments |= {"load_best_model_at_end": True, "eval_dataset": Dataset.from_list([{"x": "1"}])}
    trainer = tiny_trainer(tmp_path / "run", **arguments)
    if step == "publish":
        monkeypatch.setattr("trl_multiagent.trainers.base.checkpoints.publish", full)
    else:
        monkeypatch.setattr(trainer, step, full)
    with pytest.raises(WriteError) as error:
        trainer.train()
    message = str(error.value)
    if step == "_load_best_model":
        assert "The training ended with OSError" in message and "The last complete checkpoint is" in message
    else:
        assert "could not be written" in message and " MB are free" in message and "There is no checkpoint." in message
        assert not list((tmp_path / "run").glob("checkpoint-*"))
    assert "\n" not in message


def test_a_full_team_where_a_lora_team_was_saved(tmp_path):
    team_of("lora").save_pretrained(tmp_path / "team")
    tiny_team().save_pretrained(tmp_path / "team")
    assert same_weights(tiny_team(), tmp_path / "team")


@pytest.mark.parametrize(
    "error",
    [
        OSError(5, "Input/output error"),
        OSError(12, "Cannot allocate memory"),
        OSError(30, "Read-only file system"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory: you tried to"),
        MemoryError(),
    ],
)
def test_a_fault_of_the_machine_is_one_line(tmp_path, monkeypatch, capsys, error):
    """It says what is lost and what to do, in a training and elsewhere. Other errors keep their traceback."""

    def fails(*args):
        raise error

    trainer = tiny_trainer(tmp_path, save_strategy="steps", save_steps=1, max_steps=2, trace_steps=1)
    make = trace_files.as_frame
    monkeypatch.setattr(trace_files, "as_frame", lambda rows: fails() if rows[0]["step"] == 2 else make(rows))
    with pytest.raises(SystemExit), end_with_one_line("train"):
        trainer.train()
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith(f"train: error: The training ended with {type(error).__name__}")
    assert line.endswith(f"{tmp_path}/checkpoint-1. Later steps are lost: mend the disk or free memory, and resume.")
    with pytest.raises(SystemExit), end_with_one_line("evaluate"):
        fails()
    assert capsys.readouterr().err.endswith("Mend the disk or free memory, and start again.\n")
    with pytest.raises(RuntimeError, match="a bug"), end_with_one_line("train"):
        raise RuntimeError("a bug")


def test_a_full_disk_during_the_training(tmp_path, monkeypatch, capsys):
    """One line names the file, and the checkpoint that is there."""
    trainer = tiny_trainer(tmp_path, save_strategy="steps", save_steps=1, max_steps=3, trace_steps=1)
    make = trace_files.as_frame
    monkeypatch.setattr(trace_files, "as_frame", lambda rows: full() if rows[0]["step"] == 2 else make(rows))
    with pytest.raises(SystemExit) as ended, end_with_one_line("train"):
        trainer.train()
    assert ended.value.code == 2
    assert capsys.readouterr().err.splitlines()[-1] == (
        f"train: error: The training ended with OSError: [Errno 28] No space left on device: "
        f"'{tmp_path}/trace/00000002-00000002_process0.parquet'. The last complete checkpoint is "
        f"{tmp_path}/checkpoint-1. Later steps are lost: mend the disk or free memory, and resume."
    )
    # A checkpoint, with a limit of the size of files instead of a full disk: libraries raise errors of other kinds
    monkeypatch.undo()
    trainer = tiny_trainer(tmp_path, save_strategy="steps", save_steps=1, max_steps=3)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
        with pytest.raises(SystemExit), end_with_one_line("train"):
            trainer.train()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    error = capsys.readouterr().err.splitlines()[-1]
    assert f"The checkpoint of step 1 could not be written in {tmp_path}/_unfinished/checkpoint-1 (" in error
    assert error.endswith(f"The last complete checkpoint is {tmp_path}/checkpoint-1.")


def test_a_process_that_is_gone_is_one_line(tmp_path, monkeypatch, capsys):
    trainer = tiny_trainer(tmp_path, save_strategy="steps", save_steps=1, max_steps=3)
    generate = trainer._generate_and_score_completions

    def lost(inputs):
        if trainer.state.global_step == 1:
            where = "/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:537"
            raise RuntimeError(f"[{where}] Read error [127.0.0.1]:24489: Connection reset by peer. This is typical")
        return generate(inputs)

    monkeypatch.setattr(trainer, "_generate_and_score_completions", lost)
    with pytest.raises(SystemExit) as ended, end_with_one_line("train"):
        trainer.train()
    line = capsys.readouterr().err.splitlines()[-1]
    assert ended.value.code == 1 and line.startswith("train: error: Another process has ended, or cannot be reached: ")
    assert line.endswith(f"Connection reset by peer. The last complete checkpoint is {tmp_path}/checkpoint-1.")
    with pytest.raises(SystemExit), end_with_one_line("evaluate"):
        lost(None)
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith("evaluate: error: Another process has ended, or cannot be reached: RuntimeError: [/pytorch")
