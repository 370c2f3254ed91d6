"""
MAGRPO in one file, on torch and transformers alone: https://huggingface.co/papers/2508.04652

    python examples/minimal_magrpo.py     # one CPU core, half a minute, no download

Two agents with weights of their own, `caller` and `echo`, each see a letter, write at the same time, and are paid if
both write the same vowel first. Neither sees what the other sees or writes, so they have to settle on a vowel, and
nothing but the joint reward helps them to.

This is the algorithm of `MAGRPOTrainer` with one turn, and a test compares the gradients of the two. It leaves out:
several turns, in which each joint action opens a node of its own; agents that are adapters on one base; chat
templates; a KL penalty and clipping; micro-batches, several processes and DeepSpeed; checkpoints and logs; and what
makes it fast (one call for all agents, prompts that their completions share, rows without advantage left out).
"""

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel


LETTERS = "abcdefghijklmnopqrstuvwxyz"
VOWELS = "aeiou"
END, PAD = len(LETTERS), len(LETTERS) + 1
ROLES = ("caller", "echo")


# The task: a prompt for each role, and one reward for what both wrote


def prompts_of(item: dict[str, str]) -> dict[str, str]:
    return {role: item[role] for role in ROLES}


def reward(joint_action: dict[str, str]) -> float:
    """Pays a little for each vowel, and most for the same one, so that the first steps have something to climb."""
    first, second = (joint_action[role] for role in ROLES)
    vowels = sum(text[:1] in VOWELS and text != "" for text in (first, second))
    return vowels / 4 + (vowels == 2 and first[0] == second[0]) / 2


# The agents: any causal language models. These are random, and a letter is a token


def make_agents() -> dict[str, PreTrainedModel]:
    config = LlamaConfig(
        vocab_size=len(LETTERS) + 2,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        eos_token_id=END,
        pad_token_id=PAD,
        bos_token_id=None,
    )
    return {role: LlamaForCausalLM(config) for role in ROLES}


def encode(text: str) -> list[int]:
    return [LETTERS.index(letter) for letter in text]


def decode(ids: list[int]) -> str:
    return "".join(LETTERS[k] for k in ids if k < END)


# 1. Rollout: each agent samples G completions of its own prompt


def sample(model: PreTrainedModel, prompt: list[int], group_size: int, max_length: int) -> list[list[int]]:
    """Returns the token ids of `group_size` completions, each up to its end token."""
    with torch.no_grad():
        ids = torch.tensor([prompt] * group_size)
        sampled = model.generate(ids, max_new_tokens=max_length, do_sample=True, top_k=0, pad_token_id=PAD)
    completions = [row[len(prompt) :].tolist() for row in sampled]
    return [ids[: ids.index(END) + 1] if END in ids else ids for ids in completions]


# 2. Joint actions: the g-th completions of all agents belong together, and get one reward


def joint_rewards(completions: dict[str, list[list[int]]]) -> list[float]:
    group_size = len(completions[ROLES[0]])
    return [reward({role: decode(completions[role][g]) for role in ROLES}) for g in range(group_size)]


# 3. Advantages: what a joint action earned, compared with its group. They are the same for all agents


def advantages_of(rewards: list[float]) -> list[float]:
    mean = sum(rewards) / len(rewards)
    return [r - mean for r in rewards]


# 4. Loss of an agent: the mean over its completions of -A_g * sum over tokens of log pi(token)


def log_probability(model: PreTrainedModel, prompt: list[int], completion: list[int]) -> torch.Tensor:
    """Returns the sum of the log-probabilities of the completion's tokens, the end token included."""
    ids = torch.tensor([prompt + completion])
    logits = model(ids).logits[0, len(prompt) - 1 : -1]  # each position predicts the next token
    return logits.log_softmax(-1).gather(1, torch.tensor(completion)[:, None]).sum()


def loss_of(
    model: PreTrainedModel, prompts: list[list[int]], groups: list[list[list[int]]], advantages: list[list[float]]
) -> torch.Tensor:
    """
    Computes the loss of one agent.

    Args:
        prompts (`list[list[int]]`): Token ids of the agent's prompt, one per item.
        groups (`list[list[list[int]]]`): Token ids of its G completions of each prompt.
        advantages (`list[list[float]]`): The advantages of these.
    """
    terms = [
        -advantage * log_probability(model, prompt, completion)
        for prompt, group, of_group in zip(prompts, groups, advantages, strict=True)
        for completion, advantage in zip(group, of_group, strict=True)
    ]
    return torch.stack(terms).mean()


def main(steps: int = 40, items_per_step: int = 8, group_size: int = 8, learning_rate: float = 3e-3) -> float:
    """Trains both agents, and returns the mean reward of the last step."""
    torch.manual_seed(0)
    agents = make_agents()
    optimizers = {role: torch.optim.AdamW(agents[role].parameters(), learning_rate) for role in ROLES}
    mean = 0.0
    for step in range(steps):
        letters = torch.randint(len(LETTERS), (items_per_step, len(ROLES)))
        items = [dict(zip(ROLES, (LETTERS[k] for k in row), strict=True)) for row in letters]
        prompts = {role: [encode(prompts_of(item)[role]) for item in items] for role in ROLES}
        groups = {role: [sample(agents[role], ids, group_size, 2) for ids in prompts[role]] for role in ROLES}
        rewards = [joint_rewards({role: groups[role][k] for role in ROLES}) for k in range(items_per_step)]
        advantages = [advantages_of(of_group) for of_group in rewards]
        for role in ROLES:  # each agent learns from its own completions and the rewards of all
            loss_of(agents[role], prompts[role], groups[role], advantages).backward()
            optimizers[role].step()
            optimizers[role].zero_grad()
        mean = sum(map(sum, rewards)) / (items_per_step * group_size)
        if step % 10 == 9:
            said = {role: decode(groups[role][0][0]) for role in ROLES}
            print(f"step {step + 1:3}  reward {mean:.2f}  {said}")
    return mean


if __name__ == "__main__":
    main()
