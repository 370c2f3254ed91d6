"""
Trains two copies of SmolLM2-135M-Instruct on `hidden`, and shows what they say before and after, on words that they
were not trained on: `make demo-real`. Options are those of `trl-multiagent train`.
"""

import argparse
import json
from pathlib import Path

from trl_multiagent import cli
from trl_multiagent.models.packaged import smollm2


def main(arguments: list[str], folder: Path = Path("outputs/demo-real"), items: int = 3) -> None:
    model = smollm2()
    cli.main(["train", "magrpo", "--config", "hidden", *arguments, "--override", f"output.base_dir={folder}"])
    run = max((path for path in folder.iterdir() if (path / "team.json").is_file()), key=lambda x: x.stat().st_mtime)
    evaluation = run / "evaluation"
    options = ["--num_episodes", "1", "--ablate", "messages", "--output_dir", str(evaluation)]
    cli.main(["evaluate", model, str(run), "--config", str(run / "config.yaml"), *options])
    print(summary(evaluation, items))


def policies_of(evaluation: Path) -> tuple[dict[str, str], dict]:
    """Returns the name of each policy by what it is, and the evaluation of each name."""
    policies = json.loads((evaluation / "evaluation.json").read_text())["policies"]
    untrained, trained = (name for name, policy in policies.items() if policy["kind"] == "team")
    names = {"untrained": untrained, "trained": trained, "trained, messages cut": f"{trained}_messages_cut"}
    return {**names, "trained, messages of other items": f"{trained}_messages_shuffled"}, policies


def talks_of(evaluation: Path, policy: str) -> list[list[dict]]:
    """Returns the turns of the first episode of each item."""
    lines = (evaluation / "transcripts" / policy / "transcripts.jsonl").read_text().splitlines()
    return [record["turns"] for record in map(json.loads, lines) if record["episode"] == 0]


def said_in(turns: list[dict]) -> list[str]:
    """Returns what the agents said in an episode, each on one line."""
    return [text.replace("\n", " ") for turn in turns for text in turn["completions"].values()]


def summary(evaluation: Path, items: int) -> str:
    """Returns the first items before and after the training, and the share of right answers of each policy."""
    names, policies = policies_of(evaluation)
    talks = [talks_of(evaluation, names[when]) for when in ("untrained", "trained")]
    lines = ["", "Before and after, on words that were not in the training:", ""]
    for before, after in [*zip(*talks, strict=True)][:items]:
        lines.append(before[0]["prompts"]["speaker"].partition(".")[0] + ".")
        for when, turns in (("before", before), ("after", after)):
            said = said_in(turns)
            lines.append(f"  {when:8} speaker: {said[0]:40}  decider: {said[-1]}")
    lines += ["", f"Right answers to {len(talks[0])} items, and their 95 % intervals:", ""]
    for shown, name in names.items():
        right = policies[name]["results"]["turn_2"]["reward"]
        lines.append(f"  {shown:34} {right['mean']:.2f} [{right['low']:.2f}, {right['high']:.2f}]")
    lines += [f"  {'any team without messages':34} 0.25 at most (exact)", ""]
    return "\n".join([*lines, f"Report: {evaluation.parent / 'report.html'}"])


if __name__ == "__main__":
    main(argparse.ArgumentParser(description=__doc__).parse_known_args()[1])
