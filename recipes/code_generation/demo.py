"""
Trains two copies of a small code model to write functions together, and shows what they write before and after, on
problems that they were not trained on: `make demo-code`. Options are those of `trl-multiagent train`.
"""

import argparse
import time
from pathlib import Path

from trl_multiagent import cli
from trl_multiagent.configs.recipes.real.demo import UNTRAINED, run_since, talks_of


CONFIG = "magrpo_demo_coder"
HUB = "Qwen/Qwen2.5-Coder-0.5B-Instruct"


def main(arguments: list[str], model: str = HUB, folder: Path = Path("outputs/demo-code"), items: int = 3) -> None:
    start, settings = time.time(), [f"output.base_dir={folder}", f"agent_model.name={model}"]
    cli.main(["train", "magrpo", "--config", CONFIG, *arguments, "--override", *settings])
    minutes = (time.time() - start) / 60
    run = run_since(start, folder)
    for team, output in ((model, UNTRAINED), (str(run), "evaluation")):
        options = ["--config", str(run / "config.yaml"), "--split", f"test[:{items}]", "--num_episodes", "1"]
        cli.main(["evaluate", team, *options, "--temperature", "0", "--output_dir", str(run / output)])
    print(summary(run), f"The training took {minutes:.0f} minutes.", f"Report: {run / 'report.html'}", sep="\n")


def summary(run: Path) -> str:
    """Returns what the agents wrote before and after the training, and how many tests it passes."""
    when = {"before": run / UNTRAINED, "after": run / "evaluation"}
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
    options, arguments = parser.parse_known_args()
    main(arguments, options.model)
