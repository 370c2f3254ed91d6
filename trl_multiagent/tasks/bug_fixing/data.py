"""
The data of bug fixing, and its task: mutants of HumanEval and MBPP, and QuixBugs. `scripts/data/write_bugs.py` makes
the rows: it mutates functions, and runs each mutant on the function's tests. The demo has generated functions, see
recipes/bug_fixing/demo.py.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from trl_multiagent.environments.dataset_rows import (
    EMBEDDED,
    LOCAL_FILE,
    LOCAL_SUFFIXES,
    Dataset,
    Datasets,
    check_fields,
    load_rows,
    make_dataset,
    read_embedded,
)
from trl_multiagent.environments.task import Task, TaskSettings, setting
from trl_multiagent.tasks.bug_fixing.environment import BugFixingEnvironment
from trl_multiagent.tasks.code_generation.data import CodeDataset
from trl_multiagent.tasks.programs import SandboxSettings


QUIXBUGS = "quixbugs"
# For each benchmark with faults, the ending of its file
BENCHMARKS = {"humaneval": "_bugs", "mbpp_sanitized": "_bugs", QUIXBUGS: ""}
FIELDS: dict[str, type] = {**dict.fromkeys(("task_id", "entry_point", "test", "reference"), str), "mutants": list}
MUTANT: dict[str, type] = {"program": str, "passed": int}


def load_bug_dataset(name: str, split: str | None = None, num_mutants: int = 3, seed: int = 0) -> Dataset:
    """
    Loads faulty functions.

    A function becomes an item if some of its mutants fail its tests and end. The first of these, in an order that the
    seed determines, is the faulty program; the others tell good tests from bad ones. QuixBugs has its own faults.

    Args:
        name (`str`): `"humaneval"`, `"mbpp"` or `"quixbugs"`, or a local file of rows that
            `scripts/data/write_bugs.py` wrote.
        split (`str`, *optional*): Split in the syntax of `datasets`, such as `"test[:32]"`.
        num_mutants (`int`, *optional*, defaults to `3`): Mutants of an item besides its faulty program, at most.
        seed (`int`, *optional*, defaults to `0`): Selects the mutants.

    Returns:
        `Dataset`: Columns `task_id`, `entry_point`, `test`, `reference`, `faulty`, all text; `mutants`, a list of
        texts; `faulty_passes`, the number of asserts of `test` that the faulty program passes.

    Raises `ValueError` if there is no such dataset, a row is malformed, or no row gives an item.
    """
    file = EMBEDDED.get(name, ("", ""))[0]
    if file in BENCHMARKS:
        rows = read_embedded(name, split, BENCHMARKS[file])
    elif name.endswith(LOCAL_SUFFIXES):
        rows = load_rows(name, None, split)
    else:
        raise ValueError(
            f"There are no faults for {name!r}: use 'humaneval', 'mbpp', '{QUIXBUGS}' or 'demo', or write a file "
            "with `scripts/data/write_bugs.py`, which needs reference solutions."
        )
    for number, row in enumerate(rows, 1):
        check_fields(row, FIELDS, f"{name}, row {number}")
        for mutant in filter(None, (row.get("own_fault"), *row["mutants"])):
            check_fields(mutant, MUTANT, f"{name}, row {number}, a mutant")
    items = make_items(rows, num_mutants, seed)
    if not items:
        raise ValueError(f"{name}, split {split or 'test'}: no function has a mutant that fails its tests.")
    return make_dataset(items, name)


def make_items(rows: Sequence[dict], num_mutants: int, seed: int) -> list[dict]:
    """Returns the items of rows, without those that have no fault."""
    return [item for row in rows if (item := make_item(row, num_mutants, seed))]


def make_item(row: dict, num_mutants: int, seed: int) -> dict | None:
    """Returns the item with the first faulty mutants in the order of a seed, or `None` if there is no fault."""
    order = [*row["mutants"]]  # `None` for a mutant that passes all tests or does not end
    random.Random(f"{seed} {row.get('order') or row['task_id']}").shuffle(order)
    faults: dict[str, int] = {}  # of each program, the number of tests that it passes
    for mutant in filter(None, (row.get("own_fault"), *order)):
        if len(faults) <= num_mutants:
            faults.setdefault(mutant["program"], mutant["passed"])
    if not faults:
        return None
    faulty, *others = faults
    columns = {name: row[name] for name in ("task_id", "entry_point", "test", "reference")}
    return {**columns, "faulty": faulty, "mutants": others, "faulty_passes": faults[faulty]}


# The task


@dataclass
class BugDataset(CodeDataset):
    """The section `dataset`."""

    name: str | None = setting(
        f"'humaneval', 'mbpp', '{QUIXBUGS}' or 'demo', which come with the package; or the path of a {LOCAL_FILE} "
        "that scripts/data/write_bugs.py wrote."
    )
    eval_name: str | None = setting("The same for the evaluation set; by default as for `name`.")
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


def load_datasets(settings: TaskSettings, load: Callable[..., Dataset] = load_bug_dataset) -> Datasets:
    """Loads the training set and, if there is an `eval_split`, the evaluation set, with the errors of `load`."""
    dataset: BugDataset = settings.sections["dataset"]
    name = str(dataset.name)
    seeds = dataset.mutants, dataset.mutants_seed
    train_dataset = load(name, dataset.train_split, *seeds)
    if dataset.eval_split is None:
        return train_dataset, None
    return train_dataset, load(dataset.eval_name or name, dataset.eval_split, *seeds)


TASK = Task(make_environment, load_datasets, settings={"dataset": BugDataset, "sandbox": SandboxSettings})
