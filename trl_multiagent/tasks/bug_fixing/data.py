"""
The data of bug fixing, and its task: mutants of HumanEval and MBPP, QuixBugs, and the generated functions of the demo.

`scripts/data/write_bugs.py` makes the rows: it mutates functions, and runs each mutant on the function's tests. A
function of the demo has three results, of which the description says when they are due: `3 if x == 'a' else 5 if x ==
'b' else 8`. One number is wrong, or a condition is turned round. A team earns most if the tester tries all three
cases, and the fixer trusts the description. The demo's base model has seen careless answers of both roles.
"""

import functools
import json
import random
from dataclasses import dataclass

from trl_multiagent.environments.dataset_rows import (
    LOCAL_FILE,
    LOCAL_SUFFIXES,
    Dataset,
    Datasets,
    check_fields,
    load_rows,
    make_dataset,
)
from trl_multiagent.environments.embedded import EMBEDDED, SHORT_NAMES, generated_rows, read_data, read_embedded
from trl_multiagent.environments.task import Task, TaskSettings, setting
from trl_multiagent.models.imitation import ImitationModel
from trl_multiagent.tasks.bug_fixing.environment import BugFixingEnvironment, fixer_prompt, tester_prompt
from trl_multiagent.tasks.code_generation.data import CodeDataset
from trl_multiagent.tasks.programs import SandboxSettings


QUIXBUGS, DEMO = "quixbugs", "demo"
# For each benchmark with faults, the ending of its file
BENCHMARKS = {"humaneval": "_bugs", "mbpp_sanitized": "_bugs", QUIXBUGS: ""}
FIELDS: dict[str, type] = {**dict.fromkeys(("task_id", "entry_point", "test", "reference"), str), "mutants": list}


def load_bug_dataset(name: str, split: str | None = None, num_mutants: int = 3, seed: int = 0) -> Dataset:
    """
    Loads faulty functions.

    A function becomes an item if some of its mutants fail its tests and end. The first of these, in an order that the
    seed determines, is the faulty program; the others tell good tests from bad ones. QuixBugs has its own faults.

    Args:
        name (`str`): `"humaneval"`, `"mbpp"`, `"quixbugs"` or `"demo"`, or a local file of rows that
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
    if name == DEMO:
        rows = generated_rows(demo_functions().__getitem__, SIZES, split)
    elif file in BENCHMARKS:
        rows = read_embedded(name, split, BENCHMARKS[file])
    elif name.endswith(LOCAL_SUFFIXES):
        rows = load_rows(name, None, split)
    else:
        raise ValueError(
            f"There are no faults for {name!r}: use 'humaneval', 'mbpp', '{QUIXBUGS}' or '{DEMO}', or write a file "
            "with `scripts/data/write_bugs.py`, which needs reference solutions."
        )
    for number, row in enumerate(rows, 1):
        check_fields(row, FIELDS, f"{name}, row {number}")
    items = [item for row in rows if (item := make_item(row, num_mutants, seed))]
    if not items:
        raise ValueError(f"{name}, split {split or 'test'}: no function has a mutant that fails its tests.")
    return make_dataset(items, name)


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


# The demo


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


# The task


@dataclass
class BugDataset(CodeDataset):
    """The section `dataset`."""

    generated = (*SHORT_NAMES, DEMO)
    name: str | None = setting(
        f"'humaneval', 'mbpp', '{QUIXBUGS}' or '{DEMO}', which come with the package; or the path of a {LOCAL_FILE} "
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


def load_datasets(settings: TaskSettings) -> Datasets:
    """
    Loads the training set and, if there is an `eval_split`, the evaluation set, with the errors of
    [`load_bug_dataset`].
    """
    dataset: BugDataset = settings.sections["dataset"]
    name = str(dataset.name)
    seeds = dataset.mutants, dataset.mutants_seed
    train_dataset = load_bug_dataset(name, dataset.train_split, *seeds)
    if dataset.eval_split is None:
        return train_dataset, None
    return train_dataset, load_bug_dataset(dataset.eval_name or name, dataset.eval_split, *seeds)


TASK = Task(
    make_environment,
    load_datasets,
    settings={"dataset": BugDataset, "sandbox": SandboxSettings},
    models={DEMO: ImitationModel("bug-fixing-demo", demonstrate, 600).path},
)
