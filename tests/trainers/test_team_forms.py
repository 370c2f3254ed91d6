"""Training of teams of every form: LoRA, shared weights, frozen agents."""

import copy
import random
import shutil

import pytest
import torch
from peft import LoraConfig
from transformers import TrainerCallback

from trl_multiagent import AgentTeam

from by_hand import CHECKPOINTING, distance, one_update, reference_gradients
from tiny import team_of, tiny_trainer


# Recomputation matters where agents share layers
RECOMPUTED = [("lora", x) for x in CHECKPOINTING] + [("lora and whole modules", x) for x in CHECKPOINTING]


@pytest.mark.parametrize(
    ("form", "activations"),
    [
        *RECOMPUTED,
        *((x, "recomputed") for x in ("full", "heterogeneous", "shared", "lora on two bases", "dora", "mixed")),
    ],
)
def test_gradient_by_hand(tmp_path, form, activations):
    settings = {"num_turns": 2, "num_generations": 2, "per_device_train_batch_size": 5, **CHECKPOINTING[activations]}
    gradients, trainer, before = one_update(tmp_path, team_of(form), **settings)
    expected = reference_gradients(trainer._turns, before)
    assert distance(gradients, expected) < 1e-5


@pytest.mark.parametrize("form", ["full", "lora", "mixed"])
def test_a_frozen_agent_samples_but_does_not_change(tmp_path, form):
    team = team_of(form)
    gradients, trainer, before = one_update(tmp_path, team, frozen_agents=["aux"], num_turns=2)
    before.freeze(["aux"])
    assert distance(gradients, reference_gradients(trainer._turns, before)) < 1e-5
    changed = [not torch.equal(x, y) for x, y in zip(team.parameters(), before.parameters(), strict=True)]
    trained = {id(parameter) for parameter in team.agent_parameters("main")}
    assert changed == [id(parameter) in trained for parameter in team.parameters()]
    assert all(trainer._turns[0][0].samples["aux"].texts)
    (log,) = (entry for entry in trainer.state.log_history if "reward" in entry)
    assert "agents/main/loss" in log and "agents/aux/loss" not in log and "agents/aux/completions/mean_length" in log
    assert all(agent.config.use_cache for agent in team.agents.values())  # as saved: plain `generate` reads it


@pytest.mark.parametrize("form", ["shared", "lora on two bases", "lora and whole modules", "dora", "mixed"])
def test_reference_penalty(tmp_path, form):
    """The reference policy is each agent's initial policy, here with adapters that change the output."""
    team = team_of(form, num_hidden_layers=1)
    initial = copy.deepcopy(team)
    seen = {}

    class Keep(TrainerCallback):
        def on_step_begin(self, args, state, control, model=None, **kwargs):
            seen["before"] = copy.deepcopy(model.state_dict())

        def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
            seen["gradients"] = {name: x.grad.clone() for name, x in model.named_parameters() if x.requires_grad}

    trainer = tiny_trainer(tmp_path, team, callbacks=[Keep()], beta=0.3, max_steps=3, learning_rate=1e-2)
    trainer.train()
    (log,) = (entry for entry in trainer.state.log_history if entry.get("step") == 3 and "reward" in entry)
    assert log["agents/aux/kl"] > 1e-3
    policy = team_of(form, num_hidden_layers=1)
    if team.form == "lora":
        policy.keep_reference()
    policy.load_state_dict(seen["before"])
    expected = reference_gradients(trainer._turns, policy, beta=0.3, reference=initial)
    assert distance(seen["gradients"], expected) < 1e-5


def test_per_agent_learning_rates_of_adapters(tmp_path):
    team = team_of("lora")
    before = copy.deepcopy(team)
    tiny_trainer(tmp_path, team, agent_learning_rates={"aux": 0.0}).train()
    for role, moved in (("aux", False), ("main", True)):
        pairs = zip(team.agent_parameters(role), before.agent_parameters(role), strict=True)
        assert any(not torch.equal(x, y) for x, y in pairs) == moved


def test_shared_weights_have_one_learning_rate(tmp_path):
    with pytest.raises(ValueError, match="the agents of this team share theirs"):
        tiny_trainer(tmp_path, team_of("shared"), agent_learning_rates={"aux": 0.1})


@pytest.mark.parametrize("form", ["full", "shared", "lora on two bases", "lora and whole modules", "dora", "mixed"])
def test_resume_is_exact(tmp_path, form):
    settings = {"max_steps": 3, "save_strategy": "steps", "save_steps": 2, "learning_rate": 1e-2}
    whole = tiny_trainer(tmp_path / "run", team_of(form, num_hidden_layers=1), **settings)
    whole.train()
    other = team_of(form, num_hidden_layers=1)
    with torch.no_grad():  # the weights must come from the checkpoint, not from the team that the trainer gets
        for parameter in other.parameters():
            parameter.mul_(1.5 if parameter.requires_grad else 1.0)
    resumed = tiny_trainer(tmp_path / "run", other, **settings)
    resumed.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-2"))
    for name, x in whole.team.state_dict().items():
        assert torch.equal(x, resumed.team.state_dict()[name]), name


LORA = LoraConfig(r=4, lora_alpha=64, lora_dropout=0.1, target_modules="all-linear")
STARTS = {
    "full": ({}, {}),
    "lora": ({"peft_config": LORA}, {"beta": 0.1}),
    "lora on two bases": ({"peft_config": LORA, "name": ["", "other"]}, {"disable_dropout": False}),
    "frozen partner": ({"peft_config": LORA}, {"frozen_agents": ["aux"], "handoff": "random", "num_turns": 2}),
}


@pytest.mark.parametrize("start", STARTS)
def test_the_seed_decides_the_result(tmp_path, tiny_model, start):
    """Random numbers drawn before the team, the trainer or the training do not change it."""
    shutil.copytree(tiny_model, tmp_path / "other")
    settings, arguments = STARTS[start]
    names = [str(tmp_path / name) if name else tiny_model for name in settings.get("name", [""])]

    def train(noise, seed=1):
        torch.manual_seed(noise)
        random.seed(noise)
        team = AgentTeam.from_pretrained(
            **{**settings, "name": names if len(names) > 1 else names[0], "roles": ["aux", "main"], "seed": seed}
        )
        torch.rand(noise)
        trainer = tiny_trainer(tmp_path / "run", team, seed=seed, max_steps=2, learning_rate=1e-2, **arguments)
        torch.rand(noise)
        random.random()
        trainer.train()
        return team.state_dict()

    first, second, other = train(1), train(2), train(1, seed=2)
    assert all(torch.equal(x, second[name]) for name, x in first.items())
    assert not all(torch.equal(x, other[name]) for name, x in first.items())


def test_recomputing_with_the_wrong_adapter_changes_the_gradient(tmp_path, monkeypatch):
    monkeypatch.setattr(AgentTeam, "_checkpointing", lambda self, layer, checkpoint: checkpoint)
    monkeypatch.setattr(AgentTeam, "_forwards", lambda self, inputs: [[role] for role in inputs])
    gradients, trainer, before = one_update(tmp_path, team_of("lora"), **CHECKPOINTING["recomputed"])
    assert distance(gradients, reference_gradients(trainer._turns, before)) > 1e-2
