"""An update does not depend on the number of processes, although their trees differ."""

import json
from pathlib import Path

import pandas as pd
import pytest
import torch


LOSSES = ["loss", "grad_norm", "agents/aux/loss", "agents/main/entropy"]
SCRIPT = Path(__file__).parents[1] / "helpers" / "two_processes.py"


@pytest.fixture(scope="module")
def results(forked, tmp_path_factory):
    folder = tmp_path_factory.mktemp("processes")
    for processes, items_per_device, micro_batch in ((1, 4, 64), (2, 2, 3)):
        output = folder / str(processes)
        output.mkdir()
        finished = forked.run(SCRIPT, output, items_per_device, micro_batch, processes=processes)
        assert set(finished.codes) == {0}, finished.stderr[-4000:]
    return folder


@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_two_processes_make_the_same_update(results, beta):
    one, two = (torch.load(results / number / f"{beta}.pt", weights_only=False) for number in ("1", "2"))
    assert (one["processes"], two["processes"]) == (1, 2)
    for name, x in one["weights"].items():
        assert torch.allclose(x, two["weights"][name], rtol=1e-4, atol=1e-6), name
    for left, right in zip(one["log"], two["log"], strict=True):
        timed = ("time/", "step_time", "learning_rate", "epoch", "train_runtime", "train_s")
        names = [name for name in left if not name.startswith(timed)]
        assert {name: left[name] for name in names} == pytest.approx(
            {name: right[name] for name in names}, rel=1e-3, abs=1e-5
        )
        assert 0 < left["turn_1/early_terminated"] < 1


def test_all_processes_run_a_step_again_if_the_memory_of_one_does_not_suffice(results):
    """The rows of a forward are those of a step, until they are halved to three."""
    given = torch.load(results / "1" / "0.0.pt", weights_only=False)
    for number in ("1", "2"):
        cramped = torch.load(results / number / "cramped.pt", weights_only=False)
        assert cramped["rows"] in (2, 3)
        for name, x in given["weights"].items():
            assert torch.allclose(x, cramped["weights"][name], rtol=1e-4, atol=1e-6), name
        for left, right in zip(given["log"], cramped["log"], strict=True):
            assert {name: left[name] for name in LOSSES} == pytest.approx(
                {name: right[name] for name in LOSSES}, rel=1e-3
            )


@pytest.mark.parametrize(("beta", "logged"), [(0.0, 3), (0.1, 2)])
def test_what_is_logged_is_exchanged_once(results, beta, logged):
    """The totals of each of three batches, and at every log the rows of the completions that are printed."""
    assert torch.load(results / "2" / f"{beta}.pt", weights_only=False)["gathers"] == 3 + logged


def test_two_processes_sample_the_same(results):
    """What a completion draws depends on the item's position in the batch of all processes, not on the process."""
    one, two = (torch.load(results / number / "sampled.pt", weights_only=False) for number in ("1", "2"))
    for name, x in one["weights"].items():
        assert torch.allclose(x, two["weights"][name], rtol=1e-4, atol=1e-6), name
    columns = ["step", "split", "tree", "node", "action", "completion/aux", "completion/main"]
    traces = []
    for number in ("1", "2"):
        trace = pd.read_parquet(results / number / "sampled" / "trace")
        traces.append(sorted(trace[columns].values.tolist()))
    assert traces[0] == traces[1] and len({tuple(row[2:]) for row in traces[0]}) > 100
    for left, right, again in zip(one["evaluations"], two["evaluations"], one["evaluations"][:1] * 2, strict=True):
        assert left["eval_reward"] == pytest.approx(right["eval_reward"]) == pytest.approx(again["eval_reward"])


@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_a_micro_batch_needs_one_collective_besides_that_of_the_gradients(results, beta):
    calls = torch.load(results / "2" / f"{beta}.pt", weights_only=False)["calls"]
    of_micro_batches = [part.split() for part in " ".join(calls).split("micro-batch")[1:]]
    # Three steps with 40 rows, three per micro-batch. Without `beta`, rows are left out, and some micro-batches are
    # empty
    assert len(of_micro_batches) == 3 * 14 if beta else 3 < len(of_micro_batches) < 3 * 14
    # One is for whether all losses are finite. After the last micro-batch of a step, the next batch follows
    assert sum(names != ["all_reduce"] for names in of_micro_batches) == 3


@pytest.mark.parametrize("number", [9, 11])
@pytest.mark.parametrize("trainer", ["madpo", "reward"])
def test_pairs_that_are_repeated_for_the_second_process_do_not_count(results, trainer, number):
    """Nine or eleven pairs in batches of four: weights, training metrics, and those of an evaluation."""
    one, two = (
        torch.load(results / processes / f"{trainer}_{number}.pt", weights_only=False) for processes in ("1", "2")
    )
    for name, x in one["weights"].items():
        assert torch.allclose(x, two["weights"][name], rtol=1e-4, atol=1e-6), name
    assert (
        len(one["log"]) == len(two["log"]) == 8
    )  # two passes of three steps, the end of the training, and an evaluation
    for left, right in zip(one["log"], two["log"], strict=True):
        names = [x for x in left if not x.endswith(("runtime", "per_second", "flos"))]
        assert {x: left[x] for x in names} == pytest.approx({x: right[x] for x in names}, rel=1e-3, abs=1e-5)


def test_processes_with_different_settings_data_or_models_are_refused(forked, tmp_path):
    """They would wait for each other forever, or average gradients of different losses."""
    finished = forked.run(SCRIPT.with_name("differing_processes.py"), tmp_path, processes=2)
    assert finished.codes == [0, 0], finished.stderr[-4000:]
    answers, others = (json.loads((tmp_path / f"{process}.json").read_text()) for process in (0, 1))
    assert answers == others
    assert answers.pop("nothing") == "trained"
    assert "num_turns: 1 on process 0, 2 on process 1" in answers["num_turns"]
    for name, answer in answers.items():
        assert answer.startswith("The processes of this run differ: ") and f"{name}: " in answer and "\n" not in answer
    assert len(answers) == 4
