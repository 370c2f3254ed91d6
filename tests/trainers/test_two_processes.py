"""An update does not depend on the number of processes, although their trees differ."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch


SCRIPT = Path(__file__).with_name("two_processes.py")


def run(output, processes, items_per_device, micro_batch):
    output.mkdir()
    launcher = [sys.executable]
    if processes > 1:
        launcher += ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]
    arguments = [str(SCRIPT), str(output), str(items_per_device), str(micro_batch)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    done = subprocess.run([*launcher, *arguments], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("processes")
    run(folder / "1", 1, 4, 64)
    run(folder / "2", 2, 2, 3)
    return folder


@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_two_processes_make_the_same_update(results, beta):
    one, two = (torch.load(results / number / f"{beta}.pt", weights_only=False) for number in ("1", "2"))
    assert (one["processes"], two["processes"]) == (1, 2)
    for name, x in one["weights"].items():
        assert torch.allclose(x, two["weights"][name], rtol=1e-4, atol=1e-6), name
    for left, right in zip(one["log"], two["log"], strict=True):
        timed = ("time/", "step_time", "learning_rate", "epoch")
        names = [name for name in left if not name.startswith(timed)]
        assert {name: left[name] for name in names} == pytest.approx(
            {name: right[name] for name in names}, rel=1e-3, abs=1e-5
        )
        assert 0 < left["turn_1/early_terminated"] < 1
