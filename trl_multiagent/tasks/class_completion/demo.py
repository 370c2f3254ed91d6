"""
The demo: small generated classes, and a small base model that writes their methods carelessly.

A class keeps a log. Two of its methods put values in, two give its sum, product or text back, and each does so with an
operation such as `x * 2`. There are two ways to keep the log, and the agents write different methods, so they have to
agree:

- `"values"`: the log has what was put in, and the other methods compute the result;
- `"results"`: the log has the results so far, and the other methods take the last one.
"""

import json
import random
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

from trl_multiagent.environments.embedded import generated_rows, imitation_model, read_data
from trl_multiagent.tasks.class_completion.division import DIVISIONS, divide


class Kind(NamedTuple):
    """A kind of class: the result of a log, the result after one more value, and the operations of its methods."""

    of_log: str
    after: str
    operations: dict[str, str]


DEMO = "demo"
FILE = "class_demo.jsonl.gz"  # which `tests/helpers/write_class_demo.py` writes
SIZES = {"test": 64, "train": 320}
NUMBERS = {"": "{}", "_double": "{} * 2", "_next": "{} + 1", "_square": "{} ** 2"}
TEXTS = {"": "{}", "_double": "{} * 2", "_dash": "{} + '-'", "_upper": "{}.upper()"}
KINDS = {
    "Sum": Kind("sum(self.log)", "self.log[-1] + {}", NUMBERS),
    "Product": Kind("prod(self.log)", "self.log[-1] * ({})", NUMBERS),
    "Text": Kind("''.join(self.log)", "self.log[-1] + {}", TEXTS),
}
WAYS = ("values", "results")
CARELESS = 0.25  # share of the demonstrated methods with a mistake
MISTAKES = ("operation", "effect", "name", "syntax")


def demo_items(split: str | None) -> list[dict]:
    """
    Returns generated classes, as rows of [`load_class_dataset`]. No class is in both splits, `"train"` (320) and
    `"test"` (64).
    """
    items = [json.loads(line) for line in read_data(FILE).splitlines()]
    splits = {"test": items[: SIZES["test"]], "train": items[SIZES["test"] :]}
    return generated_rows(splits.__getitem__, SIZES, split)


def write_method(kind: str, name: str, way: str = "", mistake: str = "", operation: str | None = None) -> str:
    """
    Writes a method of a class of some `kind`, a key of `KINDS`, in one of the `WAYS`, and with one of the `MISTAKES`
    or none. Without a way, the method consists of its description. `operation` takes the place of that in the name.
    """
    of_log, after, operations = KINDS[kind]
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
            other = rng.choice([*KINDS[kind].operations.values()]) if mistake == "operation" else None
            methods.append(write_method(kind, name, way, mistake, other))
        pairs.append((demo_prompt(item, own, num_agents), "\n".join(methods)))
    return pairs


demo_model = partial(imitation_model, "demo-classes", demonstrate, 700, __file__, FILE)
