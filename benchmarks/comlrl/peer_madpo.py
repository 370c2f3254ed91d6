"""CoMLRL's side of `preference.py` of `learning/`: MADPO on given preferences. Run by the peer's own Python."""

import json
import random
import sys
from pathlib import Path

import torch
from comlrl.trainers.preference.madpo import AgentPreferenceTensors, MADPOConfig, MADPOTrainer, PreferencePair
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer


ROLES = ("aux", "main")
settings = json.loads(Path(sys.argv[1]).read_text())
random.seed(settings["seed"])
torch.manual_seed(settings["seed"])
tokenizer = AutoTokenizer.from_pretrained(settings["model"])


def ids(text: str, end: bool) -> torch.Tensor:
    tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
    return torch.tensor([*tokens, tokenizer.eos_token_id] if end else tokens)


def peer_pair(row: dict) -> PreferencePair:
    """A row of our dataset as the peer stores it."""
    return PreferencePair(
        prompts=[row[f"{role}_prompt"] for role in ROLES],
        winner_completions=[row[f"{role}_chosen"] for role in ROLES],
        loser_completions=[row[f"{role}_rejected"] for role in ROLES],
        agent_tensors=[
            AgentPreferenceTensors(
                prompt_input_ids=ids(row[f"{role}_prompt"], end=False),
                winner_completion_ids=ids(row[f"{role}_chosen"], end=True),
                loser_completion_ids=ids(row[f"{role}_rejected"], end=True),
            )
            for role in ROLES
        ],
        winner_reward=row["chosen_reward"],
        loser_reward=row["rejected_reward"],
        candidate_reward_mean=(row["chosen_reward"] + row["rejected_reward"]) / 2,
    )


args = MADPOConfig(
    num_train_epochs=settings["num_train_epochs"],
    agent_learning_rate=settings["learning_rate"],
    num_agents=2,
    agent_devices="cpu",
    max_new_tokens=40,
    temperature=1.0,
    top_p=1.0,
    top_k=0,
    eval_interval=0,
    rollout_buffer_size=settings["train_batch_size"],
    train_batch_size=settings["train_batch_size"],
    dpo_beta=settings["beta"],
)
trainer = MADPOTrainer(
    agents=[AutoModelForCausalLM.from_pretrained(settings["model"], dtype=torch.float32) for _ in ROLES],
    tokenizer=tokenizer,
    num_agents=2,
    train_dataset=Dataset.from_list([{"prompt": "not used"}]),
    reward_func=lambda *texts, **columns: [0.0] * len(texts[0]),
    formatters=[lambda item: item["prompt"] for _ in ROLES],
    args=args,
)
pairs = [peer_pair(row) for row in settings["pairs"]]
trainer._build_preference_dataset = lambda **kwargs: pairs
trainer.train()
for role, agent in zip(ROLES, trainer.agents, strict=True):
    agent.save_pretrained(Path(settings["output"]) / role)
    tokenizer.save_pretrained(Path(settings["output"]) / role)
