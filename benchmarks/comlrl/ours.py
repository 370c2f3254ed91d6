"""This project's side of `steps.py`: takes the training steps that standard input asks for."""

import json
import sys
import tempfile
from pathlib import Path

from datasets import Dataset

from benchmarks.comlrl.task import Steps, load_reward, step_arguments
from benchmarks.team_run import work
from trl_multiagent import (
    AgentTeam,
    Environment,
    IACConfig,
    IACTrainer,
    MAACConfig,
    MAACTrainer,
    MAGRPOConfig,
    MAGRPOTrainer,
    Outcome,
)
from trl_multiagent.models import generation
from trl_multiagent.models.sampling_loop import SamplingLoop


TRAINERS = {
    "magrpo": (MAGRPOTrainer, MAGRPOConfig),
    "single": (MAGRPOTrainer, MAGRPOConfig),
    "iac": (IACTrainer, IACConfig),
    "maac": (MAACTrainer, MAACConfig),
}


settings = json.loads(Path(sys.argv[1]).read_text())
trainer_class, config_class = TRAINERS[settings["algorithm"]]
steps = Steps()
rewards = []


class AskAgain(Environment):
    """At every turn each agent gets its prompt; the trainer puts the agent's past turns before it."""

    roles = tuple(settings["roles"])

    def __init__(self, reward: str):
        self.reward = load_reward(reward)

    def prompts(self, item, history):
        return {role: item[f"{role}_prompt"] for role in self.roles}

    def score(self, items, joint_actions, histories):
        values = self.reward(items, joint_actions)
        rewards.extend(values)
        return [Outcome(value) for value in values]


def and_its_work(play_trees):
    def play(items):
        turns = play_trees(items)
        steps.work = lambda: work(turns, settings["roles"])  # after the step has been timed
        return turns

    return play


with tempfile.TemporaryDirectory() as output_dir:
    args = config_class(
        output_dir=output_dir,
        items_per_device=settings["items_per_step"],
        num_turns=settings["num_turns"],
        advantage_normalization=settings["advantage_normalization"],
        **step_arguments(settings),
    )
    trainer = trainer_class(
        team=AgentTeam.from_pretrained(settings["model"], roles=settings["roles"]),
        environment=AskAgain(settings["reward"]),
        args=args,
        train_dataset=Dataset.from_list(settings["items"]),
        callbacks=[steps.callback(rewards)],
    )
    trainer._play_trees = and_its_work(trainer._play_trees)
    trainer._sample = steps.timed("generate", trainer._sample)
    trainer._judge = steps.timed("generate", trainer._judge)
    trainer._score = steps.timed("reward", trainer._score)
    # Parts of generate and update, for the profile
    generation.read_packed = steps.timed("prompts", generation.read_packed)
    generation.read_padded = steps.timed("prompts", generation.read_padded)
    SamplingLoop.run = steps.timed("tokens", SamplingLoop.run)
    trainer.compute_loss = steps.timed("forward", trainer.compute_loss)
    trainer.accelerator.backward = steps.timed("backward", trainer.accelerator.backward)
    steps.ready()
    trainer.train()
