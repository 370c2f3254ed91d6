"""
TRL's side of `steps.py --algorithms single`: takes the training steps of GRPOTrainer that standard input asks for.
"""

import json
import sys
import tempfile
from pathlib import Path

from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

from benchmarks.comlrl.task import Steps, load_reward, step_arguments


settings = json.loads(Path(sys.argv[1]).read_text())
(role,) = settings["roles"]
steps = Steps()
score = load_reward(settings["reward"])
rewards = []


def reward(prompts, completions, **columns):
    values = score([{}] * len(completions), [{role: text} for text in completions])
    rewards.extend(values)
    return values


with tempfile.TemporaryDirectory() as output_dir:
    rows = settings["items_per_step"] * settings["num_generations"]
    args = GRPOConfig(
        output_dir=output_dir,
        gradient_accumulation_steps=rows // settings["rows_per_forward"],
        beta=0.0,
        loss_type="luspo",
        importance_sampling_level="sequence",
        scale_rewards="none",
        **step_arguments(settings),
    )
    trainer = GRPOTrainer(
        model=settings["model"],
        reward_funcs=reward,
        args=args,
        train_dataset=Dataset.from_list([{"prompt": item[f"{role}_prompt"]} for item in settings["items"]]),
        callbacks=[steps.callback(rewards)],
    )
    trainer._generate = steps.timed("generate", trainer._generate)
    trainer._calculate_rewards = steps.timed("reward", trainer._calculate_rewards)
    steps.ready()
    trainer.train()
