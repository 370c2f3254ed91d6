"""Processes with different trees do not block each other, and when one fails, all end with its error."""

import importlib.util
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from accelerate.utils import DistributedType

from trl_multiagent.trainers.base.team_trainer import check_distribution

from tiny import byte_tokenizer, tiny_llama, tiny_trainer


SCRIPT = Path(__file__).resolve().parents[1] / "helpers" / "together.py"


def play(forked, tmp_path_factory, config, model, end):
    """Error output, and what each of the two processes saw."""
    folder = tmp_path_factory.mktemp(config)
    done = forked.launch(config, SCRIPT, folder, model, end)
    files = [folder / "0.pt", folder / "1.pt"]
    assert all(file.is_file() for file in files), done.stderr[-6000:]
    assert done.codes == [1]
    return done.stderr, [torch.load(file, weights_only=False) for file in files]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Folder of a model of one layer: the time that ZeRO-3 takes is proportional to the number of modules."""
    folder = tmp_path_factory.mktemp("model")
    tiny_llama(num_hidden_layers=1).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def ddp(forked, tmp_path_factory, model):
    return play(forked, tmp_path_factory, "ddp", model, "killed")


@pytest.fixture(scope="module")
def zero3(forked, tmp_path_factory, model):
    if importlib.util.find_spec("deepspeed") is None:
        pytest.skip("deepspeed is not installed")
    return play(forked, tmp_path_factory, "zero3", model, "exit")


@pytest.mark.parametrize("run", ["ends", "learns nothing"])
def test_processes_with_different_trees(ddp, zero3, run):
    (plain, other), (sharded, _) = ddp[1], zero3[1]
    assert plain[run]["distribution"] == ("MULTI_CPU", 2) and sharded[run]["distribution"] == ("DEEPSPEED", 2)
    assert (plain[run]["episodes"], other[run]["episodes"]) == (3, 0)
    assert plain[run]["weights"].keys() == sharded[run]["weights"].keys()
    for name, x in plain[run]["weights"].items():
        assert torch.allclose(x, sharded[run]["weights"][name], rtol=1e-4, atol=1e-5), name
    first, evaluation, *_ = plain[run]["log"]
    assert 0 < first["reward"] and 0 < evaluation["eval_reward"]
    for left, right in zip(plain[run]["log"], sharded[run]["log"], strict=True):
        names = [name for name in left if name.startswith(("reward", "turn_", "eval_reward", "env_step", "loss"))]
        assert {name: left[name] for name in names} == pytest.approx(
            {name: right[name] for name in names}, rel=1e-3, abs=1e-5
        )
    if run == "ends":
        assert first["turn_1/early_terminated"] == 0.5 and first["turn_3/reward_mean"] < 500
        assert first["env_step"] == 2 * 2 + 2 * (2 + 4 + 8)
    else:  # against a reference that was copied from a team loaded in parts
        assert abs(sharded[run]["log"][0]["agents/aux/kl"]) < 1e-6 < sharded[run]["log"][2]["agents/aux/kl"]


FAILURES = {
    "transition": "TaskError: The transition `broken_transition` raised LookupError: no third turn",
    "generation": "OutOfMemoryError: no room for 7 tokens",
    "nan loss": "FloatingPointError: The loss of agent 'aux' is nan at step 0. Items and completions are in ",
    "evaluation": "TaskError: The reward function `broken_reward` raised ValueError: the judge is ill",
    "metrics": "TaskError: `BadMetrics.metrics` returned the metric 'calls'",
}


@pytest.mark.parametrize(
    ("engine", "failure"),
    [*(("ddp", failure) for failure in FAILURES), *(("zero3", failure) for failure in list(FAILURES)[:3])],
)
def test_all_processes_end_with_the_error_of_one(engine, failure, request):
    first, second = request.getfixturevalue(engine)[1]
    assert second[failure].startswith(FAILURES[failure])
    assert first[failure].startswith("OtherProcessError: Process 1 on ")
    assert f" failed: {FAILURES[failure]}" in first[failure]


def test_each_process_raises_its_own_error_if_all_fail(ddp):
    first, second = ddp[1]
    for rank, seen in enumerate((first, second)):
        error = "TaskError: The reward function `broken_everywhere` raised KeyError"
        assert seen["everywhere"] == f"{error}: 'column of {rank}'"


def test_an_exit_from_a_reward_ends_the_run_as_an_error(zero3):
    assert "OtherProcessError: Process 1 on " in zero3[0]
    assert "failed: TaskError: The reward function `exiting_reward` called sys.exit(0)." in zero3[0]


def test_a_process_that_is_killed_ends_the_run(ddp):
    assert "exitcode  : -9" in ddp[0] and "Signal 9 (SIGKILL)" in ddp[0]


def test_settings_that_would_block_two_processes_are_refused(ddp, zero3):
    for seen in ddp[1]:
        assert "`even_batches: false`" in seen["even batches"]
        assert "`split_batches: true`" in seen["split batches"]
    for seen in zero3[1]:
        assert "`ds3_gather_for_generation=False`" in seen["gather"]


def test_fsdp_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(ValueError, match=r"FSDP cannot train a team: .*zero3\.yaml"):
        tiny_trainer(tmp_path)


def test_a_silent_replacement_of_deepspeed_is_refused(monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    accelerator = SimpleNamespace(distributed_type=DistributedType.MULTI_CPU, num_processes=2)
    with pytest.raises(ValueError, match="DeepSpeed was requested, but accelerate runs MULTI_CPU"):
        check_distribution(accelerator)


@pytest.mark.parametrize("saves", [False, True])
def test_zero3_must_gather_the_weights_to_save_them(saves):
    zero = {"stage": 3, "stage3_gather_16bit_weights_on_model_save": saves}
    plugin = SimpleNamespace(zero_stage=3, deepspeed_config={"zero_optimization": zero})
    state = SimpleNamespace(deepspeed_plugin=plugin)
    accelerator = SimpleNamespace(distributed_type=DistributedType.DEEPSPEED, num_processes=1, state=state)
    if saves:
        check_distribution(accelerator)
    else:
        with pytest.raises(ValueError, match="a saved team would have no weights"):
            check_distribution(accelerator)
