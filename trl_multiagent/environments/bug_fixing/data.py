"""Functions with a fault: mutants of HumanEval and MBPP, and QuixBugs."""

from __future__ import annotations

import ast
import itertools
from typing import TYPE_CHECKING

from trl_multiagent.environments.bug_fixing.mutants import make_mutants
from trl_multiagent.environments.code_generation.data import load_code_dataset
from trl_multiagent.environments.embedded import read_embedded
from trl_multiagent.environments.python_code.problems import count_asserts
from trl_multiagent.sandbox import Program, Sandbox


if TYPE_CHECKING:
    from datasets import Dataset

QUIXBUGS = "quixbugs"
CHECK_TIMEOUT = 1.0  # seconds for each test of a mutant
SLOW = 10.0  # the same for QuixBugs, some of whose references are slow
# JSON has no tuples, and some functions yield their result
PLAIN = """def plain(value):
    return [plain(part) for part in value] if isinstance(value, (list, tuple)) or hasattr(value, "__next__") else value
"""
HEAVY = {
    "knapsack": 9,
    "levenshtein": 3,
}  # a test for which the reference needs more than 10 s, or the sandbox's memory
TOLERANCE = {"sqrt"}  # functions of QuixBugs whose last argument is the tolerance of their result


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

    A problem in the HumanEval schema becomes an item if its reference solution passes its tests and some mutants fail them and end. The
    first of these mutants is the faulty program, the others tell good tests from bad ones. QuixBugs has its own faults.

    Args:
        name (`str`): `"quixbugs"`, or a dataset with reference solutions, as [`load_code_dataset`] takes it: `"humaneval"`, `"mbpp"`, a
            Hub id, or a local file.
        split (`str`, *optional*): Split in the syntax of `datasets`, such as `"test[:32]"`.
        num_mutants (`int`, *optional*, defaults to `3`): Mutants of an item besides its faulty program, at most.
        seed (`int`, *optional*, defaults to `0`): Selects the mutants.
        sandbox ([`Sandbox`], *optional*): Runs the mutants.
        type (`str`, *optional*): That of [`load_code_dataset`]; by default inferred from `name`.

    Returns:
        `Dataset`: Columns `task_id`, `entry_point`, `test`, `reference`, `faulty`, all text; `mutants`, a list of texts; `faulty_passes`,
        the number of asserts of `test` that the faulty program passes; `check_timeout`, in seconds.

    Raises:
        ValueError: the dataset is malformed, has no reference solutions, or gives no item.
    """
    import datasets

    sandbox = sandbox or Sandbox()
    if name == QUIXBUGS:
        candidates = [_quixbugs_item(row, num_mutants, seed) for row in read_embedded(QUIXBUGS, split)]
    else:
        rows = load_code_dataset(name, split, type, num_agents=1)
        if "canonical_solution" not in rows.column_names:
            raise ValueError(
                f"{name} has no reference solutions (`canonical_solution`), from which faulty programs are made."
            )
        candidates = [_mutated_item(row, num_mutants, seed) for row in rows]
    items = _items_with_faults(candidates, num_mutants, sandbox)
    if not items:
        raise ValueError(
            f"{name}, split {split or 'test'}: no reference solution passes its tests and has a mutant that fails them."
        )
    return datasets.Dataset.from_list(items)


def _mutated_item(row: dict, num_mutants: int, seed: int) -> dict:
    reference = ast.unparse(ast.parse(row["prompt"] + row["canonical_solution"]))
    return {
        **{name: row[name] for name in ("task_id", "entry_point", "test")},
        "reference": reference,
        "faulty": None,
        "mutants": _first_mutants(reference, row["entry_point"], num_mutants + 1, seed),
        "check_timeout": CHECK_TIMEOUT,
    }


def _quixbugs_item(row: dict, num_mutants: int, seed: int) -> dict:
    name, reference = row["entry_point"], ast.unparse(ast.parse(row["correct_program"]))
    checks = []
    for number, (arguments, expected) in enumerate(row["testcases"]):
        if HEAVY.get(name) == number:
            continue
        call = f"plain(candidate({', '.join(map(repr, arguments))}))"
        if name in TOLERANCE:
            checks.append(f"assert abs({call} - {expected!r}) <= {arguments[-1]!r}")
        else:
            checks.append(f"assert {call} == {expected!r}")
    return {
        "task_id": row["task_id"],
        "entry_point": name,
        "test": f"{PLAIN}\n\ndef check(candidate):\n" + "".join(f"    {check}\n" for check in checks),
        "reference": reference,
        "faulty": ast.unparse(_with_docstring(row["buggy_program"], name)),
        "mutants": _first_mutants(reference, name, num_mutants, seed),
        "check_timeout": SLOW,
    }


def _first_mutants(reference: str, entry_point: str, number: int, seed: int) -> list[str]:
    """Returns twice as many mutants as are needed, because some of them pass the tests or do not end."""
    return [*itertools.islice(make_mutants(reference, entry_point, seed), 2 * number)]


def _with_docstring(source: str, name: str) -> ast.Module:
    """Moves the text after a function of QuixBugs, which explains it, into the function as its docstring."""
    tree = ast.parse(source)
    texts = [node for node in tree.body if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)]
    tree.body = [node for node in tree.body if node not in texts]
    function = next(node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == name)
    function.body[:0] = texts[:1]
    return ast.fix_missing_locations(tree)


def _items_with_faults(candidates: list[dict], num_mutants: int, sandbox: Sandbox) -> list[dict]:
    """
    Runs the programs on the tests. Keeps the items whose reference passes and whose faulty program fails, with the mutants that fail and end.
    """
    programs = []
    for item in candidates:
        tests = item["entry_point"], item["test"]
        every = tuple(range(count_asserts(item["test"])))  # a mutant's run ends at its first failure
        programs.append(Program(item["reference"], *tests, check_timeout=item["check_timeout"]))
        programs += [Program(x, *tests, needed=every, check_timeout=CHECK_TIMEOUT) for x in item["mutants"]]
    verdicts = iter(sandbox.run(programs))
    items = []
    for item in candidates:
        reference, of_mutants = next(verdicts), [next(verdicts) for _ in item["mutants"]]
        failing = [
            source
            for source, verdict in zip(item["mutants"], of_mutants, strict=True)
            if verdict.definitions.status == "passed" and verdict.passed < verdict.total and not verdict.timeouts
        ]
        faulty = item["faulty"] or (failing.pop(0) if failing else None)
        if reference.passed == reference.total and faulty is not None:
            items.append({**item, "faulty": faulty, "mutants": failing[:num_mutants]})
    programs = [Program(x["faulty"], x["entry_point"], x["test"], check_timeout=CHECK_TIMEOUT) for x in items]
    for item, verdict in zip(items, sandbox.run(programs), strict=True):
        item["faulty_passes"] = verdict.passed
    return [item for item in items if item["faulty_passes"] < count_asserts(item["test"])]
