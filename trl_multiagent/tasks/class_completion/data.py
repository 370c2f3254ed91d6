"""
The data of class completion, and its task: ClassEval, files of such items, and the generated classes of the demo.

`scripts/data/write_classes.py` makes the items. A class of the demo keeps a log. Two of its methods put values in, two
give its sum, product or text back, and each does so with an operation such as `x * 2`. There are two ways to keep the
log, and the agents write different methods, so they have to agree:

- `"values"`: the log has what was put in, and the other methods compute the result;
- `"results"`: the log has the results so far, and the other methods take the last one.

The demo's base model writes methods carelessly, in either way.
"""

import json
import logging
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from trl_multiagent.code.sandbox import Sandbox
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
    ClassPrompts,
    divide,
    first_prompt,
)
from trl_multiagent.tasks.code_generation.data import CodeDataset
from trl_multiagent.tasks.programs import SandboxSettings


logger = logging.getLogger(__name__)
CLASSEVAL, HUB_ID, DEMO = "classeval", "FudanSELab/ClassEval", "demo"
FIELDS: dict[str, type] = {
    **dict.fromkeys(("task_id", "class_name", "skeleton", "test"), str),
    **dict.fromkeys(("methods", "method_tests", "uses", "weights", "parameters"), list),
}


def load_class_dataset(name: str, split: str | None = None, sandbox: Sandbox | None = None) -> Dataset:
    """
    Loads classes. A class is left out if its reference does not pass its tests, or if it needs files or SQLite and the
    sandbox cannot give programs a folder, see [`Sandbox.has_folders`].

    Args:
        name (`str`): `"classeval"` or `"FudanSELab/ClassEval"`, which comes with the package; `"demo"`; or a local
            file of rows that `scripts/data/write_classes.py` wrote.
        split (`str`, *optional*): Split in the syntax of `datasets`, such as `"test[:66]"`.
        sandbox ([`Sandbox`], *optional*): Says whether it has folders.

    Returns:
        `Dataset`: Columns `task_id`, `class_name`, `skeleton`, `imports`, `test`, `reference`, all text; `methods`,
        the names of the methods to write. Of each of these it has the test class, `method_tests`; the other methods
        that the reference calls in it, `uses`; the reference's number of statements, `weights`; and the number of
        parameters with `self`, `parameters`. `tests`, the test methods that the reference passes; `counting`, those
        of them that test one method and that no constant passes; `check_timeout`, in seconds; `folder`, whether it
        needs one.

    Raises `ValueError` if a row is malformed, or no row gives an item.
    """
    if name == DEMO:
        return make_dataset(demo_items(split), name)
    rows = load_rows(CLASSEVAL if name == HUB_ID else name, None, split)
    for number, row in enumerate(rows, 1):
        check_fields(row, FIELDS, f"{name}, row {number}")
    kept = [row for row in rows if row["tests"]]
    if any(row["folder"] for row in kept) and not (sandbox or Sandbox()).has_folders():
        able = [row for row in kept if not row["folder"]]
        logger.warning(
            "%s: %d of %d classes are left out, because the sandbox has no folder for their files.",
            name,
            len(kept) - len(able),
            len(kept),
        )
        kept = able
    if not kept:
        raise ValueError(f"{name}, split {split or 'test'}: no class has tests that its reference passes.")
    return make_dataset(kept, name)


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
        f"'{CLASSEVAL}' or '{HUB_ID}', which comes with the package; '{DEMO}'; or the path of a {LOCAL_FILE} that "
        "scripts/data/write_classes.py wrote."
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
        prompt_files=settings.sections["prompt_files"],
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
    settings={
        "dataset": ClassDataset,
        "external": External,
        "prompt_files": ClassPrompts,
        "reward": Reward,
        "sandbox": SandboxSettings,
    },
)
