"""
Whether a team uses its messages, on items whose best reward without a message is known exactly.

    python -m benchmarks.learning.needed  # rule and walk, five seeds each: about ten minutes of one core
    python -m benchmarks.learning.needed --runs rule_shared rule_isolated  # one agent with all facts, or the decider's
    python -m benchmarks.learning.needed --smoke  # seconds: whether it runs; its numbers mean nothing

A run is a recipe with `needed_rule.yaml` or `needed_walk.yaml`. The seed is that of the items, of the base model and
of the training. The team, and the team with its messages cut and shuffled, then answer the 512 test items once each,
sampled at temperature 1 (`evaluate --ablate messages`). A mean of 512 answers has a standard error of 0.019 at 0.25
and of 0.015 at 0.125. `bound` is the mean of the items' bounds. Processor time is that of the base model and that of
the training.

With `--folder`, runs that are there already are not made again.
"""

import argparse
import json
import os
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.team_run import REPOSITORY, Clock, machine, save_model
from trl_multiagent.configs.recipes.workflows.needed import TASK
from trl_multiagent.runs.evaluation import run_evaluation
from trl_multiagent.runs.models import make_loader
from trl_multiagent.runs.prepared import prepare_training
from trl_multiagent.runs.run import read_settings, run_recipe


CONFIGS = REPOSITORY / "recipes" / "workflows" / "configs"
# 42 answers to an item of a step, as many as the team's messages and answers
ALONE = ["magrpo.num_agents=1", "magrpo.num_generations=42"]
# Name of each run -> its configuration and changes
RUNS = {
    "rule": ("needed_rule", []),
    "walk": ("needed_walk", []),
    "walk_3_agents": ("needed_walk", ["magrpo.num_agents=3"]),
    "rule_shared": ("needed_rule", [*ALONE, "needed.facts=shared"]),
    "rule_isolated": ("needed_rule", [*ALONE, "needed.facts=isolated"]),
    "rule_literacy_0": ("needed_rule", ["needed.literacy=0"]),
    "rule_episodes": ("needed_rule", ["magrpo.branching=episodes", "magrpo.num_generations=10"]),
    "rule_noise": ("needed_rule", ["needed.noise=0.2"]),
}
POLICIES = {"messages": "", "cut": "_messages_cut", "shuffled": "_messages_shuffled"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0].strip())
    parser.add_argument("--runs", nargs="+", choices=RUNS, default=["rule", "walk"], help="what to run")
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3, 4, 5], help="seeds (default: 1 to 5)")
    parser.add_argument("--smoke", action="store_true", help="seconds: one run, one step, a tiny random model")
    parser.add_argument("--folder", type=Path, help="where the runs go; by default they are removed")
    parser.add_argument("--output", type=Path, default=Path("needed.json"), help="where the JSON goes")
    options = parser.parse_args()
    if options.smoke:
        options.runs, options.seeds = ["rule"], [1]
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        os.environ["TRL_MULTIAGENT_CACHE"] = str(folder / "cache")  # so that every base model is built and timed
        facts = {name: [measure(name, seed, folder, options.smoke) for seed in options.seeds] for name in options.runs}
    options.output.write_text(json.dumps({"machine": machine(), "runs": facts}, indent=2) + "\n")
    print(
        f"\n{'run':18}{'seed':>5}{'bound':>8}{'messages':>10}{'cut':>8}{'shuffled':>10}"
        f"{'base, cpu s':>13}{'training':>10}"
    )
    for name, of_seeds in facts.items():
        for one in of_seeds:
            rewards = "".join(
                f"{one[policy]:{width}.3f}" if policy in one else " " * (width - 1) + "-"
                for policy, width in (("messages", 10), ("cut", 8), ("shuffled", 10))
            )
            seconds = f"{one['base_seconds']:13.0f}{one['training_seconds']:10.0f}"
            print(f"{name:18}{one['seed']:5}{one['bound']:8.3f}{rewards}{seconds}")
    print(f"\nAll numbers: {options.output}")


def measure(name: str, seed: int, folder: Path, smoke: bool) -> dict[str, Any]:
    """Trains and evaluates one run, unless it is there already. Returns its facts."""
    run = folder / f"{name}_{seed}"
    if (run / "facts.json").is_file():
        return json.loads((run / "facts.json").read_text())
    config, changes = RUNS[name]
    changes = [
        *changes,
        f"seed={seed}",
        f"dataset.seed={seed}",
        f"magrpo.output_dir={run}",
        "magrpo.disable_tqdm=true",
    ]
    flags = ["--num_episodes", "1", "--output_dir", str(run / "evaluation"), "--disable_tqdm"]
    flags += [] if "magrpo.num_agents=1" in changes else ["--ablate", "messages"]
    if smoke:
        save_model(folder / "model", hidden_size=64, num_layers=1)
        changes += [f"agent_model.name={folder / 'model'}", "magrpo.max_steps=1", "dataset.eval_size=4"]
    argv = ["--config", str(CONFIGS / f"{config}.yaml"), "--override", *changes]
    clock = Clock()
    if not smoke:
        run = prepare_training(read_settings("magrpo", TASK, argv, "benchmark"))
        make_loader(run).builders["demo"]()  # builds the base model
    base = clock.facts()["cpu_seconds"]
    run_recipe("magrpo", TASK, argv, "benchmark")
    training = clock.facts()["cpu_seconds"] - base
    run_evaluation(TASK, [str(run), *flags], "benchmark")
    policies = json.loads((run / "evaluation" / "evaluation.json").read_text())["policies"]
    final = {
        key: policies[run.name + ending]["results"]["final"]
        for key, ending in POLICIES.items()
        if run.name + ending in policies
    }
    facts = {
        "seed": seed,
        "bound": final["messages"]["bound"]["mean"],
        "base_seconds": base,
        "training_seconds": training,
    }
    facts |= {key: numbers["reward"]["mean"] for key, numbers in final.items()}
    (run / "facts.json").write_text(json.dumps(facts) + "\n")
    return facts


if __name__ == "__main__":
    main()
