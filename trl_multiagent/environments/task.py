"""`Task`: the settings, the environment and the datasets of a task family."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from trl_multiagent.environments.base import Environment
from trl_multiagent.environments.centralized import CentralizedEnvironment
from trl_multiagent.environments.dataset_rows import Dataset, Datasets
from trl_multiagent.limits import setting


if TYPE_CHECKING:
    from transformers import Trainer, TrainerCallback


@dataclass
class DatasetSource:
    """
    The section `dataset`. A family with more settings for its data defines a subclass. `generated`: names of data that
    is made here or comes with the package.
    """

    generated: ClassVar[tuple[str, ...]] = ()
    name: str | None = setting("Source of the data, such as a Hub id or the path of a file.")
    train_split: str | None = setting("Rows to train on, such as 'test[33:163]'.")
    eval_split: str | None = setting("Rows to evaluate on; without it there is no evaluation.")
    size: int | None = setting("Use the first n of the rows to train on.", ge=1)
    eval_size: int | None = setting("Use the first n of the rows to evaluate on.", ge=1)

    def load_splits(self, load: Callable[[str | None], Dataset]) -> Datasets:
        """Calls `load` with the split to train on and, if there is one, with the split to evaluate on."""
        return load(self.train_split), None if self.eval_split is None else load(self.eval_split)

    @property
    def may_be_hub_id(self) -> bool:
        """Whether `name` may be an id on the Hub. If so, the model card links to it."""
        return self.name not in self.generated


class Sections(UserDict[str, Any]):
    """The sections of a task's settings by name, which remember what the task asked for."""

    def __init__(self, sections: Mapping[str, Any]):
        super().__init__(sections)
        self.asked: set[str] = set()

    def __getitem__(self, name: str) -> Any:
        self.asked.add(name)
        return super().__getitem__(name)


@dataclass(frozen=True)
class TaskSettings:
    """
    The settings of a run that are passed to its task.

    Args:
        sections (`Mapping[str, Any]`): The sections in [`Task`]`.settings` and the section `dataset`, each as an
            instance of its dataclass with the user's values.
        num_agents (`int`): Number of agents.
        run_folder (`Path`): Folder of the run. It does not have to exist yet.
        is_centralized (`bool`, *optional*, defaults to `False`): Whether one agent answers for all roles.
    """

    sections: Mapping[str, Any]
    num_agents: int
    run_folder: Path
    is_centralized: bool = False

    @property
    def dataset(self) -> DatasetSource:
        return self.sections["dataset"]


@dataclass(frozen=True)
class ModelBuilder:
    """
    A function that builds a base model for the settings of a run and returns its folder, as a value of
    [`Task`]`.models`.
    """

    build: Callable[[TaskSettings], str]


def load_datasets(settings: TaskSettings) -> Datasets:
    """Loads the training set and, if there is an `eval_split`, the evaluation set, with `load` of the section."""
    rows = settings.sections["dataset"]
    return rows.load_splits(rows.load)


@dataclass(frozen=True)
class Task:
    """
    A task family. A recipe script passes it to [`~trl_multiagent.runs.run.run_recipe`].

    Args:
        make_environment (`Callable[[TaskSettings], Environment]`): Builds the environment, before any data or model is
            loaded.
        load_datasets (`Callable[[TaskSettings], tuple[Dataset, Dataset | None]]`): Loads the training set and, if
            there is one, the evaluation set. If it raises a `ConnectionError`, `--dry_run` still prints a plan.
        settings (`dict[str, type]`, *optional*): The dataclasses of the family's own sections, by the section's name.
            Every field is a [`~limits.setting`]. If `__post_init__` raises a `ValueError`, the run ends and the
            message is shown unchanged. The section `dataset` is a [`DatasetSource`] by default.
        models (`dict[str, Callable[[], str] | ModelBuilder]`, *optional*): Functions that build a base model and
            return its folder. The user selects one with its name as `agent_model.name`. A [`ModelBuilder`] gets the
            settings of the run. Several processes may call it at once: [`~folders.build_once`] lets one of them build.
        introduction (`Callable[[TaskSettings], str | None]`, *optional*): Returns a text to print before anything is
            loaded, or `None`.
        callbacks (`Callable[[TaskSettings, Trainer], list[TrainerCallback]]`, *optional*): Returns the callbacks to
            add to the trainer.
        roles (`list[str]` or `Callable[[dict[str, Any]], list[str]]`, *optional*): The agents' roles, or a function
            from the sections to the roles. If it is given, `num_agents` is their number by default; otherwise it is 2.

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
    load_datasets: Callable[[TaskSettings], Datasets]
    settings: dict[str, type] = field(default_factory=dict)
    models: dict[str, Callable[[], str] | ModelBuilder] = field(default_factory=dict)
    introduction: Callable[[TaskSettings], str | None] | None = None
    callbacks: Callable[[TaskSettings, Trainer], list[TrainerCallback]] | None = None
    roles: Sequence[str] | Callable[[dict[str, Any]], Sequence[str]] | None = None

    def environment(self, settings: TaskSettings) -> Environment:
        """
        Builds the environment of a run with `make_environment`, and wraps it if a single agent answers for all roles.
        """
        environment = self.make_environment(settings)
        if isinstance(environment, Environment):  # another type is refused later
            environment.unwrapped.task_settings = {
                name: asdict(settings.sections[name]) for name in self.settings if name != "dataset"
            }
        return CentralizedEnvironment(environment) if settings.is_centralized else environment

    def datasets(self, settings: TaskSettings) -> Datasets:
        """
        Loads the data of a run with `load_datasets`. Raises `ValueError` if the user names data or a split, but the
        task does not look at the section `dataset`.
        """
        sections = Sections(settings.sections)
        loaded = self.load_datasets(replace(settings, sections=sections))
        for name in ("name", "eval_split", "train_split") if "dataset" not in sections.asked else ():
            if (value := getattr(settings.dataset, name)) is not None:
                raise ValueError(
                    f"`dataset.{name}` is {value!r}, but the task's `load_datasets` does not read it: remove it."
                )
        if not isinstance(loaded, tuple | list) or len(loaded) != 2:  # one dataset
            raise TypeError(
                "`load_datasets` must return two datasets, to train and to evaluate on; the latter may be None."
            )
        return loaded
