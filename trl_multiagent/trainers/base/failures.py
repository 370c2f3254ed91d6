"""Ends a training whose numbers are not finite, with a report of the items and texts that caused it."""

import json
from pathlib import Path
from typing import Any, NoReturn

from trl_multiagent.rollout.tree import Node


def end_with_report(trainer: Any, problem: str, **records: list[dict]) -> NoReturn:
    """Writes the records to the output folder of a trainer, and raises a `FloatingPointError` that names the file."""
    folder, step = Path(trainer.args.output_dir), trainer.state.global_step
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"failure_step{step}_process{trainer.accelerator.process_index}.json"
    report = {"problem": problem, "agents": list(trainer.team.roles), **records}
    path.write_text(json.dumps(report, indent=2, default=repr) + "\n")
    raise FloatingPointError(f"{problem} at step {step}. Items and completions are in {path}.") from None


def records_of(nodes: list[Node]) -> list[dict]:
    """Returns the joint actions of nodes, with their rewards if they are known."""
    records = []
    for node in nodes:
        for k, joint_action in enumerate(node.joint_actions):
            reward = {"reward": node.rewards[k]} if node.rewards else {}
            records.append({"item": node.item, **reward, "completions": joint_action})
    return records
