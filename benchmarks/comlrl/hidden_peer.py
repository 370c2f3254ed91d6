"""
CoMLRL's side of `steps.py --model smollm2`. All its agents answer in every turn: one that has nothing to say is
told to wait. Run by the peer's own Python.
"""

import json
import random
import sys
from pathlib import Path

import torch
from comlrl.trainers.reinforce import MAGRPOConfig, MAGRPOTrainer
from datasets import Dataset
from transformers import AutoTokenizer

from benchmarks.comlrl.hidden import DECIDER, SPEAKER, is_right, libraries
from benchmarks.comlrl.task import Steps


settings = json.loads(Path(sys.argv[1]).read_text())
random.seed(settings["seed"])
torch.manual_seed(settings["seed"])
steps, before = Steps(), libraries()
steps.work = lambda: before
tokenizer = AutoTokenizer.from_pretrained(settings["model"])
# Where a prompt has the padding token, this trainer lets the completion begin. The template of SmolLM2 has its own one
tokenizer.pad_token = "<|endoftext|>"
rewards = []
answers = items_done = 0
width, size = settings["num_generations"], settings["items_per_step"]


def chat(text: str) -> str:
    messages = [{"role": "user", "content": text}]
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)


def reward(speaker: list[str], decider: list[str], *, batch_items: list[dict]) -> list[float]:
    """The decider's answers in the second turn are paid. A tree's first turn is scored first."""
    global answers
    values, item = [], batch_items[0]
    for answer in decider:
        is_second = answers % (width + width**2) >= width
        values.append(is_right(item["word"], item["options"], answer) if is_second else 0.0)
        rewards.extend(values[-1:] if is_second else [])
        answers += 1
    return values


def second_turn(prompt, agent_completions, **_):
    return [chat("Wait."), chat(DECIDER.format(message=agent_completions[0], options=prompt))]


trainer = MAGRPOTrainer(
    num_agents=2,
    agent_model=settings["model"],
    tokenizer=tokenizer,
    train_dataset=Dataset.from_list([{**item, "prompt": item["options"]} for item in settings["items"]]),
    reward_func=reward,
    formatters=[lambda item: chat(SPEAKER.format(**item)), lambda item: chat("Wait.")],
    external_transition=second_turn,
    args=MAGRPOConfig(
        joint_mode="aligned",
        num_train_epochs=1,
        agent_learning_rate=settings["learning_rate"],
        num_agents=2,
        agent_devices="cpu",
        num_generations=width,
        max_new_tokens=settings["max_new_tokens"],
        temperature=settings["temperature"],
        top_p=1.0,
        top_k=0,  # None would leave the 50 of transformers
        num_turns=2,
        early_termination_threshold=None,
        external_prompt_passthrough=True,
        eval_interval=0,
        rollout_buffer_size=size * (1 + width),
        advantage_normalization=False,
    ),
)
trainer._generate_completions = steps.timed("generate", trainer._generate_completions)
train_on_item = trainer._train_step_returns


def train_on_item_in_steps(*args, **kwargs):
    """One item; the last of a step fills the buffer, and so brings the update."""
    global items_done
    if items_done % size == 0:
        steps.wait()
    train_on_item(*args, **kwargs)
    items_done += 1
    if items_done % size == 0:
        steps.done(rewards)
        rewards.clear()


trainer._train_step_returns = train_on_item_in_steps
steps.ready()
trainer.train()
