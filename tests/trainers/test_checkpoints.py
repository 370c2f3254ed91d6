"""A run that is killed and resumed is the run that was not killed; a checkpoint of another run is refused."""

import importlib.util
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import types
from pathlib import Path

import pandas
import pytest
import torch
from transformers.trainer_utils import get_last_checkpoint

from trl_multiagent import MARLOOConfig, MARLOOTrainer
from trl_multiagent.trainers.checkpoints import STATE_FILE, UNFINISHED_FOLDER, read_checkpoint

from tiny import count_reward, tiny_environment, tiny_items, tiny_team, tiny_trainer


SCRIPT = Path(__file__).with_name("killed_runs.py")
KILLED = -signal.SIGKILL


@pytest.fixture(scope="module")
def run():
    """Runs with `killed_runs.run`, in forks of a process that has imported everything."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    process = subprocess.Popen(
        [sys.executable, str(SCRIPT)], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )

    def run(folder, settings, **plan) -> list[int]:
        plan = {name: str(value) if isinstance(value, Path) else value for name, value in plan.items()}
        process.stdin.write(json.dumps({"folder": str(folder), "settings": settings, **plan}) + "\n")
        process.stdin.flush()
        return json.loads(process.stdout.readline())

    yield run
    process.stdin.close()
    process.wait(timeout=60)


@pytest.fixture(scope="module")
def whole(run, tmp_path_factory):
    """Runs that nothing interrupts, by their settings."""
    finished = {}

    def whole(settings, **plan):
        key = (settings, *map(str, plan.values()))
        if key not in finished:
            folder = tmp_path_factory.mktemp("whole") / settings
            codes = run(folder, settings, result=folder.with_suffix(".pt"), kill=("write", 0), **plan)
            assert set(codes) == {0}, output_of(folder)
            finished[key] = folder
        return finished[key]

    return whole


def output_of(folder):
    return "\n".join(path.read_text()[-3000:] for path in sorted(folder.glob("output_*.txt")))


def result_of(folder):
    return torch.load(folder.with_suffix(".pt"), weights_only=False)


def timeless(entry):
    timed = ("time/", "runtime", "per_second", "step_time")
    return {name: x for name, x in entry.items() if not any(word in name for word in timed)}


def check_same(left, right):
    """Two runs ended with the same weights, bit for bit, and wrote the same log."""
    one, other = result_of(left), result_of(right)
    assert one["weights"].keys() == other["weights"].keys()
    assert all(torch.equal(x, other["weights"][name]) for name, x in one["weights"].items())
    assert [timeless(entry) for entry in one["log"]] == [timeless(entry) for entry in other["log"]]
    for name in ("env_step", "num_tokens", "train_loss", "distribution", "processes"):
        assert one[name] == other[name], name
    assert (one["best"] and Path(one["best"]).name) == (other["best"] and Path(other["best"]).name)


def resume_and_compare(run, uninterrupted, folder, settings, **plan):
    codes = run(folder, settings, resume=True, result=folder.with_suffix(".pt"), **plan)
    assert set(codes) == {0}, output_of(folder)
    check_same(uninterrupted, folder)
    assert names(folder.glob("checkpoint-*")) == names(uninterrupted.glob("checkpoint-*"))
    assert not (folder / UNFINISHED_FOLDER).exists()


def names(paths):
    return sorted(path.name for path in paths)


@pytest.mark.parametrize(
    ("settings", "kill"),
    [
        ("plain", ("score", 6)),  # the checkpoint of step 4 lies between two logs
        ("plain", ("end", 0)),  # nothing is left to train
        ("tree", ("score", 15)),  # from the end of an epoch; the numbers count the evaluations' calls too
        ("chain", ("score", 14)),
    ],
)
def test_a_killed_run_resumes_as_if_nothing_had_happened(run, whole, tmp_path, settings, kill):
    uninterrupted = whole(settings)
    folder = tmp_path / "killed"
    assert run(folder, settings, kill=kill) == [KILLED], output_of(folder)
    assert get_last_checkpoint(folder) is not None
    resume_and_compare(run, uninterrupted, folder, settings)
    tables = [sorted(path.glob("completions/*.parquet")) for path in (uninterrupted, folder)]
    assert len(tables[0]) == (4 if settings == "tree" else 0)
    for left, right in zip(*tables, strict=True):
        pandas.testing.assert_frame_equal(pandas.read_parquet(left), pandas.read_parquet(right))


def test_at_no_instant_an_incomplete_folder_counts_as_a_checkpoint(whole):
    operations, incomplete = json.loads((whole("plain") / "operations.json").read_text())
    assert incomplete == []
    assert any(line.startswith("os.rename") for line in operations) and len(operations) > 100


@pytest.mark.parametrize(
    ("operation", "path", "last"),
    [
        ("os.mkdir", "_unfinished/checkpoint-4/agents", "checkpoint-2"),
        ("torch.save", "_unfinished/checkpoint-4/optimizer.pt", "checkpoint-2"),
        ("open", "_unfinished/checkpoint-4/team_trainer_state.json", "checkpoint-2"),
        ("os.rename", "_unfinished/checkpoint-4", "checkpoint-2"),
        ("os.rename", "/checkpoint-2", "checkpoint-4"),
        ("os.remove", "optimizer.pt", "checkpoint-4"),
    ],
)
def test_killed_during_the_save(run, whole, tmp_path, operation, path, last):
    uninterrupted = whole("plain")
    operations, _ = json.loads((uninterrupted / "operations.json").read_text())
    number = 1 + next(k for k, line in enumerate(operations) if line.startswith(operation) and line.endswith(path))
    folder = tmp_path / "killed"
    assert run(folder, "plain", kill=("write", number)) == [KILLED], output_of(folder)
    assert (folder / UNFINISHED_FOLDER).is_dir()
    assert Path(get_last_checkpoint(folder)).name == last
    read_checkpoint(folder / last)
    resume_and_compare(run, uninterrupted, folder, "plain")


def no_deepspeed() -> str:
    if importlib.util.find_spec("deepspeed") is None:
        return "deepspeed is not installed"
    return "" if shutil.which("g++") else "ZeRO on CPU needs a C++ compiler, and there is no g++"


@pytest.mark.parametrize(
    ("stage", "distribution"),
    [
        (None, "MULTI_CPU"),
        pytest.param(2, "DEEPSPEED", marks=pytest.mark.skipif(bool(no_deepspeed()), reason=no_deepspeed())),
        pytest.param(3, "DEEPSPEED", marks=pytest.mark.skipif(bool(no_deepspeed()), reason=no_deepspeed())),
    ],
)
def test_two_processes(run, whole, tmp_path, stage, distribution):
    """Each process has a part of the checkpoint; one that dies leaves the others' parts behind."""
    plan = {"processes": 2}
    if stage is not None:
        zero = {"stage": stage, "stage3_gather_16bit_weights_on_model_save": True}
        config = {"zero_optimization": zero, "zero_allow_untested_optimizer": True, "gradient_clipping": 0.0}
        auto = {"train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto"}
        plan["deepspeed"] = tmp_path / "deepspeed.json"
        plan["deepspeed"].write_text(json.dumps({**config, **auto}))
    uninterrupted = tmp_path / "whole"
    assert run(uninterrupted, "two_processes", result=tmp_path / "whole.pt", **plan) == [0, 0], output_of(uninterrupted)
    result = result_of(uninterrupted)
    assert (result["distribution"], result["processes"]) == (distribution, 2)
    folder = tmp_path / "killed"
    codes = run(folder, "two_processes", kill=("part", 2), killed_rank=1, **plan)
    assert codes[1] == KILLED and codes[0] != 0, output_of(folder)
    assert Path(get_last_checkpoint(folder)).name == "checkpoint-2"
    assert (folder / UNFINISHED_FOLDER / "checkpoint-4").is_dir()
    resume_and_compare(run, uninterrupted, folder, "two_processes", **plan)
