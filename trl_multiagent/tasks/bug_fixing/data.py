"""
The data of bug fixing, and its task: mutants of HumanEval and MBPP, QuixBugs, and the generated functions of the demo.

A function of the demo has three results, of which the description says when they are due: `3 if x == 'a' else 5 if x
== 'b' else 8`. One number is wrong, or a condition is turned round. A team earns most if the tester tries all three
cases, and the fixer trusts the description. The demo's base model has seen careless answers of both roles.
"""

import ast
import functools
import hashlib
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from trl_multiagent.code.dependencies import PARSE_ERRORS
from trl_multiagent.code.sandbox import Program, Sandbox
from trl_multiagent.environments.dataset_rows import LOCAL_FILE, Dataset, Datasets, make_dataset
from trl_multiagent.environments.embedded import SHORT_NAMES, generated_rows, read_data, read_embedded
from trl_multiagent.environments.task import Task, TaskSettings, setting
from trl_multiagent.models.imitation import ImitationModel
from trl_multiagent.tasks.bug_fixing.environment import (
    CHECK_TIMEOUT,
    BugFixingEnvironment,
    calls_in,
    examples,
    fixer_prompt,
    run_groups,
    tester_prompt,
)
from trl_multiagent.tasks.code_generation.data import CodeDataset, load_code_dataset
from trl_multiagent.tasks.problems import count_asserts
from trl_multiagent.tasks.programs import SandboxSettings


QUIXBUGS, DEMO = "quixbugs", "demo"
# The number of tests that each faulty mutant of a function passes. The last number is that of its own fault, if it has
# one
Results = dict[int, int]

# What replaces each operator and function
COMPARISONS = {ast.Lt: ast.LtE, ast.Gt: ast.GtE, ast.Eq: ast.NotEq, ast.In: ast.NotIn}
ARITHMETIC = {ast.Mult: ast.Add, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult, ast.Mod: ast.FloorDiv}
CALLS = {"min": "max", "any": "all", "upper": "lower"}
TWO_WAYS: dict[Any, Any] = {**COMPARISONS, ast.And: ast.Or, ast.Add: ast.Sub, **CALLS}
REPLACED = {**TWO_WAYS, **{new: old for old, new in TWO_WAYS.items()}, **ARITHMETIC, "append": "remove"}


def load_bug_dataset(
    name: str,
    split: str | None = None,
    num_mutants: int = 3,
    seed: int = 0,
    sandbox: Sandbox | None = None,
    type: str | None = None,
) -> Dataset:
    """
    Loads faulty functions.

    A problem in the HumanEval schema becomes an item if its reference solution passes its tests and some mutants fail
    them and end. The first of these mutants is the faulty program, the others tell good tests from bad ones. QuixBugs
    has its own faults. Which mutants of the package's benchmarks fail is known; those of other data are run.

    Args:
        name (`str`): `"quixbugs"`, `"demo"`, or a dataset with reference solutions, as [`load_code_dataset`] takes it:
            `"humaneval"`, `"mbpp"`, a Hub id, or a local file.
        split (`str`, *optional*): Split in the syntax of `datasets`, such as `"test[:32]"`.
        num_mutants (`int`, *optional*, defaults to `3`): Mutants of an item besides its faulty program, at most.
        seed (`int`, *optional*, defaults to `0`): Selects the mutants.
        sandbox ([`Sandbox`], *optional*): Runs the mutants.
        type (`str`, *optional*): That of [`load_code_dataset`].

    Returns:
        `Dataset`: Columns `task_id`, `entry_point`, `test`, `reference`, `faulty`, all text; `mutants`, a list of
        texts; `faulty_passes`, the number of asserts of `test` that the faulty program passes.

    Raises `ValueError` if the dataset is malformed, has no reference solutions, or gives no item, and
    `ConnectionError` if it is on the Hub, which cannot be reached.
    """
    if name == DEMO:
        return make_dataset(demo_items(split, num_mutants, seed), name)
    functions = read_functions(name, split, type)
    new = [function for function in functions if function.results is None]
    number = 2 * (num_mutants + 1)  # some mutants pass the tests or do not end
    tried = [function.order(seed)[:number] for function in new]
    for function, found in zip(new, find_results(new, tried, sandbox or Sandbox()), strict=True):
        function.results = found
    rows = [row for function in functions if (row := function.item(seed, num_mutants))]
    if not rows:
        where = f"{name}, split {split or 'test'}"
        raise ValueError(f"{where}: no reference solution passes its tests and has a mutant that fails them.")
    return make_dataset(rows, name)


# Mutants


class Mutants(Sequence[str]):
    """
    All programs that differ from a program in one place, in a fixed order. A few occur twice, for example `x + 0` with
    another constant or operator.

    Args:
        source (`str`): The program.
        entry_point (`str`): The function whose body is changed. Signatures, docstrings and other functions stay.
    """

    def __init__(self, source: str, entry_point: str):
        self.source, self.entry_point = source, entry_point
        nodes = self._read()[1]
        self.places = [(number, k) for number, node in enumerate(nodes) for k, _ in enumerate(changes_of(node))]

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, index: Any) -> Any:
        number, k = self.places[index]
        tree, nodes = self._read()
        setattr(nodes[number], *[*changes_of(nodes[number])][k])
        return ast.unparse(tree)

    def shuffled(self, seed: str) -> list[int]:
        """Returns the indices of all mutants in a random order that the seed determines."""
        order = [*range(len(self))]
        random.Random(seed).shuffle(order)
        return order

    def _read(self) -> tuple[ast.Module, list[ast.AST]]:
        """Returns the program as a tree, and the nodes in the body of the function, in a fixed order."""
        tree = ast.parse(self.source)
        functions = [x for x in tree.body if isinstance(x, ast.FunctionDef) and x.name == self.entry_point]
        return tree, [node for statement in functions[-1].body for node in ast.walk(statement)]


def changes_of(node: ast.AST) -> Iterator[tuple[str, Any]]:
    """
    Yields the changes that the six operators make to one node, each as a field of the node and its new value. The
    operators change comparisons, arithmetic, integers, `and` and `or`, conditions, and calls.
    """
    if isinstance(node, ast.Compare):
        for k, operator in enumerate(node.ops):
            if type(operator) in REPLACED:
                yield "ops", [*node.ops[:k], REPLACED[type(operator)](), *node.ops[k + 1 :]]
    elif isinstance(node, ast.BinOp | ast.AugAssign | ast.BoolOp) and type(node.op) in REPLACED:
        yield "op", REPLACED[type(node.op)]()
    elif isinstance(node, ast.Constant) and type(node.value) is int:
        yield "value", node.value + 1
        yield "value", node.value - 1
    elif isinstance(node, ast.If | ast.IfExp | ast.While):
        yield "test", ast.UnaryOp(ast.Not(), node.test)
    elif isinstance(node, ast.Name) and node.id in REPLACED:
        yield "id", REPLACED[node.id]
    elif isinstance(node, ast.Attribute) and node.attr in REPLACED:
        yield "attr", REPLACED[node.attr]


# Functions of the benchmarks


@dataclass
class Function:
    """A function from which faulty programs are made."""

    task_id: str
    entry_point: str
    test: str  # the hidden tests. Those that are examples in the function's description are removed
    source: str  # the reference solution
    own_fault: str | None = None  # the faulty program, if the data has one
    key: str = field(init=False)
    mutants: Mutants = field(init=False)
    results: Results | None = None  # of its mutants, if they come with the package

    def __post_init__(self) -> None:
        # Of the data itself, because the texts below depend on the version of Python
        self.key = hashlib.sha256(f"{self.source}\n{self.test}".encode()).hexdigest()[:12]
        self.mutants = Mutants(self.source, self.entry_point)
        self.test = without_examples(self.test, self.own_fault or self.source, self.entry_point)
        known = result_table().get(self.key, ())
        if len(known) == len(self.mutants) + (self.own_fault is not None):
            self.results = {k: passed for k, passed in enumerate(known) if passed is not None}

    def programs(self, order: list[int]) -> list[Program]:
        """Returns the reference, some mutants and the function's own fault as programs that run the hidden tests."""
        sources = [self.source, *(self.mutants[k] for k in order), *filter(None, [self.own_fault])]
        return [Program(source, self.entry_point, self.test, check_timeout=CHECK_TIMEOUT) for source in sources]

    def order(self, seed: int) -> list[int]:
        """Returns the indices of all mutants in a random order."""
        return self.mutants.shuffled(f"{seed} {self.task_id}")

    def item(self, seed: int, num_mutants: int) -> dict | None:
        """
        Returns the dataset row with the first faulty mutants in the order of a seed, or `None` if there is no fault.
        """
        results, faults = self.results or {}, dict[str, int]()
        if self.own_fault is not None and len(self.mutants) in results:
            faults[self.own_fault] = results[len(self.mutants)]
        for k in self.order(seed):
            if k in results and len(faults) <= num_mutants:
                faults.setdefault(self.mutants[k], results[k])
        if not faults or self.own_fault not in (None, *faults):
            return None
        faulty, *others = faults
        return {
            "task_id": self.task_id,
            "entry_point": self.entry_point,
            "test": self.test,
            "reference": ast.unparse(ast.parse(self.source)),
            "faulty": faulty,
            "mutants": others,
            "faulty_passes": faults[faulty],
        }


def read_functions(name: str, split: str | None, type: str | None = None) -> list[Function]:
    """Reads the functions of a dataset, see [`load_bug_dataset`]."""
    if name == QUIXBUGS:
        return [Function(**row) for row in read_embedded(QUIXBUGS, split)]
    rows = load_code_dataset(name, split, type, num_agents=1)
    if "canonical_solution" not in rows.column_names:
        raise ValueError(f"{name} has no reference solutions (`canonical_solution`), which faulty programs need.")
    functions = []
    for row in rows:
        source = row["prompt"] + row["canonical_solution"]
        try:
            ast.parse(source)
        except PARSE_ERRORS as error:
            problem = f"`prompt` and `canonical_solution` together are not Python source: {error}"
            raise ValueError(f"{name}, {row['task_id']}: {problem}.") from None
        functions.append(Function(row["task_id"], row["entry_point"], row["test"], source))
    return functions


def without_examples(test: str, text: str, name: str) -> str:
    """
    Returns a test without the asserts of `check` whose calls are examples in the function's text. It stays as it is if
    fewer than two asserts would remain.
    """
    given = examples(text, name)
    tree = ast.parse(test)
    for check in [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "check"]:
        check.body = [x for x in check.body if not (isinstance(x, ast.Assert) and is_given(x, name, given))]
    left = sum(isinstance(node, ast.Assert) for node in ast.walk(tree))
    return ast.unparse(tree) if given and left > 1 else test


def is_given(node: ast.Assert, name: str, given: list[Any]) -> bool:
    """Returns whether an assert calls the function, with given arguments alone."""
    try:
        calls = calls_in(node, "candidate", name)
    except ValueError:
        return False
    return bool(calls) and all(call in given for call in calls)


@functools.cache
def result_table() -> dict[str, list[int | None]]:
    """
    Returns the results of all mutants of the package's benchmarks, by the key of the function.
    `scripts/data/write_faults.py` wrote them.
    """
    return json.loads(read_data("faults.json.gz"))


def find_results(functions: list[Function], orders: list[list[int]], sandbox: Sandbox) -> list[Results]:
    """
    Runs mutants, and the functions' own faults, on the hidden tests. A mutant is no fault if it passes all, does not
    end, or cannot be loaded. A function whose reference fails gets no results.
    """
    groups = [function.programs(order) for function, order in zip(functions, orders, strict=True)]
    results: list[Results] = []
    for function, order, verdicts in zip(functions, orders, run_groups(sandbox.run, groups), strict=True):
        reference, *others = verdicts
        passed = {}
        for k, verdict in zip([*order, len(function.mutants)], others, strict=False):
            ends = verdict.definitions.status == "passed" and not verdict.timeouts
            if verdict.passed < verdict.total and (ends or k == len(function.mutants)):
                passed[k] = verdict.passed
        results.append(passed if reference.passed == count_asserts(function.test) else {})
    return results


# The demo


SEED = 20
ROWS = {"train": 512, "test": 64}
LETTERS = "abcdefgh"
# Probability of each mistake of a fixer's demonstration
MISTAKES = {"unchanged": 0.2, "another fault": 0.2, "long": 0.1, "no return": 0.1, "syntax": 0.1}
WRONG_RESULT, FIRST_CASE = 0.2, 0.5  # probability of a wrong result in a test, and of a test of the first case


class Choice(NamedTuple):
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


@functools.cache
def draw_functions() -> dict[str, list[Choice]]:
    """Returns the functions of the splits `"train"` and `"test"`. No function is in both."""
    rng = random.Random(SEED)
    drawn: dict[Choice, None] = {}
    while len(drawn) < sum(ROWS.values()):
        drawn[Choice(tuple(rng.sample(LETTERS, 2)), tuple(rng.sample(range(10), 3)))] = None
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
            pairs.append((tester_prompt(item), write_tests(function, rng)))
        else:
            pairs.append((fixer_prompt(item, alone=rng.random() < 0.5), write_fix(function, item, rng)))
    return pairs


def write_tests(function: Choice, rng: random.Random) -> str:
    """Writes one to three tests, half of them of the first case, and some with a wrong result."""
    lines = []
    for _ in range(rng.randint(1, 3)):
        x = function.letters[0] if rng.random() < FIRST_CASE else rng.choice(LETTERS)
        wrong = rng.random() < WRONG_RESULT
        lines.append(f"assert f('{x}') == {rng.choice(function.results) if wrong else function.call(x)}\n")
    return "".join(lines)


def write_fix(function: Choice, item: dict, rng: random.Random) -> str:
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


# The task


@dataclass
class BugDataset(CodeDataset):
    """The section `dataset`."""

    generated = (*SHORT_NAMES, DEMO)
    name: str | None = setting(
        f"'humaneval', 'mbpp', '{QUIXBUGS}' or '{DEMO}', which come with the package; a Hub id; or the path of a "
        f"{LOCAL_FILE}."
    )
    eval_name: str | None = setting("The same for the evaluation set; by default that of `name`.")
    mutants: int = setting(
        "Mutants of each function, besides its faulty version, on which the tests are tried.", 3, ge=0, le=20
    )
    mutants_seed: int = setting("Selects the mutants.", 0, ge=0)


def make_environment(settings: TaskSettings) -> BugFixingEnvironment:
    """
    Builds the environment. Raises [`UnavailableError`] if the machine does not offer the protection
    `sandbox.min_tier`.
    """
    sandbox = settings.sections["sandbox"].make_checked_sandbox()
    return BugFixingEnvironment(settings.num_agents, sandbox, settings.run_folder / "suspicious_programs")


def load_datasets(settings: TaskSettings) -> Datasets:
    """
    Loads the training set and, if there is an `eval_split`, the evaluation set, with the errors of
    [`load_bug_dataset`].
    """
    dataset: BugDataset = settings.sections["dataset"]
    name = str(dataset.name)
    with settings.sections["sandbox"].make_sandbox() as sandbox:

        def load(source: str, split: str | None) -> Dataset:
            type = dataset.type if source == name else None
            return load_bug_dataset(source, split, dataset.mutants, dataset.mutants_seed, sandbox, type)

        train_dataset = load(name, dataset.train_split)
        eval_dataset = None if dataset.eval_split is None else load(dataset.eval_name or name, dataset.eval_split)
        return train_dataset, eval_dataset


TASK = Task(
    make_environment,
    load_datasets,
    settings={"dataset": BugDataset, "sandbox": SandboxSettings},
    models={DEMO: ImitationModel("bug-fixing-demo", demonstrate, 600).path},
)
