"""Trained weights are float32, whatever is computed in; or bfloat16 with an optimizer that rounds stochastically."""

import pytest
import torch
from distributed_forms import Deterministic
from pairs import pair_config, pair_trainer, pairs
from transformers import LlamaConfig, LlamaForSequenceClassification

from trl_multiagent import IACConfig, IACTrainer, JointRewardConfig, JointRewardTrainer, MAGRPOTrainer

from tiny import byte_tokenizer, team_of, tiny_llama, tiny_team, tiny_trainer


class FixedMAGRPO(Deterministic, MAGRPOTrainer):
    """MAGRPO on completions that depend on nothing but the prompt."""


class FixedIAC(Deterministic, IACTrainer):
    """IAC on such completions."""


SETTINGS = {"learning_rate": 5e-6, "max_steps": 10, "weight_decay": 0.0}


def lora_team(base_dtype):
    """A LoRA team whose base has the same values in both data types."""
    team = team_of("lora")
    for parameter in team.parameters():
        if not parameter.requires_grad:
            parameter.data = parameter.data.bfloat16().to(base_dtype)
    return team


def reward_model(dtype=torch.float32):
    torch.manual_seed(0)
    return LlamaForSequenceClassification(LlamaConfig(**tiny_llama().config.to_dict() | {"num_labels": 1})).to(dtype)


def make_trainer(folder, kind, bf16):
    base_dtype = torch.bfloat16 if bf16 else torch.float32
    if kind == "full":
        return tiny_trainer(folder, tiny_team(), trainer=FixedMAGRPO, bf16=bf16, **SETTINGS)
    if kind == "lora":
        return tiny_trainer(folder, lora_team(base_dtype), trainer=FixedMAGRPO, bf16=bf16, **SETTINGS)
    if kind.startswith("critics"):
        settings = SETTINGS | {"critic_learning_rate": 5e-6, "num_generations": 4, "bf16": bf16}
        team = tiny_team()
        if kind == "critics of a lora team":
            team = lora_team(base_dtype)
            tiny_llama(2).bfloat16().save_pretrained(folder / "critic")
            byte_tokenizer().save_pretrained(folder / "critic")
            settings["critic_models"] = str(folder / "critic")
        elif kind == "critics that are adapters":
            team, settings["critic_form"] = lora_team(base_dtype), "adapter"
        return tiny_trainer(folder, team, trainer=FixedIAC, config=IACConfig, **settings)
    if kind == "preferences":
        return pair_trainer(folder, bf16=bf16, **SETTINGS)
    args = pair_config(folder, JointRewardConfig, bf16=bf16, **SETTINGS)
    return JointRewardTrainer(reward_model(), args, pairs(), processing_class=byte_tokenizer())


def update(folder, kind, bf16):
    trainer = make_trainer(folder, kind, bf16)
    trained = {name: x for name, x in trainer.model.named_parameters() if x.requires_grad}
    before = {name: x.detach().clone() for name, x in trained.items()}
    trainer.train()
    return torch.cat([(trained[name].detach() - x).double().flatten() for name, x in before.items()])


@pytest.mark.parametrize(
    "kind", ["full", "lora", "critics", "critics of a lora team", "critics that are adapters", "preferences", "reward model"]
)
def test_the_update_of_bf16_is_that_of_float32(tmp_path, kind):
    expected, found = update(tmp_path / "float32", kind, False), update(tmp_path / "bf16", kind, True)
    cosine = torch.cosine_similarity(expected, found, dim=0)
    print(kind, cosine, found.norm()/expected.norm(), (found != 0).double().mean(), (expected!=0).double().mean())
