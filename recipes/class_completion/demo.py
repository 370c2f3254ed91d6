"""
The classes of the demo of class completion, and its base model, which writes methods carelessly. A class keeps a log,
in one of two ways:

- `"values"`: the log has what was put in, and the other methods compute the result;
- `"results"`: the log has the results so far, and the other methods take the last one.
"""

import random
from pathlib import Path
from typing import NamedTuple

from trl_multiagent.models.imitation import ImitationModel
from trl_multiagent.tasks.class_completion import data, environment
from trl_multiagent.tasks.class_completion.data import demo_items, demo_prompt
from trl_multiagent.tasks.class_completion.environment import DIVISIONS, divide


class Log(NamedTuple):
    """A class of the demo: the result of a log, the result after one more value, and the operations of its methods."""

    of_log: str
    after: str
    operations: dict[str, str]


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


MODEL = ImitationModel("demo-classes", demonstrate, 700, sources=[Path(data.__file__), Path(environment.__file__)])
