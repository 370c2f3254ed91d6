"""
What a team learns in each task family, beside one agent that is trained alone: the families' embedded demos.

    python -m benchmarks.learning.families  # MAGRPO and its control, three seeds
    python -m benchmarks.learning.families --families bug_fixing --algorithms iac maac
    python -m benchmarks.learning.families --smoke  # seconds: whether it runs; its numbers mean nothing

A run is a recipe with `<algorithm>_<family>_demo.yaml`. `grpo` is the control: one agent, the same number of scored
answers. Before and after the training, the held-out items are answered once. What is compared is a metric that team
and control share:
- `bug_fixing`: `fix`, how many of the failing hidden tests the repaired function passes. The control writes no tests,
  so its reward is another one.
- other families: `total_reward`, the reward before any scaling.

The difference between a team and the control is that of each seed, in percent of the largest value that the metric can
have, with a 95 % t-interval over seeds. Processor time is that of the run, without that of building the base model.

With `--folder`, runs that are there already are not made again.
"""

import argparse
import dataclasses
import gc
import json
import tempfile
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.team_run import REPOSITORY, Clock, machine, save_model
from trl_multiagent.environments.imports import TASKS
from trl_multiagent.environments.task import Task
from trl_multiagent.evaluation.statistics import t_interval
from trl_multiagent.runs.prepared import prepare_training
from trl_multiagent.runs.run import read_settings, run_recipe


RECIPES = REPOSITORY / "recipes"
METRICS = {
    "bug_fixing": "fix",
    "writing": "total_reward",
    "block_building": "total_reward",
    "class_completion": "total_reward",
}
CONTROL = "grpo"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0].strip())
    there = [name for name in METRICS if name in TASKS and config_file(name, "magrpo").is_file()]
    parser.add_argument("--families", nargs="+", choices=there, default=there, help="what to run (default: all)")
    parser.add_argument(
        "--algorithms", nargs="+", default=["magrpo"], help="of the teams, such as magrpo iac maac (default: magrpo)"
    )
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds (default: 3)")
    parser.add_argument("--smoke", action="store_true", help="seconds: one family, one step, a tiny random model")
    parser.add_argument("--folder", type=Path, help="where the runs go; by default they are removed")
    parser.add_argument("--output", type=Path, default=Path("families.json"), help="where the JSON goes")
    options = parser.parse_args()
    if options.smoke:
        options.families, options.seeds = there[:1], 1
    numbers = {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        for family in options.families:
            numbers[family] = measure(family, folder, options)
            print_table(family, numbers[family])
    options.output.write_text(json.dumps({"machine": machine(), "families": numbers}, indent=2) + "\n")
    print(f"\nAll numbers: {options.output}")


def config_file(family: str, algorithm: str) -> Path:
    return RECIPES / family / "configs" / f"{algorithm}_{family}_demo.yaml"


def measure(family: str, folder: Path, options: argparse.Namespace) -> dict[str, list[dict]]:
    """Trains the teams and the control with every seed. Returns the facts of all runs, by algorithm."""
    module, name = TASKS[family].split(":")
    task = dataclasses.replace(getattr(import_module(module), name), introduction=None, callbacks=None)
    common: list[str] = []
    if options.smoke:
        save_model(folder / "model", hidden_size=64, num_layers=1)
        common = [f"agent_model.name={folder / 'model'}", "dataset.eval_size=2"]
    else:
        task.models["demo"]()  # builds the base model, whose time does not count
    runs: dict[str, list[dict]] = {}
    for algorithm in dict.fromkeys([*options.algorithms, CONTROL]):
        if not config_file(family, algorithm).is_file():
            print(f"{family} has no {config_file(family, algorithm).name}: {algorithm} is left out.")
            continue
        runs[algorithm] = [
            train(task, family, algorithm, seed, folder, common, options.smoke) for seed in range(options.seeds)
        ]
    return runs


def train(task: Task, family: str, algorithm: str, seed: int, folder: Path, common: list[str], smoke: bool) -> dict:
    """Trains one run, unless it is there already, and returns what its metric was before and after."""
    run = folder / f"{family}_{algorithm}_{seed}"
    facts_file = run / "facts.json"
    if facts_file.is_file():
        return json.loads(facts_file.read_text())
    common = [*common, f"seed={seed}", "output.save_final_model=false", f"{algorithm}.output_dir={run}"]
    if smoke:
        common += [f"{algorithm}.max_steps=1", f"{algorithm}.max_completion_length=4"]
    config = ["--config", str(config_file(family, algorithm))]
    settings = prepare_training(read_settings(algorithm, task, [*config, "--override", *common], "benchmark"))
    ranges = settings.make_environment().metric_ranges
    args = settings.training_args
    changes = [f"{algorithm}.{key}={args.max_steps}" for key in ("save_steps", "eval_steps")]
    changes += [f"{algorithm}.{key}=steps" for key in ("save_strategy", "eval_strategy")]
    changes += [f"{algorithm}.eval_on_start=true", f"{algorithm}.disable_tqdm=true"]
    clock = Clock()
    run_recipe(algorithm, task, [*config, "--override", *common, *changes], "benchmark")
    gc.collect()  # ends the helper processes of the sandbox, so that their time counts
    facts = {"seed": seed, **clock.facts(), **read_log(run, METRICS[family], args.num_turns)}
    facts["largest"] = ranges[METRICS[family]][1]
    facts_file.write_text(json.dumps(facts) + "\n")
    print(
        f"{run.name}: {facts['start']:.3f} to {facts['end']:.3f}, {facts['cpu_seconds']:.0f} s of processor time",
        flush=True,
    )
    return facts


def read_log(run: Path, metric: str, num_turns: int) -> dict[str, Any]:
    """
    Reads a metric of the final turn from the log of a run: on the held-out items at the start and the end, and on the
    training items.
    """
    (state,) = run.glob("checkpoint-*/trainer_state.json")
    history = json.loads(state.read_text())["log_history"]
    name = f"turn_{num_turns}/{metric}"
    held_out = [logs[f"eval_{name}"] for logs in history if f"eval_{name}" in logs]
    return {"start": held_out[0], "end": held_out[-1], "training": [logs[name] for logs in history if name in logs]}


def print_table(family: str, runs: dict[str, list[dict]]) -> None:
    print(f"\n{family}, `{METRICS[family]}` on the held-out items, by seed")
    print(f"{'':8}{'at most':>9}{'start':>24}{'end':>24}{'mean':>9}{'cpu, s':>9}")
    for algorithm, of_seeds in runs.items():
        start, end = (" ".join(f"{facts[when]:.2f}" for facts in of_seeds) for when in ("start", "end"))
        mean, seconds = (np.mean([facts[name] for facts in of_seeds]) for name in ("end", "cpu_seconds"))
        print(f"{algorithm:8}{of_seeds[0]['largest']:9g}{start:>24}{end:>24}{mean:9.3f}{seconds:9.0f}")
    for algorithm in [name for name in runs if name != CONTROL]:
        pairs = zip(runs[algorithm], runs.get(CONTROL, []), strict=False)
        shares = np.array([100 * (team["end"] / team["largest"] - one["end"] / one["largest"]) for team, one in pairs])
        if len(shares) > 1:
            low, high = t_interval(shares, 0.95)
            interval = f", 95 % interval {low:+.1f} to {high:+.1f}" if low == low else ", the same with every seed"
        else:
            interval = ""
        if len(shares):
            print(f"{algorithm} - {CONTROL}: {shares.mean():+.1f} % of the largest value{interval}")


if __name__ == "__main__":
    main()
