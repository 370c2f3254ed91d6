"""
A task of your own: the agents' prompts, the reward of their answers, and the items.

Here, each of two agents writes a digit, and the two digits must make the item's total. Neither sees the other's
answer, so that they have to learn who takes how much. Both get the same reward.
"""

from dataclasses import dataclass

from trl_multiagent import FunctionEnvironment, Task
from trl_multiagent.environments.task import setting
from trl_multiagent.models.imitation import ImitationModel


PROMPTS = {  # {total} is a column of the items
    "left": "Two digits make {total}. The first digit is ",
    "right": "Two digits make {total}. The second digit is ",
}
DIGITS = set("0123456789")


@dataclass
class Sums:
    """
    The section `sums` of config.yaml. `trl-multiagent train magrpo --task task:TASK --help` lists its settings.
    """

    largest: int = setting("The largest total.", 18)

    def __post_init__(self):
        if not 0 <= self.largest <= 18:
            raise ValueError(f"`sums.largest` is {self.largest}; two digits make 0 to 18.")


def make_environment(settings):
    """
    Makes the prompts and the reward. `settings.sections` has the sections of config.yaml that belong to the task.
    """

    def right_total(completions, total, **columns):
        """Returns 1 for each pair of answers that are two digits and make the total, and 0 for any other pair."""
        rewards = []
        for completion, wanted in zip(completions, total, strict=True):
            answers = [completion[role].strip() for role in PROMPTS]
            are_digits = all(answer in DIGITS for answer in answers)
            rewards.append(float(are_digits and sum(map(int, answers)) == wanted))
        return rewards

    environment = FunctionEnvironment(PROMPTS, reward_funcs=[right_total])
    # For the confidence intervals of an evaluation
    environment.metric_ranges = dict.fromkeys(("reward", "rewards/right_total"), (0.0, 1.0))
    return environment


def load_datasets(settings):
    """
    Returns the items to train on, and the items to evaluate on or `None`. Read your own with `datasets.load_dataset`.
    """
    from datasets import Dataset

    items = Dataset.from_dict({"total": range(settings.sections["sums"].largest + 1)})
    return items, items  # there are no others


def demonstrate(number, rng):
    """
    Draws so many prompts, each with a digit that may be right. They train the small model that makes this task run
    anywhere. `agent_model.name` takes any other model, which needs no demonstrations.
    """
    pairs = []
    for _ in range(number):
        total = rng.randint(0, 18)
        prompt = rng.choice([*PROMPTS.values()]).format(total=total)
        pairs.append((prompt, str(rng.randint(max(0, total - 9), min(9, total)))))
    return pairs


TASK = Task(
    make_environment,
    load_datasets,
    settings={"sums": Sums},
    models={"small": ImitationModel("sums", demonstrate, 200, architecture={"hidden_size": 64}).path},
    roles=(*PROMPTS,),
)
