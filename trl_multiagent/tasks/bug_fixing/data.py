"""Functions with a fault: mutants of HumanEval and MBPP, and QuixBugs."""

import ast
import functools
import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass, field

from trl_multiagent.code.dependencies import PARSE_ERRORS
from trl_multiagent.code.sandbox import Program, Sandbox, Verdict
from trl_multiagent.environments.dataset_rows import Dataset, make_dataset
from trl_multiagent.environments.embedded import read_data, read_embedded
from trl_multiagent.tasks.bug_fixing.calls import without_examples
from trl_multiagent.tasks.bug_fixing.demo import DEMO, demo_items
from trl_multiagent.tasks.bug_fixing.mutants import Mutants
from trl_multiagent.tasks.code_generation.data import load_code_dataset
from trl_multiagent.tasks.problems import count_asserts


QUIXBUGS = "quixbugs"
CHECK_TIMEOUT = 1.0  # seconds for each test
# The number of tests that each faulty mutant of a function passes. The last number is that of its own fault, if it has
# one
Results = dict[int, int]


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
        type (`str`, *optional*): That of [`load_code_dataset`]; by default inferred from `name`.

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


@functools.cache
def result_table() -> dict[str, list[int | None]]:
    """Returns the results of all mutants of the package's benchmarks, by the key of the function."""
    return json.loads(read_data("faults.json.gz"))


def find_results(functions: list[Function], orders: list[list[int]], sandbox: Sandbox) -> list[Results]:
    """
    Runs mutants, and the functions' own faults, on the hidden tests. A mutant is no fault if it passes all, does not
    end, or cannot be loaded. A function whose reference fails gets no results.
    """
    groups = [function.programs(order) for function, order in zip(functions, orders, strict=True)]
    verdicts = run_groups(sandbox.run, groups)
    results: list[Results] = []
    for function, order, (reference, *others) in zip(functions, orders, verdicts, strict=True):
        passed = {}
        for k, verdict in zip([*order, len(function.mutants)], others, strict=False):
            ends = verdict.definitions.status == "passed" and not verdict.timeouts
            if verdict.passed < verdict.total and (ends or k == len(function.mutants)):
                passed[k] = verdict.passed
        results.append(passed if reference.passed == count_asserts(function.test) else {})
    return results


def run_groups(run: Callable[[list[Program]], list[Verdict]], groups: list[list[Program]]) -> list[list[Verdict]]:
    """Runs the programs of all groups, if there are any, at the same time. Returns the verdicts of each group."""
    programs = [program for group in groups for program in group]
    verdicts = iter(run(programs) if programs else ())
    return [[next(verdicts) for _ in group] for group in groups]
