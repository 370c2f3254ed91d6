"""
The task of the demo of class completion: generated classes, their prompts and base model.

A class keeps a log. Two of its methods put values in, two give its sum, product or text back, and each does so with an
operation such as `x * 2`. There are two ways to keep the log, and the agents write different methods, so they have to
agree:

- `"values"`: the log has what was put in, and the other methods compute the result;
- `"results"`: the log has the results so far, and the other methods take the last one.

The base model writes methods carelessly, in either way.
"""

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from trl_multiagent.environments.dataset_rows import Datasets, generated_rows, make_dataset, read_data
from trl_multiagent.environments.task import Task, TaskSettings
from trl_multiagent.models.imitation import ImitationModel
from trl_multiagent.tasks.class_completion import data
from trl_multiagent.tasks.class_completion.environment import (
    DIVISIONS,
    ClassCompletionEnvironment,
    divide,
    first_prompt,
)


DEMO = "demo"  # the name of the classes and of their base model
FAMILY = sorted(Path(data.__file__).parent.glob("*.py"))  # whose code determines the base model, too


class Log(NamedTuple):
    """A class of the demo: the result of a log, the result after one more value, and the operations of its methods."""

    of_log: str
    after: str
    operations: dict[str, str]


FILE = "class_demo.jsonl.gz"  # which `scripts/data/write_class_demo.py` writes
SIZES = {"test": 64, "train": 320}
NUMBERS = {"": "{}", "_double": "{} * 2", "_next": "{} + 1", "_square": "{} ** 2"}
TEXTS = {"": "{}", "_double": "{} * 2", "_dash": "{} + '-'", "_upper": "{}.upper()"}
LOGS = {
    "Sum": Log("sum(self.log)", "self.log[-1] + {}", NUMBERS),
    "Product": Log("prod(self.log)", "self.log[-1] * ({})", NUMBERS),
    "Text": Log("''.join(self.log)", "self.log[-1] + {}", TEXTS),
}
WAYS = ("values", "results")
CARELESS = 0.25  # share of the demonstrated methods with a mistake
MISTAKES = ("operation", "effect", "name", "syntax")


def demo_items(split: str | None) -> list[dict]:
    """
    Returns generated classes, as rows of [`~data.load_class_dataset`]. No class is in both splits, `"train"` (320) and
    `"test"` (64).
    """
    items = [json.loads(line) for line in read_data(FILE).splitlines()]
    splits = {"test": items[: SIZES["test"]], "train": items[SIZES["test"] :]}
    return generated_rows(splits.__getitem__, SIZES, split)


def write_method(kind: str, name: str, way: str = "", mistake: str = "", operation: str | None = None) -> str:
    """
    Writes a method of a class of some `kind`, a key of `LOGS`, in one of the `WAYS`, and with one of the `MISTAKES`
    or none. Without a way, the method consists of its description. `operation` takes the place of that in the name.
    """
    of_log, after, operations = LOGS[kind]
    operation = operation or operations[name[3:]]
    if name.startswith("put"):
        header, value = f"def {name}(self, x):\n", operation.format("x")
        bodies = (f'"""Put in {value}."""', f"self.log.append({value})", f"self.log.append({after.format(value)})")
    else:
        described, computed, last = (operation.format(log) for log in (kind.lower(), of_log, "self.log[-1]"))
        header, bodies = f"def {name}(self):\n", (f'"""Return {described}."""', f"return {computed}", f"return {last}")
    body = bodies[("", *WAYS).index(way)]
    if mistake == "effect":
        body = body.replace("return ", "y = ").replace("self.log.append", "y = ")
    if mistake == "syntax":
        body = body.replace("self.", "self ")
    return f"{header.replace(name, 'helper') if mistake == 'name' else header}    {body}\n"


def demo_prompt(item: dict, own: Sequence[str], num_agents: int) -> str:
    """Returns the prompt of an agent, short as in the training of the demo's model."""
    return f"{item['skeleton']}# Write only {', '.join(own)}:\n"


def demonstrate(number: int, rng: random.Random) -> list[tuple[str, str]]:
    """
    Draws pairs of a prompt and an answer: of either agent of a team, or of one that works alone. Each keeps the log in
    one way.
    """
    items = demo_items("train")
    pairs = []
    for _ in range(number):
        item, num_agents = rng.choice(items), rng.choice((1, 2, 2))
        own, way, kind = rng.choice(divide(item, num_agents, DIVISIONS[0])), rng.choice(WAYS), item["class_name"]
        methods = []
        for name in own:
            mistake = rng.choice(MISTAKES) if rng.random() < CARELESS else ""
            other = rng.choice([*LOGS[kind].operations.values()]) if mistake == "operation" else None
            methods.append(write_method(kind, name, way, mistake, other))
        pairs.append((demo_prompt(item, own, num_agents), "\n".join(methods)))
    return pairs


# The task


@dataclass
class DemoDataset(data.ClassDataset):
    """The section `dataset`, in which the name `demo` selects the generated classes."""

    generated = (*data.ClassDataset.generated, DEMO)


def make_environment(settings: TaskSettings) -> ClassCompletionEnvironment:
    return data.make_environment(settings, demo_prompt if settings.dataset.name == DEMO else first_prompt)


def load_datasets(settings: TaskSettings) -> Datasets:
    if settings.dataset.name != DEMO:
        return data.load_datasets(settings)
    return settings.dataset.load_splits(lambda split: make_dataset(demo_items(split), DEMO))


# Class completion in which the name `demo` selects the generated classes and their base model
TASK = Task(
    make_environment,
    load_datasets,
    settings={**data.TASK.settings, "dataset": DemoDataset},
    models={DEMO: ImitationModel("demo-classes", demonstrate, 700, FAMILY).path},
)
