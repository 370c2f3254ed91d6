"""
A procedural family of small HumanEval-shaped problems: keep some elements, map each of them, reduce them to the
result.

`sum_square_even` keeps the even numbers of a list, squares each and sums them. A list problem takes one of 8
conditions, 7 maps and 7 reductions, a string problem one of 6, 3 and 5; a fifth of the 482 combinations is held out.
Every solution splits naturally into a helper that prepares a list and a main function that reduces it, and there are
two ways to split it.
"""

import operator
import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

from trl_multiagent.environments.dataset_rows import Dataset, generated_rows, make_dataset
from trl_multiagent.tasks.code_generation.reward import AUX, MAIN


SEED = 20
HELD_OUT = 96
VARIANTS = 3  # of each training combination; they differ in inputs and wording
ASSERTS = 8


class Part(NamedTuple):
    """A condition, map or reduction: its name in the entry point, its expression, and its words in three wordings."""

    name: str
    code: str
    phrase: str
    verb: str = ""


@dataclass(frozen=True)
class Family:
    """The argument and the parts of list problems, or of string problems."""

    argument: str
    conditions: tuple[Part, ...]
    maps: tuple[Part, ...]
    reductions: tuple[Part, ...]


def parts(table: str) -> tuple[Part, ...]:
    """Reads a table with a part per line and a column per field."""
    return tuple(Part(*map(str.strip, line.split("|"))) for line in table.strip().splitlines())


# No map is idempotent, so mapping twice changes the result. No reduction is the identity, which would make main a thin
# wrapper of aux, or `len`, which does not depend on the map.
LISTS = Family(
    argument="xs",
    conditions=parts("""
        even     | x % 2 == 0 | the even numbers
        odd      | x % 2 == 1 | the odd numbers
        positive | x > 0      | the positive numbers
        negative | x < 0      | the negative numbers
        large    | x > 5      | the numbers above 5
        small    | x < 5      | the numbers below 5
        threes   | x % 3 == 0 | the multiples of 3
        fives    | x % 5 == 0 | the multiples of 5
    """),
    maps=parts("""
        square   | x * x  | the squares of      | square
        cube     | x ** 3 | the cubes of        | cube
        double   | x * 2  | the doubles of      | double
        triple   | x * 3  | the triples of      | triple
        negate   | -x     | the negatives of    | negate
        next     | x + 1  | the successors of   | add 1 to
        previous | x - 1  | the predecessors of | take 1 from
    """),
    reductions=parts("""
        sum     | sum(ys)    | the sum of
        max     | max(ys)    | the largest of
        min     | min(ys)    | the smallest of
        first   | ys[0]      | the first of
        last    | ys[-1]     | the last of
        sort    | sorted(ys) | the sorted list of
        reverse | ys[::-1]   | the reversed list of
    """),
)
STRINGS = Family(
    argument="s",
    conditions=parts("""
        vowels   | x in 'aeiou'     | the vowels
        others   | x not in 'aeiou' | all but the vowels
        letters  | x.isalpha()      | the letters
        digits   | x.isdigit()      | the digits
        capitals | x.isupper()      | the capital letters
        smalls   | x.islower()      | the small letters
    """),
    maps=parts("""
        twice | x * 2           | the doubles of      | double
        dash  | x + '-'         | the dashed forms of | put a dash after
        shift | chr(ord(x) + 1) | the successors of   | shift
    """),
    reductions=parts("""
        join  | ''.join(ys)         | the string of
        back  | ''.join(ys[::-1])   | the reversed string of
        order | ''.join(sorted(ys)) | the sorted string of
        first | ys[0]               | the first of
        last  | ys[-1]              | the last of
    """),
)
FAMILIES = (LISTS, STRINGS)
WORDINGS = (
    "Return {reduction} {map} {condition}.",
    "Keep {condition}, {verb} each, return {reduction} them.",
    "Find {reduction} {map} {condition} in {argument}.",
)


@cache
def compiled(code: str) -> Callable[[list | str], Any]:
    """Returns a function that evaluates an expression in `values`."""
    return eval(f"lambda values: {code}")


@dataclass(frozen=True)
class Problem:
    """One combination of a condition, a map and a reduction."""

    family: Family
    condition: Part
    map: Part
    reduction: Part

    @property
    def name(self) -> str:
        return f"{self.reduction.name}_{self.map.name}_{self.condition.name}"

    @property
    def argument(self) -> str:
        return self.family.argument

    def kept(self, values: list | str) -> list:
        """Returns the values that meet the condition."""
        return compiled(f"[x for x in values if {self.condition.code}]")(values)

    def mapped(self, values: list) -> list:
        """Maps every value once."""
        return compiled(f"[{self.map.code} for x in values]")(values)

    def reduced(self, values: list) -> Any:
        """Reduces the values to the result."""
        return compiled(self.reduction.code.replace("ys", "values"))(values)

    def inputs(self, rng: random.Random, length: int) -> list | str:
        """
        Draws an argument on which the likely wrong solutions differ from the right one.

        At least two of its elements are kept and at least one is not. The result changes if the map is left out or
        applied twice, which happens when the agents follow different conventions.
        """
        while True:
            values: list | str
            if self.family is LISTS:
                values = [rng.randint(-9, 12) for _ in range(length)]
            else:
                values = "".join(rng.choice("aeioubcdfgAEKRT2468") for _ in range(length))
            kept = self.kept(values)
            if not 2 <= len(kept) < length:
                continue
            once = self.mapped(kept)
            if self.reduced(once) not in (self.reduced(kept), self.reduced(self.mapped(once))):
                return values

    def asserted(self, rng: random.Random) -> list[list | str]:
        """
        Draws the arguments of the asserts. Both ways to split the work show in them: no more than
        half of them have the same result, and in at least two, what the helper returns is not the result.
        """
        while True:
            drawn = [self.inputs(rng, length=rng.randint(4, 7)) for _ in range(ASSERTS)]
            kept, results = [self.kept(values) for values in drawn], [self.solve(values) for values in drawn]
            helpers = kept, [self.mapped(values) for values in kept]
            differing = min(sum(map(operator.ne, values, results)) for values in helpers)
            if differing >= 2 and max(map(results.count, results)) <= ASSERTS // 2:
                return drawn

    def item(self, variant: int) -> dict:
        """Returns the dataset row of one variant of the problem."""
        rng = random.Random(f"{SEED}/{self.name}/{variant}")
        sentence = WORDINGS[rng.randrange(len(WORDINGS))].format(
            condition=self.condition.phrase,
            map=self.map.phrase,
            verb=self.map.verb,
            reduction=self.reduction.phrase,
            argument=self.argument,
        )
        example = self.inputs(rng, length=4 if self.family is LISTS else 5)
        asserts = self.asserted(rng)
        return {
            "task_id": f"demo/{self.name}/{variant}",
            "prompt": f"def {self.name}({self.argument}):\n"
            f'    """{sentence}\n    >>> {self.name}({example!r})\n    {self.solve(example)!r}\n    """\n',
            "entry_point": self.name,
            "test": "def check(candidate):\n"
            + "".join(f"    assert candidate({values!r}) == {self.solve(values)!r}\n" for values in asserts),
            "canonical_solution": f"    ys = [{self.map.code} for x in {self.argument} if {self.condition.code}]\n"
            f"    return {self.reduction.code}\n",
        }

    def solve(self, values: list | str) -> Any:
        """Returns the right answer."""
        return self.reduced(self.mapped(self.kept(values)))


def demo_problems(split: str) -> list[Problem]:
    """Returns the combinations of the split `"train"` (386) or `"test"` (96, held out). No combination is in both."""
    if split not in ("train", "test"):
        raise ValueError(f"The demo's data has the splits 'train' and 'test', not {split!r}.")
    problems = [
        Problem(family, condition, map, reduction)
        for family in FAMILIES
        for condition in family.conditions
        for map in family.maps
        for reduction in family.reductions
    ]
    random.Random(SEED).shuffle(problems)
    return problems[:HELD_OUT] if split == "test" else problems[HELD_OUT:]


@cache
def problems_by_name() -> dict[str, Problem]:
    """Returns the problems of both splits by the name of their function."""
    return {problem.name: problem for split in ("train", "test") for problem in demo_problems(split)}


def problem_of(item: dict) -> Problem:
    """Returns the problem of a row of [`demo_dataset`]."""
    return problems_by_name()[item["entry_point"]]


def demo_rows(split: str) -> list[dict]:
    """Returns the rows of the split `"train"` or `"test"`."""
    variants = 1 if split == "test" else VARIANTS
    problems = demo_problems(split)
    return [problem.item(variant) for variant in range(variants) for problem in problems]


def demo_dataset(split: str) -> Dataset:
    """
    Returns the demo's problems in the schema of HumanEval: task_id, prompt, entry_point, test, canonical_solution.

    Args:
        split (`str`): Rows of `"train"` (1158: 386 combinations in three variants of inputs and wording) or of
            `"test"` (96, one for each of the combinations that are not in `"train"`), such as `"test[:32]"`.
    """
    sizes = {"train": VARIANTS * len(demo_problems("train")), "test": HELD_OUT}
    return make_dataset(generated_rows(demo_rows, sizes, split), "the demo")


def demo_prompts(item: dict) -> dict[str, str]:
    """Returns the prompts of the two agents, short as in the training of the demo's model."""
    return {
        AUX: f"# Write only a helper function aux for this task.\n{item['prompt']}# aux:\n",
        MAIN: f"# Write only this function. It may call a helper aux.\n{item['prompt']}# main:\n",
    }
