"""Code generation as a task: its datasets, in the HumanEval schema and checked row by row, and its sections."""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from trl_multiagent.code.dependencies import FUNCTIONS, IMPORTS, PARSE_ERRORS, all_tables, bound_names, names_in
from trl_multiagent.code.extraction import join_sources
from trl_multiagent.code.sandbox import read_asserts
from trl_multiagent.environments.base import Prompt
from trl_multiagent.environments.dataset_rows import (
    LOCAL_FILE,
    LOCAL_SUFFIXES,
    SHORT_NAMES,
    Dataset,
    Datasets,
    check_fields,
    check_name,
    kind_of,
    load_rows,
    make_dataset,
    read_file,
    select_rows,
)
from trl_multiagent.environments.task import DatasetSource, Task, TaskSettings, setting
from trl_multiagent.tasks.code_generation.environment import (
    EXPERT_EDITS,
    MODES,
    OTHER_NAMES,
    CodeGenerationEnvironment,
    CodePrompts,
)
from trl_multiagent.tasks.code_generation.expert import Expert, ExpertSettings
from trl_multiagent.tasks.code_generation.item_facts import read_problem
from trl_multiagent.tasks.code_generation.reward import AUX, COLLABORATION, KINDS, MAIN, CodeReward
from trl_multiagent.tasks.programs import SandboxSettings


DATASET_TYPES = ("humaneval", "coophumaneval", "mbpp")
FIELDS = ("task_id", "prompt", "entry_point", "test")
MBPP_FIELDS = {"task_id": int, "prompt": str, "code": str, "test_imports": list, "test_list": list}


def load_code_dataset(name: str, split: str | None = None, type: str | None = None, num_agents: int = 2) -> Dataset:
    """
    Loads code problems, and checks every row.

    Args:
        name (`str`): Id of a dataset on the Hub, path of a local `.jsonl`, `.json` or `.parquet` file, or a benchmark
            that comes with the package: `"humaneval"`, `"coophumaneval"` or `"mbpp"`. Without a network, the ids of
            these on the Hub give the package's copy.
        split (`str`, *optional*): Split, with or without a slice, in the syntax of `datasets`: `"test"`,
            `"test[33:163]"`, `"train[:10%]"`. A slice without a name, such as `"[16:]"`, is taken from the split
            `test`, or from the only split that the dataset has. `None` selects all rows of this split. A local file
            has one split, which may be given any name.
        type (`str`, *optional*): `"humaneval"`, `"coophumaneval"` or `"mbpp"`. Nothing depends on it: rows in MBPP's
            schema, which have a `test_list`, are always brought to HumanEval's.
        num_agents (`int`, *optional*, defaults to `2`): Size of the team. With 2 agents no problem may define `aux`,
            because this is the name of the helper.

    Returns:
        `datasets.Dataset`: Columns `task_id`, `prompt`, `entry_point`, `test` and, where the source has one,
        `canonical_solution`, all text.

    Raises:
        ValueError: a row is malformed, or its test cannot tell right answers from wrong ones; the message names the
            file, the row (counted from 1) and the field. Also if the `type` is unknown, or the `split` selects no
            rows.
        FileNotFoundError: a local file does not exist.
    """
    if type not in (None, *DATASET_TYPES):
        raise ValueError(f"Unknown dataset type {type!r}: expected one of {', '.join(DATASET_TYPES)}.")
    is_local = name.endswith(LOCAL_SUFFIXES)
    if is_local:
        rows, source = read_file(Path(name)), name
    else:
        config = "sanitized" if name == "google-research-datasets/mbpp" else None
        rows, source = load_rows(name, config, split), f"{name}, split {split or 'test'}"
    if not rows:
        raise ValueError(f"{source} has no rows.")
    test_field = "test"
    if "test_list" in rows[0]:  # as in MBPP, whatever the type: the peer's files give it others
        test_field = "test_list"
        rows = [mbpp_row(row, f"{source}, row {number}") for number, row in enumerate(rows, 1)]
    dataset = make_dataset(_checked_rows(rows, source, test_field, num_agents), source)
    return select_rows(dataset, split, source) if is_local else dataset


def _checked_rows(rows: list[dict], source: str, test_field: str, num_agents: int) -> list[dict]:
    fields = [*FIELDS, "canonical_solution"] if any("canonical_solution" in row for row in rows) else FIELDS
    seen: dict[str, int] = {}  # for each id, the number of the row
    for number, row in enumerate(rows, 1):
        where = f"{source}, row {number}"
        check_fields(row, dict.fromkeys(fields, str), where)
        first, name = seen.setdefault(row["task_id"], number), row["entry_point"]
        if first != number:
            raise ValueError(f"{where}: field `task_id` is {row['task_id']!r}, as in row {first}; ids must be unique.")
        try:
            prefix = read_problem(row["prompt"], name).prefix
        except ValueError as error:
            raise ValueError(f"{where}: field `prompt` is malformed: {error}.") from None
        if problem := unusable_test(row["test"], name):
            raise ValueError(f"{where}: field `{test_field}` {problem}.")
        if num_agents == 2 and (name == AUX or AUX in bound_names(all_tables(prefix)[0])):
            field = "`entry_point` is" if name == AUX else "`prompt` defines"
            raise ValueError(f"{where}: field {field} `{AUX}`, which is the name of the helper in a team of two.")
    return [{field: row[field] for field in fields} for row in rows]


def unusable_test(test: str, entry_point: str, check: str = "") -> str:
    """
    Explains why a test cannot tell right answers from wrong ones; empty if no reason was found. It is read, not run,
    so a test that the reference solution fails, or that never reaches its asserts, is not found here. The test may
    call the `entry_point` by this name or as `candidate`. A test without a `check` has this one.
    """
    try:
        asserts = read_asserts(test)
    except PARSE_ERRORS as error:
        return f"is not Python source: {error}"
    tree = ast.parse(test)
    checks = [x for x in ast.parse(check).body + tree.body if isinstance(x, FUNCTIONS) and x.name == "check"]
    if not checks:
        return "does not define `check(candidate)` at its top level"
    names = [argument.arg for argument in ast.walk(checks[-1].args) if isinstance(argument, ast.arg)]
    if not isinstance(checks[-1], ast.FunctionDef) or len(names) - len(checks[-1].args.defaults) != 1:
        return "must define `check` as a plain function that takes one argument, the candidate"
    if not asserts.sources:
        return "has no assert that can fail"
    if not names_in(tree) & {"candidate", entry_point, *names}:
        return "never calls the candidate"
    return ""


# MBPP


def mbpp_row(row: dict, where: str) -> dict:
    """
    Converts a row of sanitized MBPP to the schema of HumanEval.

    The prompt consists of the reference solution's imports and the signature of its function, with the task as
    docstring. Helper functions of the reference belong to the solution, so they follow the body in
    `canonical_solution`. If the signature needs them, they precede it in the prompt.
    """
    check_fields(row, MBPP_FIELDS, where)
    for field in ("test_imports", "test_list"):
        for text in row[field]:
            if not isinstance(text, str):
                raise ValueError(f"{where}: field `{field}` must hold text, not {kind_of(text)}.")
    code = _parsed(row["code"], f"{where}: field `code`")
    asserts = [_mbpp_assert(test, where) for test in row["test_list"]]
    if not asserts:
        raise ValueError(f"{where}: field `test_list` is empty.")
    tested = [
        node
        for node in code.body
        if isinstance(node, ast.FunctionDef) and all(node.name in names_in(test) for test in asserts)
    ]
    if not tested:
        raise ValueError(f"{where}: field `code` defines no function that every entry of `test_list` calls.")
    function = tested[-1]

    imports = [node for node in code.body if isinstance(node, IMPORTS)]
    helpers = [node for node in code.body if node not in imports and node is not function]
    solution = function.body[1:] if ast.get_docstring(function) is not None else function.body
    function.body = [ast.Expr(ast.Constant(f" {row['prompt'].strip()}\n    "))]
    needed_first = bool(names_in(function) & bound_names(all_tables(_source(helpers))[0]))
    prompt = _source([function])
    function.body += solution
    body = _source([function]).removeprefix(prompt)
    for name in (node for test in asserts for node in ast.walk(test) if isinstance(node, ast.Name)):
        name.id = "candidate" if name.id == function.name else name.id
    check: Any = ast.parse("def check(candidate): pass").body[0]
    check.body = [*asserts]
    return {
        "task_id": f"MBPP/{row['task_id']}",
        "prompt": join_sources(_source(imports), _source(helpers) if needed_first else "", prompt),
        "entry_point": function.name,
        "canonical_solution": join_sources(body, "" if needed_first else _source(helpers)),
        "test": join_sources("\n".join(row["test_imports"]), _source([check])),
    }


def _mbpp_assert(test: str, where: str) -> ast.Assert:
    body = _parsed(test, f"{where}: field `test_list`, {test!r}").body
    if len(body) != 1 or not isinstance(body[0], ast.Assert):
        raise ValueError(f"{where}: field `test_list`, {test!r} is not one assert.")
    return body[0]


def _parsed(source: str, where: str) -> ast.Module:
    try:
        return ast.parse(source)
    except PARSE_ERRORS as error:
        raise ValueError(f"{where} is not Python source: {error}.") from None


def _source(nodes: Sequence[ast.stmt]) -> str:
    return ast.unparse(ast.fix_missing_locations(ast.Module([*nodes], type_ignores=[]))).strip("\n")


# The sections of a run's settings


@dataclass
class CodeDataset(DatasetSource):
    """The section `dataset`."""

    generated = SHORT_NAMES
    name: str | None = setting(
        "'humaneval', 'coophumaneval' or 'mbpp', which come with the package; a Hub id; or the path of a "
        f"{LOCAL_FILE}."
    )
    type: str | None = setting(f"{', '.join(map(repr, DATASET_TYPES))}; rows are read by their columns.")

    def __post_init__(self) -> None:
        if self.name is None:
            help = type(self).__dataclass_fields__["name"].metadata["help"]
            raise ValueError(f"`dataset.name` is missing: {help}")
        check_name(self.name)


@dataclass
class External(ExpertSettings):
    """The section `external`: the feedback between turns."""

    mode: str = setting(
        f"Feedback that agents get between turns: {', '.join(map(repr, MODES))}.",
        "level_feedback",
        choices=(*MODES, *OTHER_NAMES),
    )
    sandbox_slice: int | Literal["all"] | None = setting(
        "It contains results of the first n tests, of the last n if negative, of all for 0 or 'all'.", 1
    )
    hidden_tests: int = setting("Number of an item's last tests that it never contains; the reward uses all.", 0, ge=0)
    external_prompt_passthrough: (
        bool | Literal["1", "true", "yes", "y", "on", "0", "false", "no", "n", "off"] | None
    ) = setting(
        "Whether the prompt of a later turn is the feedback alone, or (false) the first prompt with the feedback "
        "in the place of the problem; by default it is the feedback alone."
    )

    def __post_init__(self) -> None:
        self.mode = OTHER_NAMES.get(self.mode, self.mode)
        passes = self.external_prompt_passthrough not in (False, "0", "false", "no", "n", "off")
        self.external_prompt_passthrough = passes
        if self.mode == EXPERT_EDITS:
            self.expert_endpoint()


@dataclass
class Reward:
    """The section `reward`."""

    type: Literal["function"] | None = setting("Source of the rewards; only 'function', the task's own reward.")
    kind: str = setting(
        "'paper' is the published table; 'earned' has the same scale and only rewards solving the task.",
        CodeReward.kind,
        choices=KINDS,
    )
    collaboration: str = setting(
        "For 'paper', how to decide whether main uses aux and its value: 'static' reads the code, 'executed' also "
        "runs the tests.",
        CodeReward.collaboration,
        choices=COLLABORATION,
    )


def make_environment(
    settings: TaskSettings,
    first_prompts: Callable[[dict], Mapping[str, Prompt]] | None = None,
    warn_about_items: bool = True,
) -> CodeGenerationEnvironment:
    """
    Makes the environment that the sections `external`, `reward` and `sandbox` describe. For the other arguments see
    [`CodeGenerationEnvironment`]. Raises [`UnavailableError`] if the machine does not offer the protection
    `sandbox.min_tier`.
    """
    external, reward, limits = (settings.sections[name] for name in ("external", "reward", "sandbox"))
    roles = (AUX, MAIN) if settings.num_agents == 2 else (MAIN,)
    expert = Expert(external, roles, settings.run_folder) if external.mode == EXPERT_EDITS else None
    return CodeGenerationEnvironment(
        num_agents=settings.num_agents,
        mode=external.mode,
        sandbox_slice=external.sandbox_slice,
        hidden_tests=external.hidden_tests,
        external_prompt_passthrough=external.external_prompt_passthrough,
        prompt_files=settings.sections["prompt_files"],
        reward_kind=reward.kind,
        collaboration=reward.collaboration,
        adaptive_timeout=limits.adaptive_timeout,
        sandbox=limits.make_checked_sandbox(),
        keep_suspicious=settings.run_folder / "suspicious_programs",
        first_prompts=first_prompts,
        warn_about_items=warn_about_items,
        expert=expert,
    )


def load_datasets(settings: TaskSettings) -> Datasets:
    """
    Loads the training set and, with `dataset.eval_split`, the evaluation set. For errors see [`load_code_dataset`].
    """
    name, type = str(settings.dataset.name), settings.sections["dataset"].type
    return settings.dataset.load_splits(lambda split: load_code_dataset(name, split, type, settings.num_agents))


TASK = Task(
    make_environment,
    load_datasets,
    settings={
        "dataset": CodeDataset,
        "external": External,
        "prompt_files": CodePrompts,
        "reward": Reward,
        "sandbox": SandboxSettings,
    },
)
