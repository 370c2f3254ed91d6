"""A task for the tests of evaluation. Run under a launcher, it evaluates a saved team in every process."""

import sys

import torch
from datasets import Dataset

from trl_multiagent import FunctionEnvironment, Task
from trl_multiagent.environments.task import DatasetSource
from trl_multiagent.runs.evaluation import run_evaluation

from process_group import end_process_group
from tiny import count_reward, tiny_items


ITEMS = 7


class LetterEnvironment(FunctionEnvironment):
    """
    Agents answer a task `x`. An answer passes if the first byte of main's text is even; a first turn may be revised.
    """

    def __init__(self, roles):
        prompts = {role: "Task {x}, part " + role + ":" for role in roles}
        super().__init__(prompts, count_reward, transition=lambda item, history: dict.fromkeys(roles, "Again:"))

    def evaluate(self, items, joint_actions, histories):
        outcomes = self.score(items, joint_actions, histories)
        for outcome, joint_action in zip(outcomes, joint_actions, strict=True):
            outcome.metrics["passed"] = float(ord((joint_action["main"] or "a")[0]) % 2 == 0)
        return outcomes


def load_datasets(settings):
    items = tiny_items(12)
    if settings.dataset.eval_split == "empty":
        return items, items.select([])
    return items, Dataset.from_dict({"x": items["x"][:ITEMS]}) if settings.dataset.eval_split else None


TASK = Task(
    lambda settings: LetterEnvironment(("aux", "main")[-settings.num_agents :]),
    load_datasets,
    settings={"dataset": DatasetSource},
)


def evaluate(*argv, task=TASK, cross_play=False):
    """Runs the command in this process."""
    argv = [*map(str, argv), "--max_completion_length", "6", "--num_episodes", "4", "--disable_tqdm"]
    argv += [] if "--items_per_batch" in argv else ["--items_per_batch", "3"]
    run_evaluation(task, argv, prog="evaluate", cross_play=cross_play)


if __name__ == "__main__":
    torch.set_num_threads(1)
    evaluate(*sys.argv[1:], "--split", "test")
    end_process_group()
