"""
The task of the demo of bug fixing: generated functions and their base model.

A function has three results, of which the description says when they are due: `3 if x == 'a' else 5 if x == 'b' else
8`. One number is wrong, or a condition is turned round. A team earns most if the tester tries all three cases, and the
fixer trusts the description. The base model has seen careless answers of both roles.
"""

import functools
import json
import random
from dataclasses import dataclass
from pathlib import Path

from trl_multiagent.environments.dataset_rows import Dataset, Datasets, generated_rows, make_dataset, read_data
from trl_multiagent.environments.task import Task, TaskSettings
from trl_multiagent.models.imitation import ImitationModel
from trl_multiagent.tasks.bug_fixing import data
from trl_multiagent.tasks.bug_fixing.environment import fixer_prompt, tester_prompt


DEMO = "demo"  # the name of the functions and of their base model
FAMILY = sorted(Path(data.__file__).parent.glob("*.py"))  # whose code determines the base model, too
SIZES = {"test": 64, "train": 512}
LETTERS = "abcdefgh"
# Probability of each mistake of a fixer's demonstration
MISTAKES = {"unchanged": 0.2, "another fault": 0.2, "long": 0.1, "no return": 0.1, "syntax": 0.1}
WRONG_RESULT, FIRST_CASE = 0.2, 0.5  # probability of a wrong result in a test, and of a test of the first case


@functools.cache
def demo_functions() -> dict[str, list[dict]]:
    """
    Returns the functions of the splits `"train"` and `"test"`. No function is in both. Beside the columns of other
    rows, they have `results`, which the function returns, by letter; other letters have theirs under `""`.
    """
    rows = [json.loads(line) for line in read_data("bug_demo.jsonl.gz").splitlines()]
    return {"train": rows[SIZES["test"] :], "test": rows[: SIZES["test"]]}


def demonstrate(number: int, rng: random.Random) -> list[tuple[str, str]]:
    """
    Draws pairs of a prompt and one agent's answer: a tester's, a fixer's in a team, and a fixer's that works alone.
    """
    functions = [
        (row, item) for row in demo_functions()["train"] for seed in (1, 2) for item in data.make_items([row], 1, seed)
    ]
    pairs = []
    for _ in range(number):
        row, item = rng.choice(functions)
        if rng.random() < 0.5:
            pairs.append((tester_prompt(item), write_tests(row["results"], rng)))
        else:
            pairs.append((fixer_prompt(item, alone=rng.random() < 0.5), write_fix(row["results"], item, rng)))
    return pairs


def write_tests(results: dict[str, int], rng: random.Random) -> str:
    """Writes one to three tests, half of them of the first case, and some with a wrong result."""
    lines = []
    for _ in range(rng.randint(1, 3)):
        x = next(iter(results)) if rng.random() < FIRST_CASE else rng.choice(LETTERS)
        wrong = rng.random() < WRONG_RESULT
        result = rng.choice([*results.values()]) if wrong else results.get(x, results[""])
        lines.append(f"assert f('{x}') == {result}\n")
    return "".join(lines)


def write_fix(results: dict[str, int], item: dict, rng: random.Random) -> str:
    """Writes a repaired function, with a mistake more often than not."""
    mistake = rng.choices(["", *MISTAKES], [1 - sum(MISTAKES.values()), *MISTAKES.values()])[0]
    programs = {"unchanged": item["faulty"], "another fault": item["mutants"][0]}
    body = programs.get(mistake, item["reference"]).partition('"""\n    ')[2]
    if mistake == "long":
        body = f"y = {results['']}\n    {body.replace('return', 'y =')}\n    return y"
    elif mistake == "no return":
        body = body.replace("return", "y =")
    elif mistake == "syntax":
        body = body.replace(" else", "", 1)
    return f"def f(x):\n    {body}\n"


# The task


@dataclass
class DemoDataset(data.BugDataset):
    """The section `dataset`, in which the name `demo` selects the generated functions."""

    generated = (*data.BugDataset.generated, DEMO)


def load_bug_dataset(name: str, split: str | None = None, num_mutants: int = 3, seed: int = 0) -> Dataset:
    """Loads faulty functions, see [`~data.load_bug_dataset`], or the generated ones, `"demo"`."""
    if name != DEMO:
        return data.load_bug_dataset(name, split, num_mutants, seed)
    rows = generated_rows(demo_functions().__getitem__, SIZES, split)
    return make_dataset(data.make_items(rows, num_mutants, seed), name)


def load_datasets(settings: TaskSettings) -> Datasets:
    return data.load_datasets(settings, load_bug_dataset)


# Bug fixing in which the name `demo` selects the generated functions and their base model
TASK = Task(
    data.make_environment,
    load_datasets,
    settings={**data.TASK.settings, "dataset": DemoDataset},
    models={DEMO: ImitationModel("bug-fixing-demo", demonstrate, 600, FAMILY).path},
)
