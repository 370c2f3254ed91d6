"""This project's side of `vs_comlrl.py`: takes the training steps that standard input asks for."""

import json
import sys
import tempfile
from pathlib import Path

from datasets import Dataset
from transformers import TrainerCallback
from vs_comlrl_task import ROLES, Steps, load_reward

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


TRAINERS = {
    "magrpo": (MAGRPOTrainer, MAGRPOConfig),
    "iac": (IACTrainer, IACConfig),
    "maac": (MAACTrainer, MAACConfig),
}


settings = json.loads(Path(sys.argv[1]).read_text())
trainer_class, config_class = TRAINERS[settings["algorithm"]]
steps = Steps()
rewards = []


class AskAgain(Environment):
    """At every turn each agent gets its prompt; the trainer puts the agent's past turns before it."""

    roles = ROLES

    def __init__(self, reward: str):
        self.reward = load_reward(reward)

    def prompts(self, item, history):
        return {role: item[f"{role}_prompt"] for role in ROLES}

    def score(self, items, joint_actions, histories):
        values = self.reward(items, joint_actions)
        rewards.extend(values)
        return [Outcome(value) for value in values]


class OneStepAtATime(TrainerCallback):
    """A step ends with its log, so that the metrics are part of it."""

    def on_train_begin(self, args, state, control, **kwargs):
        steps.wait()

    def on_log(self, args, state, control, logs, **kwargs):
        if "loss" in logs:  # not the summary at the end
            steps.done(rewards)
            rewards.clear()
            if state.global_step < state.max_steps:
                steps.wait()


with tempfile.TemporaryDirectory() as output_dir:
    args = config_class(
        output_dir=output_dir,
        seed=settings["seed"],
        max_steps=len(settings["items"]) // settings["items_per_step"],
        items_per_device=settings["items_per_step"],
        per_device_train_batch_size=settings["rows_per_forward"],
        num_generations=settings["num_generations"],
        max_completion_length=settings["max_new_tokens"],
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        num_turns=settings["num_turns"],
        advantage_normalization=settings["advantage_normalization"],
        shuffle_dataset=False,
        # The peer's optimizer: AdamW with torch's defaults, a constant rate, no clipping
        learning_rate=settings["learning_rate"],
        lr_scheduler_type="constant",
        weight_decay=0.01,
        max_grad_norm=0.0,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
    )
    trainer = trainer_class(
        team=AgentTeam.from_pretrained(settings["model"], roles=ROLES),
        environment=AskAgain(settings["reward"]),
        args=args,
        train_dataset=Dataset.from_list(settings["items"]),
        callbacks=[OneStepAtATime()],
    )
    trainer._sample = steps.timed("generate", trainer._sample)
    trainer._judge = steps.timed("generate", trainer._judge)
    trainer._score = steps.timed("reward", trainer._score)
    steps.ready()
    trainer.train()
