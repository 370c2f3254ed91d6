"""The update is computed without dropout, like the sampling, unless dropout is enabled."""

import copy

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model

from trl_multiagent import AgentTeam

from by_hand import CHECKPOINTING, distance, one_update, reference_gradients
from tiny import byte_tokenizer, tiny_llama


TOKENS = {"vocab_size": 258, "eos_token_id": 256, "pad_token_id": 257, "bos_token_id": None}
SIZE = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}


def noisy_models():
    """Models whose forward is random in training mode, each for another reason."""
    torch.manual_seed(0)
    # Modules
    gpt2 = transformers.GPT2Config(n_positions=256, initializer_range=0.3, **SIZE, **TOKENS)
    # Functions in the checkpointed layer itself, and layers that are skipped
    noise = {"dropout": 0.3, "layerdrop": 0.5, "init_std": 0.3}
    opt = transformers.OPTConfig(ffn_dim=64, word_embed_proj_dim=32, **noise, **SIZE, **TOKENS)
    # A function in the layer's children
    noise = {"hidden_dropout": 0.3, "attention_dropout": 0.3}
    bloom = transformers.BloomConfig(n_layer=2, n_head=2, hidden_size=32, **noise, **TOKENS)
    # Noise in the router
    noise = {"router_jitter_noise": 0.5, "router_aux_loss_coef": 0.0, "attention_dropout": 0.2}
    experts = {"intermediate_size": 64, "num_key_value_heads": 2, "num_local_experts": 4, "initializer_range": 0.3}
    mixtral = transformers.MixtralConfig(**noise, **experts, **SIZE, **TOKENS)
    return {
        "gpt2": transformers.GPT2LMHeadModel(gpt2),
        "llama": tiny_llama(attention_dropout=0.4),  # a function in the attention, with a rate from the configuration
        "opt": transformers.OPTForCausalLM(opt),
        "bloom": transformers.BloomForCausalLM(bloom),
        "mixtral": transformers.MixtralForCausalLM(mixtral),
    }


def noisy_team(form):
    models = noisy_models()
    if form == "lora":
        config = LoraConfig(r=4, lora_dropout=0.5, target_modules="all-linear", init_lora_weights=False)
        models = {
            f"{role}_agent": get_peft_model(models[role], copy.deepcopy(config), adapter_name=f"{role}_agent").train()
            for role in ("gpt2", "llama")
        }
    return AgentTeam(models, {role: byte_tokenizer() for role in models})


def test_the_models_are_random_in_training_mode():
    team = noisy_team("full")
    team.uses_dropout = True
    for training in (True, False):
        team.train(training)
        for agent in team.agents.values():
            outputs = [agent(torch.arange(65, 90).unsqueeze(0)).logits for _ in range(6)]
            assert all(torch.equal(outputs[0], other) for other in outputs) != training


@pytest.mark.parametrize("form", ["full", "lora"])
@pytest.mark.parametrize("activations", CHECKPOINTING)
def test_gradient_by_hand(tmp_path, form, activations):
    team = noisy_team(form)
    settings = {"num_turns": 2, "num_generations": 2, "per_device_train_batch_size": 5, **CHECKPOINTING[activations]}
    gradients, trainer, before = one_update(tmp_path, team, beta=0.1, **settings)
    # The penalty is zero at the first step if the reference has no dropout either
    assert distance(gradients, reference_gradients(trainer._turns, before)) < 1e-4
    assert all(abs(trainer.state.log_history[0][f"agents/{role}/kl"]) < 1e-6 for role in team.roles)


@pytest.mark.parametrize("gradient_checkpointing", [False, True])
def test_dropout_can_be_enabled(tmp_path, gradient_checkpointing):
    team = AgentTeam({"solo": tiny_llama(attention_dropout=0.4)}, {"solo": byte_tokenizer()})
    settings = {"disable_dropout": False, "gradient_checkpointing": gradient_checkpointing}
    gradients, trainer, before = one_update(tmp_path, team, **settings)
    assert distance(gradients, reference_gradients(trainer._turns, before)) > 0.1
