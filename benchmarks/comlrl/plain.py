"""
The reward curve of `steps.py --algorithms iac` once more, in plain PyTorch and transformers.

    python -m benchmarks.comlrl.plain              # about a minute per seed
    python -m benchmarks.comlrl.plain --smoke      # seconds: whether it runs; its numbers mean nothing

IAC with a critic that explains nothing is REINFORCE with rewards that are standardized over the update. This is a loop
of about forty lines with neither system, on the same items, prompts, rewards, optimizer and learning rate. A system
whose curve differs from this one by more than chance, while its critic explains little, has a fault.
"""

import argparse
import json
import statistics
import tempfile
from pathlib import Path

import torch
from tqdm.auto import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.comlrl.steps import COMMON, CRITICS, CURVE_LEARNING_RATE, items
from benchmarks.comlrl.task import ROLES, load_reward
from benchmarks.team_run import save_model
from trl_multiagent.configs.recipes.demo.model import demo_model


STEPS, POINTS = 40, 8
SIZE = CRITICS["items_per_step"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0].strip())
    parser.add_argument("--smoke", action="store_true", help="seconds: two steps of a tiny model")
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds (default: 3)")
    parser.add_argument("--first_seed", type=int, default=0, help="the first of them (default: 0)")
    parser.add_argument("--output", type=Path, default=Path("comlrl_plain.json"), help="where the JSON goes")
    options = parser.parse_args()
    torch.set_num_threads(1)
    steps, points, size = STEPS, POINTS, SIZE
    seeds = range(options.first_seed, options.first_seed + options.seeds)
    curves = []
    with tempfile.TemporaryDirectory() as folder:
        if options.smoke:
            steps, points, size, seeds = 2, 2, 4, range(1)
            save_model(Path(folder), hidden_size=64, num_layers=1)
        model = folder if options.smoke else demo_model()
        for seed in seeds:
            rewards = train(model, seed, steps, size)
            stretch = steps // points
            curves.append([statistics.mean(rewards[k : k + stretch]) for k in range(0, steps, stretch)])
            options.output.write_text(json.dumps({"by_seed": curves}, indent=2) + "\n")
    print("env steps up to " + "".join(f"{size * steps // points * (k + 1):7}" for k in range(points)))
    print("plain PyTorch   " + "".join(f"{statistics.mean(column):7.2f}" for column in zip(*curves, strict=True)))
    means = [statistics.mean(curve) for curve in curves]
    error = f" +- {statistics.stdev(means) / len(means) ** 0.5:.2f} (standard error)" if len(means) > 1 else ""
    print(f"mean over the whole run: {statistics.mean(means):.2f}{error}, {len(means)} seeds")


def train(model: str, seed: int, steps: int, size: int) -> list[float]:
    """Trains a team that starts from a model, and returns the mean joint reward of each step."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    agents = {role: AutoModelForCausalLM.from_pretrained(model) for role in ROLES}
    optimizers = {role: torch.optim.AdamW(agents[role].parameters(), lr=CURVE_LEARNING_RATE) for role in ROLES}
    score = load_reward("code")
    torch.manual_seed(seed)
    dataset, means = items(steps * size, seed), []
    for step in tqdm(range(steps), desc=f"seed {seed}", unit="step"):
        batch = dataset[size * step : size * (step + 1)]
        sampled = {role: sample(agents[role], tokenizer, [item[f"{role}_prompt"] for item in batch]) for role in ROLES}
        texts = {
            role: tokenizer.batch_decode([ids for _, ids in pairs], skip_special_tokens=True)
            for role, pairs in sampled.items()
        }
        joint_actions = [dict(zip(ROLES, answers, strict=True)) for answers in zip(*texts.values(), strict=True)]
        rewards = torch.tensor(score(batch, joint_actions))
        means.append(rewards.mean().item())
        advantages = (rewards - rewards.mean()) / rewards.std(correction=0).clamp(min=1e-6)
        for role in ROLES:
            optimizers[role].zero_grad()
            for (prompt, completion), advantage in zip(sampled[role], advantages, strict=True):
                log_p = (
                    agents[role](torch.cat([prompt, completion])[None]).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
                )
                (-advantage * log_p.gather(1, completion[:, None]).sum() / size).backward()
            optimizers[role].step()
    return means


@torch.no_grad()
def sample(agent, tokenizer, prompts: list[str]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Samples one completion of each prompt, and returns the tokens of both, without padding."""
    inputs = tokenizer(prompts, return_tensors="pt", padding=True, padding_side="left")
    output = agent.generate(
        **inputs, do_sample=True, temperature=1.0, top_p=1.0, top_k=0, max_new_tokens=COMMON["max_new_tokens"]
    )
    length = inputs["input_ids"].size(1)
    pairs = zip(inputs["input_ids"], inputs["attention_mask"], output[:, length:], strict=True)
    pad = tokenizer.pad_token_id
    # The loss counts the end-of-sequence token, and `generate` fills the rest of a row with padding
    return [(ids[mask.bool()], row[(row == pad).cumsum(0) == 0]) for ids, mask, row in pairs]


if __name__ == "__main__":
    main()
