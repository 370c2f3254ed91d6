"""Trained weights are float32, whatever is computed in; or bfloat16 with an optimizer that rounds stochastically."""

import contextlib

import pytest
import torch
from distributed_forms import Deterministic
from pairs import pair_config, pair_trainer, pairs
from peft import LoraConfig
from transformers import LlamaConfig, LlamaForSequenceClassification

from trl_multiagent import AgentTeam, IACConfig, IACTrainer, JointRewardConfig, JointRewardTrainer, MAGRPOTrainer
from trl_multiagent.environments.reward_models import JointRewardModel

from tiny import byte_tokenizer, team_of, tiny_llama, tiny_team, tiny_trainer


class FixedMAGRPO(Deterministic, MAGRPOTrainer):
    """MAGRPO on completions that depend on nothing but the prompt."""


class FixedIAC(Deterministic, IACTrainer):
    """IAC on such completions."""


SETTINGS = {"learning_rate": 5e-6, "max_steps": 2, "weight_decay": 0.0}


def lora_team(base_dtype):
    """A LoRA team whose base has the same values in both data types."""
    team = team_of("lora")
    for parameter in team.parameters():
        if not parameter.requires_grad:
            parameter.data = parameter.data.bfloat16().to(base_dtype)
    return team


def reward_model(dtype):
    torch.manual_seed(0)
    model = LlamaForSequenceClassification(LlamaConfig(**tiny_llama().config.to_dict() | {"num_labels": 1}))
    return model.bfloat16().to(dtype)  # the same values in both data types


def reward_trainer(folder, dtype=torch.float32, peft_config=None, callbacks=None, **settings):
    args = pair_config(folder, JointRewardConfig, **settings)
    own = {"processing_class": byte_tokenizer(), "peft_config": peft_config, "callbacks": callbacks}
    return JointRewardTrainer(reward_model(dtype), args, pairs(), **own)


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
    if kind == "reward model":
        return reward_trainer(folder, bf16=bf16, **SETTINGS)
    peft_config = LoraConfig(r=4, target_modules="all-linear", task_type="SEQ_CLS")  # the head is trained in full
    return reward_trainer(folder, base_dtype, peft_config, bf16=bf16, **SETTINGS)


def update(folder, kind, bf16):
    """What a training adds to the agents or to the reward model, and to the critics."""
    trainer = make_trainer(folder, kind, bf16)
    trained = {name: x for name, x in trainer.model.named_parameters() if x.requires_grad}
    assert {x.dtype for x in trained.values()} == {torch.float32}
    before = {name: x.detach().clone() for name, x in trained.items()}
    torch.manual_seed(0)  # the adapter of a reward model has dropout
    trainer.train()
    parts = [[], []]
    for name, x in trained.items():
        parts["critic" in name].append((x.detach() - before[name]).double().flatten())
    return [torch.cat(part) for part in parts if part]


KINDS = ["full", "lora", "critics", "critics of a lora team", "critics that are adapters"]
KINDS += ["preferences", "reward model", "reward model, lora"]


@pytest.mark.parametrize("kind", KINDS)
def test_the_update_of_bf16_is_that_of_float32(tmp_path, kind):
    """Plain AdamW on weights in bfloat16 changes 7.5 % of them at this rate."""
    expected, found = update(tmp_path / "float32", kind, False), update(tmp_path / "bf16", kind, True)
    assert len(expected) == 1 + kind.startswith("critics")
    for x, y in zip(expected, found, strict=True):
        assert torch.cosine_similarity(x, y, dim=0) > 0.97
        assert y.norm() / x.norm() == pytest.approx(1.0, abs=0.03)
        assert (y != 0).double().mean() == pytest.approx((x != 0).double().mean().item(), abs=0.01)


def test_before_its_first_step_the_policy_is_the_one_that_sampled(tmp_path):
    """The probability ratio is 1, because both log-probabilities are computed in bfloat16."""
    ratios = []

    class Ratios(MAGRPOTrainer):
        def agent_loss(self, role, outputs, rows):
            old, mask = rows.old_logps, rows.completion_mask.bool()
            ratios.append((outputs.log_probs[:, -old.size(1) :] - old)[mask].exp())
            return super().agent_loss(role, outputs, rows)

    trainer = tiny_trainer(tmp_path, trainer=Ratios, bf16=True, num_iterations=2, max_steps=2, learning_rate=1e-3)
    trainer.train()
    first, second = ratios[:2], ratios[2:]
    assert all(torch.equal(x, torch.ones_like(x)) for x in first) and not all((x == 1).all() for x in second)


def test_a_reward_model_keeps_the_small_updates_of_its_adapter(tmp_path):
    config = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj"], task_type="SEQ_CLS")
    trainer = reward_trainer(tmp_path, torch.bfloat16, config, bf16=True, **SETTINGS)
    trainer.train()
    trainer.save_model()
    layer = trainer.model.base_model.model.model.layers[0].self_attn.q_proj
    update = 2 * layer.lora_B["default"].weight @ layer.lora_A["default"].weight
    saved = JointRewardModel(str(tmp_path)).model.model.layers[0].self_attn.q_proj.weight
    change = saved.detach() - layer.base_layer.weight.float()
    assert torch.cosine_similarity(change.flatten(), update.flatten(), dim=0) > 0.99 and update.norm() > 0


# Weights in bfloat16


def test_bfloat16_weights_are_refused(tmp_path):
    trainers = [
        lambda: tiny_trainer(tmp_path, tiny_team().bfloat16()),
        lambda: pair_trainer(tmp_path, team_of("lora").bfloat16()),
        lambda: reward_trainer(tmp_path, torch.bfloat16),
    ]
    for make in trainers:
        with pytest.raises(ValueError, match=r"weight '.*' is bfloat16.*`dtype='float32'`.*bf16_stochastic_round"):
            make()


def test_weights_that_are_not_trained_may_be_bfloat16(tmp_path):
    team = tiny_team()
    team.agents["aux"].bfloat16()
    tiny_trainer(tmp_path, team, frozen_agents=["aux"], bf16=True).train()
    assert {x.dtype for x in team.agents["aux"].parameters()} == {torch.bfloat16}


def test_data_types_of_a_team_that_is_loaded(tmp_path):
    tiny_llama().bfloat16().save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    team = AgentTeam.from_pretrained(tmp_path, ["aux", "main"], base_dtype="bfloat16")
    assert {x.dtype for x in team.parameters()} == {torch.float32}  # it has no base
    config = LoraConfig(r=2, target_modules="all-linear", modules_to_save=["norm"])
    team = AgentTeam.from_pretrained(tmp_path, ["aux", "main"], config, base_dtype="bfloat16")
    team.keep_reference()
    for name, x in team.named_parameters():
        is_adapter = "lora_" in name or "modules_to_save" in name
        assert x.dtype == (torch.float32 if is_adapter else torch.bfloat16), name


ROUNDING = {"optim": "adamw_torch_8bit", "optim_args": "bf16_stochastic_round=True"}


@contextlib.contextmanager
def without_compiler():
    """Inside, torchao runs its kernels without compiling them, which takes minutes."""
    pytest.importorskip("torchao")
    torch.compiler.set_stance("force_eager")
    try:
        yield
    finally:
        torch.compiler.set_stance("default")


@pytest.mark.parametrize("beta2", [0.99, 0.999])
@pytest.mark.parametrize("shape", [(64, 128), (32, 32)])  # the moments have 8 bits, or are bfloat16
def test_stochastic_rounding_has_no_bias(tmp_path, shape, beta2):
    """After many steps that are mostly smaller than half a bit of bfloat16, the mean movement is that of float32."""

    def movement(dtype, **settings):
        generator = torch.Generator().manual_seed(0)
        start = (0.02 * torch.randn(shape, generator=generator)).bfloat16()
        direction = torch.randn(shape, generator=generator)
        weight = torch.nn.Parameter(start.to(dtype, copy=True))
        args = pair_config(tmp_path, JointRewardConfig, learning_rate=1e-6, adam_beta2=beta2, **settings)
        optimizer_class, arguments = JointRewardTrainer.get_optimizer_cls_and_kwargs(args)
        optimizer = optimizer_class([weight], **arguments)
        torch.manual_seed(0)
        for _ in range(200):
            weight.grad = (1e-3 * (direction + torch.randn(shape, generator=generator))).to(dtype)
            optimizer.step()
        return (weight.detach().float() - start.float()) * -direction.sign()

    with without_compiler():
        expected, found = movement(torch.float32).mean(), movement(torch.bfloat16, **ROUNDING).mean()
        lost = movement(torch.bfloat16).mean()
    assert found / expected == pytest.approx(1.0, abs=0.04)
    assert lost / expected < 0.1  # plain AdamW


def test_training_of_bfloat16_weights(tmp_path):
    """
    With a learning rate per agent, over a checkpoint, and with critics, which have the data type of their agents.
    """
    settings = {**ROUNDING, "bf16": True, "learning_rate": 1e-3, "agent_learning_rates": {"aux": 1e-2}, "max_steps": 2}
    settings |= {"trainer": IACTrainer, "config": IACConfig, "save_strategy": "steps", "save_steps": 1}
    with without_compiler():
        trainer = tiny_trainer(tmp_path, tiny_team().bfloat16(), **settings)
        trainer.train()
        again = tiny_trainer(tmp_path, tiny_team().bfloat16(), **settings)
        again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    rates = {round(float(group["lr"]), 6) for group in again.optimizer.param_groups}
    assert rates == {1e-2, 1e-3}
    for (name, x), y in zip(trainer.model.named_parameters(), again.model.parameters(), strict=True):
        assert x.dtype == (torch.float32 if "heads" in name else torch.bfloat16)
        assert torch.equal(x, y), name


def test_where_nothing_can_be_rounded(tmp_path, monkeypatch):
    with without_compiler():
        with pytest.raises(ValueError, match="weights in bfloat16, but they are float32"):
            tiny_trainer(tmp_path, team_of("lora"), **ROUNDING)
        monkeypatch.setattr(JointRewardConfig, "world_size", 2)
        with pytest.raises(ValueError, match=r"several processes would round.*DeepSpeed ZeRO"):
            pair_config(tmp_path, JointRewardConfig, **ROUNDING)
