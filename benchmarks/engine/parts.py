"""
What the parts of the engine save, in processor time.

    python -m benchmarks.engine.parts                    # all parts, about five minutes on one core
    python -m benchmarks.engine.parts --parts sampling   # some of them
    python -m benchmarks.engine.parts --smoke            # seconds: whether it runs; its numbers mean nothing

Each part compares a way of this package with another one that gives the same, in one process and in turns, and reports
medians.

sampling: the sampling loop, against transformers' `generate` with the same shared prompts in a static cache, per token
that is sampled. The cases are a turn of the demo (16 prompts, 4 completions of at most 40 tokens each), and a random
model of 12 million parameters with a vocabulary of 16,384.

update: an update of 8 items of the demo, G = 4, of which two have answers with different rewards, against a quarter of
an update in which all have. Two full agents, 8 rows per forward.

waits: how often the host would wait for a GPU, counted on the CPU: per token of a call of 256 tokens, in the form of
the loop that a GPU uses, without its graphs; and per micro-batch of two agents, in the forward and the loss. TRL's
head on a GPU and transformers' `Trainer` wait more often.

demo: the share of the reward, with the experiments of `earned`, of the wall time of the first and last 20 steps of the
demo: the medians of what the run's log calls `time/generate`, `time/reward` and `time/update`.

products: what the matrix products with the weights alone take in float32, in a model of SmolLM2-135M's shape, against
the sampling loop and an update (one prompt of 100 tokens, 4 completions of 24), in float32 and in bfloat16. And the
products of a token of 16 and 32 rows, with weights in float32 against bfloat16 and int8.

compiled: a token of 32 rows by the forward of such a model in bfloat16, against the same through `torch.compile`, and
what the compilation takes.
"""

import argparse
import contextlib
import dataclasses
import json
import math
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from datasets import Dataset
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DynamicCache,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    StaticCache,
    TrainerCallback,
)
from trl.trainer.utils import add_fused_lm_head, pad

from benchmarks.comlrl.floor import forward, forward_and_backward, seconds
from benchmarks.team_run import checksum_reward, save_model
from trl_multiagent import AgentTeam, FunctionEnvironment, MAGRPOConfig, MAGRPOTrainer
from trl_multiagent.configs.recipes.demo.model import demo_model
from trl_multiagent.configs.recipes.demo.problems import demo_dataset, demo_prompts
from trl_multiagent.configs.recipes.demo.task import TASK
from trl_multiagent.folders import LOG_FILE
from trl_multiagent.models.generation import generate_groups
from trl_multiagent.models.sampling_loop import GPU_PERIOD, SamplingLoop
from trl_multiagent.models.shared_prompts import read_padded, repeat_prompts
from trl_multiagent.rollout.tree import Samples
from trl_multiagent.runs.run import run_recipe
from trl_multiagent.team.agent_team import run_agent
from trl_multiagent.trainers.base.batch import Batch, Row, agent_tensors, forward_inputs


Result = dict[str, float | str]
COMPLETIONS = 4  # of each prompt
PHASES = ("generate", "reward", "update")  # of a step


def in_turns(ours: Callable[[int], int], other: Callable[[int], int], rounds: int) -> tuple[float, float]:
    """
    Returns the medians of the processor seconds of two functions, each divided by what it returns. They get the number
    of the round.
    """
    taken: dict[Callable[[int], int], list[float]] = {ours: [], other: []}
    for k in range(-1, rounds):  # the first one is not counted
        for function, measured in taken.items():
            start = time.process_time()
            number = function(k + 1)
            measured += [(time.process_time() - start) / number] if k >= 0 else []
    return statistics.median(taken[ours]), statistics.median(taken[other])


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
    prompt_cache = read_padded(model, ids, mask)
    repeat_prompts(prompt_cache, owners, length)
    cache = StaticCache(config=model.config, max_cache_len=length + config.max_new_tokens)
    for k, layer in enumerate(prompt_cache.layers):
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


# Update and waits


class Timed(MAGRPOTrainer):
    """Records the processor seconds of each update, without what precedes it, and the waits of its micro-batches."""

    def _generate_and_score_completions(self, inputs: list[dict]) -> list[Batch]:
        start = time.process_time()
        batches = super()._generate_and_score_completions(inputs)
        self.sampling = time.process_time() - start
        self.made = len(batches)
        return batches

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        start, self.sampling = time.process_time(), 0.0
        loss = super().training_step(*args, **kwargs)
        self.seconds += time.process_time() - start - self.sampling
        return loss

    def compute_loss(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        with Waits() as waits:
            loss = super().compute_loss(*args, **kwargs)
        self.waits = waits.count
        return loss


class Waits(TorchDispatchMode):
    """Counts the operations whose result the host reads."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        aten = torch.ops.aten
        self.count += func in (aten._local_scalar_dense.default, aten.nonzero.default)
        return func(*args, **(kwargs or {}))

    def __enter__(self) -> "Waits":
        read = torch.Tensor.tolist  # no operation of torch

        def tolist(x: torch.Tensor) -> Any:
            self.count += 1
            return read(x)

        self.patch = mock.patch.object(torch.Tensor, "tolist", tolist)
        self.patch.start()
        return super().__enter__()

    def __exit__(self, *args: Any) -> None:
        self.patch.stop()
        super().__exit__(*args)


def steps_of(kept: int, steps: int, smoke: bool) -> Timed:
    """Takes steps in which the answers to `kept` of 8 items have different rewards. Returns the trainer."""

    def reward(completions: list[dict[str, str]], x: list[int], **columns: Any) -> list[float]:
        values = checksum_reward(completions)
        return [value if k % 8 < kept else 0.0 for k, value in zip(x, values, strict=True)]

    with tempfile.TemporaryDirectory() as folder:
        if smoke:
            save_model(Path(folder), 64, 1)
        path = folder if smoke else demo_model()
        items = [demo_prompts(row) for row in demo_dataset("train").select(range(8))]
        rows = [{"x": k, **{f"of_{role}": text for role, text in item.items()}} for k, item in enumerate(items)]
        config = MAGRPOConfig(
            folder,
            **{"items_per_device": 8, "num_generations": 4, "max_completion_length": 4 if smoke else 40},
            **{"per_device_train_batch_size": 8, "max_steps": steps, "learning_rate": 1e-6, "shuffle_dataset": False},
            **{"bf16": False, "use_cpu": True, "gradient_checkpointing": False, "report_to": "none"},
            **{"save_strategy": "no", "disable_tqdm": True, "logging_strategy": "no"},
        )
        environment = FunctionEnvironment({"aux": "{of_aux}", "main": "{of_main}"}, reward)
        trainer = Timed(AgentTeam.from_pretrained(path, ["aux", "main"]), environment, config, Dataset.from_list(rows))
        trainer.seconds, of_steps = 0.0, []

        class EndOfStep(TrainerCallback):
            def on_step_end(self, *args: Any, **kwargs: Any) -> None:
                of_steps.append(trainer.seconds)
                trainer.seconds = 0.0

        trainer.add_callback(EndOfStep())
        trainer.train()
    trainer.seconds = statistics.median(of_steps[1:])
    return trainer


def measure_update(rounds: int, smoke: bool) -> list[Result]:
    whole, quarter = (steps_of(kept, rounds + 1, smoke) for kept in (8, 2))
    assert (whole.made, quarter.made) == (4, 1)
    name = "a quarter of the rows, over its share"
    return [{"case": f"update, {name}", "ours": whole.seconds / 4, "other": quarter.seconds, "unit": "s"}]


def measure_waits(rounds: int, smoke: bool) -> list[Result]:
    config = GenerationConfig(
        **{"max_new_tokens": 4 if smoke else 256, "do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0},
        **{"eos_token_id": [127], "pad_token_id": 126, "disable_compile": True},
    )
    loop = "trl_multiagent.models.sampling_loop"
    run, counts = SamplingLoop.run, []

    def counted(*args: Any) -> torch.Tensor:
        with Waits() as waits:
            result = run(*args)
        counts.append(waits.count / (result.size(1) - args[2].size(1)))
        return result

    with (
        mock.patch(f"{loop}.replays", lambda device: True),
        mock.patch(f"{loop}.period_of", lambda device: GPU_PERIOD),
        mock.patch.object(SamplingLoop, "run", counted),
    ):
        generate_groups(random_model(127, 16, 1), [[5, 6], [7]], [[0], [1]], config)
    micro_batch = steps_of(8, 2, smoke).waits
    cases = {"waits, per token": counts[0], "waits, per micro-batch": float(micro_batch)}
    return [{"case": case, "ours": number, "other": math.nan, "unit": ""} for case, number in cases.items()]


# The reward


def measure_demo(rounds: int, smoke: bool) -> list[Result]:
    with tempfile.TemporaryDirectory() as folder:
        changes = ["magrpo.disable_tqdm=true", "output.save_final_model=false", f"magrpo.output_dir={folder}/run"]
        if smoke:
            save_model(Path(folder, "model"), 64, 1)
            changes += [f"agent_model.name={folder}/model", "magrpo.max_steps=2", "magrpo.items_per_device=2"]
        with contextlib.redirect_stdout(sys.stderr):
            task = dataclasses.replace(TASK, callbacks=None) if smoke else TASK  # without the demo's evaluations
            run_recipe("magrpo", task, ["--config", "magrpo_demo", "--override", *changes], "benchmark")
        log = map(json.loads, Path(folder, "run", LOG_FILE).read_text().splitlines())
        steps = [{phase: x[f"time/{phase}"] for phase in PHASES} for x in log if "time/reward" in x]
    results: list[Result] = []
    for name, part in {"first": steps[:20], "last": steps[-20:]}.items():
        medians = {phase: statistics.median(x[phase] for x in part) for phase in PHASES}
        share: Result = {"case": f"demo, reward, {name} steps", "ours": sum(medians.values()), "unit": "s, wall time"}
        results.append(share | {"other": medians["reward"]} | medians)
    return results


# Beside matrix products


def in_bfloat16(x: torch.Tensor, weight: torch.Tensor) -> None:
    x.bfloat16() @ weight.T


def in_int8(x: torch.Tensor, weight: torch.Tensor) -> None:
    """A product of rows that are rounded each by its own scale, because a token must not depend on other rows."""
    scale = x.abs().amax(dim=1, keepdim=True) / 127
    torch._int_mm((x / scale).round().to(torch.int8), weight.T) * scale * torch.ones(len(weight))


def small_llama(smoke: bool) -> LlamaForCausalLM:
    """Returns a random model of the shape of SmolLM2-135M."""
    size = (128, 16, 32, 1, 4, 4) if smoke else (49152, 576, 1536, 30, 9, 3)
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    torch.manual_seed(0)
    config = LlamaConfig(**dict(zip((*names, "num_key_value_heads"), size, strict=True)), tie_word_embeddings=True)
    return LlamaForCausalLM(config).eval()


@torch.no_grad()
def measure_compiled(rounds: int, smoke: bool) -> list[Result]:
    model = small_llama(smoke).to(torch.bfloat16)
    prompts, token = torch.zeros(32, 60, dtype=torch.long), torch.zeros(32, 1, dtype=torch.long)

    def seconds_per_token(forward: Callable[..., Any]) -> float:
        cache, times = DynamicCache(config=model.config), []
        model(prompts, past_key_values=cache)
        for k in range(8 * rounds):
            start = time.process_time()
            forward(token, past_key_values=cache, position_ids=torch.full_like(token, 60 + k))
            times.append(time.process_time() - start)
        return statistics.median(times)

    start = time.process_time()
    compiled = torch.compile(model, dynamic=True, backend="eager" if smoke else "inductor")
    seconds_per_token(compiled)
    case = f"a token of 32 rows, compiled in {time.process_time() - start:.0f} s"
    return [{"case": case, "ours": seconds_per_token(compiled), "other": seconds_per_token(model), "unit": "s"}]


def measure_products(rounds: int, smoke: bool) -> list[Result]:
    model = small_llama(smoke)
    add_fused_lm_head(model, outputs=("log_probs", "entropy"))
    head = model.get_output_embeddings().weight
    body = [x.weight for x in model.modules() if isinstance(x, torch.nn.Linear) and x.weight is not head]
    settings = GenerationConfig(
        **{"max_new_tokens": 24, "do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0},
        **{"eos_token_id": [127], "pad_token_id": 126, "disable_compile": True},
    )
    rng = random.Random(0)
    prompts = [[rng.randrange(100) for _ in range(100)] for _ in range(8)]
    samples = Samples(prompts[0], [[rng.randrange(100) for _ in range(24)] for _ in range(4)], [""] * 4, [[]] * 4)
    tensors = agent_tensors([Row(0, {"main": samples}, g, {"main": 1.0}) for g in range(4)], "main", 0, [127])
    inputs = forward_inputs(model, tensors)
    run, times = SamplingLoop.run, []

    def timed(*args: Any) -> torch.Tensor:
        start = time.process_time()
        result = run(*args)
        times.append(time.process_time() - start)
        return result

    def update() -> float:
        start = time.process_time()
        run_agent(model, None, **inputs).log_probs.sum().backward()
        return time.process_time() - start

    products = {
        "a token of 32 rows": seconds([*body, head], 32, forward),
        "update": seconds(body, inputs["input_ids"].numel(), forward_and_backward)
        + seconds([head], 96, forward_and_backward),
    }
    results: list[Result] = []
    for precision in ("float32", "bfloat16"):
        times.clear()
        with (
            mock.patch.object(SamplingLoop, "run", timed),
            torch.autocast("cpu", torch.bfloat16, enabled=precision == "bfloat16"),
        ):
            for k in range(1 + rounds):
                generate_groups(model, prompts, [[4 * k + g for g in range(4)]] * 8, settings)
            updates = [update() for _ in range(1 + rounds)]
        taken = {"a token of 32 rows": statistics.median(times[1:]) / 24, "update": statistics.median(updates[1:])}
        for case, number in products.items():
            results.append({"case": f"{case}, {precision}", "ours": number, "other": taken[case], "unit": "s"})
    weights = [x.detach() for x in (*body, head)]
    for rows in (16, 32):
        other = seconds(weights, rows, forward)
        for dtype, product in ((torch.bfloat16, in_bfloat16), (torch.int8, in_int8)):
            ours, case = seconds([x.to(dtype) for x in weights], rows, product), f"products of {rows} rows, {dtype}"
            results.append({"case": case, "ours": ours, "other": other, "unit": "s"})
    return results


PARTS = {
    "sampling": measure_sampling,
    "update": measure_update,
    "waits": measure_waits,
    "demo": measure_demo,
    "products": measure_products,
    "compiled": measure_compiled,
}


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
