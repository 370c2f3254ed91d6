"""
Shows what two copies of a small code model write together before and after their training, on problems that they were
not trained on: `make demo-code`. The trained adapters are in `trained/`. With `--train` they are trained here, and
further options are those of `trl-multiagent train`.
"""

import argparse
import json
import shutil
import time
from pathlib import Path

from trl_multiagent import cli
from trl_multiagent.configs.recipes.real.demo import UNTRAINED, run_since, talks_of


CONFIG = "magrpo_demo_coder"
HUB = "Qwen/Qwen2.5-Coder-0.5B-Instruct"
TRAINED = Path(__file__).parent / "trained"
TOOK = "20 minutes of two cores"  # to train it


def main(
    model: str = HUB,
    options: list[str] | None = None,
    folder: Path = Path("outputs/demo-code"),
    trained: Path = TRAINED,
    items: int = 3,
) -> None:
    """Shows the `trained` team; with `options`, trains one with them, and shows it."""
    start, config, settings = time.time(), CONFIG, ["--override", f"agent_model.name={model}"]
    if options is None:
        team, took = copy_for(model, trained, folder / "trained"), TOOK
    else:
        cli.main(["train", "magrpo", "--config", CONFIG, *options, *settings, f"output.base_dir={folder}"])
        team, took = run_since(start, folder), f"{(time.time() - start) / 60:.0f} minutes"
        config = str(team / "config.yaml")
    for name, output in ((model, UNTRAINED), (str(team), "evaluation")):
        sampling = ["--split", f"test[:{items}]", "--num_episodes", "1", "--temperature", "0"]
        cli.main(["evaluate", name, "--config", config, *sampling, "--output_dir", str(team / output), *settings])
    print(summary(team), f"The training took {took}.", f"Report: {team / 'evaluation' / 'report.html'}", sep="\n")


def copy_for(model: str, trained: Path, folder: Path) -> Path:
    """Copies trained adapters, for a base with another name, and without results of an earlier call."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(trained, folder)
    for file in folder.glob("agents/*/adapter_config.json"):
        file.write_text(json.dumps(json.loads(file.read_text()) | {"base_model_name_or_path": model}))
    return folder


def summary(team: Path) -> str:
    """Returns what the agents wrote before and after the training, and how many tests it passes."""
    when = {"before": team / UNTRAINED, "after": team / "evaluation"}
    talks = {name: talks_of(next((folder / "transcripts").iterdir())) for name, folder in when.items()}
    lines = ["", "Before and after, on problems that were not in the training:", ""]
    for episodes in zip(*talks.values(), strict=True):
        lines.append(episodes[0][0]["prompts"]["main"][-1]["content"])
        for name, (turn,) in zip(talks, episodes, strict=True):
            metrics = turn["metrics"]
            passed = f"{metrics['tests_passed']:.0f} of {metrics['tests_total']:.0f} tests pass"
            used = "main uses aux" if metrics["collab_aux_usage"] else "no test that passes needs aux"
            lines += ["", f"--- {name}: {passed}, {used}"]
            lines += [f"# {role}\n{text.strip()}" for role, text in turn["completions"].items()]
        lines.append("")
    return "\n".join(lines)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=HUB, help="id on the Hub, folder, or GGUF file")
    parser.add_argument("--train", action="store_true", help="train the adapters here, half an hour of one core")
    given, options = parser.parse_known_args()
    if options and not given.train:
        parser.error(f"{' '.join(options)}: options of the training need --train")
    main(given.model, options if given.train else None)
