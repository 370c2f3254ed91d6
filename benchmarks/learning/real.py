"""
What two real language models learn in a game of recipes/real, on held-out words.

    python -m benchmarks.learning.real hidden                # three seeds: about 15 minutes of one core
    python -m benchmarks.learning.real taboo --seeds 1
    python -m benchmarks.learning.real editor editor_alone   # the team, and one agent that may write as many tokens
    python -m benchmarks.learning.real --smoke               # seconds: whether it runs; its numbers mean nothing

Each seed trains the configuration of that name and then plays the held-out items: with messages, with messages cut,
and with those of other items (`evaluate --ablate messages`). The numbers are the mean of the final turn and its 95 %
interval over items; the untrained model plays the same items. `bound` is what a team without messages reaches at most.
CPU seconds are those of the training. A row is printed as soon as it is known, and with `--folder`, runs that are
there already are not made again.
"""

import argparse
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.team_run import Clock, machine, save_model
from trl_multiagent.models.packaged import smollm2
from trl_multiagent.runs.evaluation import run_evaluation
from trl_multiagent.runs.run import run_recipe


# Name of each run -> its configuration, its changes, and its metrics with their bounds without messages, if known
RUNS: dict[str, tuple[str, list[str], dict[str, str]]] = {
    "hidden": ("hidden", [], {"reward": "0.25"}),
    "taboo": ("taboo", [], {"reward": "0.25", "said_the_word": ""}),
    "editor": ("editor", [], {"reward": "", "solved": ""}),
    # 20 answers to an item of a step, as many as the team's drafts and edits
    "editor_alone": (
        "editor",
        [
            "task=trl_multiagent.configs.recipes.real.editor:ALONE",
            "magrpo.num_turns=1",
            "magrpo.num_generations=20",
        ],
        {"reward": "", "solved": ""},
    ),
}
POLICIES = ("untrained", "trained", "cut", "shuffled")
TEAMS = ("hidden", "taboo", "editor")  # runs with messages


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0].strip())
    parser.add_argument("runs", nargs="*", metavar="RUN", default=["hidden"], help=f"what to run: {', '.join(RUNS)}")
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3], help="seeds (default: 1 to 3)")
    parser.add_argument("--override", nargs="+", default=[], metavar="KEY=VALUE", help="settings of the training")
    parser.add_argument("--smoke", action="store_true", help="seconds: one step of a tiny random model")
    parser.add_argument("--folder", type=Path, help="where the runs go; by default they are removed")
    parser.add_argument("--output", type=Path, default=Path("real.json"), help="where the JSON goes")
    options = parser.parse_args()
    if unknown := {*options.runs} - {*RUNS}:
        parser.error(f"no run {unknown.pop()!r}: there are {', '.join(RUNS)}")
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        if options.smoke:
            save_model(folder / "model", hidden_size=64, num_layers=1)
            options.seeds = [1]
            options.override += [f"agent_model.name={folder / 'model'}", "magrpo.max_steps=1"]
        model = str(folder / "model") if options.smoke else smollm2()
        print("| run, metric | seed | untrained | trained | messages cut | of other items | bound | training, CPU s |")
        print("| --- | --- | --- | --- | --- | --- | --- | --- |", flush=True)
        facts = []
        for name in options.runs:
            for seed in options.seeds:
                facts.append(measure(name, seed, model, folder, options.override))
                print("\n".join(rows(facts[-1])), flush=True)
    options.output.write_text(json.dumps({"machine": machine(), "runs": facts}, indent=2) + "\n")


def measure(name: str, seed: int, model: str, folder: Path, overrides: Sequence[str]) -> dict[str, Any]:
    """Trains and evaluates one run, unless it is there already. Returns its facts."""
    run = folder / f"{name}_{seed}"
    if (run / "facts.json").is_file():
        return json.loads((run / "facts.json").read_text())
    config, changes, _ = RUNS[name]
    changes = [*changes, *overrides, f"seed={seed}", f"magrpo.output_dir={run}", "magrpo.disable_tqdm=true"]
    clock = Clock()
    run_recipe("magrpo", None, ["--config", config, "--override", *changes], "benchmark")
    facts = {"run": name, "seed": seed, "cpu_seconds": clock.facts()["cpu_seconds"]}
    untrained = folder / f"{name}_untrained"
    if not (untrained / "evaluation.json").is_file():
        play([model], run, untrained)
    play([str(run), *(["--ablate", "messages"] if name in TEAMS else [])], run, run / "evaluation")
    policies = [*results_of(untrained), *results_of(run / "evaluation")]
    facts |= dict(zip(POLICIES, policies, strict=False))
    (run / "facts.json").write_text(json.dumps(facts) + "\n")
    return facts


def play(teams: list[str], run: Path, folder: Path) -> None:
    """Plays the held-out items of a run, once each."""
    flags = ["--config", str(run / "config.yaml"), "--num_episodes", "1", "--output_dir", str(folder)]
    run_evaluation(None, [*teams, *flags, "--disable_tqdm"], "benchmark")


def results_of(folder: Path) -> list[dict[str, dict[str, float]]]:
    """Returns the final turn's metrics of each policy of an evaluation, in the order in which they played."""
    policies = json.loads((folder / "evaluation.json").read_text())["policies"]
    return [policy["results"]["final"] for policy in policies.values()]


def rows(facts: dict[str, Any]) -> list[str]:
    """Returns the rows of a run as Markdown, one for each metric."""
    lines = []
    for metric, bound in RUNS[facts["run"]][2].items():
        policies = [facts[key][metric] for key in POLICIES if key in facts]
        shown = [f"{x['mean']:.2f} [{x['low']:.2f}, {x['high']:.2f}]" for x in policies]
        shown += [""] * (len(POLICIES) - len(shown))
        seconds = f"{facts['cpu_seconds']:.0f}"
        cells = [f"`{facts['run']}`, {metric}", str(facts["seed"]), *shown, bound, seconds]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


if __name__ == "__main__":
    main()
