"""
Step time and memory per process of MAGRPO on one and two processes, plain and sharded, as ratios to one process.

    python -m benchmarks.memory.scaling            # about 10 minutes on two cores
    python -m benchmarks.memory.scaling --quick    # a smaller model, full teams only: about 4 minutes
    python -m benchmarks.memory.scaling --smoke    # seconds: whether it runs; its numbers mean nothing

Two agents on a random Llama of bytes, 8 items a step in every form: two processes play 4 each. Every form is launched
once with its file of `accelerate_configs/`; `team_run.py` says what is measured and how. Times are medians of the
steps after the first. Float32 on the CPU, mixed precision on GPUs.

A perfect two processes would take 0.5 of the time of one, and ZeRO-3 0.5 of the memory held. On the CPU a device is
`--threads` cores; with more threads than cores all in all, the time ratios say nothing.
"""

import argparse
import json
import tempfile
from pathlib import Path

import torch

from benchmarks.team_run import LAUNCHES, MIB, launch, machine, run_here, save_model


COMMON = {
    "roles": ["aux", "main"],
    "num_items": 8,
    "num_tokens": 32,
    "dtype": "float32",
    "gradient_checkpointing": False,
    "micro_batch": 8,
}
TEAMS = {"full": None, "LoRA": {"r": 8, "target_modules": "all-linear"}}
RATIOS = ("seconds", "held", "peak")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0].strip())
    parser.add_argument("--quick", action="store_true", help="a smaller model, fewer steps, full teams only")
    parser.add_argument("--smoke", action="store_true", help="seconds: a tiny model, one process and DDP")
    parser.add_argument("--steps", type=int, help="timed steps of each form (default: 5, quick: 2)")
    parser.add_argument("--threads", type=int, default=1, help="torch threads of each process (default: 1)")
    parser.add_argument("--timeout", type=float, default=600, help="seconds for one run (default: 600)")
    parser.add_argument("--output", type=Path, default=Path("scaling.json"), help="where the JSON goes")
    options = parser.parse_args()
    steps = options.steps or (1 if options.smoke else 2 if options.quick else 5)
    hidden_size = 64 if options.smoke else 256 if options.quick else 512
    common = {**COMMON, "num_items": 2, "num_tokens": 4} if options.smoke else COMMON
    on_gpus = torch.cuda.device_count() >= 2
    results = {"machine": machine(), "threads": options.threads, "settings": common, "teams": {}}
    with tempfile.TemporaryDirectory() as folder:
        parameters = save_model(Path(folder), hidden_size=hidden_size, num_layers=4)
        settings = {**common, "model": folder, "steps": steps + 1, "bf16": on_gpus}
        print(
            f"Two agents of {parameters / 1e6:.1f} M parameters, {common['num_items']} items a step, medians of "
            f"{steps} "
            f"steps; {results['machine']['cores']} cores, {options.threads} threads per process"
        )
        for team in ("full",) if options.quick or options.smoke else TEAMS:
            print(
                f"\n{team:18}{'s/step':>9}{'ratio':>8}{'held':>10}{'ratio':>8}{'peak':>10}{'ratio':>8}   MiB per "
                "process"
            )
            forms = results["teams"][team] = {}
            for name in ("one process", "DDP") if options.smoke else LAUNCHES:
                of_team = {**settings, "lora": TEAMS[team]}
                if options.smoke and name == "one process":  # without the seconds that a process takes to start
                    records = run_here(of_team)
                else:
                    records = launch(name, of_team, on_gpus, options.threads, options.timeout)
                forms[name] = summary(records, forms.get("one process"))
                print_form(name, forms[name])
    results["load_at_the_end"] = machine()["load"]
    options.output.write_text(json.dumps(results, indent=2) + "\n")
    print(f"\nAll numbers: {options.output}")


def summary(records: list[dict], one_process: dict | None) -> dict:
    """The slowest and the largest process of a form, and its ratios to one process."""
    form = {
        "processes": len(records),
        "distributed_type": records[0]["distributed_type"],
        "device": records[0]["device"],
        "seconds": max(record["seconds"] for record in records),
        "held": max(record["held"] for record in records),
        "peak": max(record[phase] for record in records for phase in ("generate", "update")),
        "records": records,
    }
    reference = one_process or form
    return {**form, "ratio": {key: form[key] / reference[key] for key in RATIOS}}


def print_form(name: str, form: dict) -> None:
    ratio = form["ratio"]
    label = f"{name} x {form['processes']}" if form["processes"] > 1 else name
    print(
        f"{label:18}{form['seconds']:9.2f}{ratio['seconds']:7.2f}x{form['held'] / MIB:10.0f}{ratio['held']:7.2f}x"
        f"{form['peak'] / MIB:10.0f}{ratio['peak']:7.2f}x   {form['distributed_type']}, {form['device']}",
        flush=True,
    )


if __name__ == "__main__":
    main()
