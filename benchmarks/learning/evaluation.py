"""
What a team of the demo is worth: beside a trained control, in cross-play, with agents replaced, and with a second
turn.

    python -m benchmarks.learning.evaluation  # three seeds: about an hour on two cores
    python -m benchmarks.learning.evaluation --seeds 1  # one seed, without cross-play
    python -m benchmarks.learning.evaluation --smoke  # seconds: whether it runs; its numbers mean nothing
    python -m benchmarks.learning.evaluation --speed  # two minutes: CPU time by the items of a batch

Four kinds of runs, each with every seed:
- `team`: the demo, `magrpo_demo.yaml`.
- the control of each team: one agent that answers alone, at the cost of the team (`evaluate --control single_agent`).
- `two turns`: `mt_magrpo_demo.yaml`, from a base model that has seen revisions, with the feedback `level_feedback`.
- `one turn`: the same base model and the same number of scored answers, with one turn.

All are evaluated with the commands of the package on the 96 held-out problems, with 5 sampled episodes each.
Confidence intervals are over items and seeds. Three seeds say little about how much seeds differ, so the table also
has the numbers of every seed.

With `--folder`, runs and transcripts that are there already are not made again.
"""

import argparse
import dataclasses
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

from benchmarks.team_run import REPOSITORY, machine, save_model
from trl_multiagent import AgentTeam, Environment, Outcome
from trl_multiagent.configs.recipes.demo.model import demo_model
from trl_multiagent.configs.recipes.demo.problems import demo_dataset, demo_prompts
from trl_multiagent.configs.recipes.demo.task import TASK
from trl_multiagent.evaluation.config import EvaluationConfig
from trl_multiagent.evaluation.play import play_policy
from trl_multiagent.evaluation.players import LoadedTeam, Policy
from trl_multiagent.models import generation
from trl_multiagent.models.sampling_loop import SamplingLoop
from trl_multiagent.runs.evaluation import run_evaluation
from trl_multiagent.runs.run import run_recipe


CONFIGS = REPOSITORY / "recipes" / "code_generation" / "configs"
QUIET = dataclasses.replace(TASK, introduction=None, callbacks=None)  # the demo without its own evaluation
# Name of each kind of runs -> its configuration and changes
RUNS = {
    "team": ("magrpo_demo.yaml", []),
    "two_turns": ("mt_magrpo_demo.yaml", []),
    "one_turn": ("magrpo_demo.yaml", ["agent_model.name=demo_two_turns"]),
}


class Lengths(Environment):
    """For a smoke run, whose random model would never write a program: the reward is the number of characters."""

    def __init__(self, num_agents: int):
        self.roles = ("aux", "main")[-num_agents:]

    def prompts(self, item, history):
        return {role: f"{demo_prompts(item)[role]}{'Again.' if history else ''}" for role in self.roles}

    def score(self, items, joint_actions, histories):
        lengths = [float(sum(map(len, action.values()))) for action in joint_actions]
        return [Outcome(length, {"passed": float(length % 2), "paper_reward": length}) for length in lengths]


SMOKE = dataclasses.replace(QUIET, make_environment=lambda settings: Lengths(settings.num_agents))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0].strip())
    parser.add_argument("--smoke", action="store_true", help="seconds: a tiny random model, a few answers")
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds (default: 3)")
    parser.add_argument(
        "--num_episodes", type=int, default=5, help="sampled episodes per held-out problem (default: 5)"
    )
    parser.add_argument("--runs", nargs="+", choices=RUNS, default=[*RUNS], help="what to run (default: all)")
    parser.add_argument("--folder", type=Path, help="where runs and transcripts go; by default they are removed")
    parser.add_argument("--output", type=Path, default=Path("evaluation.json"), help="where the JSON goes")
    parser.add_argument("--speed", action="store_true", help="measure only the CPU time by `items_per_batch`")
    options = parser.parse_args()
    if options.speed:
        print_speed()
        return
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        numbers = measure(folder, options)
    options.output.write_text(json.dumps({"machine": machine(), **numbers}, indent=2) + "\n")
    print_tables(numbers)
    print(f"\nAll numbers: {options.output}")


def measure(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Trains and evaluates everything that is not there yet. Returns the reports."""
    seeds = 2 if options.smoke else options.seeds
    task = SMOKE if options.smoke else QUIET
    changes: list[str] = []
    if options.smoke:
        save_model(folder / "model", hidden_size=64, num_layers=1)
        changes = [f"agent_model.name={folder / 'model'}"]
    names = ["team", "two_turns"] if options.smoke else options.runs
    teams = {name: [train(task, name, seed, folder, changes) for seed in range(seeds)] for name in names}
    reports = {}
    for name, runs in teams.items():
        flags = ["--control", "single_agent", "--contributions"] if name == "team" else []
        reports[name] = evaluate(task, runs, folder / f"{name}_evaluation", options, flags)
    if "team" in teams and seeds > 1:
        reports["cross_play"] = evaluate(task, teams["team"], folder / "cross_play", options, [], cross_play=True)
    return reports


def train(task, name: str, seed: int, folder: Path, changes: list[str]) -> Path:
    """Trains one run, unless it is there already, and returns its folder."""
    run = folder / f"{name}_{seed}"
    if not (run / "team.json").is_file():
        config, own = RUNS[name]
        fixed = [f"seed={seed}", f"magrpo.output_dir={run}", "magrpo.disable_tqdm=true", "magrpo.logging_steps=20"]
        if changes:
            fixed += ["magrpo.max_steps=1", "magrpo.items_per_device=1", "magrpo.max_completion_length=4"]
        print(f"Training {run.name}", flush=True)
        run_recipe(
            "magrpo", task, ["--config", str(CONFIGS / config), "--override", *own, *fixed, *changes], "benchmark"
        )
    return run


def evaluate(
    task, runs: list[Path], folder: Path, options: argparse.Namespace, flags: list[str], cross_play: bool = False
) -> dict[str, Any]:
    """Evaluates runs with the command of the package, and returns its report."""
    episodes = 2 if options.smoke else options.num_episodes
    argv = [*map(str, runs), "--num_episodes", str(episodes), "--output_dir", str(folder), "--disable_tqdm", *flags]
    if options.smoke:
        argv += ["--num_bootstraps", "100", "--override", "dataset.eval_size=2"]
    run_evaluation(task, argv, "benchmark", cross_play)
    return json.loads((folder / ("cross_play.json" if cross_play else "evaluation.json")).read_text())


def print_speed() -> None:
    """
    Prints the median CPU seconds of 64 items on one thread, for several sizes of a batch in turn. Answers are scored
    by their length.
    """
    torch.set_num_threads(1)
    roles, dataset = ["aux", "main"], demo_dataset("test").select(range(64))
    team, accelerator = AgentTeam.from_pretrained(demo_model(), roles=roles), Accelerator(cpu=True)
    policy = Policy("team", "team", Lengths(2), lambda: LoadedTeam(team, {}), max_completion_length=40)
    settings: dict[str, Any] = {"num_turns": 1, "temperature": 1.0, "disable_tqdm": True, "k": [1]}
    parts = {"prompts": 0.0, "tokens": 0.0}  # of the last evaluation

    def timed(part: str, function: Callable) -> Callable:
        def wrapper(*args, **kwargs):
            start = time.process_time()
            result = function(*args, **kwargs)
            parts[part] += time.process_time() - start
            return result

        return wrapper

    generation.read_packed = timed("prompts", generation.read_packed)
    generation.read_padded = timed("prompts", generation.read_padded)
    SamplingLoop.run = timed("tokens", SamplingLoop.run)
    for episodes in (1, 10):
        seconds: dict[int, list[float]] = {1: [], 8: [], 16: [], 64: []}
        profiles: dict[int, list[list[float]]] = {size: [] for size in seconds}
        for repetition in range(4):
            for size, measured in seconds.items():
                with tempfile.TemporaryDirectory() as folder:
                    own = {"num_episodes": episodes, "items_per_batch": size, "output_dir": folder}
                    parts.update(prompts=0.0, tokens=0.0)
                    start = time.process_time()
                    play_policy(policy, dataset, EvaluationConfig(**settings, **own), accelerator)
                if repetition > 0:  # the first is a warm-up
                    measured.append(time.process_time() - start)
                    profiles[size].append([parts["prompts"], parts["tokens"]])
        medians = {size: statistics.median(measured) for size, measured in seconds.items()}
        for size, median in medians.items():
            ratio = median / medians[64]
            prompts, tokens = map(statistics.median, zip(*profiles[size], strict=True))
            print(
                f"{episodes:2} episodes, {size:2} items per batch: {median:6.2f} s, {ratio:4.1f} x that of 64; "
                f"reading prompts {prompts:.2f} s, sampling tokens {tokens:.2f} s"
            )


def print_tables(numbers: dict[str, Any]) -> None:
    def show(estimate: dict[str, float] | None) -> str:
        if estimate is None:
            return "-"
        interval = "" if estimate["low"] is None else f" [{estimate['low']:.3f}, {estimate['high']:.3f}]"
        return f"{estimate['mean']:.3f}{interval}"

    print(f"\n{'':28}{'paper reward':>24}{'pass@1':>24}{'tokens':>9}")
    for name, report in numbers.items():
        if name == "cross_play" or "policies" not in report:
            continue
        rows = {x: policy for x, policy in report["policies"].items() if policy["kind"] in ("team", "control")}
        if "over_teams" in report:
            rows[f"{name}, all seeds"] = {"results": report["over_teams"], "cost_per_episode": {}}
        for row, policy in rows.items():
            final, tokens = policy["results"]["final"], policy["cost_per_episode"].get("generated_tokens")
            cost = "" if tokens is None else f"{tokens:.1f}"
            print(f"{row:28}{show(final.get('paper_reward')):>24}{show(final.get('pass@1')):>24}{cost:>9}")
        for title in ("control", "contributions"):
            for row, of_turn in report.get(title, {}).items():
                text = "team minus control" if title == "control" else f"loss, {row}"
                final = of_turn["final"]
                print(f"{text:52}{show(final.get('pass@1')):>24}")
    if "cross_play" in numbers:
        play = numbers["cross_play"]["cross_play"]["pass@1"]
        for name in ("diagonal", "off_diagonal", "difference"):
            print(f"cross-play, pass@1, {name:32}{show(play[name]):>24}")


if __name__ == "__main__":
    main()
