"""
What the parts of the engine save, in processor time.

    python benchmarks/engine.py                    # all parts, about eleven minutes on one core
    python benchmarks/engine.py --parts sampling   # some of them
    python benchmarks/engine.py --smoke            # seconds: whether it runs; its numbers mean nothing

Each part compares a way of this package with another one that gives the same, in one process, on one thread and in
turns, and reports medians. All models are in float32.

sampling: the sampling loop, against transformers' `generate` with the same shared prompts in a static cache, per token
that is sampled. The cases are a turn of the demo (16 prompts, 4 completions of at most 40 tokens each), and a random
model of 12 million parameters with a vocabulary of 16,384.

packing: an update in which rows share what they have in common, against rows of their own. A random Llama of 2.1 M
parameters, forward and backward of all rows of rollout trees with four completions per prompt. Packed rows are
computed in one pass, rows of their own in a pass for each prompt, which has the least padding. `checkpointed`
recomputes activations, which is TRL's default; `kept` does not. `positions` are those of the forward passes.

grouping: one call for all LoRA agents on one base, against one call for each. A random Qwen2 of 50 M parameters with
an adapter of rank 16 on all linear layers per agent, which samples four completions of 24 tokens per agent. `base`
shows what bounds one call: the base samples as many rows without adapters.
"""

import argparse
import contextlib
import json
import random
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import torch
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer, models
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    StaticCache,
)
from trl.trainer.utils import add_fused_lm_head, pad

from trl_multiagent import AgentTeam
from trl_multiagent.demo.model import demo_model
from trl_multiagent.demo.problems import demo_dataset, demo_prompts
from trl_multiagent.models.generation import generate_groups
from trl_multiagent.models.shared_prompts import prompt_cache
from trl_multiagent.rollout.sampler import TransformersGenerator, TurnPrompts, sampling_arguments
from trl_multiagent.rollout.tree import Node, Samples
from trl_multiagent.team.agent_team import run_agent
from trl_multiagent.trainers.base import batch
from trl_multiagent.trainers.base.batch import Row, agent_tensors, forward_inputs


COMPLETIONS = 4  # of each prompt
Result = tuple[str, dict[str, float]]  # a case, and the milliseconds of each way, this package's first


def in_turns(ways: dict[str, Callable[[int], int]], rounds: int) -> dict[str, float]:
    """
    Returns the medians of the processor milliseconds of functions, each divided by what it returns. They get the
    number of the round.
    """
    times: dict[str, list[float]] = {name: [] for name in ways}
    for k in range(rounds + 1):
        for name, way in ways.items():
            start = time.process_time()
            number = way(k)
            times[name].append((time.process_time() - start) * 1e3 / number)
    return {name: statistics.median(of_way[1:]) for name, of_way in times.items()}  # the first one is not counted


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


def measure_sampling(rounds: int, smoke: bool) -> Iterator[Result]:
    rng = random.Random(0)
    prompts = [[rng.randrange(100) for _ in range(rng.randint(16, 32))] for _ in range(4)]
    cases = {"12M, vocabulary 16,384": (random_model(16384, 256, 4), prompts, 16383, 16382, 24)}
    if smoke:
        cases = {"tiny": (random_model(128, 16, 1), prompts, 127, 126, 4)}
    else:
        cases["demo"] = (*demo_level(), 40)
    for name, (model, of_case, end, padding, tokens) in cases.items():
        config = GenerationConfig(
            **{"max_new_tokens": tokens, "do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0},
            **{"eos_token_id": [end], "pad_token_id": padding, "disable_compile": True},
        )

        def ours(k: int) -> int:
            seeds = [[1000 * k + COMPLETIONS * p + g for g in range(COMPLETIONS)] for p in range(len(of_case))]  # noqa: B023
            groups = generate_groups(model, of_case, seeds, config)  # noqa: B023
            return sum(len(ids) for group in groups for ids in group)

        ways = {"loop": ours, "generate": lambda k: with_generate(model, of_case, config)}  # noqa: B023
        yield f"sampling, {name}, per token", in_turns(ways, rounds)


# Packing


VOCABULARY = 1024
PROMPT, COMPLETION, FEEDBACK = 120, 40, 30  # the most tokens of each
ITEMS = {1: 8, 2: 2, 3: 1}  # by number of turns


def tree_rows(num_turns: int, num_items: int) -> list[Row]:
    """
    The rows of whole trees. Prompts and completions have different lengths, and a child's prompt continues its
    parent's row.
    """
    generator = torch.Generator().manual_seed(0)

    def tokens(most: int) -> list[int]:
        length = int(torch.randint(most // 2, most + 1, (), generator=generator))
        return torch.randint(VOCABULARY, (length,), generator=generator).tolist()

    rows: list[Row] = []
    prompts = [tokens(PROMPT) for _ in range(num_items)]
    for turn in range(num_turns):
        following = []
        for prompt in prompts:
            completions = [tokens(COMPLETION) for _ in range(COMPLETIONS)]
            samples = {"agent": Samples(prompt, completions, [""] * COMPLETIONS)}
            rows += [Row(turn, samples, g, {"agent": g - 1.5}) for g in range(COMPLETIONS)]
            following += [[*prompt, *completion, *tokens(FEEDBACK)] for completion in completions]
        prompts = following
    return rows


def update(model: LlamaForCausalLM, rows: list[Row], own: bool) -> tuple[int, float]:
    """Takes a forward and a backward. Returns the number of positions, and the norm of the gradient."""
    model.zero_grad()
    size = COMPLETIONS if own else len(rows)
    positions = 0
    for part in [agent_tensors(rows[k : k + size], "agent", 0, [1]) for k in range(0, len(rows), size)]:
        with mock.patch.object(batch, "can_pack", return_value=False) if own else contextlib.nullcontext():
            inputs = forward_inputs(model, part)
        log_probs = run_agent(model, None, **inputs).log_probs[:, -part.completion_ids.size(1) :]
        ((log_probs * part.completion_mask).sum(dim=1) * part.advantages).sum().div(-len(rows)).backward()
        positions += inputs["input_ids"].numel()
    return positions, torch.nn.utils.get_total_norm([parameter.grad for parameter in model.parameters()]).item()


def measure_packing(rounds: int, smoke: bool) -> Iterator[Result]:
    torch.manual_seed(0)
    size = {"hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, max_position_embeddings=4096, **size)).train()
    add_fused_lm_head(model, outputs=("log_probs", "entropy"))
    for num_turns, num_items in ITEMS.items() if not smoke else [(1, 1)]:
        rows = tree_rows(num_turns, num_items)
        (packed, norm), (own, other) = update(model, rows, own=False), update(model, rows, own=True)
        assert abs(norm - other) < 1e-4 * norm, f"the updates differ: {norm}, {other}"
        ways = {"packed": lambda k: bool(update(model, rows, own=False))}  # noqa: B023
        ways["own rows"] = lambda k: bool(update(model, rows, own=True))  # noqa: B023
        for form in ("checkpointed", "kept"):
            switch = "enable" if form == "checkpointed" else "disable"
            getattr(model, f"activation_checkpointing_{switch}")()
            case = f"packing, T = {num_turns}, {len(rows)} rows, {packed} and {own} positions, {form}"
            yield case, in_turns(ways, rounds)


# Grouping


BASE = {"hidden_size": 640, "intermediate_size": 1728, "num_hidden_layers": 8, "vocab_size": 16384}
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


def sampling(team: AgentTeam, prompt: list[int], num_tokens: int, apart: bool = False) -> Callable[[int], int]:
    """Returns a function that samples with all agents, in one call or `apart`."""
    generator = TransformersGenerator(team, sampling_arguments({"max_new_tokens": num_tokens}))
    nodes, prompts = [Node({}, [], {})], [prompt]
    calls = [(role,) for role in team.roles] if apart else [team.roles]

    def sample(k: int) -> int:
        for roles in calls:
            asked = TurnPrompts(dict.fromkeys(roles, nodes), dict.fromkeys(roles, prompts), COMPLETIONS)
            generator.generate(asked)
        return 1

    return sample


def measure_grouping(rounds: int, smoke: bool) -> Iterator[Result]:
    size, tokens = (SMALL, 4) if smoke else (BASE, 24)
    for num_agents in (2,) if smoke else (2, 4, 8):
        team, alone = make_team(num_agents, size), make_team(num_agents, size, adapters=False)
        torch.manual_seed(1)
        prompt = torch.randint(1, 200, (60,)).tolist()
        ways = {"one call": sampling(team, prompt, tokens), "a call each": sampling(team, prompt, tokens, apart=True)}
        ways["base"] = sampling(alone, prompt, tokens)
        yield f"grouping, {num_agents} LoRA agents", in_turns(ways, rounds)


PARTS = {"sampling": measure_sampling, "packing": measure_packing, "grouping": measure_grouping}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0].strip())
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=[*PARTS], help="what to measure (default: all)")
    parser.add_argument("--rounds", type=int, default=9, help="measurements of each (default: 9)")
    parser.add_argument("--smoke", action="store_true", help="seconds: tiny models")
    parser.add_argument("--output", type=Path, default=Path("engine.json"), help="where the JSON goes")
    options = parser.parse_args()
    torch.set_num_threads(1)
    results = []
    for part in options.parts:
        for case, times in PARTS[part](1 if options.smoke else options.rounds, options.smoke):
            ours, other = [*times.values()][:2]
            results.append({"case": case, "ms": times, "ratio": other / ours})
            columns = ", ".join(f"{name} {value:.3f} ms" for name, value in times.items())
            print(f"{case}: {columns}, ratio {other / ours:.2f}", flush=True)
    options.output.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
