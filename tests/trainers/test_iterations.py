"""Several optimizer steps on one batch: the ratio to the policy that sampled it, clipping, checkpoints."""

import copy

import pytest
import torch
from transformers import TrainerCallback
from trl import GRPOConfig

from trl_multiagent import FunctionEnvironment, IACConfig, IACTrainer

from by_hand import FixedGRPO, distance, log_probability, trl_trainer
from tiny import count_reward, team_of, tiny_environment, tiny_experts, tiny_items, tiny_team, tiny_trainer


class Steps(TrainerCallback):
    """Keeps the gradients and the team of each optimizer step."""

    def __init__(self):
        self.gradients, self.teams = [], []

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        self.gradients.append({name: x.grad.clone() for name, x in model.named_parameters() if x.requires_grad})
        team = copy.deepcopy(model)
        team.zero_grad()
        for agent in team.agents.values():
            agent.__dict__.pop("forward", None)
        self.teams.append(team)


def by_hand(turns, old, team, low, high):
    nodes = [node for nodes in turns for node in nodes]
    roles = team.roles
    rows = [(node, g) for node in nodes for g in range(len(node.rewards))]
    total, clipped = 0.0, 0
    for node, g in rows:
        ratios = {}
        for role in roles:
            samples = node.samples[role]
            with team.activate(role) as agent:
                log_p = log_probability(agent, samples.prompt_ids, samples.completion_ids[g])
            with torch.no_grad(), old.activate(role) as agent:
                log_old = log_probability(agent, samples.prompt_ids, samples.completion_ids[g])
            ratios[role] = log_p - log_old
        advantage = node.returns[g] - sum(node.returns) / len(node.returns)
        for role in roles:
            ratio = ratios[role].exp()
            limited = ratio.clamp(1 - low, 1 + high)
            total = total - torch.minimum(ratio * advantage, limited * advantage).sum() / len(rows)
            clipped += int((limited * advantage < ratio * advantage).sum())
    total.backward()
    return {name: x.grad for name, x in team.named_parameters() if x.requires_grad}, clipped


@pytest.mark.parametrize("form", ["full", "lora"])
def test_the_second_step_is_that_of_plain_pytorch(tmp_path, monkeypatch, form):
    steps = Steps()
    settings = {"num_iterations": 2, "max_steps": 2, "optim": "sgd", "learning_rate": 0.02, "num_turns": 2}
    settings |= {"epsilon": 0.1, "epsilon_high": 0.15, "num_generations": 3, "per_device_train_batch_size": 5}
    trainer = tiny_trainer(tmp_path, team_of(form), callbacks=[steps], **settings)
    together, forwards = [], trainer.team._forwards
    monkeypatch.setattr(trainer.team, "_forwards", lambda inputs: together.append(forwards(inputs)) or together[-1])
    trainer.train()
    assert (form == "lora") == any(len(roles) > 1 for of_forward in together for roles in of_forward)
    assert trainer.env_step == sum(len(node.rewards) for nodes in trainer._turns for node in nodes)
    old = steps.teams[0]
    for gradients, team in zip(steps.gradients, steps.teams, strict=True):
        expected, clipped = by_hand(trainer._turns, copy.deepcopy(old), team, 0.1, 0.15)
        assert distance(gradients, expected) < 2e-5
    assert clipped > 5
    first, second = trainer.state.log_history[:2]
    assert first["agents/aux/clip_ratio/region_mean"] == 0.0 < second["agents/aux/clip_ratio/region_mean"]
    assert "reward" in first and "reward" not in second


def test_one_agent_equals_trl(tmp_path):
    """After two steps on one batch, the weights are those of GRPOTrainer."""
    environment = FunctionEnvironment({"solo": "{prompt}"}, count_reward)
    dataset = tiny_items(2).add_column("prompt", ["First task:", "The second task:"])
    settings = {"num_iterations": 2, "max_steps": 2, "optim": "sgd", "learning_rate": 0.02, "epsilon": 0.1}
    team = tiny_team(("solo",))
    before = copy.deepcopy(team)
    trainer = tiny_trainer(tmp_path, team, environment, train_dataset=dataset, **settings)
    trainer.train()
    losses = {"loss_type": "luspo", "scale_rewards": "none"}
    single = trl_trainer(tmp_path, FixedGRPO, GRPOConfig, trainer, before, dataset, **losses, **settings)
    start = tiny_team(("solo",)).agents["solo"].state_dict()
    ours = {name: x - start[name] for name, x in team.agents["solo"].state_dict().items()}
    theirs = {name: x - start[name] for name, x in single.model.state_dict().items()}
    assert distance(ours, theirs) < 1e-4


def test_critics_take_every_step_on_the_same_targets(tmp_path):
    steps = Steps()
    settings = {"num_iterations": 3, "max_steps": 3, "critic_learning_rate": 0.1, "value_clip_range": 0.2}
    trainer = tiny_trainer(tmp_path, trainer=IACTrainer, config=IACConfig, callbacks=[steps], **settings)
    trainer.train()
    losses = [log["critics/aux/value_loss"] for log in trainer.state.log_history[:3]]
    assert len(set(losses)) == 3
    assert sum("critics/aux/explained_variance" in log for log in trainer.state.log_history) == 1


def test_a_run_resumes_bit_for_bit(tmp_path):
    """A save that is due in the middle of a batch waits for its end."""
    settings = {"num_iterations": 3, "save_strategy": "steps", "save_steps": 2}
    settings |= {"train_dataset": tiny_items(4), "num_train_epochs": 1, "max_steps": -1}
    whole = tiny_trainer(tmp_path / "whole", **settings)
    whole.train()
    saved = sorted(path.name for path in (tmp_path / "whole").glob("checkpoint-*"))
    assert saved == ["checkpoint-3", "checkpoint-6"] and whole.args.steps_per_epoch(4) == 6
    resumed = tiny_trainer(tmp_path / "resumed", **settings)
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-3"))
    found = resumed.team.state_dict()
    assert all(torch.equal(x, found[name]) for name, x in whole.team.state_dict().items())
    assert resumed.env_step == whole.env_step


def test_a_router_loss_needs_the_policy_that_sampled(tmp_path):
    team = team_of("full")
    team = type(team)({"aux": team.agents["aux"], "main": tiny_experts("qwen3_moe")}, team.tokenizers)
    with pytest.raises(ValueError, match="cannot be combined with a router loss"):
        tiny_trainer(tmp_path, team, tiny_environment(), num_iterations=2)
