"""
A MAGRPO step on one GPU, by phase: seconds, tokens per second, share of the roofline, peak memory, and where the host
waits.

    python -m benchmarks.engine.gpu                        # all parts, each under eight minutes, one after the other
    python -m benchmarks.engine.gpu --parts tests 3B-full  # some; other parts of an earlier call stay in the file
    python -m benchmarks.engine.gpu --device cpu --smoke   # seconds: whether it runs; its numbers mean nothing

Two agents with random weights of Qwen2.5-Coder's shapes, 8 items, G = 4, prompts of 300 tokens, completions of 256,
8 rows in a forward of the update, activations checkpointed. Nothing is downloaded. `team_run.py` says what is measured
and how. A run that fails, for example for lack of memory, is a line of the table, and a part that has used its time
leaves its last runs out.

Parts: `tests`, and for each size `<size>-full` and `<size>-lora`, with one turn and with two (a tree), and

- full, float32: float32 weights, computed in bfloat16. The default;
- full, bfloat16: weights in bfloat16, which the optimizer rounds stochastically. Needs `.[rounding]`;
- LoRA, float32 and bfloat16: the data type of the base, `r` = 16 on all linear layers;
- 32 rows, 32 rows kept, 32 rows alone: as the base in bfloat16 (full: float32), with 32 rows in a forward; activations
  kept, not checkpointed; and agents on one base kept apart, in forwards of their own;
- no graphs: float32 weights or a base in bfloat16, sampled without CUDA graphs;
- transformers' loop: sampling with transformers' own loop instead of the package's;
- vLLM: float32 weights, or adapters on a base in bfloat16, sampled with vLLM in the same process. Needs
  `.[vllm]`.

The roofline is the time for the products with the weights alone: every token of a tree that differs from others, or in
what precedes it, once; all weights read once per decoding step of a turn; at the rates for large products and for
copies that are measured at the start. Attention, adapters, the optimizer and the cache of keys and values are not in
it.
"""

import argparse
import gc
import importlib.util
import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from benchmarks.team_run import MIB, REPOSITORY, machine, now, run_here


# Hidden size, intermediate size, layers, heads, heads of keys and values, vocabulary
SHAPES = {
    "0.135B": (576, 1536, 30, 9, 3, 49152),
    "0.5B": (896, 4864, 24, 14, 2, 151936),
    "1.5B": (1536, 8960, 28, 12, 2, 151936),
    "3B": (2048, 11008, 36, 16, 2, 151936),
    "tiny": (64, 128, 2, 2, 1, 512),
}
SIZES = ("0.135B", "0.5B", "1.5B", "3B")
COMMON = {"roles": ["aux", "main"], "num_items": 8, "num_tokens": 256, "prompt_tokens": 280, "micro_batch": 8}
COMMON |= {"gradient_checkpointing": True, "bf16": True, "count_reads": True}
LORA = {"r": 16, "target_modules": "all-linear"}
ROUNDING = {"optim": "adamw_torch_8bit", "optim_args": "bf16_stochastic_round=True"}
VLLM = {"use_vllm": True, "vllm_mode": "colocate", "vllm_gpu_memory_utilization": 0.15}
TESTS = [
    "test_generation.py",
    "trainers/test_magrpo_update.py",
    "trainers/test_precision.py",
    "trainers/test_team_forms.py",
]
SECONDS = 450  # of a part
SLOW = {"renormalize_logits": True}
COLUMNS = (
    "step",
    "generate",
    "reward",
    "update",
    "tokens/s",
    "of roofline",
    "and update",
    "peak, GiB",
    "and update",
    "reads",
    "launches",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0].strip())
    parts = ["tests", *(f"{size}-{form}" for size in SIZES for form in ("full", "lora"))]
    parser.add_argument("--parts", nargs="+", choices=parts, default=parts, help="default: all")
    parser.add_argument("--device", choices=("cuda", "cpu"), help="default: cuda where there is a GPU")
    parser.add_argument("--steps", type=int, default=2, help="timed steps of a run (default: 2)")
    parser.add_argument("--turns", type=int, nargs="+", default=(1, 2), help="turns of the trees (default: 1 2)")
    parser.add_argument("--kinds", nargs="+", help="kinds of runs of a part, for example `bfloat16` (default: all)")
    parser.add_argument("--seconds", type=int, default=SECONDS, help="of a part (default: %(default)s)")
    parser.add_argument(
        "--smoke", action="store_true", help="seconds: one step of a tiny model, and one file of tests"
    )
    parser.add_argument("--output", type=Path, default=Path("gpu.json"), help="where the JSON goes")
    options = parser.parse_args()
    # One GPU or none, before torch looks for them
    os.environ["CUDA_VISIBLE_DEVICES"] = "" if options.device == "cpu" else os.environ.get("CUDA_VISIBLE_DEVICES", "0")
    on_gpu = torch.cuda.is_available()
    if not on_gpu and (options.device == "cuda" or not options.smoke):
        sys.exit("There is no GPU that torch can use. A CPU is for a try: `--device cpu --smoke`.")
    common, tests, steps = COMMON, TESTS, options.steps
    if options.smoke:
        parts, tests, steps = ["tests", "tiny-lora"], ["test_advantages.py"], 1
        common = {**COMMON, "num_items": 1, "num_tokens": 2, "prompt_tokens": 16}
    elif options.output.is_file():
        results = json.loads(options.output.read_text())
    if options.smoke or not options.output.is_file():
        results = {"parts": {}}
    results |= {"machine": machine(), "torch": torch.__version__, "settings": common}
    results["rates"] = rates("cuda" if on_gpu else "cpu", 64 if options.smoke else 8192)
    print("Products: {flops:.3g} operations/s in bfloat16; copies: {bytes:.3g} bytes/s".format(**results["rates"]))
    signal.signal(signal.SIGALRM, end_run)
    for part in parts if options.smoke else options.parts:
        print(f"\n{part}", flush=True)
        if part == "tests":
            results["parts"][part] = run_tests(tests)
        else:
            size, form = part.split("-")
            settings = {**common, "steps": steps + 2}
            runs = ways(form, options.turns, options.kinds)
            runs = dict(list(runs.items())[-1:]) if options.smoke else runs
            records = results["parts"].setdefault(part, {})
            for name, record in run_part(size, runs, settings, results["rates"], on_gpu, options.seconds):
                records[name] = record
                options.output.write_text(json.dumps(results, indent=2) + "\n")  # a part may be cut off
        options.output.write_text(json.dumps(results, indent=2) + "\n")
    print(f"\nAll numbers: {options.output}")


def end_run(*signal_and_frame: object) -> None:
    raise TimeoutError("the time of the part is over")


def rates(device: str, size: int) -> dict[str, float]:
    """
    Operations per second of a large matrix product in bfloat16, and bytes per second of a large copy, read and
    written.
    """
    x = torch.ones(size, size, dtype=torch.bfloat16, device=device)
    copied = torch.empty(4 * size, 4 * size, dtype=torch.bfloat16, device=device)
    source = torch.empty_like(copied)
    products, copies = [], []
    for _ in range(10):
        start = now()
        x @ x
        middle = now()
        copied.copy_(source)
        products.append(middle - start)
        copies.append(now() - middle)
    moved = 2 * copied.numel() * copied.element_size()
    return {"flops": 2 * size**3 / statistics.median(products), "bytes": moved / statistics.median(copies)}


def run_tests(files: list[str]) -> dict:
    """Runs tests of the project with what this machine has."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *(f"tests/{file}" for file in files)]
    try:
        done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        print(f"not finished after {SECONDS} s")
        return {"finished": False}
    failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    print("\n".join([*failed, f"{len(failed)} tests failed" if done.returncode else "all tests passed"]))
    return {"finished": True, "returncode": done.returncode, "failed": failed, "end": done.stdout[-2000:]}


def run_part(
    size: str, runs: dict, common: dict, speed: dict[str, float], on_gpu: bool, seconds: int
) -> Iterator[tuple[str, dict]]:
    """Makes the runs of a size, until the time of a part is over. Yields the name and the record of each."""
    end, reads = time.monotonic() + seconds, {}
    print(f"{'':26}" + "".join(f"{name:>13}" for name in COLUMNS))
    with tempfile.TemporaryDirectory() as folder:
        save_model(Path(folder), size, "cuda" if on_gpu else "cpu")
        for name, settings in runs.items():
            settings = {**common, "model": folder, **settings}
            left = int(end - time.monotonic())
            try:
                if left < 15:
                    raise TimeoutError(f"the {seconds} s of a part are over")
                signal.alarm(left)
                (record,) = run_here(settings)
                signal.alarm(0)
                record["roofline"] = roofline(size, record["work"], settings, speed)
                print_record(name, record)
                reads = reads or record["reads"]
            except (RuntimeError, TimeoutError) as error:
                signal.alarm(0)
                record = {"failed": str(error)}
                print(f"{name:26}  failed: {str(error).strip().splitlines()[-1][:120]}", flush=True)
            yield name, record
            gc.collect()
            if on_gpu:
                torch.cuda.empty_cache()
    for place, number in list(reads.items())[:10]:
        print(f"  {number:5} reads in {place.split('site-packages/')[-1]}")


def ways(form: str, turns: list[int], chosen: list[str] | None) -> dict[str, dict]:
    """Returns the settings of the runs of a form, by name."""
    lora = LORA if form == "lora" else None
    kinds = {dtype: {"dtype": dtype, "lora": lora, "arguments": {}} for dtype in ("float32", "bfloat16")}
    if form == "full":
        kinds["bfloat16"]["arguments"] = ROUNDING
        if importlib.util.find_spec("torchao") is None:
            print("torchao is not installed: without full, bfloat16")
            del kinds["bfloat16"]
    if importlib.util.find_spec("vllm") is not None:
        kinds["vLLM"] = {"dtype": "bfloat16" if lora else "float32", "lora": lora, "arguments": VLLM}
    base = kinds["bfloat16" if lora else "float32"]
    kinds["32 rows"] = {**base, "micro_batch": 32}
    kinds["32 rows kept"] = {**base, "micro_batch": 32, "gradient_checkpointing": False, "profiles": True}
    if lora:
        kinds["32 rows alone"] = {**kinds["32 rows kept"], "profiles": False, "grouped": False}
    kinds["no graphs"] = {**base, "graphs": False}
    # transformers' own loop is used where a setting asks for a processor that ours does not have
    kinds["transformers' loop"] = {**base, "arguments": {"generation_kwargs": SLOW}}
    return {
        f"{form}, {kind}, T = {number}": {
            **way,
            "arguments": {"generation_kwargs": None, **way["arguments"], "num_turns": number},
        }
        for number, (kind, way) in itertools.product(turns, kinds.items())
        if chosen is None or not {kind, f"{form}, {kind}"}.isdisjoint(chosen)
    }


def save_model(folder: Path, size: str, device: str) -> None:
    """Writes a model with random weights, and a tokenizer for which every character is a token."""
    hidden, intermediate, layers, heads, kv_heads, vocabulary = SHAPES[size]
    config = Qwen2Config(
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        vocab_size=vocabulary,
        max_position_embeddings=32768,
        tie_word_embeddings=True,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
        dtype="bfloat16",
    )
    torch.manual_seed(0)
    with torch.device(device):
        Qwen2ForCausalLM(config).bfloat16().save_pretrained(folder)
    characters = (chr(k) for k in itertools.count(9) if not 0xD800 <= k < 0xE000)  # all but surrogates
    tokens = ["<pad>", "<eos>", *itertools.islice(characters, vocabulary - 2)]
    tokenizer = Tokenizer(models.WordLevel({token: k for k, token in enumerate(tokens)}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>").save_pretrained(folder)


def roofline(size: str, work: dict[str, int], settings: dict, speed: dict[str, float]) -> dict[str, float]:
    """Seconds that sampling and update take at least."""
    hidden, intermediate, layers, heads, kv_heads, vocabulary = SHAPES[size]
    body = layers * hidden * (2 * hidden + 2 * hidden * kv_heads // heads + 3 * intermediate)
    head = vocabulary * hidden
    forward = 2 * (body * work["tokens"] + head * work["sampled_tokens"]) / speed["flops"]
    # Decoding reads the weights in bfloat16; the tokens of the prompts are read in few calls
    sampled = 2 * (body + head) * work["sampled_tokens"] / speed["flops"]
    decoding = max(sampled, 2 * (body + head) * work["decoding_steps"] / speed["bytes"])
    # Forward, again under checkpointing, gradients of the activations, and of the weights unless they are a base
    passes = 2 + settings["gradient_checkpointing"] + (settings["lora"] is None)
    return {"generate": forward - sampled + decoding, "update": passes * forward}


def print_record(name: str, record: dict) -> None:
    phases, floor = record["phases"], record["roofline"]
    cells = [f"{record['seconds']:.2f}", *(f"{phases[phase]:.2f}" for phase in ("generate", "reward", "update"))]
    cells.append(f"{record['work']['sampled_tokens'] / phases['generate']:.0f}")
    cells += [f"{floor[phase] / phases[phase]:.1%}" for phase in ("generate", "update")]
    cells += [f"{record[phase] / MIB / 1024:.2f}" for phase in ("generate", "update")]
    cells.append(str(sum(record["reads"].values())) if record["device"] == "cuda" else "-")
    cells.append(str(record["launches"]))
    print(f"{name:26}" + "".join(f"{cell:>13}" for cell in cells), flush=True)
    for operation, number, seconds in record["profile"] or ():
        print(f"    {seconds:9.4f} s in {number:6} {operation[:90]}")


if __name__ == "__main__":
    main()
