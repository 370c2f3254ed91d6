"""Code generation as a task: its sections, its environment and its datasets."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from trl_multiagent.console import printable
from trl_multiagent.environments.base import Prompt
from trl_multiagent.environments.dataset_rows import LOCAL_FILE, LOCAL_SUFFIXES
from trl_multiagent.environments.embedded import SHORT_NAMES
from trl_multiagent.environments.task import DatasetSource, Task, TaskSettings, setting
from trl_multiagent.tasks.code_generation.data import DATASET_TYPES, load_code_dataset
from trl_multiagent.tasks.code_generation.environment import CodeGenerationEnvironment
from trl_multiagent.tasks.code_generation.expert import Expert, ExpertSettings
from trl_multiagent.tasks.code_generation.feedback import EXPERT_EDITS, MODES, OTHER_NAMES
from trl_multiagent.tasks.code_generation.prompts import AUX, MAIN, CodePrompts
from trl_multiagent.tasks.code_generation.reward import COLLABORATION, KINDS, CodeReward
from trl_multiagent.tasks.problems import count_asserts
from trl_multiagent.tasks.programs import SandboxSettings


if TYPE_CHECKING:
    from datasets import Dataset


logger = logging.getLogger(__name__)


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
        path = Path(self.name)
        is_local = path.suffix in LOCAL_SUFFIXES
        if path.is_file() and not is_local:
            raise ValueError(f"`dataset.name` is {self.name!r}; it must be a Hub id or the path of a {LOCAL_FILE}.")
        if not path.exists() and (is_local or self.name.startswith(("/", "./", "../"))):
            raise ValueError(f"`dataset.name` is {self.name!r}, but there is no such file in {Path.cwd()}.")


@dataclass
class External(ExpertSettings):
    """The section `external`: the feedback between turns."""

    mode: str = setting(
        f"Feedback that agents get between turns: {', '.join(map(repr, MODES))}.",
        "level_feedback",
        choices=(*MODES, *OTHER_NAMES),
    )
    sandbox_slice: int | Literal["all"] | None = setting(
        "Tests whose results it contains: the first n, the last n if negative, all for 0 or 'all'.", 1
    )
    hidden_tests: int = setting("Number of an item's last tests that it never contains; the reward uses all.", 0, ge=0)
    external_prompt_passthrough: (
        bool | Literal["1", "true", "yes", "y", "on", "0", "false", "no", "n", "off"] | None
    ) = setting(
        "Whether the prompt of a later turn is the feedback alone, or (false) the first prompt with the feedback "
        "in the place of "
        "the problem; by default it is the feedback alone."
    )

    def __post_init__(self) -> None:
        self.mode = OTHER_NAMES.get(self.mode, self.mode)
        if self.mode == EXPERT_EDITS:
            self.check_expert()

    @property
    def passes_prompts_through(self) -> bool:
        """Whether the prompt of a later turn is the feedback alone."""
        return self.external_prompt_passthrough not in (False, "0", "false", "no", "n", "off")


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
    sandbox = limits.make_checked_sandbox()
    return CodeGenerationEnvironment(
        num_agents=settings.num_agents,
        mode=external.mode,
        sandbox_slice=external.sandbox_slice,
        hidden_tests=external.hidden_tests,
        external_prompt_passthrough=external.passes_prompts_through,
        prompt_files=settings.sections["prompt_files"],
        reward_kind=reward.kind,
        collaboration=reward.collaboration,
        adaptive_timeout=limits.adaptive_timeout,
        sandbox=sandbox,
        keep_suspicious=settings.run_folder / "suspicious_programs",
        first_prompts=first_prompts,
        warn_about_items=warn_about_items,
        expert=expert,
    )


def load_datasets(settings: TaskSettings) -> tuple[Dataset, Dataset | None]:
    """
    Loads the training set and, with `dataset.eval_split`, the evaluation set. For errors see [`load_code_dataset`].
    """
    dataset: CodeDataset = settings.sections["dataset"]
    assert dataset.name is not None
    load = partial(load_code_dataset, dataset.name, type=dataset.type, num_agents=settings.num_agents)
    train_dataset = load(split=dataset.train_split)
    eval_dataset = None if dataset.eval_split is None else load(split=dataset.eval_split)
    hidden_tests = settings.sections["external"].hidden_tests
    for rows in (train_dataset, eval_dataset):
        if hidden_tests and rows is not None:
            _warn_about_hidden_tests(rows, hidden_tests)
    return train_dataset, eval_dataset


def _warn_about_hidden_tests(rows: Dataset, hidden_tests: int) -> None:
    few = [row["task_id"] for row in rows if count_asserts(row["test"]) <= hidden_tests]
    if few:
        logger.warning(
            "`external.hidden_tests` is %d: feedback on %s%s contains no tests, because there are no more than that.",
            hidden_tests,
            printable(", ".join(few[:3])),
            f" and {len(few) - 3} other items" if len(few) > 3 else "",
        )


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
