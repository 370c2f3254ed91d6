"""Trainings whose processes were started with something different. Run by `test_two_processes.py` in two processes."""

import json
import os
import sys
from pathlib import Path

from trl_multiagent import FunctionEnvironment

from process_group import end_process_group
from tiny import count_reward, tiny_items, tiny_team, tiny_trainer


def arguments(process: int) -> dict[str, dict]:
    """What a process gives to the trainer, by the name of the setting that differs."""
    other = tiny_items(12).map(lambda row: {"x": row["x"] + "0" * process})
    environment = FunctionEnvironment({"aux": "Help {x}" + "?" * process, "main": "Do {x}"}, count_reward)
    team = tiny_team()
    team.agents["aux"].model.norm.weight.data += process  # DDP makes the teams equal, not the reference policies
    return {
        "nothing": {"items_per_device": 1},
        "num_turns": {"num_turns": 1 + process},
        "train_dataset": {"train_dataset": other},
        "environment prompts": {"environment": environment},
        "weights that are not trained": {"team": team, "beta": 0.1},
    }


def main(output: str, process: int):
    answers = {}
    for name, given in arguments(process).items():
        try:
            tiny_trainer(Path(output) / "run", **given).train()
            answers[name] = "trained"
        except ValueError as error:
            answers[name] = str(error)
    (Path(output) / f"{process}.json").write_text(json.dumps(answers))


if __name__ == "__main__":
    main(sys.argv[1], int(os.environ["RANK"]))
    end_process_group()
