"""Iterative MADPO and MARLHF in two processes: what does not depend on chance is that of one process."""

import json
from pathlib import Path

import pytest
import torch
from datasets import load_from_disk
from safetensors.torch import load_file


SCRIPT = Path(__file__).parents[1] / "helpers" / "preference_runs.py"
ROUNDS = ["--num_iterations", "2", "--preference_replay_sample_size", "16"]  # whole batches
ENGINES = {
    "ddp": None,
    "zero3": {"stage": 3, "stage3_gather_16bit_weights_on_model_save": True},
}
COMMON = {"zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False}
COMMON |= dict.fromkeys(("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping"), "auto")


@pytest.fixture(scope="module")
def single(forked, tiny_model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("single")
    for algorithm in ("madpo_iter", "marlhf_iter"):
        finished = forked.run(SCRIPT, folder / algorithm, tiny_model, 4, algorithm, *ROUNDS)
        assert finished.codes == [0], finished.stderr[-4000:]
    return folder


@pytest.mark.parametrize(
    ("algorithm", "engine"),
    [("madpo_iter", "ddp"), ("marlhf_iter", "zero3")],
)
def test_two_processes(algorithm, engine, single, forked, tiny_model, tmp_path):
    config = None
    if ENGINES[engine] is not None:
        pytest.importorskip("deepspeed")
        config = tmp_path / "zero.json"
        config.write_text(json.dumps({**COMMON, "zero_optimization": ENGINES[engine]}))
    finished = forked.run(SCRIPT, tmp_path / "run", tiny_model, 2, algorithm, *ROUNDS, processes=2, zero=config)
    assert finished.codes == [0, 0], finished.stderr[-4000:]
    one, two = single / algorithm / "_rounds", tmp_path / "run" / "_rounds"
    results = [json.loads((folder / "round_1" / "results.json").read_text()) for folder in (one, two)]
    assert (tmp_path / "run" / "team.json").is_file()
    first = [load_from_disk(folder / "round_0" / "preferences") for folder in (one, two)]
    assert first[0].to_list() == first[1].to_list()
    if algorithm == "madpo_iter":
        assert results[0]["iter"] == results[1]["iter"] and results[0]["env_step"] == results[1]["env_step"]
        parts = [f"teams/round_{k}/agents/{role}" for k in (1, 2) for role in ("aux", "main")]
    else:  # the team samples with other random numbers in every process
        assert results[1]["env_step"] == 2 * results[0]["env_step"] == 32  # twice the items per step
        parts = ["round_0/reward_model"]
    for part in parts:
        weights = load_file(two / part / "model.safetensors")
        for name, x in load_file(one / part / "model.safetensors").items():
            assert torch.allclose(x, weights[name], rtol=1e-4, atol=1e-5), (part, name)
