"""
The data of class completion, and its task: ClassEval, and files of such items, which `scripts/data/write_classes.py`
makes. The demo has generated classes, see recipes/class_completion/demo.py.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass

from trl_multiagent.code.sandbox import Sandbox
from trl_multiagent.environments.dataset_rows import (
    LOCAL_FILE,
    Dataset,
    Datasets,
    check_fields,
    load_rows,
    make_dataset,
)
from trl_multiagent.environments.task import Task, TaskSettings, setting
from trl_multiagent.tasks.class_completion.environment import (
    COMPAT,
    DIVISIONS,
    KINDS,
    MODES,
    ClassCompletionEnvironment,
    ClassPrompts,
    first_prompt,
)
from trl_multiagent.tasks.code_generation.data import CodeDataset
from trl_multiagent.tasks.programs import SandboxSettings


logger = logging.getLogger(__name__)
CLASSEVAL, HUB_ID = "classeval", "FudanSELab/ClassEval"
FIELDS: dict[str, type] = {
    **dict.fromkeys(("task_id", "class_name", "skeleton", "test"), str),
    **dict.fromkeys(("methods", "method_tests", "uses", "weights", "parameters"), list),
}
NULLABLE = ("imports", "reference", "tests", "counting", "check_timeout")  # of a class that is left out


def load_class_dataset(name: str, split: str | None = None, sandbox: Sandbox | None = None) -> Dataset:
    """
    Loads classes. A class is left out if its reference does not pass its tests, or if it needs files or SQLite and the
    sandbox cannot give programs a folder, see [`Sandbox.has_folders`].

    Args:
        name (`str`): `"classeval"` or `"FudanSELab/ClassEval"`, which comes with the package; or a local file of
            rows that `scripts/data/write_classes.py` wrote.
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
    rows = load_rows(CLASSEVAL if name == HUB_ID else name, None, split)
    for number, row in enumerate(rows, 1):
        check_fields(row, FIELDS, f"{name}, row {number}")
        if missing := [field for field in NULLABLE if field not in row]:
            raise ValueError(f"{name}, row {number}: field `{missing[0]}` is missing.")
    kept = [row for row in rows if row["tests"]]
    if any(row.get("folder") for row in kept) and not (sandbox or Sandbox()).has_folders():
        able = [row for row in kept if not row.get("folder")]
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


# The task


@dataclass
class ClassDataset(CodeDataset):
    """The section `dataset`."""

    name: str | None = setting(
        f"'{CLASSEVAL}' or '{HUB_ID}', which comes with the package; 'demo'; or the path of a {LOCAL_FILE} that "
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


def make_environment(
    settings: TaskSettings, make_prompt: Callable[..., str] = first_prompt
) -> ClassCompletionEnvironment:
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
        make_prompt=make_prompt,
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
    settings={
        "dataset": ClassDataset,
        "external": External,
        "prompt_files": ClassPrompts,
        "reward": Reward,
        "sandbox": SandboxSettings,
    },
)
