"""Collects preferences in every process. Run by `tests/preferences/test_collection.py` under a launcher."""

import sys
from pathlib import Path

import torch
from accelerate import PartialState

from trl_multiagent.preferences import PreferenceConfig, collect_preferences

from process_group import end_process_group
from tiny import count_reward, tiny_environment, tiny_items, tiny_team


def collect(folder: Path, environment=None) -> None:
    settings = {"preference_num_candidates": 4, "preference_pairs_per_sample": 3, "items_per_chunk": 5}
    config = PreferenceConfig(output_dir=str(folder), max_completion_length=6, **settings)
    collect_preferences(tiny_team(), environment or tiny_environment(), tiny_items(), config)


def failing(process: int):
    """An environment that fails in one process."""

    def reward(completions, **columns):
        if PartialState().process_index == process:
            1 / 0  # noqa: B018
        return count_reward(completions)

    reward.__name__ = "count_reward"
    return tiny_environment(reward=reward)


if __name__ == "__main__":
    torch.set_num_threads(1)
    if len(sys.argv) > 2:
        collect(Path(sys.argv[1]) / "broken", failing(int(sys.argv[2])))
    else:
        collect(Path(sys.argv[1]) / "whole")
    end_process_group()
