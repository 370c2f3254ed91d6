"""
LoRA agents on one base: one call for all of them against one call for each, in processor time.

    python -m benchmarks.engine.grouped            # a base of 50 M parameters: about 4 minutes on one core
    python -m benchmarks.engine.grouped --smoke    # seconds: whether it runs; its numbers mean nothing

The base is a random Qwen2 in float32, each agent has an adapter of rank 16 on all linear layers. One turn of rollout
trees is sampled; both ways take turns with a third one, which shows what bounds one call: the base samples as many
rows without adapters.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from trl_multiagent import AgentTeam
from trl_multiagent.rollout.sampler import TransformersGenerator, TurnPrompts
from trl_multiagent.rollout.sampling_arguments import sampling_arguments
from trl_multiagent.rollout.tree import Node


SIZE = {"hidden_size": 640, "intermediate_size": 1728, "num_hidden_layers": 8, "vocab_size": 16384}
SMALL = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 256}


def make_team(num_agents: int, size: dict[str, int], adapters: bool = True) -> AgentTeam:
    torch.manual_seed(0)
    heads = {
        "num_attention_heads": max(2, size["hidden_size"] // 64),
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
    }
    base = Qwen2ForCausalLM(Qwen2Config(**size, **heads))
    lora = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", init_lora_weights=False)
    roles = [f"agent_{k}" for k in range(num_agents)]
    model = get_peft_model(base, lora, adapter_name=roles[0]) if adapters else base
    for role in roles[1:] if adapters else ():
        model.add_adapter(role, lora)
    words = {f"w{k}": k for k in range(size["vocab_size"])}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(words)), eos_token="w0")
    return AgentTeam(dict.fromkeys(roles, model), dict.fromkeys(roles, tokenizer))


def sampling(team: AgentTeam, prompts: list[list[int]], num_generations: int, num_tokens: int) -> list[Callable]:
    """Returns a function for each of the two ways."""
    generator = TransformersGenerator(team, sampling_arguments({"max_new_tokens": num_tokens}))
    nodes = [Node({}, [], {}) for _ in prompts]

    def sample(*roles: str) -> None:
        generator.generate(TurnPrompts(dict.fromkeys(roles, nodes), dict.fromkeys(roles, prompts), num_generations))

    return [lambda: [sample(role) for role in team.roles], lambda: sample(*team.roles)]


def seconds(ways: list[Callable], repetitions: int) -> list[float]:
    """Returns the median processor time of each way. The first run of each does not count."""
    times: list[list[float]] = [[] for _ in ways]
    for _ in range(repetitions + 1):
        for way, of_way in zip(ways, times, strict=True):
            start = time.process_time()
            way()
            of_way.append(time.process_time() - start)
    return [statistics.median(of_way[1:]) for of_way in times]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0].strip())
    parser.add_argument("--smoke", action="store_true", help="seconds: a tiny base, two agents")
    parser.add_argument("--agents", type=int, nargs="+", default=[2, 4, 8], help="numbers of agents (default: 2 4 8)")
    parser.add_argument("--repetitions", type=int, default=5, help="timed runs of each way (default: 5)")
    parser.add_argument("--output", type=Path, default=Path("grouped.json"), help="where the JSON goes")
    options = parser.parse_args()
    torch.set_num_threads(1)
    size, numbers = (SMALL, [2]) if options.smoke else (SIZE, options.agents)
    repetitions = 1 if options.smoke else options.repetitions
    results = []
    print(f"{'part':10}{'agents':>7}{'rows':>6}{'each, s':>10}{'one, s':>10}{'ratio':>7}{'base, s':>10}")
    for num_agents in numbers:
        team = make_team(num_agents, size)
        torch.manual_seed(1)
        prompts = torch.randint(1, 200, (1, 60)).tolist()
        number = 4 if options.smoke else 24
        ways = sampling(team, prompts, 4, number)
        ways += sampling(make_team(num_agents, size, adapters=False), prompts, 4, number)[1:]
        each, one, base = seconds(ways, repetitions)
        results.append({"part": "sampling", "agents": num_agents, "rows": 4, "each": each, "one": one, "base": base})
        print(f"{'sampling':10}{num_agents:7}{4:6}{each:10.3f}{one:10.3f}{each / one:7.2f}{base:10.3f}", flush=True)
    options.output.write_text(json.dumps({"size": size, "results": results}))


if __name__ == "__main__":
    main()
