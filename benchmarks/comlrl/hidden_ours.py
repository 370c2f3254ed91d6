"""This project's side of `steps.py --model smollm2`."""

import json
import sys
import tempfile
from pathlib import Path

from datasets import Dataset
from peft import LoraConfig

from benchmarks.comlrl.hidden import ADAPTER, ALONE, DECIDER, SPEAKER, arguments, is_right, libraries
from benchmarks.comlrl.task import Steps
from trl_multiagent import AgentTeam, MAGRPOConfig, MAGRPOTrainer, workflow


settings = json.loads(Path(sys.argv[1]).read_text())
roles = ("speaker", "decider")[-settings["agents"] :]
steps, before = Steps(), libraries()
steps.work = lambda: before
rewards = []


@workflow(roles=roles)
async def hidden(item, agents):
    if len(roles) == 1:
        return is_right(item["word"], item["options"], await agents.decider(ALONE.format(**item)))
    message = await agents.speaker(SPEAKER.format(**item))
    answer = await agents.decider(DECIDER.format(**item, message=message))
    return is_right(item["word"], item["options"], answer)


def and_its_rewards(play_trees):
    def play(items):
        turns = play_trees(items)
        rewards.extend(reward for node in turns[-1] for reward in node.rewards)
        return turns

    return play


with tempfile.TemporaryDirectory() as output_dir:
    peft_config = LoraConfig(**ADAPTER) if settings["lora"] else None
    trainer = MAGRPOTrainer(
        AgentTeam.from_pretrained(settings["model"], roles, peft_config),
        hidden,
        MAGRPOConfig(
            output_dir,
            items_per_device=settings["items_per_step"],
            num_turns=settings["agents"],
            advantage_normalization=False,
            **arguments(settings),
        ),
        train_dataset=Dataset.from_list(settings["items"]),
        callbacks=[steps.callback(rewards)],
    )
    trainer._play_trees = and_its_rewards(trainer._play_trees)
    trainer._sample = steps.timed("generate", trainer._sample)
    steps.ready()
    trainer.train()
