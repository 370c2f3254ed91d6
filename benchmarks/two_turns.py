"""
The task of `actor_critic.py`: two turns with a delayed reward, where the first turn decides what the second can earn.

An item is a pair of letters out of [`LETTERS`]. At both turns every agent sees one letter, and answers with one token. The right
answer is a letter as well, which depends on the agent and on the letter that it sees, and which nobody tells it.

- At the first turn both agents see the first letter. There is no reward. How many of them are right, 0, 1 or 2, opens a room worth
  [`WORTH`][k]. They are not told which.
- At the second turn both see the second letter, after their own first prompt and answer. The reward is the worth of the room times
  [`SHARE`][m], where m is the number of agents who are right now: 1 if all four answers are right.

The model is a random Llama of about 50,000 parameters, whose 18 tokens are the letters and the words of the prompts. It answers at random at
first, so the mean reward is near 0.08.
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
    """The task. The history of a branch has the first answers, from which the reward of the second turn follows."""

    roles = ROLES

    def prompts(self, item, history):
        return dict.fromkeys(ROLES, f"now {item['second']} :" if history else f"see {item['first']} :")

    def score(self, items, joint_actions, histories):
        outcomes = []
        for item, action, history in zip(items, joint_actions, histories, strict=True):
            if not history:
                right = number_right(action, item["first"])
                outcomes.append(Outcome(0.0, {"right": right}))
            else:
                worth = WORTH[number_right(history[0].joint_action, item["first"])]
                right = number_right(action, item["second"])
                outcomes.append(Outcome(worth * SHARE[right], {"right": right}))
        return outcomes


def number_right(action: dict[str, str], letter: str) -> int:
    """How many agents say the letter that is theirs to say: one further in the alphabet for the first agent, two for the second."""
    position = LETTERS.index(letter)
    right = {role: LETTERS[(position + k) % len(LETTERS)] for k, role in enumerate(ROLES, start=1)}
    return sum(action[role].strip() == right[role] for role in ROLES)


def two_turn_items(number: int, seed: int) -> Dataset:
    """Items whose letters are drawn at random."""
    letters = torch.randint(len(LETTERS), (number, 2), generator=torch.Generator().manual_seed(seed))
    return Dataset.from_list([{"first": LETTERS[a], "second": LETTERS[b]} for a, b in letters.tolist()])


def save_two_turn_model(folder: Path, seed: int) -> None:
    """Writes the random model and its tokenizer."""
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
