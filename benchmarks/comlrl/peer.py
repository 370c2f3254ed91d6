"""
CoMLRL's side of `steps.py`: takes the training steps that standard input asks for. Run by the peer's own Python.
"""

import json
import random
import sys
from pathlib import Path

import torch
from comlrl.trainers.actor_critic import IACConfig, IACTrainer, MAACConfig, MAACTrainer
from comlrl.trainers.reinforce import MAGRPOConfig, MAGRPOTrainer
from datasets import Dataset

from benchmarks.comlrl.task import ROLES, Steps, load_reward


settings = json.loads(Path(sys.argv[1]).read_text())
random.seed(settings["seed"])
torch.manual_seed(settings["seed"])
steps = Steps()
score = steps.timed("reward", load_reward(settings["reward"]))
rewards = []


def joint_reward(aux: list[str], main: list[str], *, batch_items: list[dict]) -> list[float]:
    """Called with one joint action at a time, as this trainer does."""
    values = score(batch_items, [dict(zip(ROLES, texts, strict=True)) for texts in zip(aux, main, strict=True)])
    rewards.extend(values)
    return values


def ask_again(prompt, agent_completions, num_agents, prompt_history_per_agent, response_history_per_agent):
    """The next turn: all that the agent was asked and answered, and its first prompt once more."""
    return [
        f"{prompts[-1]}{responses[-1]}\n\n{prompts[0]}"
        for prompts, responses in zip(prompt_history_per_agent, response_history_per_agent, strict=True)
    ]


nodes_per_item = sum(settings["num_generations"] ** turn for turn in range(settings["num_turns"]))
common = {
    "num_train_epochs": 1,
    "agent_learning_rate": settings["learning_rate"],
    "num_agents": 2,
    "agent_devices": "cpu",
    "num_generations": settings["num_generations"],
    "max_new_tokens": settings["max_new_tokens"],
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,  # None would leave the 50 of transformers
    "num_turns": settings["num_turns"],
    "early_termination_threshold": None,
    "external_prompt_passthrough": True,
    "eval_interval": 0,
    "rollout_buffer_size": settings["items_per_step"] * nodes_per_item,
    "advantage_normalization": settings["advantage_normalization"],
}
given = {
    "agent_model": settings["model"],
    "train_dataset": Dataset.from_list(settings["items"]),
    "reward_func": joint_reward,
    "formatters": [lambda item, role=role, **_: item[f"{role}_prompt"] for role in ROLES],
    "external_transition": ask_again if settings["num_turns"] > 1 else None,
}
if settings["algorithm"] == "magrpo":
    trainer = MAGRPOTrainer(num_agents=2, args=MAGRPOConfig(joint_mode="aligned", **common), **given)
    train_on, phases = "_train_step_returns", ["_generate_completions"]
else:
    critics = {"critic_learning_rate": settings["learning_rate"], "critic_devices": "cpu"}
    given["critic_model"] = settings["model"]
    if settings["algorithm"] == "iac":
        trainer, phases = IACTrainer(args=IACConfig(**critics, **common), **given), ["_generate_rollout"]
    else:
        trainer = MAACTrainer(args=MAACConfig(**critics, **common), **given)
        phases = ["_generate", "_critic_value_from_text"]
    train_on = "_run_batch"
for phase in phases:
    setattr(trainer, phase, steps.timed("generate", getattr(trainer, phase)))
train_on_item = getattr(trainer, train_on)
items_done = 0


def train_on_item_in_steps(*args, **kwargs):
    """One item; the last of a step fills the buffer, and so brings the update."""
    global items_done
    if items_done % settings["items_per_step"] == 0:
        steps.wait()
    train_on_item(*args, **kwargs)
    items_done += 1
    if items_done % settings["items_per_step"] == 0:
        steps.done(rewards)
        rewards.clear()


setattr(trainer, train_on, train_on_item_in_steps)
steps.ready()
trainer.train()
