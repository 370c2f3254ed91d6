"""
Trains the workflow `writer_editor` with each trainer on rollout trees, and draws docs/images/trainers.png. It runs 18
trainings of less than a minute on a quiet core each; finished runs are kept in outputs/trainers/.

    python docs/images/make_trainers.py
"""

import json
from pathlib import Path
from statistics import fmean, stdev

from matplotlib.figure import Figure

import trl_multiagent
from trl_multiagent.configs.recipes.workflows.writer_editor import TASK, writer_editor


NAMES = ("MAGRPO", "MARLOO", "MAReMax", "MAREINFORCE", "IAC", "MAAC")
SEEDS, STEPS, ENDS = (0, 1, 2), 60, 10
RUNS = Path("outputs/trainers")
# Every trainer plays the same trees: 160 scored joint actions in each step
COMMON = {
    "num_turns": 2,
    "num_generations": 4,
    "items_per_device": 8,
    "per_device_train_batch_size": 128,
    "max_completion_length": 12,
    "max_steps": STEPS,
    "learning_rate": 7e-4,
    "warmup_steps": 5,
    "adam_beta2": 0.99,
    "logging_steps": 1,
    "bf16": False,
    "gradient_checkpointing": False,
    "save_strategy": "no",
    "report_to": "none",
    "disable_tqdm": True,
}
CRITICS = {"critic_learning_rate": 3.5e-3, "gae_lambda": 1.0, "advantage_normalization": False}
OTHER = {"IAC": CRITICS, "MAAC": CRITICS}


def rewards(name: str, seed: int) -> list[float]:
    """Returns the mean reward of the final texts at each step. Trains if there is no run yet."""
    file = RUNS / f"{name}_{seed}.json"
    if not file.exists():
        environment = writer_editor
        team = trl_multiagent.AgentTeam.from_pretrained(TASK.models["demo"](), roles=environment.roles)
        settings = {**COMMON, **OTHER.get(name, {}), "seed": seed}
        args = getattr(trl_multiagent, f"{name}Config")(str(RUNS / "run"), **settings)
        items, _ = TASK.load_datasets(None)
        trainer = getattr(trl_multiagent, f"{name}Trainer")(team, environment, args, train_dataset=items)
        trainer.train()
        log = [entry["final_turn/reward"] for entry in trainer.state.log_history if "final_turn/reward" in entry]
        file.write_text(json.dumps(log))
    return json.loads(file.read_text())


def draw(runs: dict[str, list[list[float]]], path: Path) -> None:
    figure = Figure(figsize=(9, 5), layout="constrained")
    for axes, (name, seeds) in zip(figure.subplots(2, 3, sharex=True, sharey=True).flat, runs.items(), strict=True):
        for log in seeds:
            axes.plot(range(1, STEPS + 1), log, color="#4c78a8", alpha=0.35, linewidth=1)
        axes.plot(range(1, STEPS + 1), [fmean(values) for values in zip(*seeds, strict=True)], color="#4c78a8")
        axes.set(title=name, ylim=(0, 1), xlim=(1, STEPS))
        axes.grid(alpha=0.3)
    figure.supxlabel("optimizer step (160 env steps each)")
    figure.supylabel("reward of the final text, 0 to 1")
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    RUNS.mkdir(parents=True, exist_ok=True)
    runs = {name: [rewards(name, seed) for seed in SEEDS] for name in NAMES}
    for name, seeds in runs.items():
        first, last = ([fmean(log[part]) for log in seeds] for part in (slice(ENDS), slice(-ENDS, None)))
        print(f"{name}: first {ENDS} steps {fmean(first):.2f}, last {ENDS} {fmean(last):.2f} (sd {stdev(last):.2f})")
    draw(runs, Path(__file__).with_name("trainers.png"))
