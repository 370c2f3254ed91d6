"""The router loss of mixture-of-experts agents, compared with plain PyTorch and with TRL's trainer."""

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from trl import GRPOConfig

from trl_multiagent import AgentTeam, FunctionEnvironment

from by_hand import CHECKPOINTING, FixedGRPO, distance, one_update, reference_gradients, router_loss, trl_update
from tiny import (
    EXPERTS,
    Workflow,
    byte_tokenizer,
    count_reward,
    tiny_environment,
    tiny_experts,
    tiny_items,
    tiny_llama,
    tiny_trainer,
)


def team_of(models):
    return AgentTeam(models, {role: byte_tokenizer() for role in models})


def experts_team(**changes):
    """
    A dense agent and all architectures of experts. The dense one is first, so the first agent does not decide for all.
    """
    models = {f"{name}_agent": tiny_experts(name, **changes) for name in EXPERTS}
    return team_of({"dense": tiny_llama(), **models})


def adapters_team():
    models = {}
    for name in ("qwen3_moe", "mixtral"):
        base = tiny_experts(name)
        for k in (1, 2):
            torch.manual_seed(k)
            config = LoraConfig(r=4, lora_alpha=16, target_modules="all-linear", init_lora_weights=False)
            if k == 1:
                base = get_peft_model(base, config, adapter_name=f"{name}_1")
            else:
                base.add_adapter(f"{name}_2", config)
            models[f"{name}_{k}"] = base
    return team_of(models)


def gradients_by_hand(trainer, before, coef=0.5):
    """The gradients of the policy loss, plus those of the router losses of the agents that have one."""
    if any(node.rewards[0] != reward for nodes in trainer._turns for node in nodes for reward in node.rewards):
        reference_gradients(trainer._turns, before)
    add_router_losses(trainer, before, coef)
    trained = {name: x for name, x in before.named_parameters() if x.requires_grad}
    return {name: torch.zeros_like(x) if x.grad is None else x.grad for name, x in trained.items()}


def add_router_losses(trainer, before, coef=0.5):
    """Adds their gradients, and returns them."""
    losses = {role: router_loss(trainer._turns, before, role) for role in trainer._router_loss_coefs}
    for loss in losses.values():
        (coef * loss).backward()
    return losses


@pytest.mark.parametrize(
    ("build", "activations"),
    [(experts_team, "recomputed"), (adapters_team, "kept activations"), (adapters_team, "recomputed")],
)
def test_gradient_by_hand(tmp_path, build, activations):
    """With several turns, and micro-batches of which the last one is partly padding."""
    settings = {"items_per_device": 1, "num_turns": 2, "num_generations": 2, "per_device_train_batch_size": 4}
    gradients, trainer, before = one_update(tmp_path, build(), **settings, **CHECKPOINTING[activations])
    policy = reference_gradients(trainer._turns, before)
    assert distance(gradients, policy) > 0.01
    losses = add_router_losses(trainer, before)  # to the gradients of the policy loss
    assert distance(gradients, policy) < 1e-5
    for role, loss in losses.items():
        assert trainer.state.log_history[0][f"agents/{role}/aux_loss"] == pytest.approx(loss.item(), rel=1e-4)
    assert "agents/dense/aux_loss" not in trainer.state.log_history[0]


@pytest.mark.parametrize("size", [2, 64])
def test_rows_without_an_advantage_count(tmp_path, size):
    """Even in micro-batches that contain only padding otherwise."""
    environment = tiny_environment(("solo",), reward=lambda completions, **columns: [1.0] * len(completions))
    team = team_of({"solo": tiny_experts("qwen2_moe")})
    settings = {"items_per_device": 3, "num_turns": 2, "early_termination_threshold": 0.5}
    gradients, trainer, before = one_update(
        tmp_path, team, environment=environment, per_device_train_batch_size=size, **settings
    )
    assert [len(nodes) for nodes in trainer._turns] == [3, 0]
    assert distance(gradients, gradients_by_hand(trainer, before)) < 1e-5


@pytest.mark.parametrize("asks", [False, True])
@pytest.mark.parametrize(("given", "coef"), [(0.0, 0.0), (0.25, 0.25)])
def test_the_coefficient_can_be_set(tmp_path, given, coef, asks):
    """Even for a model whose configuration requests router logits in every forward."""
    team = team_of({"dense": tiny_llama(), "solo": tiny_experts("mixtral", output_router_logits=asks)})
    gradients, trainer, before = one_update(tmp_path, team, router_aux_loss_coef=given, beta=0.1)
    assert distance(gradients, gradients_by_hand(trainer, before, coef)) < 1e-5
    assert list(trainer._router_loss_coefs) == (["solo"] if coef else [])


@pytest.mark.parametrize("architecture", EXPERTS)
def test_one_agent_equals_trl(tmp_path, architecture):
    environment = FunctionEnvironment({"solo": "{prompt}"}, count_reward)
    dataset = tiny_items(2).add_column("prompt", ["First task:", "The second task:"])
    team = team_of({"solo": tiny_experts(architecture)})
    gradients, trainer, before = one_update(tmp_path, team, environment=environment, train_dataset=dataset)
    settings = {"loss_type": "luspo", "scale_rewards": "none"}
    expected, log = trl_update(tmp_path, FixedGRPO, GRPOConfig, trainer, before, dataset, **settings)
    assert distance({name.removeprefix("models.solo."): g for name, g in gradients.items()}, expected) < 1e-5
    assert trainer.state.log_history[0]["agents/solo/aux_loss"] == pytest.approx(log["aux_loss"], rel=1e-4)


MIXED = {"a": tiny_llama, "b": lambda: tiny_experts("mixtral")}


@pytest.mark.parametrize(
    ("models", "settings", "message"),
    [
        ({"a": tiny_llama}, {"router_aux_loss_coef": 0.1}, "no trained agent is a mixture of experts"),
        (MIXED, {"router_aux_loss_coef": 0.1, "frozen_agents": ["b"]}, "no trained agent is a mixture of experts"),
        (MIXED, CHECKPOINTING["recomputed, reentrant"], "of b has no gradient through reentrant checkpointing"),
    ],
)
def test_refusals(tmp_path, models, settings, message):
    with pytest.raises(ValueError, match=message):
        one_update(tmp_path, team_of({role: build() for role, build in models.items()}), **settings)


def test_an_agent_that_does_not_act_in_a_batch_does_not_learn(tmp_path):
    team = team_of({role: tiny_experts("qwen3_moe") for role in ("aux", "main")})
    before = {name: x.clone() for name, x in team.named_parameters()}
    items = Dataset.from_dict({"x": ["1234", "4321"]})  # for which main never acts
    trainer = tiny_trainer(tmp_path, team, Workflow(), num_turns=3, num_generations=2, train_dataset=items)
    trainer.train()
    changed = {name.split(".")[1] for name, x in team.named_parameters() if not torch.equal(x, before[name])}
    assert changed == {"aux"}
    log = trainer.state.log_history[0]
    assert log["agents/main/aux_loss"] == 0.0 < log["agents/aux/aux_loss"]
