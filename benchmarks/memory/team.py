"""
Memory of a team: what one more LoRA agent costs, what a critic costs, and what a process holds of a full team under
ZeRO-3.

    python -m benchmarks.memory.team                   # all, about 12 minutes on two cores
    python -m benchmarks.memory.team --parts critics   # one part of it
    python -m benchmarks.memory.team --quick           # small models, one precision: about 3 minutes
    python -m benchmarks.memory.team --smoke           # seconds: whether it runs; its numbers mean nothing

Every run takes a few training steps with a random Llama of bytes, in fresh processes: MAGRPO's, except for critics.
`team_run.py` says what is measured and how. On a machine with GPUs it is their memory; ZeRO-3 needs two, and runs on
the CPU where there are fewer.

LoRA: teams of 1, 2, 3, 4 and 8 agents on one base, in one process. An agent should cost 16 bytes per parameter of its
adapter: weight, gradient and Adam's two moments in float32. The activations of all agents live together, so a row is
short and activations are checkpointed; what is left of them is in the peak.

Critics: a LoRA team of two agents, with the critics of IAC (one per agent) and MAAC (one), which are adapters on the
agents' base. They are compared with MAREINFORCE, which trains the same number of completions and has no critic. An
agent samples one completion per item, so a critic reads as many prompts as there are completions. A forward has one
row.

ZeRO-3: a full team of two agents, in one process and in two.
- mixed precision: weights loaded in float32, `bf16` on. One process keeps them in float32 and computes in bfloat16;
  DeepSpeed computes with shards in bfloat16 and keeps others in float32 for Adam;
- float32: DeepSpeed keeps its shards of the weights twice;
- bfloat16 weights: loaded in bfloat16, `bf16` on. One process trains them with stochastic rounding and Adam's state in
  8 bits (torchao); DeepSpeed keeps float32 for Adam all the same, so this compares two different optimizers.
"""

import argparse
import json
import tempfile
from pathlib import Path

import torch

from benchmarks.team_run import LAUNCHES, MIB, launch, machine, run_here, save_model


# Data type of the loaded weights, and `bf16`
PRECISIONS = {
    "mixed precision": ("float32", True),
    "float32": ("float32", False),
    "bfloat16 weights": ("bfloat16", True),
}
ROUNDING = {"optim": "adamw_torch_8bit", "optim_args": "bf16_stochastic_round=True", "adam_beta2": 0.99}
AGENTS = (1, 2, 3, 4, 8)
LORA = {"r": 8, "target_modules": "all-linear"}
CRITIC_RANKS = (8, 16)
PARTS = ("lora", "critics", "zero3")
# What is to be reached, in percent
LORA_TARGET = 5
CRITIC_TARGET = 5
ZERO_TARGET = 60
COMMON = {
    "steps": 3,
    "num_tokens": 8,
    "gradient_checkpointing": True,
    "micro_batch": 2,
}
SIZES = ("held", "generate", "update")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0].strip())
    parser.add_argument("--quick", action="store_true", help="small models, and mixed precision only")
    parser.add_argument("--smoke", action="store_true", help="seconds: tiny models, one process in place of ZeRO-3")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="what to measure (default: all)")
    parser.add_argument("--threads", type=int, default=1, help="torch threads of each process (default: 1)")
    parser.add_argument("--timeout", type=float, default=600, help="seconds for one run (default: 600)")
    parser.add_argument("--output", type=Path, default=Path("team_memory.json"), help="where the JSON goes")
    options = parser.parse_args()
    gpus = torch.cuda.device_count()
    agents_of_teams, common = AGENTS, COMMON
    critic_runs = [("mareinforce", None), *((name, rank) for rank in CRITIC_RANKS for name in ("maac", "iac"))]
    base_size, full_size = (1024, 512) if options.quick else (2048, 1024)
    if options.smoke:
        agents_of_teams, common, base_size, full_size = (1, 2), {**COMMON, "steps": 2}, 64, 64
        critic_runs = critic_runs[:2]

    def measure(name: str, settings: dict, on_gpus: bool) -> list[dict]:
        if options.smoke:  # without the seconds that a process takes to start
            return run_here(settings)
        return launch(name, settings, on_gpus, options.threads, options.timeout)

    results = {"machine": machine(), "settings": {**common, "lora": LORA}}
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder) / "base"
        base_parameters = save_model(base, hidden_size=base_size, num_layers=2)
        settings = {**common, "model": str(base), "lora": LORA, "num_items": 1, "dtype": "float32", "bf16": False}
        if "lora" in options.parts:
            runs = {}
            for agents in agents_of_teams:
                roles = [f"agent_{k}" for k in range(agents)]
                (runs[agents],) = measure("one process", {**settings, "roles": roles}, gpus >= 1)
            results["lora"] = compare_lora(runs, base_parameters)
            print_lora(results["lora"])

        if "critics" in options.parts:
            runs = {}
            for algorithm, rank in critic_runs:
                arguments = {"num_generations": 1}
                if rank is not None:
                    arguments |= {"critic_form": "adapter", "critic_lora_r": rank}
                run = {"roles": ["aux", "main"], "num_items": 4, "micro_batch": 1}
                run |= {"algorithm": algorithm, "arguments": arguments}
                (runs[algorithm, rank],) = measure("one process", {**settings, **run}, gpus >= 1)
            results["critics"] = compare_critics(runs, base_parameters)
            print_critics(results["critics"])

        if "zero3" in options.parts:
            full = Path(folder) / "full"
            parameters = 2 * save_model(full, hidden_size=full_size, num_layers=4)
            settings = {**common, "model": str(full), "roles": ["aux", "main"], "lora": None, "num_items": 2}
            results["zero3"] = []
            if options.smoke:
                print("\nIn this smoke run, one process stands in for ZeRO-3 on two.")
            for precision in ("mixed precision",) if options.quick or options.smoke else PRECISIONS:
                dtype, bf16 = PRECISIONS[precision]
                run = {**settings, "dtype": dtype, "bf16": bf16}
                one = {**run, "arguments": ROUNDING} if dtype == "bfloat16" else run
                runs = {
                    "one process": measure("one process", one, gpus >= 2),
                    "ZeRO-3": measure("ZeRO-3", run, gpus >= 2),
                }
                results["zero3"].append({"precision": precision, **compare_zero(runs, parameters)})
                print_zero(results["zero3"][-1])
    options.output.write_text(json.dumps(results, indent=2) + "\n")
    print(f"\nAll numbers: {options.output}")


def compare_lora(runs: dict[int, dict], base_parameters: int) -> dict:
    """What each team costs, and what one more agent adds, in percent of the base's bytes."""
    base = 4 * base_parameters
    adapter = runs[1]["trained_parameters"]
    result = {"base_parameters": base_parameters, "adapter_parameters": adapter, "expected": 1600 * adapter / base}
    result["runs"] = {agents: {name: run[name] for name in ("device", *SIZES)} for agents, run in runs.items()}
    if 4 in runs:
        result["fourth_agent"] = {name: 100 * (runs[4][name] - runs[3][name]) / base for name in SIZES}
    result["most_agents"] = most = max(runs)
    result["per_agent"] = {name: 100 * (runs[most][name] - runs[1][name]) / (most - 1) / base for name in SIZES}
    return result


def compare_critics(runs: dict[tuple[str, int | None], dict], base_parameters: int) -> dict:
    """What each team holds and uses, and what one critic adds, in percent of the base's bytes."""
    base, without = 4 * base_parameters, runs["mareinforce", None]
    result = {"base_parameters": base_parameters, "device": without["device"], "runs": []}
    for (algorithm, rank), run in runs.items():
        critics = {"mareinforce": 0, "maac": 1, "iac": 2}[algorithm]
        record = {"algorithm": algorithm, "rank": rank, "critics": critics, **{name: run[name] for name in SIZES}}
        if critics:
            record["per_critic"] = {name: 100 * (run[name] - without[name]) / critics / base for name in SIZES}
        result["runs"].append(record)
    return result


def compare_zero(runs: dict[str, list[dict]], parameters: int) -> dict:
    """What the process with the most holds and uses, and its ratio to one process in percent."""
    result = {"parameters": parameters, "device": runs["ZeRO-3"][0]["device"]}
    for name, records in runs.items():
        result[name] = {size: max(record[size] for record in records) for size in SIZES}
        result[name]["peak"] = max(result[name][size] for size in SIZES[1:])
    one, sharded = (result[name] for name in ("one process", "ZeRO-3"))
    result["ratio"] = {size: 100 * sharded[size] / one[size] for size in one}
    return result


def print_lora(result: dict) -> None:
    print(
        f"\nLoRA team on one base of {result['base_parameters'] / 1e6:.1f} M parameters "
        f"({4 * result['base_parameters'] / MIB:.0f} MiB), {LORA}, {result['runs'][1]['device']}"
    )
    print(f"{'MiB':22}" + "".join(f"{name:>10}" for name in SIZES))
    for agents, run in result["runs"].items():
        print(f"{agents:<2} agents            " + "".join(f"{run[name] / MIB:10.1f}" for name in SIZES))
    labels = {"fourth_agent": "fourth agent, % of base", "per_agent": f"2nd to {result['most_agents']}., mean"}
    for key, label in labels.items():
        if key not in result:  # in a smoke run
            continue
        print(f"{label:23}" + "".join(f"{result[key][name]:9.2f}%" for name in SIZES))
    print(
        f"adapter, its gradients and Adam's state: {result['expected']:.2f} % of the base; target {LORA_TARGET} %",
        flush=True,
    )


def print_critics(result: dict) -> None:
    print(
        f"\nLoRA team of two on one base of {result['base_parameters'] / 1e6:.1f} M parameters "
        f"({4 * result['base_parameters'] / MIB:.0f} MiB), {result['device']}; a critic is an adapter on the same base"
    )
    print(f"{'MiB':30}" + "".join(f"{name:>10}" for name in SIZES) + "   one critic, % of base")
    for run in result["runs"]:
        label = f"{run['algorithm']}, {run['critics']} of rank {run['rank']}" if run["critics"] else "no critic"
        cells = "".join(f"{run[name] / MIB:10.1f}" for name in SIZES)
        share = "".join(f"{run['per_critic'][name]:8.2f}%" for name in SIZES) if run["critics"] else ""
        print(f"{label:30}{cells}{share}")
    print(f"a critic on the agents' base: target {CRITIC_TARGET} %", flush=True)


def print_zero(result: dict) -> None:
    print(
        f"\nFull team of two agents, {result['parameters'] / 1e6:.1f} M parameters together, "
        f"{result['precision']}, {result['device']}"
    )
    print(f"{'MiB per process':18}{'held':>10}{'B/param':>9}" + "".join(f"{name:>10}" for name in SIZES[1:]))
    for name in ("one process", "ZeRO-3"):
        run = result[name]
        label = f"{name} x {LAUNCHES[name][1]}" if LAUNCHES[name][1] > 1 else name
        cells = "".join(f"{run[size] / MIB:10.1f}" for size in SIZES[1:])
        print(f"{label:18}{run['held'] / MIB:10.1f}{run['held'] / result['parameters']:9.2f}{cells}")
    ratio = result["ratio"]
    print(f"{'ratio':18}{ratio['held']:9.1f}%{'':9}" + "".join(f"{ratio[size]:9.1f}%" for size in SIZES[1:]))
    print(f"held: target {ZERO_TARGET} %; largest peak: {ratio['peak']:.1f} %", flush=True)


if __name__ == "__main__":
    main()
