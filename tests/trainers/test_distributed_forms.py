"""Two updates change every form of team in the same way, however the work and the weights are distributed."""

import functools
import importlib.util
import json
from pathlib import Path

import distributed_forms
import pytest
import torch
from distributed_forms import BFLOAT16, PREFERENCES, REWARD_MODEL
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForSequenceClassification

from trl_multiagent import AgentTeam

from tiny import FORMS, byte_tokenizer, team_of, tiny_experts, tiny_llama


SCRIPT = Path(__file__).parents[1] / "helpers" / "distributed_forms.py"
CASES = [*distributed_forms.CASES, *PREFERENCES, REWARD_MODEL]
FORM_OF_CASE = {case: form for case, (form, _) in [*distributed_forms.CASES.items(), *PREFERENCES.items()]}
OFFLOAD = "ZeRO-3 with offload"
LAUNCHES = {
    "DDP": None,
    "ZeRO-1": {"stage": 1},
    "ZeRO-2": {"stage": 2},
    "ZeRO-3": {"stage": 3, "stage3_param_persistence_threshold": 0},  # or small weights would stay whole
    OFFLOAD: {"stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}},
}

# Offloading moves the shards of ZeRO-3 and nothing else, so what runs with it need not run without
OFFLOADED = ["full", "lora and whole modules", "fresh adapters", "experts", "adapters as critics"]
# ZeRO-2 does what ZeRO-1 does, and shards gradients besides. No code of this package distinguishes the two
PARTITIONED = ["full", "shared", "lora", "frozen partner", "experts", "critics", "adapters as critics", "workflow"]
PARTITIONED += ["preferences", REWARD_MODEL]
# Under ZeRO-3, "lora" recomputes activations, too, and "workflow" and "value heads" shard what the last two do
SHARDED_BY_OTHERS = ["workflow in episodes", "workflow with critics"]
SHARDED_BY_OTHERS += ["central critic"]  # "critics" and "workflow" do what it does
CASES_OF = {
    "DDP": [case for case in CASES if case != "value heads"],  # which the workflow with critics has
    "ZeRO-1": ["lora"],
    "ZeRO-2": [*PARTITIONED, "workflow in episodes"],  # ranks whose episodes differ in length
    # The preferences have a frozen adapter
    "ZeRO-3": [case for case in CASES if case == "full" or case not in [*OFFLOADED, *SHARDED_BY_OTHERS]],
    OFFLOAD: OFFLOADED,
}


@pytest.fixture(scope="module")
def teams(tmp_path_factory):
    folder = tmp_path_factory.mktemp("teams")
    for form in FORMS:
        layers = (
            2 if form == "heterogeneous" else 1
        )  # the time that ZeRO-3 takes is proportional to the number of modules
        team = team_of(form, num_hidden_layers=layers)
        for k, model in enumerate(team.models.values()):
            base = folder / f"{layers} layers, base {k}"
            tiny_llama(k, num_hidden_layers=layers).save_pretrained(base)
            for config in getattr(model, "peft_config", {}).values():
                config.base_model_name_or_path = str(base)
        team.save_pretrained(folder / form)
    experts = {"aux": tiny_llama(), "main": tiny_experts("qwen3_moe")}
    AgentTeam(experts, {role: byte_tokenizer() for role in experts}).save_pretrained(folder / "experts")
    torch.manual_seed(0)
    reward_model = LlamaForSequenceClassification(LlamaConfig(**tiny_llama().config.to_dict() | {"num_labels": 1}))
    reward_model.save_pretrained(folder / "reward_model")
    return folder


@pytest.fixture(scope="module")
def single(forked, teams, tmp_path_factory):
    output = tmp_path_factory.mktemp("single")
    finished = forked.run(SCRIPT, teams, output, 4)
    assert finished.codes == [0], finished.stderr[-6000:]
    return output


@pytest.fixture(scope="module")
def distributed(forked, teams, tmp_path_factory):
    """Runs the cases of a launch, once, and returns its output folder and what it says of itself."""

    @functools.cache
    def run(name):
        cases = CASES_OF[name] + ([*BFLOAT16] if name in ("DDP", "ZeRO-2", "ZeRO-3") else [])
        return launch(name, cases, forked, teams, tmp_path_factory.mktemp("distributed"))

    return run


def launch(name, cases, forked, teams, output):
    zero = LAUNCHES[name]
    config = None
    if zero is not None:
        if importlib.util.find_spec("deepspeed") is None:
            pytest.skip("deepspeed is not installed")
        automatic = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping")
        settings = dict.fromkeys(automatic, "auto")
        settings |= {"zero_optimization": zero | {"stage3_gather_16bit_weights_on_model_save": True}}
        settings |= {"zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False}
        config = output / "deepspeed.json"
        config.write_text(json.dumps(settings))
    finished = forked.run(SCRIPT, teams, output, 2, *cases, processes=2, zero=config)
    assert finished.codes == [0, 0], finished.stderr[-6000:]
    return output, json.loads((output / "report.json").read_text())


def weights(folder):
    files = sorted(file for part in ("agents", "critics") for file in (folder / part).glob("*/*.safetensors"))
    assert files
    return {f"{file.relative_to(folder).parent}/{name}": x for file in files for name, x in load_file(file).items()}


@pytest.mark.parametrize(("name", "case"), [(name, case) for name, cases in CASES_OF.items() for case in cases])
def test_the_update_is_that_of_one_process(name, case, single, distributed):
    output, report = distributed(name)
    expected, found = weights(single / case), weights(output / case)
    assert expected.keys() == found.keys()
    for key, x in expected.items():
        # Two steps of SGD amplify rounding
        limit = 1e-4 if case.startswith("preferences") else 3e-4
        assert (found[key] - x).norm() <= limit * x.norm(), key

    results = json.loads((single / "report.json").read_text())[case].get("results")
    assert results is None or report[case]["results"] == pytest.approx(results, rel=1e-3, abs=1e-6)
    zero = LAUNCHES[name]
    assert report[case]["processes"] == 2
    assert report[case]["distributed_type"] == ("MULTI_CPU" if zero is None else "DEEPSPEED")
    assert report[case]["zero_stage"] == (zero["stage"] if zero else None)
    assert report[case]["offload"] == bool(zero and "offload_optimizer" in zero)
    if case == "workflow":
        assert report[case]["acting"] == [["aux", "main"], ["aux"]]  # nobody is main on the second process
    elif not case.startswith(("preferences", "workflow")):
        assert all(0 < share < 1 for share in report[case]["early_terminated"])  # ranks with different trees


@pytest.mark.parametrize("case", distributed_forms.SAMPLED)
def test_zero_3_gathers_the_weights_of_the_agents_that_sample(case, single, distributed):
    expected = json.loads((single / "report.json").read_text())[case]
    found = distributed("ZeRO-3")[1][case]
    assert found["answers"] == expected["answers"]
    roles = ["aux", "main"]
    assert found["held"] == {role: roles if case in ("shared", "lora") else [role] for role in roles}
    if case in ("full", "shared"):
        assert (expected["whole_references"], found["whole_references"]) == (roles, [])


@pytest.mark.parametrize("case", BFLOAT16)
@pytest.mark.parametrize("name", ["DDP", "ZeRO-2", "ZeRO-3"])
def test_the_update_in_bfloat16_is_that_of_one_process(name, case, single, distributed):
    """DeepSpeed computes with weights in bfloat16, and adds the update to float32 ones, as DDP does."""
    output, _ = distributed(name)
    expected, found = (torch.load(folder / case / "update.pt") for folder in (single, output))
    assert expected.keys() == found.keys()
    expected, found = (torch.cat([x[key].flatten() for key in expected]) for x in (expected, found))
    assert torch.cosine_similarity(expected, found, dim=0) > 0.99
    assert found.norm() / expected.norm() == pytest.approx(1.0, abs=0.01)
    assert (found != 0).float().mean() > 0.99


OTHERS = ("fresh adapters", "critic", "heads", "model")


@pytest.mark.parametrize("case", [case for case in CASES if not any(word in case for word in OTHERS)])
def test_one_process_trains_what_is_to_be_trained(case, single, teams):
    before, after = weights(teams / FORM_OF_CASE[case]), weights(single / case)
    assert before.keys() == after.keys()
    for key, x in before.items():
        frozen = "frozen" in case and key.startswith("agents/aux/")
        assert torch.equal(x, after[key]) == frozen, key
