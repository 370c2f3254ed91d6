"""
A task of your own: the agents' prompts, the reward of their answers, and the items.

Here, two agents learn to write the same letters. Neither sees the other's answer; both get the same reward.
"""

from dataclasses import dataclass
from pathlib import Path

from trl_multiagent import FunctionEnvironment, Task
from trl_multiagent.environments.task import setting


@dataclass
class Letters:
    """
    The section `letters` of config.yaml. `trl-multiagent train magrpo --task task:TASK --help` lists its settings.
    """

    allowed: str = setting("Letters that earn a reward.", "abcdefghijklmnopqrstuvwxyz")

    def __post_init__(self):
        if not self.allowed:
            raise ValueError("`letters.allowed` is empty: give at least one letter.")


def make_environment(settings):
    """
    Makes the prompts and the reward. `settings.sections` has the sections of config.yaml that belong to the task.
    """
    allowed = set(settings.sections["letters"].allowed)

    def shared_letters(completions, **columns):
        """Returns, for each pair of answers, the share of the letters that both agents wrote, between 0 and 1."""
        rewards = []
        for completion in completions:
            left, right = (set(completion[role]) for role in ("left", "right"))
            rewards.append(len(left & right & allowed) / max(1, len(left | right)))
        return rewards

    prompts = {"left": "Letters for {topic}: ", "right": "{topic} in letters: "}  # {topic} is a column of the items
    environment = FunctionEnvironment(prompts, reward_funcs=[shared_letters])
    environment.metric_ranges = {"reward": (0.0, 1.0)}  # for the confidence intervals of an evaluation
    return environment


def load_datasets(settings):
    """
    Returns the items to train on, and the items to evaluate on or `None`. Read your own with `datasets.load_dataset`.
    """
    from datasets import Dataset

    topics = ["rain", "snow", "wind", "night", "river", "stone", "field", "fire"]
    return Dataset.from_dict({"topic": topics}), Dataset.from_dict({"topic": ["hill", "lake", "cloud", "moon"]})


def tiny_model():
    """Returns a tiny random model, so that the task runs anywhere. `agent_model.name` takes any other model."""
    from trl_multiagent.models.tiny import tiny_model

    return tiny_model(Path(__file__).parent / "tiny_model")


TASK = Task(
    make_environment,
    load_datasets,
    settings={"letters": Letters},
    models={"tiny": tiny_model},
    roles=("left", "right"),
)
