"""
Trains two copies of SmolLM2-135M-Instruct on `hidden`, and shows what they say before and after, on words that they
were not trained on: `make demo-real`. It takes the options of `trl-multiagent train`.
"""

import argparse
import json
import sys
import time
from pathlib import Path

from trl_multiagent import cli
from trl_multiagent.models.packaged import smollm2


UNTRAINED = "evaluation_untrained"
POLICIES = ("untrained", "trained", "trained, messages cut", "trained, messages of other items")


def main(arguments: list[str], folder: Path = Path("outputs/demo-real"), items: int = 3) -> None:
    model, start = smollm2(), time.time()
    cli.main(["train", "magrpo", "--config", "hidden", *arguments, "--override", f"output.base_dir={folder}"])
    run = run_since(start, folder)
    for team, output, ablation in ((model, UNTRAINED, []), (str(run), "evaluation", ["--ablate", "messages"])):
        options = ["--config", str(run / "config.yaml"), "--num_episodes", "1", *ablation]
        cli.main(["evaluate", team, *options, "--output_dir", str(run / output)])
    print(summary(run, items))


def run_since(start: float, folder: Path) -> Path:
    """Returns the folder of the last run that has saved its team since a time. Without any, ends the program."""
    teams = [(path.stat().st_mtime, path.parent) for path in folder.glob("*/team.json")]
    if not teams or max(teams)[0] < start:
        sys.exit(f"No team was saved in {folder}, so there is nothing to show.")
    return max(teams)[1]


def policies_of(run: Path) -> dict[str, tuple[Path, dict]]:
    """Returns the folder of transcripts and the evaluation of each policy, by what it is."""
    found = []
    for folder in (run / UNTRAINED, run / "evaluation"):
        policies = json.loads((folder / "evaluation.json").read_text())["policies"]
        found += [(folder / "transcripts" / name, policy) for name, policy in policies.items()]
    return dict(zip(POLICIES, found, strict=True))


def talks_of(transcripts: Path) -> list[list[dict]]:
    """Returns the turns of the first episode of each item."""
    lines = (transcripts / "transcripts.jsonl").read_text().splitlines()
    return [record["turns"] for record in map(json.loads, lines) if record["episode"] == 0]


def said_in(turns: list[dict]) -> list[str]:
    """Returns what the agents said in an episode, each on one line."""
    return [text.replace("\n", " ") for turn in turns for text in turn["completions"].values()]


def summary(run: Path, items: int) -> str:
    """Returns the first items before and after the training, and the share of right answers of each policy."""
    policies = policies_of(run)
    talks = [talks_of(policies[when][0]) for when in POLICIES[:2]]
    lines = ["", "Before and after, on words that were not in the training:", ""]
    for before, after in [*zip(*talks, strict=True)][:items]:
        lines.append(before[0]["prompts"]["speaker"].partition(".")[0] + ".")
        for when, turns in (("before", before), ("after", after)):
            said = said_in(turns)
            lines.append(f"  {when:8} speaker: {said[0]:40}  decider: {said[-1]}")
    lines += ["", f"Right answers to {len(talks[0])} items, and their 95 % intervals:", ""]
    for shown, (_, policy) in policies.items():
        right = policy["results"]["turn_2"]["reward"]
        lines.append(f"  {shown:34} {right['mean']:.2f} [{right['low']:.2f}, {right['high']:.2f}]")
    lines += [f"  {'any team without messages':34} 0.25 at most, expected over the draw of the items", ""]
    return "\n".join([*lines, f"Report: {run / 'report.html'}"])


if __name__ == "__main__":
    main(argparse.ArgumentParser(description=__doc__).parse_known_args()[1])
