"""
Writes the rows of bug fixing: functions, their mutants, and how many hidden tests each mutant passes.

    python scripts/data/write_bugs.py  # the package's rows of HumanEval, MBPP and the demo; many minutes
    python scripts/data/write_bugs.py functions.jsonl bugs.jsonl  # those of functions in the schema of HumanEval
    python scripts/data/write_bugs.py quixbugs.jsonl trl_multiagent/data/quixbugs.jsonl.gz

The input needs `task_id`, `prompt`, `canonical_solution`, `entry_point` and `test`, all text, or the fields of
QuixBugs: `task_id`, `entry_point`, `correct_program`, `buggy_program` and `testcases`, pairs of arguments and results.
To be run after a change of the benchmarks or of the operators of `Mutants`.
"""

import ast
import gzip
import json
import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import trl_multiagent
from trl_multiagent.code.dependencies import PARSE_ERRORS
from trl_multiagent.code.sandbox import Program, Sandbox
from trl_multiagent.configs.recipes.bug_fixing.demo import LETTERS, SIZES
from trl_multiagent.tasks.bug_fixing.environment import CHECK_TIMEOUT, calls_in, examples, run_groups
from trl_multiagent.tasks.code_generation.data import load_code_dataset


DATA = Path(trl_multiagent.__file__).parent / "data"
MBPP = "prompt+test+validation+train"

# What replaces each operator and function
COMPARISONS = {ast.Lt: ast.LtE, ast.Gt: ast.GtE, ast.Eq: ast.NotEq, ast.In: ast.NotIn}
ARITHMETIC = {ast.Mult: ast.Add, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult, ast.Mod: ast.FloorDiv}
CALLS = {"min": "max", "any": "all", "upper": "lower"}
TWO_WAYS: dict[Any, Any] = {**COMPARISONS, ast.And: ast.Or, ast.Add: ast.Sub, **CALLS}
REPLACED = {**TWO_WAYS, **{new: old for old, new in TWO_WAYS.items()}, **ARITHMETIC, "append": "remove"}


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


# Functions


@dataclass
class Function:
    """A function from which faulty programs are made."""

    task_id: str
    entry_point: str
    test: str  # the hidden tests. Those that are examples in the function's description are removed
    source: str  # the reference solution
    own_fault: str | None = None  # the faulty program, if the data has one

    def __post_init__(self) -> None:
        self.mutants = Mutants(self.source, self.entry_point)
        self.test = without_examples(self.test, self.own_fault or self.source, self.entry_point)

    def row(self, passed: dict[int, int]) -> dict:
        """Returns the row; `passed` is a value of [`find_results`]."""
        programs = [*self.mutants, *([] if self.own_fault is None else [self.own_fault])]
        faults = [{"program": x, "passed": passed[k]} if k in passed else None for k, x in enumerate(programs)]
        own = None if self.own_fault is None else faults.pop()
        if self.own_fault is not None and own is None:
            faults = []
        reference = ast.unparse(ast.parse(self.source))
        named = {"task_id": self.task_id, "entry_point": self.entry_point, "test": self.test, "reference": reference}
        return {**named, "own_fault": own, "mutants": faults}


def read_functions(rows: list[dict]) -> list[Function]:
    """Reads functions in the schema of HumanEval or QuixBugs."""
    return [
        Function(**from_quixbugs(row))
        if "buggy_program" in row
        else Function(row["task_id"], row["entry_point"], row["test"], row["prompt"] + row["canonical_solution"])
        for row in rows
    ]


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
    except PARSE_ERRORS:
        return False
    return bool(calls) and all(call in given for call in calls)


def find_results(functions: list[Function], sandbox: Sandbox) -> list[dict[int, int]]:
    """
    Runs all mutants, and the functions' own faults, on the hidden tests. Returns the number of tests that each fault
    passes; the number of the function's own fault is the last. A mutant is no fault if it passes all, does not end, or
    cannot be loaded. A function whose reference fails gets no results.
    """
    groups = [
        [
            Program(source, function.entry_point, function.test, check_timeout=CHECK_TIMEOUT)
            for source in filter(None, [function.source, *function.mutants, function.own_fault])
        ]
        for function in functions
    ]
    results = []
    for function, (reference, *others) in zip(functions, run_groups(sandbox.run, groups), strict=True):
        passed = {}
        for k, verdict in enumerate(others):
            ends = verdict.definitions.status == "passed" and not verdict.timeouts
            if verdict.passed < verdict.total and (ends or k == len(function.mutants)):
                passed[k] = verdict.passed
        results.append(passed if reference.passed == reference.total else {})
    return results


# QuixBugs


# JSON has no tuples, and some functions yield their result
PLAIN = """def plain(value):
    return [plain(part) for part in value] if isinstance(value, (list, tuple)) or hasattr(value, "__next__") else value
"""
# Tests for which the reference needs more than a second, or the sandbox's memory
HEAVY = {"knapsack": (9,), "levenshtein": (2, 3)}
TOLERANCE = {"sqrt"}  # functions whose last argument is the tolerance of their result


def from_quixbugs(row: dict) -> dict:
    """Returns the fields of a [`Function`]."""
    name = row["entry_point"]
    checks = []
    for number, (arguments, expected) in enumerate(row["testcases"]):
        call = f"plain(candidate({', '.join(map(repr, arguments))}))"
        close = f"abs({call} - {expected!r}) <= {arguments[-1]!r}"
        if number not in HEAVY.get(name, ()):
            checks.append(f"    assert {close if name in TOLERANCE else f'{call} == {expected!r}'}\n")
    # The text after the faulty function, which explains it, becomes its docstring
    tree = ast.parse(row["buggy_program"])
    texts = [node for node in tree.body if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)]
    tree.body = [node for node in tree.body if node not in texts]
    function = next(node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == name)
    function.body[:0] = texts[:1]
    return {
        "task_id": row["task_id"],
        "entry_point": name,
        "test": f"{PLAIN}\n\ndef check(candidate):\n{''.join(checks)}",
        "source": row["correct_program"],
        "own_fault": ast.unparse(tree),
    }


# The demo


SEED = 20


def demo_rows() -> list[dict]:
    """Draws the functions of the demo, those of the split `test` last, and returns their rows, those first."""
    rng = random.Random(SEED)
    drawn: dict[tuple[tuple[str, ...], tuple[int, ...]], None] = {}
    while len(drawn) < sum(SIZES.values()):
        drawn[tuple(rng.sample(LETTERS, 2)), tuple(rng.sample(range(10), 3))] = None
    names = [f"{split}/{k}" for split in ("train", "test") for k in range(SIZES[split])]
    rows = [demo_row(name, *choice) for name, choice in zip(names, drawn, strict=True)]
    return rows[SIZES["train"] :] + rows[: SIZES["train"]]


def demo_row(name: str, letters: tuple[str, ...], results: tuple[int, ...]) -> dict:
    """Returns the row of a function. All of its mutants fail one of its tests."""
    (a, b), (first, second, other) = letters, results
    description = f"'{a}' gives {first}, '{b}' gives {second}, others give {other}."
    body = f"return {first} if x == '{a}' else {second} if x == '{b}' else {other}"
    source = f'def f(x):\n    """{description}"""\n    {body}'
    known = {a: first, b: second, "": other}
    tests = {x: known.get(x, other) for x in (a, b, *[x for x in LETTERS if x not in letters][:2])}
    checks = "".join(f"    assert candidate('{x}') == {result}\n" for x, result in tests.items())
    mutants = []
    for program in Mutants(source, "f"):
        expression = program.partition("return ")[2]
        passed = sum(eval(expression, {"x": x}) == result for x, result in tests.items())
        mutants.append({"program": program, "passed": passed})
    row = {"task_id": name, "entry_point": "f", "test": f"def check(candidate):\n{checks}", "reference": source}
    return {**row, "order": source, "results": known, "mutants": mutants}


def read_rows(path: str) -> list[dict]:
    """Reads JSON lines, compressed if the name ends in `.gz`."""
    content = Path(path).read_bytes()
    return [json.loads(line) for line in (gzip.decompress(content) if path.endswith(".gz") else content).splitlines()]


def write_rows(rows: list[dict], path: Path) -> None:
    """Writes JSON lines, compressed if the name ends in `.gz`."""
    content = "".join(json.dumps(row) + "\n" for row in rows).encode()
    path.write_bytes(gzip.compress(content, 9, mtime=0) if path.suffix == ".gz" else content)
    print(f"{path}: {len(rows)} rows, {path.stat().st_size} bytes")


def main() -> None:
    with Sandbox() as sandbox:
        if sys.argv[1:]:
            sources = {Path(sys.argv[2]): read_rows(sys.argv[1])}
        else:
            write_rows(demo_rows(), DATA / "bug_demo.jsonl.gz")
            sources = {
                DATA / f"{file}_bugs.jsonl.gz": load_code_dataset(name, split, num_agents=1).to_list()
                for file, name, split in (("humaneval", "humaneval", "test"), ("mbpp_sanitized", "mbpp", MBPP))
            }
        for path, rows in sources.items():
            functions = read_functions(rows)
            results = find_results(functions, sandbox)
            write_rows([function.row(passed) for function, passed in zip(functions, results, strict=True)], path)


if __name__ == "__main__":
    main()
