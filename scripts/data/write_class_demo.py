"""
Writes `trl_multiagent/data/class_demo.jsonl.gz`: the generated classes of the demo of class completion, first those of
the split `test`. To be run after a change of `write_method`, or of an item's columns.
"""

import itertools
import random
import textwrap
from collections.abc import Iterator, Sequence

from write_bugs import DATA, write_rows
from write_classes import make_item

from trl_multiagent.configs.recipes.class_completion.demo import DEMO, LOGS, write_method


SEED = 31
STARTS = {"Sum": "0", "Product": "1", "Text": "''"}  # the log at the start
VALUES = {"Sum": range(2, 10), "Product": range(2, 6), "Text": ("a", "bc", "d", "ef")}  # that the tests put in


def demo_items() -> Iterator[dict]:
    """Yields all classes, in a random order."""
    classes = [
        (name, put, get)
        for name, kind in LOGS.items()
        for put, get in itertools.product(itertools.permutations(kind.operations, 2), repeat=2)
    ]
    random.Random(SEED).shuffle(classes)
    return itertools.starmap(demo_item, classes[:384])


def demo_item(kind: str, put: Sequence[str], get: Sequence[str]) -> dict:
    names = [name for pair in zip(put, get, strict=True) for name in (f"put{pair[0]}", f"get{pair[1]}")]
    head = f"class {kind}:\n    def __init__(self):\n        self.log = [{STARTS[kind]}]\n"
    skeleton, solution = (
        head + "".join("\n" + textwrap.indent(write_method(kind, name, way), " " * 4) for name in names)
        for way in ("", "values")
    )
    tests = [write_test(kind, solution, names, number) for number in range(len(names))]
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


def write_test(kind: str, solution: str, names: Sequence[str], number: int) -> str:
    """Writes the test of a method, which needs another one. A mixture of both ways to keep the log fails it."""
    rng = random.Random(f"{SEED}/{solution}/{number}")
    put, get = (names[number], rng.choice(names[1::2])) if number % 2 == 0 else (rng.choice(names[::2]), names[number])
    lines = [f"box = {kind}()", *(f"box.{put}({value!r})" for value in rng.choices(VALUES[kind], k=3))]
    namespace: dict = {}
    exec("\n".join(["from math import prod", solution, *lines]), namespace)
    lines.append(f"self.assertEqual(box.{get}(), {getattr(namespace['box'], get)()!r})")
    body = textwrap.indent("\n".join(lines), " " * 8)
    return f"class Test{number}(unittest.TestCase):\n    def test(self):\n{body}\n"


if __name__ == "__main__":
    write_rows([*demo_items()], DATA / "class_demo.jsonl.gz")
