"""What a recipe has to know of a task family: its settings, its environment and its datasets, as one plain object."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trl_multiagent.environments.base import Environment


if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import Trainer, TrainerCallback


def setting(help: str, default: Any = None, choices: Sequence[Any] | None = None) -> Any:
    """
    One setting: a field of the dataclass that describes a section.

    Args:
        help (`str`): What `--help` says about it.
        default (`Any`, *optional*): Value if the section does not have the setting.
        choices (`Sequence`, *optional*): The allowed values. Without them the type annotation decides.
    """
    metadata = {"help": help} if choices is None else {"help": help, "choices": tuple(choices)}
    return dataclasses.field(default=default, metadata=metadata)


@dataclass
class DatasetSource:
    """The section `dataset`. A family with more settings for its data subclasses it."""

    name: str | None = setting("Where the data comes from: a Hub id or the path of a file, for example.")
    train_split: str | None = setting("Rows to train on, such as 'test[33:163]'.")
    eval_split: str | None = setting("Rows to evaluate on; without it there is no evaluation.")

    @property
    def may_be_hub_id(self) -> bool:
        """Whether `name` may be an id on the Hub, to which the model card then links."""
        return True


@dataclass(frozen=True)
class TaskSettings:
    """
    What a recipe tells its task.

    Args:
        sections (`dict[str, Any]`):
            For each name in [`Task`]`.settings`, and for `"dataset"`, an instance of its dataclass with the user's values.
        num_agents (`int`): Number of agents.
        run_folder (`Path`): Folder of the run. It may not exist yet.
    """

    sections: dict[str, Any]
    num_agents: int
    run_folder: Path

    @property
    def dataset(self) -> DatasetSource:
        return self.sections["dataset"]


@dataclass(frozen=True)
class Task:
    """
    A task family, as a script hands it to [`~trl_multiagent.recipe.run.run_recipe`].

    Args:
        make_environment (`Callable[[TaskSettings], Environment]`):
            Makes the environment, before any data or model is loaded.
        load_datasets (`Callable[[TaskSettings], tuple[Dataset, Dataset | None]]`):
            Loads the training set and, if there is one, the evaluation set. If it raises a `ConnectionError`, `--dry_run`
            still prints a plan.
        settings (`dict[str, type]`, *optional*):
            The dataclass of each of the family's own sections, by the section's name. Every field is a [`setting`]. A
            `__post_init__` may raise a `ValueError`, whose message the user gets as it is. The section `dataset` is a
            [`DatasetSource`] unless the family has its own.
        models (`dict[str, Callable[[], str]]`, *optional*):
            Base models that the task can build, by the name to give as `agent_model.name`: a function that returns the
            model's folder.
        introduction (`Callable[[TaskSettings], str | None]`, *optional*):
            A text to print before anything is loaded.
        callbacks (`Callable[[TaskSettings, Trainer], list[TrainerCallback]]`, *optional*):
            Callbacks to add to the trainer.

    Example:

    ```python
    >>> from trl_multiagent import FunctionEnvironment

    >>> def make_environment(settings):
    ...     prompts = {"poet": "Write a line about {topic}.", "critic": "Name a word for {topic}."}
    ...     return FunctionEnvironment(prompts, lambda completions, **columns: [float(len(c)) for c in completions])

    >>> def load_datasets(settings):
    ...     from datasets import Dataset
    ...
    ...     return Dataset.from_dict({"topic": ["rain", "snow"]}), None

    >>> TASK = Task(make_environment, load_datasets)

    ```
    """

    make_environment: Callable[[TaskSettings], Environment]
    load_datasets: Callable[[TaskSettings], tuple[Dataset, Dataset | None]]
    settings: dict[str, type] = dataclasses.field(default_factory=dict)
    models: dict[str, Callable[[], str]] = dataclasses.field(default_factory=dict)
    introduction: Callable[[TaskSettings], str | None] | None = None
    callbacks: Callable[[TaskSettings, Trainer], list[TrainerCallback]] | None = None
