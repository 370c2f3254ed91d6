"""
The base model of the demo of bug fixing, which has seen careless answers of both roles. A team earns most if the
tester tries all three cases, and the fixer trusts the description.
"""

import random
from pathlib import Path

from trl_multiagent.models.imitation import ImitationModel
from trl_multiagent.tasks.bug_fixing import data, environment
from trl_multiagent.tasks.bug_fixing.data import demo_functions, make_item
from trl_multiagent.tasks.bug_fixing.environment import fixer_prompt, tester_prompt


LETTERS = "abcdefgh"
# Probability of each mistake of a fixer's demonstration
MISTAKES = {"unchanged": 0.2, "another fault": 0.2, "long": 0.1, "no return": 0.1, "syntax": 0.1}
WRONG_RESULT, FIRST_CASE = 0.2, 0.5  # probability of a wrong result in a test, and of a test of the first case


def demonstrate(number: int, rng: random.Random) -> list[tuple[str, str]]:
    """
    Draws pairs of a prompt and one agent's answer: a tester's, a fixer's in a team, and a fixer's that works alone.
    """
    functions = [
        (row, item) for row in demo_functions()["train"] for seed in (1, 2) if (item := make_item(row, 1, seed))
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


MODEL = ImitationModel("bug-fixing-demo", demonstrate, 600, sources=[Path(data.__file__), Path(environment.__file__)])
