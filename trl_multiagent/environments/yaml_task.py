"""
The task `functions`: prompt templates and reward functions that a YAML file names. Only the rewards are Python.

    prompts:
      poet: "Write a line about {topic}:"
      critic: "Name a word for {topic}:"
    reward_funcs: [rewards.shared_words]
    dataset:
      name: topics.jsonl
"""

from dataclasses import dataclass

from trl_multiagent.environments import task
from trl_multiagent.environments.base import Environment, as_messages, ask, check_prompt
from trl_multiagent.environments.dataset_rows import (
    LOCAL_FILE,
    LOCAL_SUFFIXES,
    Dataset,
    Datasets,
    check_columns,
    check_name,
    load_file,
    load_from_hub,
)
from trl_multiagent.environments.function_environment import FunctionEnvironment, fields_of
from trl_multiagent.environments.imports import import_function
from trl_multiagent.environments.task import DatasetSource, Task, TaskSettings, setting
from trl_multiagent.environments.task_errors import TaskError


@dataclass
class Rows(DatasetSource):
    """The section `dataset`."""

    name: str | None = setting(f"Hub id, or path of a {LOCAL_FILE}.")
    config: str | None = setting("Configuration of a dataset on the Hub.")

    def __post_init__(self) -> None:
        if self.name is None or not self.name.strip("./"):  # `.` and `..` are no folders of data
            raise ValueError(f"`dataset.name` is {self.name or 'missing'}; give a Hub id or a path of a {LOCAL_FILE}.")
        check_name(self.name)

    def load(self, split: str | None) -> Dataset:
        """
        Loads the rows of a split, such as `"train[:100]"`. A local file has one split, with any name. Raises
        `ConnectionError` if the Hub cannot be reached, and `ValueError` if the file or the split is malformed, or
        there are no rows.
        """
        name = str(self.name)
        if name.endswith(LOCAL_SUFFIXES):
            rows = load_file(name, split)
        else:
            split = "train" if split is None else f"train{split}" if split.startswith("[") else split
            rows = load_from_hub(name, self.config, split)
        if len(rows) == 0:
            raise ValueError(f"{name} has no rows.")
        return rows


@dataclass
class Functions:
    """The section `functions`. Its settings may also be at the top level of the file."""

    prompts: dict[str, str | list[dict[str, str]]] = setting(
        "The first prompt of each role: a text, or a list of messages, with {column} for the value of a column."
    )
    reward_funcs: list[str] = setting("Reward functions, as package.module.function.")
    reward_weights: list[float] | None = setting("Weight of each, 1 by default.")
    order: list[list[str]] | None = setting(
        "The roles that act at each turn, such as [[writer], [editor]]; {writer} in a prompt is then its last answer."
    )
    transition: str | None = setting("Function that makes the prompts of later turns, as package.module.function.")

    def __post_init__(self) -> None:
        if not self.prompts:
            raise ValueError("`functions.prompts` is missing: a template for each role, such as {poet: 'Write ...'}.")
        for role, template in self.prompts.items():
            check_prompt(f"`functions.prompts.{role}`", template)
        if not self.reward_funcs:
            raise ValueError("`functions.reward_funcs` is missing: one or more functions, such as [my.rewards.f].")
        self.make_environment()

    def make_environment(self) -> FunctionEnvironment:
        """Imports the functions and makes the environment. Raises `ValueError` if a function cannot be used."""
        functions = [import_function("functions.reward_funcs", path) for path in self.reward_funcs]
        transition = None if self.transition is None else import_function("functions.transition", self.transition)
        try:
            return FunctionEnvironment(self.prompts, functions, self.reward_weights, transition, order=self.order)
        except TypeError as error:  # a class, or a function that cannot be called as a reward function
            raise ValueError(f"`functions.reward_funcs`: {error}") from error

    @property
    def columns(self) -> list[str]:
        """The columns that the templates name."""
        messages = [message for prompt in self.prompts.values() for message in as_messages(prompt)]
        names = dict.fromkeys(name for message in messages for name in fields_of(message["content"]))
        return [name for name in names if self.order is None or name not in self.prompts]


def make_environment(settings: TaskSettings) -> FunctionEnvironment:
    return settings.sections["functions"].make_environment()


def load_datasets(settings: TaskSettings) -> Datasets:
    """
    Loads the training set and, with `dataset.eval_split`, the evaluation set, see [`Rows.load`]. Raises `ValueError`
    if a template needs a column that the rows do not have.
    """
    rows, columns = settings.sections["dataset"], settings.sections["functions"].columns
    datasets = rows.load_splits(rows.load)
    try:
        ask(make_environment(settings), [datasets[0][0]], [[]])
    except TaskError as error:  # templates are settings, not code
        raise ValueError(str(error)) from error
    for dataset, split in zip(datasets, (rows.train_split, rows.eval_split), strict=True):
        if dataset is not None:
            check_columns(dataset, columns, f"{rows.name}, split {split or 'whole'}")
    return datasets


TASK = Task(
    make_environment,
    load_datasets,
    settings={"dataset": Rows, "functions": Functions},
    roles=lambda sections: tuple(sections["functions"].prompts),
)


def task_of(environment: Environment) -> Task:
    """Makes a task of an environment, such as a workflow. Its items come from the section `dataset`."""
    return Task(lambda settings: environment, task.load_datasets, settings={"dataset": Rows}, roles=environment.roles)
