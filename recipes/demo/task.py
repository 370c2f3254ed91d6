"""The task of the demo: code generation with the demo's problems, prompts, base model and report."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from trl_multiagent.configs.recipes.demo.model import ONE_TURN, TWO_TURNS
from trl_multiagent.configs.recipes.demo.problems import demo_dataset, demo_prompts
from trl_multiagent.environments.base import Environment
from trl_multiagent.environments.dataset_rows import LOCAL_FILE, SHORT_NAMES, Datasets
from trl_multiagent.environments.task import Task, TaskSettings, setting
from trl_multiagent.tasks.code_generation import data as code_generation


if TYPE_CHECKING:
    from transformers import Trainer, TrainerCallback


NAME = "demo"
INTRODUCTION = """
Two agents learn to write code together
=======================================
Each problem asks for one small Python function. The agent "aux" writes a helper, the agent "main"
the function itself, which may call the helper; neither sees what the other writes. Both start as
copies of one tiny language model that was trained on careless demonstrations of two kinds:

  A  aux keeps some elements, main maps and reduces them
  B  aux keeps and maps them, main only reduces

A mixed pair fails. All they learn from is one joint reward between 0 and 4: how many tests their
code passes together, and whether both do a part of the work. Training takes one to two minutes on
two free cores.
"""


@dataclasses.dataclass
class DemoDataset(code_generation.CodeDataset):
    """The section `dataset`, in which the name `demo` selects the demo's problems."""

    generated = (*SHORT_NAMES, NAME)
    name: str | None = setting(f"Hub id, path of a {LOCAL_FILE}, or '{NAME}'.")

    def __post_init__(self) -> None:
        super().__post_init__()
        types = (*code_generation.DATASET_TYPES, NAME)
        if self.type is not None and self.type not in types:
            raise ValueError(f"`dataset.type` is {self.type!r}; it must be one of {', '.join(map(repr, types))}.")
        if self.type == NAME and self.name != NAME:
            raise ValueError(
                f"`dataset.type` is '{NAME}', which has its own problems, but `dataset.name` is {self.name!r}: set it "
                f"to '{NAME}', or choose another type."
            )


def is_demo_run(settings: TaskSettings) -> bool:
    """Returns whether the run uses the demo's problems and prompts, and two agents."""
    has_prompts = bool(settings.sections["prompt_files"].given())
    return settings.dataset.name == NAME and settings.num_agents == 2 and not has_prompts


def make_environment(settings: TaskSettings) -> Environment:
    is_demo = settings.dataset.name == NAME
    # A few of the demo's items have tests that trivial answers pass. Its user cannot change them, so no warning is
    # needed
    return code_generation.make_environment(settings, demo_prompts if is_demo else None, warn_about_items=not is_demo)


def load_datasets(settings: TaskSettings) -> Datasets:
    if settings.dataset.name != NAME:
        return code_generation.load_datasets(settings)
    return settings.dataset.load_splits(lambda split: demo_dataset(split or "train"))


def introduction(settings: TaskSettings) -> str | None:
    return INTRODUCTION if is_demo_run(settings) else None


def callbacks(settings: TaskSettings, trainer: Trainer) -> list[TrainerCallback]:
    if not is_demo_run(settings):
        return []
    from trl_multiagent.configs.recipes.demo.report import DemoReport  # imports the trainers

    report = DemoReport(demo_dataset("test"))
    report.before(trainer)  # must come before the trainer draws random numbers
    return [report]


# Code generation in which the name `demo` selects the demo's problems and base model, and `demo_two_turns` a base
# model for two turns
TASK = Task(
    make_environment,
    load_datasets,
    settings={**code_generation.TASK.settings, "dataset": DemoDataset},
    models={NAME: ONE_TURN.path, "demo_two_turns": TWO_TURNS.path},
    introduction=introduction,
    callbacks=callbacks,
)
