"""LoRA agents on a base in 4 or 8 bits."""

import copy

import pytest
import torch
from peft import LoraConfig
from transformers import BitsAndBytesConfig

from trl_multiagent import AgentTeam

from by_hand import distance, one_update, reference_gradients
from tiny import byte_tokenizer, tiny_environment, tiny_llama, tiny_trainer


pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
QUANTIZATIONS = {
    "4 bits": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": "float32"},
    "8 bits": {"load_in_8bit": True},
}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("base")
    tiny_llama(hidden_size=64, intermediate_size=128).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("bits", QUANTIZATIONS)
@pytest.mark.parametrize("gradient_checkpointing", [False, True])
def test_the_adapters_learn_and_the_base_stays(base, tmp_path, bits, gradient_checkpointing):
    quantization = {"quantization_config": BitsAndBytesConfig(**QUANTIZATIONS[bits])}
    config = LoraConfig(r=4, target_modules="all-linear")
    team = AgentTeam.from_pretrained(base, ["aux", "main"], peft_config=config, **quantization)
    assert any("bit" in type(module).__name__ for module in team.modules())
    before = {name: copy.deepcopy(x) for name, x in team.named_parameters()}
    trainer = tiny_trainer(tmp_path, team, max_steps=2, beta=0.1, gradient_checkpointing=gradient_checkpointing)
    trainer.train()
    for role in team.roles:
        assert any(not torch.equal(x, before[n]) for n, x in team.named_parameters() if f".{role}." in n)
    assert all(torch.equal(x, before[n]) for n, x in team.named_parameters() if "lora_" not in n)

    trainer.save_model(str(tmp_path))
    loaded = AgentTeam.from_pretrained(str(tmp_path), **quantization)
    ids = torch.tensor([[65, 66, 67]])
    for role in team.roles:
        with team.activate(role) as agent, loaded.activate(role) as other, torch.no_grad():
            assert torch.equal(agent.eval()(ids).logits, other.eval()(ids).logits)


@pytest.mark.parametrize("bits", QUANTIZATIONS)
def test_quantized_weights_without_adapters_are_refused(base, tmp_path, bits):
    """Only norms and embeddings would be trained."""
    quantization = {"quantization_config": BitsAndBytesConfig(**QUANTIZATIONS[bits])}
    team = AgentTeam.from_pretrained(base, ["aux", "main"], **quantization)
    with pytest.raises(ValueError, match=r"weights of agent 'aux' are quantized, .* load it with a `peft_config`"):
        tiny_trainer(tmp_path, team)
    tiny_trainer(
        tmp_path,
        AgentTeam({"aux": tiny_llama(), "main": team.agents["main"]}, team.tokenizers),
        frozen_agents=["main"],
    )


@pytest.mark.parametrize("copied", [None, ["norm"]])  # agents that compute together, and apart
@pytest.mark.parametrize("bits", QUANTIZATIONS)
def test_gradients_pass_through_a_base_that_was_evaluated(base, tmp_path, bits, copied):
    quantization = {"quantization_config": BitsAndBytesConfig(**QUANTIZATIONS[bits])}
    config = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False, modules_to_save=copied)
    team = AgentTeam.from_pretrained(base, ["aux", "main"], peft_config=config, **quantization)
    team.collaborate({"x": 1}, tiny_environment(), max_new_tokens=4)
    gradients, trainer, before = one_update(tmp_path, team)
    assert distance(gradients, reference_gradients(trainer._turns, before)) < 1e-5
