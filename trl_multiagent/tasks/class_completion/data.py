"""
The data of class completion, and its task: ClassEval, files in its format, and the generated classes of the demo.

A class of the demo keeps a log. Two of its methods put values in, two give its sum, product or text back, and each
does so with an operation such as `x * 2`. There are two ways to keep the log, and the agents write different methods,
so they have to agree:

- `"values"`: the log has what was put in, and the other methods compute the result;
- `"results"`: the log has the results so far, and the other methods take the last one.

The demo's base model writes methods carelessly, in either way.
"""

import ast
import contextlib
import functools
import hashlib
import json
import logging
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from trl_multiagent.code.dependencies import PARSE_ERRORS
from trl_multiagent.code.sandbox import Program, Sandbox
from trl_multiagent.environments.dataset_rows import (
    LOCAL_FILE,
    Dataset,
    Datasets,
    check_fields,
    load_rows,
    make_dataset,
)
from trl_multiagent.environments.embedded import SHORT_NAMES, generated_rows, read_data
from trl_multiagent.environments.task import Task, TaskSettings, setting
from trl_multiagent.models.imitation import ImitationModel
from trl_multiagent.tasks.class_completion.environment import (
    COMPAT,
    DIVISIONS,
    KINDS,
    MODES,
    ClassCompletionEnvironment,
    divide,
    find_class,
    first_prompt,
    functions_of,
    passed_by,
    program_of,
    read_answer,
)
from trl_multiagent.tasks.code_generation.data import CodeDataset
from trl_multiagent.tasks.programs import SandboxSettings


logger = logging.getLogger(__name__)
CLASSEVAL, DEMO = "classeval", "demo"
FIELDS: dict[str, type] = {
    **dict.fromkeys(("task_id", "class_name", "skeleton", "solution_code", "test"), str),
    **dict.fromkeys(("methods_info", "import_statement"), list),
}
METHOD_FIELDS: dict[str, type] = dict.fromkeys(("method_name", "test_class"), str)
# What a method can return without any work. A test method that passes with one of them in place of all methods earns
# nothing
CONSTANTS = ("None", "True", "0", "''", "[]")
ENOUGH = 0.8  # share of its test methods that a class's reference must pass
# Typographic quotes and spaces, which some skeletons have in place of Python's
STRAIGHT = str.maketrans(
    {"\u2018": "'", "\u2019": "'", "\u201c": '"', "\u201d": '"', "\u00a0": " ", "\u200b": None, "\ufeff": None}
)


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
    bodies = read_methods(row["solution_code"], row["class_name"], where)
    skeleton = clean_skeleton(row)
    headers = read_methods(skeleton, row["class_name"], where)
    tests = {method["method_name"]: method["test_class"] for method in row["methods_info"]}
    names = [name for name in headers if name in tests and name in bodies]
    if not names:
        raise ValueError(f"{where}: no method of the skeleton is in both `methods_info` and `solution_code`.")
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


def read_methods(source: str, class_name: str, where: str) -> dict[str, ast.FunctionDef]:
    """
    Returns the methods of a class in the dataset. Raises `ValueError` if there is no such class; the message begins
    with `where`.
    """
    try:
        owner = find_class(ast.parse(source), class_name)
    except PARSE_ERRORS as error:
        raise ValueError(f"{where}: `skeleton` or `solution_code` is not Python source: {error}.") from None
    if owner is None:
        raise ValueError(f"{where}: `skeleton` or `solution_code` has no class `{class_name}`.")
    return {node.name: node for node in functions_of(owner)}


def clean_skeleton(row: dict) -> str:
    """
    Returns the text of a row's skeleton, with straight quotes. If it is still not Python, it is made of the reference
    without the bodies of the methods to write.
    """
    text = row["skeleton"].translate(STRAIGHT)
    with contextlib.suppress(ValueError):
        read_methods(text, row["class_name"], "")
        return text
    tree = ast.parse(row["solution_code"])
    texts = {method["method_name"]: method.get("method_description") or "" for method in row["methods_info"]}
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.name in texts:
            description = texts[node.name].partition('"""')[2].rpartition('"""')[0].strip()
            node.body = [ast.Expr(ast.Constant(description))]
    return ast.unparse(ast.fix_missing_locations(tree))


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
    `scripts/data/write_class_tests.py` wrote it.
    """
    return json.loads(read_data("classeval_tests.json.gz"))


def constant(item: dict, value: str) -> str:
    """Returns an answer in which every method returns a constant."""
    return "".join(f"def {name}(*args, **kwargs):\n    return {value}\n" for name in item["methods"])


def single_program(item: dict, answer: str) -> Program:
    """Returns the program of a single agent's answer to an item."""
    return program_of(item, [read_answer(answer, item["class_name"])], [item["methods"]])


# The demo


class Log(NamedTuple):
    """A class of the demo: the result of a log, the result after one more value, and the operations of its methods."""

    of_log: str
    after: str
    operations: dict[str, str]


FILE = "class_demo.jsonl.gz"  # which `scripts/data/write_class_demo.py` writes
SIZES = {"test": 64, "train": 320}
NUMBERS = {"": "{}", "_double": "{} * 2", "_next": "{} + 1", "_square": "{} ** 2"}
TEXTS = {"": "{}", "_double": "{} * 2", "_dash": "{} + '-'", "_upper": "{}.upper()"}
LOGS = {
    "Sum": Log("sum(self.log)", "self.log[-1] + {}", NUMBERS),
    "Product": Log("prod(self.log)", "self.log[-1] * ({})", NUMBERS),
    "Text": Log("''.join(self.log)", "self.log[-1] + {}", TEXTS),
}
WAYS = ("values", "results")
CARELESS = 0.25  # share of the demonstrated methods with a mistake
MISTAKES = ("operation", "effect", "name", "syntax")


def demo_items(split: str | None) -> list[dict]:
    """
    Returns generated classes, as rows of [`load_class_dataset`]. No class is in both splits, `"train"` (320) and
    `"test"` (64).
    """
    items = [json.loads(line) for line in read_data(FILE).splitlines()]
    splits = {"test": items[: SIZES["test"]], "train": items[SIZES["test"] :]}
    return generated_rows(splits.__getitem__, SIZES, split)


def write_method(kind: str, name: str, way: str = "", mistake: str = "", operation: str | None = None) -> str:
    """
    Writes a method of a class of some `kind`, a key of `LOGS`, in one of the `WAYS`, and with one of the `MISTAKES`
    or none. Without a way, the method consists of its description. `operation` takes the place of that in the name.
    """
    of_log, after, operations = LOGS[kind]
    operation = operation or operations[name[3:]]
    if name.startswith("put"):
        header, value = f"def {name}(self, x):\n", operation.format("x")
        bodies = (f'"""Put in {value}."""', f"self.log.append({value})", f"self.log.append({after.format(value)})")
    else:
        described, computed, last = (operation.format(log) for log in (kind.lower(), of_log, "self.log[-1]"))
        header, bodies = f"def {name}(self):\n", (f'"""Return {described}."""', f"return {computed}", f"return {last}")
    body = bodies[("", *WAYS).index(way)]
    if mistake == "effect":
        body = body.replace("return ", "y = ").replace("self.log.append", "y = ")
    if mistake == "syntax":
        body = body.replace("self.", "self ")
    return f"{header.replace(name, 'helper') if mistake == 'name' else header}    {body}\n"


def demo_prompt(item: dict, own: Sequence[str], num_agents: int) -> str:
    """Returns the prompt of an agent, short as in the training of the demo's model."""
    return f"{item['skeleton']}# Write only {', '.join(own)}:\n"


def demonstrate(number: int, rng: random.Random) -> list[tuple[str, str]]:
    """
    Draws pairs of a prompt and an answer: of either agent of a team, or of one that works alone. Each keeps the log in
    one way.
    """
    items = demo_items("train")
    pairs = []
    for _ in range(number):
        item, num_agents = rng.choice(items), rng.choice((1, 2, 2))
        own, way, kind = rng.choice(divide(item, num_agents, DIVISIONS[0])), rng.choice(WAYS), item["class_name"]
        methods = []
        for name in own:
            mistake = rng.choice(MISTAKES) if rng.random() < CARELESS else ""
            other = rng.choice([*LOGS[kind].operations.values()]) if mistake == "operation" else None
            methods.append(write_method(kind, name, way, mistake, other))
        pairs.append((demo_prompt(item, own, num_agents), "\n".join(methods)))
    return pairs


# The task


@dataclass
class ClassDataset(CodeDataset):
    """The section `dataset`."""

    generated = (*SHORT_NAMES, DEMO)
    name: str | None = setting(
        f"'{CLASSEVAL}', which comes with the package; a Hub id; the path of a {LOCAL_FILE} in the same format; "
        "or 'demo'."
    )
    type: str | None = setting("The format of the rows; only 'classeval'.", choices=(CLASSEVAL, None))
    division: str = setting(
        "Who writes which methods: 'balanced', or 'parameter_count', which leaves an agent idle in half of the "
        "classes.",
        DIVISIONS[0],
        choices=DIVISIONS,
    )


@dataclass
class External:
    """The section `external`: the feedback between turns."""

    mode: str = setting(
        "Feedback that agents get between turns: 'code_feedback', or 'plain' for none.", MODES[0], choices=MODES
    )


@dataclass
class Reward:
    """The section `reward`."""

    kind: str = setting(
        "'compat' is CoMLRL's table; 'earned' pays for tests that no constant passes, equally for every method.",
        COMPAT,
        choices=KINDS,
    )


def make_environment(settings: TaskSettings) -> ClassCompletionEnvironment:
    """
    Builds the environment. Raises [`UnavailableError`] if the machine does not offer the protection
    `sandbox.min_tier`.
    """
    dataset: ClassDataset = settings.sections["dataset"]
    return ClassCompletionEnvironment(
        settings.num_agents,
        division=dataset.division,
        kind=settings.sections["reward"].kind,
        mode=settings.sections["external"].mode,
        make_prompt=demo_prompt if dataset.name == DEMO else first_prompt,
        sandbox=settings.sections["sandbox"].make_checked_sandbox(),
        keep_suspicious=settings.run_folder / "suspicious_programs",
    )


def load_datasets(settings: TaskSettings) -> Datasets:
    """
    Loads the training set and, if there is an `eval_split`, the evaluation set, with the errors of
    [`load_class_dataset`].
    """
    name = str(settings.dataset.name)
    with settings.sections["sandbox"].make_sandbox() as sandbox:
        return settings.dataset.load_splits(lambda split: load_class_dataset(name, split, sandbox))


TASK = Task(
    make_environment,
    load_datasets,
    models={DEMO: ImitationModel("demo-classes", demonstrate, 700).path},
    settings={"dataset": ClassDataset, "external": External, "reward": Reward, "sandbox": SandboxSettings},
)
