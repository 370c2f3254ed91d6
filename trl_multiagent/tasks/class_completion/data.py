"""Classes with methods to write: ClassEval, and files in its format."""

import ast
import functools
import hashlib
import json
import logging
from collections.abc import Sequence
from dataclasses import replace

from trl_multiagent.code.dependencies import PARSE_ERRORS
from trl_multiagent.code.sandbox import Program, Sandbox, Verdict
from trl_multiagent.environments.dataset_rows import Dataset, check_fields, load_rows, make_dataset
from trl_multiagent.environments.embedded import read_data
from trl_multiagent.tasks.class_completion import merging
from trl_multiagent.tasks.class_completion.demo import DEMO, demo_items


logger = logging.getLogger(__name__)
CLASSEVAL = "classeval"
FIELDS: dict[str, type] = {
    **dict.fromkeys(("task_id", "class_name", "skeleton", "solution_code", "test"), str),
    **dict.fromkeys(("methods_info", "import_statement"), list),
}
METHOD_FIELDS: dict[str, type] = dict.fromkeys(("method_name", "test_class"), str)
# What a method can return without any work. A test method that passes with one of them in place of all methods earns
# nothing
CONSTANTS = ("None", "True", "0", "''", "[]")
ENOUGH = 0.8  # share of its test methods that a class's reference must pass


def load_class_dataset(name: str, split: str | None = None, sandbox: Sandbox | None = None) -> Dataset:
    """
    Loads classes.

    The reference of each class runs twice, except for the package's copy of ClassEval, of which the results are known.
    Test methods that it does not pass both times are left out, and so are classes of which it does not pass four
    fifths: those that need packages that the sandbox does not have, and, except where it can give programs a folder
    (see [`Sandbox.has_folders`]), those that need files or SQLite.

    Args:
        name (`str`): `"classeval"`, which comes with the package; `"demo"`; a Hub id such as `"FudanSELab/ClassEval"`;
            or a local file.
        split (`str`, *optional*): Split in the syntax of `datasets`, such as `"test[:66]"`.
        sandbox ([`Sandbox`], *optional*): Runs the references.

    Returns:
        `Dataset`: Columns `task_id`, `class_name`, `skeleton`, `imports`, `test`, `reference`, all text; `methods`,
        the names of the methods to write; `method_tests`, `uses`, `weights` and `parameters`, see [`make_item`];
        `tests`, the test methods that the reference passes; `counting`, those of them that test one method and that no
        constant passes; `check_timeout`, in seconds; `folder`, whether it needs one.

    Raises `ValueError` if a row is malformed, or no row gives an item, and `ConnectionError` if the Hub cannot be
    reached.
    """
    if name == DEMO:
        return make_dataset(demo_items(split), name)
    items = [make_item(row, f"{name}, row {k}") for k, row in enumerate(load_rows(name, None, split), 1)]
    new = [item for item in items if key_of(item) not in known_tests()]
    sandbox = sandbox or Sandbox()
    found = find_tests(new, sandbox) if new else []
    tests = known_tests() | dict(zip(map(key_of, new), found, strict=True))
    kept = [item | columns for item in items if (columns := tests[key_of(item)])]
    if any(item["folder"] for item in kept) and not sandbox.has_folders():
        able = [item for item in kept if not item["folder"]]
        message = "%s: %d of %d classes are left out, because the sandbox's tier %r has no folder for their files."
        logger.warning(message, name, len(kept) - len(able), len(kept), sandbox.tier)
        kept = able
    if not kept:
        where = f"{name}, split {split or 'test'}"
        raise ValueError(f"{where}: no class has tests that its reference passes and a constant does not.")
    return make_dataset(kept, name)


def make_item(row: dict, where: str) -> dict:
    """
    Returns the item of a row, before its tests were tried. Of each of its `methods`, it has the test class,
    `method_tests`; the other methods that the reference calls in it, `uses`; the reference's number of statements,
    `weights`; and the number of parameters in the skeleton with `self`, `parameters`. Raises `ValueError`, which
    begins with `where`, if the row is malformed.
    """
    check_fields(row, FIELDS, where)
    for number, method in enumerate(row["methods_info"], 1):
        if not isinstance(method, dict):
            raise ValueError(f"{where}: entry {number} of `methods_info` is no mapping.")
        check_fields(method, METHOD_FIELDS, f"{where}, entry {number} of `methods_info`")
    try:
        ast.parse("\n".join(row["import_statement"]))
    except (TypeError, *PARSE_ERRORS) as error:
        raise ValueError(f"{where}: `import_statement` must be a list of import statements: {error}.") from None
    bodies = merging.read_methods(row["solution_code"], row["class_name"], where)
    skeleton = merging.clean_skeleton(row)
    headers = merging.read_methods(skeleton, row["class_name"], where)
    tests = {method["method_name"]: method["test_class"] for method in row["methods_info"]}
    names = [name for name in headers if name in tests and name in bodies]
    if not names:
        raise ValueError(f"{where}: the class has no method that `methods_info` and `solution_code` have, too.")
    inside = [[*ast.walk(bodies[name])] for name in names]
    attributes = [{node.attr for node in nodes if isinstance(node, ast.Attribute)} for nodes in inside]
    arguments = [[x for x in ast.iter_child_nodes(headers[name].args) if isinstance(x, ast.arg)] for name in names]
    return {
        **{field: row[field] for field in ("task_id", "class_name", "test")},
        "skeleton": skeleton,
        "imports": "\n".join(row["import_statement"]),
        "reference": row["solution_code"],
        "methods": names,
        "method_tests": [tests[name] for name in names],
        "uses": [sorted(found & {*names} - {name}) for name, found in zip(names, attributes, strict=True)],
        "weights": [sum(isinstance(node, ast.stmt) for node in nodes) for nodes in inside],
        "parameters": [len(own) for own in arguments],
    }


def find_tests(items: list[dict], sandbox: Sandbox) -> list[dict | None]:
    """
    Runs references and constants on the tests of some items; if a reference fails, again with a folder where the
    sandbox can give one. Returns the columns `tests`, `counting`, `check_timeout` and `folder` of each; `None` if the
    tests cannot tell right from wrong.
    """
    found = _find_tests(items, sandbox)
    failed = [k for k, columns in enumerate(found) if columns is None]
    if failed and sandbox.has_folders():
        with_folder = _find_tests([items[k] | {"folder": True} for k in failed], sandbox)
        found = [columns or with_folder.pop(0) for columns in found]
    return found


def _find_tests(items: list[dict], sandbox: Sandbox) -> list[dict | None]:
    references = [single_program(item, item["reference"]) for item in items]
    first = sandbox.run(references)
    # enough for each test, because this is twice the time of all of them
    limits = [min(sandbox.check_timeout, max(1.0, round(2 * verdict.cpu_seconds, 1))) for verdict in first]
    again = sandbox.run([replace(p, check_timeout=limit) for p, limit in zip(references, limits, strict=True)])
    tests = [sorted(passed_by(one) & passed_by(other)) for one, other in zip(first, again, strict=True)]
    kept = [k for k, verdict in enumerate(first) if tests[k] and len(tests[k]) >= ENOUGH * verdict.total]
    programs = [single_program(items[k], constant(items[k], x)) for k in kept for x in CONSTANTS]
    trivial = iter(sandbox.run([replace(p, check_timeout=1.0) for p in programs]))
    found: list[dict | None] = [None] * len(items)
    for k in kept:
        passed = set().union(*(passed_by(next(trivial)) for _ in CONSTANTS))
        of_methods = [test for test in tests[k] if test.split(".")[0] in items[k]["method_tests"]]
        if counting := [test for test in of_methods if test not in passed]:
            own = {"check_timeout": limits[k], "folder": references[k].folder}
            found[k] = {"tests": tests[k], "counting": counting, **own}
    return found


def key_of(item: dict) -> str:
    """Returns the name of an item in the table of known tests: a hash of what decides which tests pass."""
    texts = [item[name] for name in ("skeleton", "imports", "reference", "test")]
    return hashlib.sha256(json.dumps([texts, item["methods"]]).encode()).hexdigest()[:12]


@functools.cache
def known_tests() -> dict[str, dict | None]:
    """
    Returns what [`find_tests`] found for the package's copy of ClassEval, by [`key_of`].
    `tests/helpers/write_class_tests.py` wrote it.
    """
    return json.loads(read_data("classeval_tests.json.gz"))


def constant(item: dict, value: str) -> str:
    """Returns an answer in which every method returns a constant."""
    return "".join(f"def {name}(*args, **kwargs):\n    return {value}\n" for name in item["methods"])


def single_program(item: dict, answer: str) -> Program:
    """Returns the program of a single agent's answer to an item."""
    return program_of(item, [merging.read_answer(answer, item["class_name"])], [item["methods"]])


def program_of(item: dict, answers: Sequence[merging.Answer], division: Sequence[Sequence[str]]) -> Program:
    """Returns the program that runs an item's tests on the merged class, see [`merging.merge`]."""
    source = merging.merge(item, answers, division)
    own = {name: item[name] for name in ("check_timeout", "folder") if name in item}
    return Program(source, item["class_name"], item["test"], item["imports"], unittest=True, **own)


def passed_by(verdict: Verdict) -> set[str]:
    """Returns the names of the test methods that a program passed."""
    return {check.source for check in verdict.checks if check.status == "passed"}
