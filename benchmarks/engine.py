"""
What the parts of the engine save, in processor time.

    python benchmarks/engine.py                    # all parts, about five minutes on one core
    python benchmarks/engine.py --parts sampling   # some of them
    python benchmarks/engine.py --smoke            # seconds: whether it runs; its numbers mean nothing

Each part compares a way of this package with another one that gives the same, in one process and in turns, and reports
medians.

sampling: the sampling loop, against transformers' `generate` with the same shared prompts in a static cache, per token
that is sampled. The cases are a turn of the demo (16 prompts, 4 completions of at most 40 tokens each), and a random
model of 12 million parameters with a vocabulary of 16,384.
"""

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    StaticCache,
)
from trl.trainer.utils import pad

from trl_multiagent.demo.model import demo_model
from trl_multiagent.demo.problems import demo_dataset, demo_prompts
from trl_multiagent.models.generation import generate_groups
from trl_multiagent.models.shared_prompts import prompt_cache


Result = dict[str, float | str]
COMPLETIONS = 4  # of each prompt


def in_turns(ours: Callable[[int], int], other: Callable[[int], int], rounds: int) -> tuple[float, float]:
    """
    Returns the medians of the processor seconds of two functions, each divided by what it returns. They get the number
    of the round.
    """
    seconds: dict[Callable[[int], int], list[float]] = {ours: [], other: []}
    for k in range(-1, rounds):  # the first one is not counted
        for function, measured in seconds.items():
            start = time.process_time()
            number = function(k + 1)
            measured += [(time.process_time() - start) / number] if k >= 0 else []
    return statistics.median(seconds[ours]), statistics.median(seconds[other])


# Sampling


def random_model(vocabulary: int, hidden: int, layers: int) -> PreTrainedModel:
    torch.manual_seed(0)
    size = {
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "intermediate_size": 3 * hidden,
        "num_hidden_layers": layers,
    }
    return LlamaForCausalLM(LlamaConfig(num_attention_heads=4, **size)).eval()


def demo_level() -> tuple[PreTrainedModel, list[list[int]], int, int]:
    """Returns the demo's model, prompts, and the tokens that end and pad completions."""
    path = demo_model()
    tokenizer = AutoTokenizer.from_pretrained(path)
    prompts = [tokenizer(demo_prompts(item)["main"])["input_ids"] for item in demo_dataset("train").select(range(16))]
    return AutoModelForCausalLM.from_pretrained(path).eval(), prompts, tokenizer.eos_token_id, tokenizer.pad_token_id


@torch.no_grad()
def with_generate(model: PreTrainedModel, prompts: list[list[int]], config: GenerationConfig) -> int:
    """Samples with transformers. Returns the number of tokens."""
    tensors = [torch.tensor(ids) for ids in prompts]
    ids = pad(tensors, padding_value=config.pad_token_id, padding_side="left")
    mask = pad([torch.ones_like(x) for x in tensors], padding_value=0, padding_side="left")
    owners, length = torch.arange(len(prompts)).repeat_interleave(COMPLETIONS), ids.size(1)
    prompt_layers = prompt_cache(model, ids, mask, owners, length).layers
    cache = StaticCache(config=model.config, max_cache_len=length + config.max_new_tokens)
    for k, layer in enumerate(prompt_layers):
        cache.update(layer.keys, layer.values, k)
    inputs = {"input_ids": ids[owners], "attention_mask": mask[owners], "past_key_values": cache}
    output = model.generate(**inputs, generation_config=config)[:, length:]
    ends = output == config.eos_token_id[0]
    return int(((ends.cumsum(dim=1) - ends.long()) == 0).sum())


def measure_sampling(rounds: int, smoke: bool) -> list[Result]:
    rng = random.Random(0)
    prompts = [[rng.randrange(100) for _ in range(rng.randint(16, 32))] for _ in range(4)]
    cases = {"12M, vocabulary 16,384": (random_model(16384, 256, 4), prompts, 16383, 16382, 24)}
    if smoke:
        cases = {"tiny": (random_model(128, 16, 1), prompts, 127, 126, 4)}
    else:
        cases["demo"] = (*demo_level(), 40)
    results: list[Result] = []
    for name, (model, of_case, end, padding, tokens) in cases.items():
        config = GenerationConfig(
            **{"max_new_tokens": tokens, "do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0},
            **{"eos_token_id": [end], "pad_token_id": padding, "disable_compile": True},
        )

        def ours(k: int) -> int:
            seeds = [[1000 * k + COMPLETIONS * p + g for g in range(COMPLETIONS)] for p in range(len(of_case))]  # noqa: B023
            groups = generate_groups(model, of_case, seeds, config)  # noqa: B023
            return sum(len(ids) for group in groups for ids in group)

        own, other = in_turns(ours, lambda k: with_generate(model, of_case, config), rounds)  # noqa: B023
        results.append({"case": f"sampling, {name}", "ours": own * 1e3, "other": other * 1e3, "unit": "ms per token"})
    return results


PARTS = {"sampling": measure_sampling}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0].strip())
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=[*PARTS], help="what to measure (default: all)")
    parser.add_argument("--rounds", type=int, default=15, help="measurements of each (default: 15)")
    parser.add_argument("--smoke", action="store_true", help="seconds: tiny models")
    parser.add_argument("--output", type=Path, default=Path("engine.json"), help="where the JSON goes")
    options = parser.parse_args()
    torch.set_num_threads(1)
    results = [
        result
        for part in options.parts
        for result in PARTS[part](1 if options.smoke else options.rounds, options.smoke)
    ]
    print(f"{'':40}{'ours':>10}{'other':>10}{'ratio':>8}")
    for x in results:
        x["ratio"] = x["other"] / x["ours"]
        print(f"{x['case']:40}{x['ours']:10.4f}{x['other']:10.4f}{x['ratio']:8.2f}  {x['unit']}")
    options.output.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
