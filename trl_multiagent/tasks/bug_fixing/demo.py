"""
The embedded demo: small faulty functions, and a base model that has seen careless answers of both roles.

Each function has three results, of which the description says when they are due: `3 if x == 'a' else 5 if x == 'b'
else 8`. One number is wrong, or a condition is turned round. A team earns most if the tester tries all three cases,
and the fixer trusts the description.
"""

import random
from functools import cache, partial
from typing import NamedTuple

from trl_multiagent.environments.embedded import generated_rows, imitation_model
from trl_multiagent.tasks.bug_fixing import prompts
from trl_multiagent.tasks.bug_fixing.mutants import Mutants


DEMO = "demo"
SEED = 20
ROWS = {"train": 512, "test": 64}
LETTERS = "abcdefgh"
# Probability of each mistake of a fixer's demonstration
MISTAKES = {"unchanged": 0.2, "another fault": 0.2, "long": 0.1, "no return": 0.1, "syntax": 0.1}
WRONG_RESULT, FIRST_CASE = 0.2, 0.5  # probability of a wrong result in a test, and of a test of the first case


class Function(NamedTuple):
    """
    A function of the demo: the letters of its two cases, and its results, of which the last is that of other letters.
    """

    letters: tuple[str, ...]
    results: tuple[int, ...]

    @property
    def source(self) -> str:
        (a, b), (first, second, other) = self.letters, self.results
        description = f"'{a}' gives {first}, '{b}' gives {second}, others give {other}."
        body = f"return {first} if x == '{a}' else {second} if x == '{b}' else {other}"
        return f'def f(x):\n    """{description}"""\n    {body}'

    def call(self, x: str) -> int:
        return dict(zip(self.letters, self.results, strict=False)).get(x, self.results[-1])

    def item(self, name: str, num_mutants: int, seed: int) -> dict:
        """Returns the dataset row. All mutants fail one of the tests."""
        mutants = Mutants(self.source, "f")
        order = mutants.shuffled(f"{seed} {self.source}")
        faulty, *others = [mutants[k] for k in order[: num_mutants + 1]]
        inputs = [*self.letters, *[x for x in LETTERS if x not in self.letters][:2]]
        checks = "".join(f"    assert candidate('{x}') == {self.call(x)}\n" for x in inputs)
        expression = faulty.partition("return ")[2]  # this module wrote it, so it needs no sandbox
        return {
            "task_id": name,
            "entry_point": "f",
            "test": f"def check(candidate):\n{checks}",
            "reference": self.source,
            "faulty": faulty,
            "mutants": others,
            "faulty_passes": sum(eval(expression, {"x": x}) == self.call(x) for x in inputs),
        }


@cache
def draw_functions() -> dict[str, list[Function]]:
    """Returns the functions of the splits `"train"` and `"test"`. No function is in both."""
    rng = random.Random(SEED)
    drawn: dict[Function, None] = {}
    while len(drawn) < sum(ROWS.values()):
        drawn[Function(tuple(rng.sample(LETTERS, 2)), tuple(rng.sample(range(10), 3)))] = None
    functions = [*drawn]
    return {"train": functions[: ROWS["train"]], "test": functions[ROWS["train"] :]}


def demo_items(split: str | None, num_mutants: int, seed: int) -> list[dict]:
    """Returns the demo's items, in the columns of [`load_bug_dataset`]."""

    def make(name: str) -> list[dict]:
        return [x.item(f"{name}/{k}", num_mutants, seed) for k, x in enumerate(draw_functions()[name])]

    return generated_rows(make, ROWS, split)


def demonstrate(number: int, rng: random.Random) -> list[tuple[str, str]]:
    """
    Draws pairs of a prompt and one agent's answer: a tester's, a fixer's in a team, and a fixer's that works alone.
    """
    items = [(function, function.item("", 1, seed)) for function in draw_functions()["train"] for seed in (1, 2)]
    pairs = []
    for _ in range(number):
        function, item = rng.choice(items)
        if rng.random() < 0.5:
            pairs.append((prompts.tester_prompt(item), write_tests(function, rng)))
        else:
            pairs.append((prompts.fixer_prompt(item, alone=rng.random() < 0.5), write_fix(function, item, rng)))
    return pairs


def write_tests(function: Function, rng: random.Random) -> str:
    """Writes one to three tests, half of them of the first case, and some with a wrong result."""
    lines = []
    for _ in range(rng.randint(1, 3)):
        x = function.letters[0] if rng.random() < FIRST_CASE else rng.choice(LETTERS)
        wrong = rng.random() < WRONG_RESULT
        lines.append(f"assert f('{x}') == {rng.choice(function.results) if wrong else function.call(x)}\n")
    return "".join(lines)


def write_fix(function: Function, item: dict, rng: random.Random) -> str:
    """Writes a repaired function, with a mistake more often than not."""
    mistake = rng.choices(["", *MISTAKES], [1 - sum(MISTAKES.values()), *MISTAKES.values()])[0]
    source = {"unchanged": item["faulty"], "another fault": item["mutants"][0]}.get(mistake, function.source)
    body = source.partition('"""\n    ')[2]
    if mistake == "long":
        body = f"y = {function.results[-1]}\n    {body.replace('return', 'y =')}\n    return y"
    elif mistake == "no return":
        body = body.replace("return", "y =")
    elif mistake == "syntax":
        body = body.replace(" else", "", 1)
    return f"def f(x):\n    {body}\n"


demo_model = partial(imitation_model, "bug-fixing-demo", demonstrate, 600, __file__)
