"""
The task of `actor_critic.py`: two turns with a delayed reward, where the first turn decides what the second can earn.

At both turns every agent sees one of [`LETTERS`] and answers with one token. The right answer is a letter, too: it
depends on the agent and on the letter that it sees, and nobody tells the agent which one it is.

- At the first turn both agents see the item's first letter. There is no reward. [`WORTH`][k] is what the second turn
  is worth, where k is the number of agents who are right. The agents do not learn k.
- At the second turn both see the item's second letter, after their own first prompt and answer. The score is the worth
  times [`SHARE`][m], where m is the number of agents who are right now. It is 1 if all four answers are right, and
  0.08 for random ones.
- The reward, which is given at the second turn only, is the score plus the `spread` times the position of the first
  letter in the alphabet (0 to 3). As in most data sets, some items then earn more than others whatever the agents do.

The model is a random Llama of about 50,000 parameters. Its 16 tokens are the letters and the words of the prompts.
"""

from pathlib import Path

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from trl_multiagent import Environment, Outcome


ROLES = ("aux", "main")
LETTERS = "abcd"
WORTH = (0.25, 0.5, 1.0)
SHARE = (0.25, 0.5, 1.0)
WORDS = (*LETTERS, "see", "now", ":", "[", "]", *ROLES, "answers")


class TwoTurns(Environment):
    """The task. A branch's history holds the first answers, on which the reward of the second turn depends."""

    roles = ROLES

    def __init__(self, spread: float):
        self.spread = spread

    def prompts(self, item, history):
        return dict.fromkeys(ROLES, f"now {item['second']} :" if history else f"see {item['first']} :")

    def score(self, items, joint_actions, histories):
        return [self.outcome(*each) for each in zip(items, joint_actions, histories, strict=True)]

    def outcome(self, item: dict, joint_action: dict[str, str], history: list) -> Outcome:
        if not history:
            return Outcome(0.0)
        worth = WORTH[number_right(history[0].joint_action, item["first"])]
        score = worth * SHARE[number_right(joint_action, item["second"])]
        return Outcome(self.spread * LETTERS.index(item["first"]) + score, {"score": score})


def number_right(joint_action: dict[str, str], seen: str) -> int:
    """
    How many agents are right: the first one says the letter after the one that it sees, the second one the letter
    after that.
    """
    position = LETTERS.index(seen)
    right = {role: LETTERS[(position + k) % len(LETTERS)] for k, role in enumerate(ROLES, start=1)}
    return sum(joint_action[role].strip() == right[role] for role in ROLES)


def two_turn_items(number: int, seed: int) -> Dataset:
    """Items with random letters."""
    letters = torch.randint(len(LETTERS), (number, 2), generator=torch.Generator().manual_seed(seed))
    return Dataset.from_list([{"first": LETTERS[a], "second": LETTERS[b]} for a, b in letters.tolist()])


def save_two_turn_model(folder: Path, seed: int) -> None:
    """Writes a random model and its tokenizer, which splits texts into words."""
    vocabulary = {word: k for k, word in enumerate((*WORDS, "<unk>", "<eos>", "<pad>"))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", eos_token="<eos>", pad_token="<pad>", padding_side="left"
    )
    fast.save_pretrained(folder)
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(vocabulary),
        hidden_size=48,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=128,
        initializer_range=0.1,
        eos_token_id=vocabulary["<eos>"],
        pad_token_id=vocabulary["<pad>"],
        bos_token_id=None,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
