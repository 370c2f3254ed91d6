"""The side of TRL's GRPOTrainer of `steps.py --model smollm2`: one agent."""

import json
import sys
import tempfile
from pathlib import Path

from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM
from trl import GRPOConfig, GRPOTrainer

from benchmarks.comlrl.hidden import ADAPTER, ALONE, arguments, is_right, libraries
from benchmarks.comlrl.task import Steps


settings = json.loads(Path(sys.argv[1]).read_text())
steps, before = Steps(), libraries()
steps.work = lambda: before
rewards = []


def reward(completions, word, options, **columns):
    answers = [message["content"] for (message,) in completions]
    values = list(map(is_right, word, options, answers))
    rewards.extend(values)
    return values


with tempfile.TemporaryDirectory() as output_dir:
    rows = settings["items_per_step"] * settings["num_generations"]
    items = [{**x, "prompt": [{"role": "user", "content": ALONE.format(**x)}]} for x in settings["items"]]
    trainer = GRPOTrainer(
        # The configuration of a converted GGUF file names no architecture, by which TRL loads
        model=AutoModelForCausalLM.from_pretrained(settings["model"], dtype="float32"),
        reward_funcs=reward,
        args=GRPOConfig(
            output_dir,
            gradient_accumulation_steps=rows // settings["rows_per_forward"],
            beta=0.0,
            loss_type="luspo",
            importance_sampling_level="sequence",
            scale_rewards="none",
            **arguments(settings),
        ),
        train_dataset=Dataset.from_list(items),
        peft_config=LoraConfig(**ADAPTER) if settings["lora"] else None,
        callbacks=[steps.callback(rewards)],
    )
    trainer._generate = steps.timed("generate", trainer._generate)
    steps.ready()
    trainer.train()
