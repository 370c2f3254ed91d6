"""
Two updates of a tiny team, and then a reward that fails on process 1. Run by `test_two_hosts.py`, on two hosts and on
one.

Argument: a folder for the team and for what every process saw.
"""

import faulthandler
import json
import os
import sys
from pathlib import Path

import torch

from process_group import end_process_group
from tiny import count_reward, tiny_environment, tiny_trainer


FOLDER = Path(sys.argv[1])


def broken_reward(completions, **columns):
    if os.environ["RANK"] == "1":
        raise ValueError("the judge is ill")
    return count_reward(completions)


def error_of(trainer):
    try:
        trainer.train()
    except Exception as error:
        return f"{type(error).__name__}: {error}"


if __name__ == "__main__":
    torch.set_num_threads(1)
    faulthandler.dump_traceback_later(600, exit=True)  # processes that wait for each other say where
    trainer = tiny_trainer(FOLDER, num_turns=2, max_steps=2, optim="sgd", learning_rate=0.5)
    trainer.train()
    trainer.save_model()
    seen = {
        "processes": trainer.accelerator.num_processes,
        "on_this_host": int(os.environ["LOCAL_WORLD_SIZE"]),
        "network": os.readlink("/proc/self/ns/net"),
        "reward": [entry["reward"] for entry in trainer.state.log_history if "reward" in entry],
        "error": error_of(tiny_trainer(FOLDER / "broken", environment=tiny_environment(reward=broken_reward))),
    }
    (FOLDER / f"process{trainer.accelerator.process_index}.json").write_text(json.dumps(seen))
    end_process_group()
