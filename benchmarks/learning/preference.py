"""
What a team learns from preferences: MADPO, its iterative form and MARLHF on the demo, beside MAGRPO at the same number
of scored joint answers, and beside CoMLRL's MADPO on the same preferences.

    python -m benchmarks.learning.preference                       # three seeds: about an hour on two cores
    python -m benchmarks.learning.preference --seeds 1 --no_peer   # one seed of this project: about 20 minutes
    python -m benchmarks.learning.preference --methods "CoMLRL's madpo" --peer_learning_rate 1e-4  # at another rate
    python -m benchmarks.learning.preference --smoke               # seconds: whether it runs; its numbers mean nothing

Every run starts from the demo's base model and is trained with the demo's configurations, on the reward of kind
`paper`. The result is the mean joint reward of four sampled answers to each of the 96 held-out problems.

What is equal:
- MADPO and MAGRPO: the number of joint answers that are sampled and scored. MAGRPO takes as many optimizer steps as
  that needs, with the batch and learning rate of the demo.
- MADPO and CoMLRL's MADPO: the preferences, the model, the number of pairs per update and of updates, beta, and the
  peak of the learning rate. CoMLRL has no reference policy, no `sft` term, a constant learning rate, one AdamW per
  agent with torch's defaults, no clipping, and leaves out the last token of every answer.

The scored answers of MARLHF are those of its preferences: in the training of its team, the reward model scores.

Seconds are those of the whole run, collection included, from the loaded libraries to the saved team; CoMLRL's contain
no collection. The first call with the peer makes an environment for it, see `comlrl/steps.py`.
"""

import argparse
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import yaml

from benchmarks.comlrl.steps import peer_python
from benchmarks.team_run import REPOSITORY, Clock, machine, save_model
from trl_multiagent import AgentTeam, Environment, Outcome
from trl_multiagent.configs.recipes.demo.model import demo_model
from trl_multiagent.configs.recipes.demo.problems import demo_dataset, demo_prompts
from trl_multiagent.configs.recipes.demo.task import TASK
from trl_multiagent.environments.task import Task
from trl_multiagent.preferences import load_preferences
from trl_multiagent.runs.prepared import prepare_training
from trl_multiagent.runs.rounds import PREFERENCES_FOLDER
from trl_multiagent.runs.run import read_settings, run_recipe


CONFIGS = REPOSITORY / "recipes" / "code_generation" / "configs"
ROLES = ("aux", "main")
QUIET = dataclasses.replace(TASK, introduction=None, callbacks=None)  # the demo without its own evaluation


class Lengths(Environment):
    """For a smoke run, whose random model would never write a program: the reward is the number of characters."""

    roles = ROLES

    def prompts(self, item, history):
        return demo_prompts(item)

    def score(self, items, joint_actions, histories):
        lengths = [float(sum(map(len, action.values()))) for action in joint_actions]
        return [Outcome(length, {"paper_reward": length}) for length in lengths]


SMOKE = dataclasses.replace(QUIET, make_environment=lambda settings: Lengths())
EPISODES = 4  # per held-out problem
METHODS = (
    "base",
    "madpo",
    "madpo without sft",
    "magrpo at madpo's answers",
    "madpo_iter",
    "magrpo at madpo_iter's answers",
    "marlhf",
    "CoMLRL's madpo",
)
TARGETS = {"madpo": 2.4, "madpo_iter": 3.0, "marlhf": 2.6}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0].strip())
    parser.add_argument("--smoke", action="store_true", help="seconds: a tiny random model, a few answers")
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds (default: 3)")
    parser.add_argument("--first_seed", type=int, default=0, help="the first of them (default: 0)")
    parser.add_argument("--no_peer", action="store_true", help="leave CoMLRL out")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS, help="what to run (default: all)")
    parser.add_argument(
        "--peer_learning_rate", type=float, help="CoMLRL's learning rate (default: that of madpo_demo)"
    )
    parser.add_argument("--peer_python", help="a Python in which CoMLRL is installed; by default one is made")
    parser.add_argument("--output", type=Path, default=Path("preference.json"), help="where the JSON goes")
    options = parser.parse_args()
    peer = None
    if not options.no_peer and METHODS[-1] in options.methods:
        peer = options.peer_python or peer_python(make=not options.smoke)
        if peer is None:
            print(
                "CoMLRL is not installed here, and a smoke run installs nothing: these are this project's runs alone."
            )
    seeds = 1 if options.smoke else options.seeds
    results: dict[str, list[dict]] = {name: [] for name in METHODS}
    with tempfile.TemporaryDirectory() as folder:
        model = demo_model() if not options.smoke else folder
        if options.smoke:
            save_model(Path(folder), hidden_size=64, num_layers=1)
        for seed in range(options.first_seed, options.first_seed + seeds):
            with tempfile.TemporaryDirectory() as runs:
                run_seed(seed, model, Path(runs), options, peer, results)
    numbers = {"machine": machine(), "targets": TARGETS, "results": results}
    options.output.write_text(json.dumps(numbers, indent=2) + "\n")
    print_table(results)
    print(f"\nAll numbers: {options.output}")


def run_seed(
    seed: int,
    model: str,
    runs: Path,
    options: argparse.Namespace,
    peer: str | None,
    results: dict[str, list[dict]],
) -> None:
    """Runs the methods with one seed, and adds what they reached to `results`."""
    methods, smoke = options.methods, options.smoke
    if smoke:  # once beside MAGRPO, which is the same beside the others
        methods = [x for x in methods if not x.startswith("magrpo at") or x == "magrpo at madpo's answers"]
    common = [f"agent_model.name={model}", f"seed={seed}"]

    task = SMOKE if smoke else QUIET

    def add(name: str, folder: Path | str | None, **facts: float) -> None:
        source = model if folder is None else str(folder)
        reward = held_out_reward(task, source, None if folder is not None else ROLES, 2 if smoke else None)
        results[name].append({"seed": seed, "reward": reward, **facts})
        print(f"seed {seed}, {name}: held-out reward {reward:.2f}", flush=True)

    if "base" in methods:
        add("base", None, answers=0, updates=0, seconds=0.0, cpu_seconds=0.0)
    for name in ("madpo", "madpo without sft", "madpo_iter", "marlhf"):
        against = [f"magrpo at {name}'s answers", *([METHODS[-1]] if name == "madpo" else [])]
        if not {name, *against} & {*methods}:
            continue
        method, _, without_sft = name.partition(" without ")
        folder, config = runs / name, CONFIGS / f"{method}_demo.yaml"
        changes = [f"{method}.output_dir={folder}", f"{method}.disable_tqdm=true", f"{method}.logging_steps=1000"]
        changes += ["dataset.eval_split=null"]
        changes += ["madpo.loss_type=[sigmoid]", "madpo.loss_weights=[1.0]"] if without_sft else []
        if smoke:
            changes += ["dataset.size=4", f"{method}.preference_num_candidates=4", f"{method}.max_completion_length=8"]
            changes += ["madpo_iter.num_iterations=2"] if name == "madpo_iter" else []
            changes += ["marlhf.max_steps=1", "marlhf.items_per_device=2"] if name == "marlhf" else []
        clock = Clock()
        run_recipe(method, task, ["--config", str(config), "--override", *common, *changes], "benchmark")
        facts = clock.facts()
        done = [
            json.loads(path.read_text())
            for path in [folder / "results.json", *folder.glob("_rounds/*/results.json")]
            if path.is_file()
        ]
        answers = sum(one["collection"]["candidates_scored"] for one in done)
        updates = sum(one.get("steps", 0) for one in done)
        add(name, folder, answers=answers, updates=updates, **facts)
        if f"magrpo at {name}'s answers" in methods:
            train_magrpo(task, name, answers, runs, common, smoke, add)
        if name == "madpo" and peer is not None:
            train_peer(peer, folder, model, seed, runs, config, options.peer_learning_rate, add)


def train_magrpo(task: Task, name: str, answers: int, runs: Path, common: list[str], smoke: bool, add) -> None:
    """Trains with MAGRPO on as many scored joint answers as another method used."""
    config = CONFIGS / "magrpo_demo.yaml"
    section = yaml.safe_load(config.read_text())["magrpo"]
    steps = max(1, answers // (section["items_per_device"] * section["num_generations"]))
    folder = runs / f"magrpo_{name}"
    changes = [
        f"magrpo.output_dir={folder}",
        f"magrpo.max_steps={steps}",
        "reward.kind=paper",
        "dataset.eval_split=null",
    ]
    changes += [
        "magrpo.disable_tqdm=true",
        "magrpo.logging_steps=1000",
        *(["magrpo.max_completion_length=8", "magrpo.items_per_device=2"] if smoke else []),
    ]
    clock = Clock()
    run_recipe("magrpo", task, ["--config", str(config), "--override", *common, *changes], "benchmark")
    answers = steps * section["items_per_device"] * section["num_generations"]
    add(f"magrpo at {name}'s answers", folder, answers=answers, updates=steps, **clock.facts())


def train_peer(
    peer: str, collected: Path, model: str, seed: int, runs: Path, config: Path, learning_rate: float | None, add
) -> None:
    """Trains with CoMLRL on the preferences that a run of ours collected."""
    section = yaml.safe_load(config.read_text())["madpo"]
    pairs = load_preferences(str(collected / PREFERENCES_FOLDER), ROLES)
    settings = {
        "pairs": pairs.to_list(),
        "model": model,
        "seed": seed,
        "learning_rate": learning_rate or section["learning_rate"],
        "beta": section["beta"],
        "num_train_epochs": section["num_train_epochs"],
        "train_batch_size": section["per_device_train_batch_size"],
        "output": str(runs / "peer"),
    }
    path = runs / "peer.json"
    path.write_text(json.dumps(settings))
    environment = {**os.environ, "WANDB_MODE": "disabled", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    clock = Clock(children=True)
    done = subprocess.run(
        [peer, "-m", "benchmarks.comlrl.peer_madpo", path],
        cwd=REPOSITORY,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise RuntimeError(f"CoMLRL's run failed:\n{done.stderr[-3000:]}")
    updates = section["num_train_epochs"] * -(-len(pairs) // section["per_device_train_batch_size"])
    collection = json.loads((collected / "results.json").read_text())["collection"]
    team = AgentTeam.from_pretrained([str(runs / "peer" / role) for role in ROLES], ROLES)
    team.save_pretrained(runs / "peer_team")
    add(METHODS[-1], runs / "peer_team", answers=collection["candidates_scored"], updates=updates, **clock.facts())


def held_out_reward(task: Task, source: str, roles: tuple[str, ...] | None, num_items: int | None) -> float:
    """The mean joint reward, kind `paper`, of sampled answers to the held-out problems."""
    argv = ["--config", str(CONFIGS / "magrpo_demo.yaml"), "--override", "reward.kind=paper"]
    environment = prepare_training(read_settings("magrpo", task, argv, "benchmark")).make_environment()
    items = demo_dataset("test").to_list()[:num_items]
    torch.manual_seed(0)
    team = AgentTeam.from_pretrained(source, roles)
    tokens = 40 if num_items is None else 4
    episodes = team.collaborate(
        items * EPISODES, environment, max_new_tokens=tokens, temperature=1.0, top_p=1.0, top_k=0
    )
    return statistics.fmean(episode[-1].outcome.metrics["paper_reward"] for episode in episodes)


def print_table(results: dict[str, list[dict]]) -> None:
    print(f"\n{'':32}{'held-out reward':>18}{'aim':>6}{'scored':>9}{'updates':>9}{'wall, s':>9}{'cpu, s':>9}")
    for name, runs in results.items():
        if not runs:
            continue
        rewards = [run["reward"] for run in runs]
        error = statistics.stdev(rewards) / len(rewards) ** 0.5 if len(rewards) > 1 else float("nan")
        means = [
            statistics.fmean(run[key] for run in runs) for key in ("answers", "updates", "seconds", "cpu_seconds")
        ]
        reward = f"{statistics.fmean(rewards):.2f} +- {error:.2f}" if len(rewards) > 1 else f"{rewards[0]:.2f}"
        aim = f"{TARGETS[name]:g}" if name in TARGETS else ""
        print(f"{name:32}{reward:>18}{aim:>6}" + "".join(f"{value:>9.0f}" for value in means))
    sys.stdout.flush()


if __name__ == "__main__":
    main()
