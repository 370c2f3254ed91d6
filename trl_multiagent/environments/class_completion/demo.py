"""
The demo: small generated classes, and a small base model that writes their methods carelessly.

A class keeps a log. Two of its methods put values in, two give its sum, product or text back, and each does so with an operation such as
`x * 2`. There are two ways to keep the log, and the agents write different methods, so they have to agree:

- `"values"`: the log has what was put in, and the other methods compute the result;
- `"results"`: the log has the results so far, and the other methods take the last one.
"""

from __future__ import annotations

import itertools
import random
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from trl_multiagent.environments.class_completion.data import make_item
from trl_multiagent.environments.class_completion.division import DIVISIONS, divide


if TYPE_CHECKING:
    from datasets import Dataset


class Kind(NamedTuple):
    """A kind of class: its log at the start, the result of a log, a result after one more value, operations, and values to put in."""

    start: str
    of_log: str
    after: str
    operations: dict[str, str]
    values: Sequence


DEMO = "demo"
SEED = 31
SIZES = {"test": 64, "train": 320}
NUMBERS = {"": "{}", "_double": "{} * 2", "_next": "{} + 1", "_square": "{} ** 2"}
TEXTS = {"": "{}", "_double": "{} * 2", "_dash": "{} + '-'", "_upper": "{}.upper()"}
KINDS = {
    "Sum": Kind("0", "sum(self.log)", "self.log[-1] + {}", NUMBERS, range(2, 10)),
    "Product": Kind("1", "prod(self.log)", "self.log[-1] * ({})", NUMBERS, range(2, 6)),
    "Text": Kind("''", "''.join(self.log)", "self.log[-1] + {}", TEXTS, ("a", "bc", "d", "ef")),
}
WAYS = ("values", "results")
CARELESS = 0.25  # share of the demonstrated methods with a mistake
MISTAKES = ("operation", "effect", "name", "syntax")


def demo_dataset(split: str) -> Dataset:
    """Returns generated classes, as rows of [`load_class_dataset`]. No class is in both splits, `"train"` (320) and `"test"` (64)."""
    import datasets

    if split not in SIZES:
        raise ValueError(f"The demo's data has the splits {' and '.join(map(repr, SIZES))}, not {split!r}.")
    classes = [
        (name, put, get)
        for name, kind in KINDS.items()
        for put, get in itertools.product(itertools.permutations(kind.operations, 2), repeat=2)
    ]
    random.Random(SEED).shuffle(classes)
    first = 0 if split == "test" else SIZES["test"]
    return datasets.Dataset.from_list([_item(*parts) for parts in classes[first : first + SIZES[split]]])


def _item(kind: str, put: Sequence[str], get: Sequence[str]) -> dict:
    names = [name for pair in zip(put, get, strict=True) for name in (f"put{pair[0]}", f"get{pair[1]}")]
    head = f"class {kind}:\n    def __init__(self):\n        self.log = [{KINDS[kind].start}]\n"
    skeleton, solution = (
        head + "".join("\n" + textwrap.indent(write_method(kind, name, way), " " * 4) for name in names)
        for way in ("", "values")
    )
    tests = [_test(kind, solution, names, number) for number in range(len(names))]
    row = {
        "task_id": f"demo/{kind}/{'/'.join(names)}",
        "class_name": kind,
        "skeleton": skeleton,
        "solution_code": solution,
        "import_statement": ["from math import prod"],
        "test": "import unittest\n\n" + "\n\n".join(tests),
        "methods_info": [{"method_name": name, "test_class": f"Test{k}"} for k, name in enumerate(names)],
    }
    every = [f"Test{k}.test" for k in range(len(names))]
    return make_item(row, DEMO) | {"tests": every, "counting": every, "check_timeout": 1.0}


def _test(kind: str, solution: str, names: Sequence[str], number: int) -> str:
    """Writes the test of a method, which needs another one. A mixture of both ways to keep the log fails it."""
    rng = random.Random(f"{SEED}/{solution}/{number}")
    put, get = (names[number], rng.choice(names[1::2])) if number % 2 == 0 else (rng.choice(names[::2]), names[number])
    lines = [f"box = {kind}()", *(f"box.{put}({value!r})" for value in rng.choices(KINDS[kind].values, k=3))]
    namespace: dict = {}
    exec("\n".join(["from math import prod", solution, *lines]), namespace)
    lines.append(f"self.assertEqual(box.{get}(), {getattr(namespace['box'], get)()!r})")
    body = textwrap.indent("\n".join(lines), " " * 8)
    return f"class Test{number}(unittest.TestCase):\n    def test(self):\n{body}\n"


def write_method(kind: str, name: str, way: str = "", mistake: str = "", operation: str | None = None) -> str:
    """
    Writes a method of a class of some `kind`, a key of `KINDS`, in one of the `WAYS`, and with one of the `MISTAKES` or none. Without a way, the
    method consists of its description. `operation` takes the place of that in the name.
    """
    _, of_log, after, operations, _ = KINDS[kind]
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
    """Draws pairs of a prompt and an answer: of either agent of a team, or of one that works alone. Each keeps the log in one way."""
    items = demo_dataset("train").to_list()
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


def demo_model() -> str:
    """Returns the folder of the demo's base model."""
    from trl_multiagent.models.imitation import ImitationModel

    return ImitationModel("demo-classes", demonstrate, 700, [Path(__file__)]).path()
