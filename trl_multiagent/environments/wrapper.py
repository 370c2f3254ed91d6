"""Environments that change another one."""

from typing import Any

from trl_multiagent.environments.base import (
    Environment,
    History,
    JointAction,
    Outcome,
    Prompts,
    ask,
    judge,
    prompts_of_one,
    resume_settings,
)


def of_task(name: str) -> Any:
    """Returns a method that calls the task's method of this name."""

    def method(self: "EnvironmentWrapper", *args: Any, **kwargs: Any) -> Any:
        return getattr(self.task, name)(*args, **kwargs)

    return method


class EnvironmentWrapper(Environment):
    """
    Base class of environments that change a part of another one. It delegates everything to its task; a subclass
    overrides what it changes.
    """

    def __init__(self, task: Environment):
        self.task = task
        self.roles = task.roles

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.task!r})"

    @property
    def unwrapped(self) -> Environment:
        return self.task.unwrapped

    show_answers = of_task("show_answers")
    check_turns = of_task("check_turns")
    playing = of_task("playing")
    group_rewards = of_task("group_rewards")
    prepare = of_task("prepare")
    plan = of_task("plan")
    metrics = of_task("metrics")
    state_dict = of_task("state_dict")
    load_state_dict = of_task("load_state_dict")

    prompts = prompts_of_one

    def next_prompts(self, items: list[dict], histories: list[History]) -> list[Prompts]:
        return ask(self.task, items, histories)

    def score(self, items: list[dict], joint_actions: list[JointAction], histories: list[History]) -> list[Outcome]:
        return self.judge(items, joint_actions, histories, evaluation=False)

    def evaluate(self, items: list[dict], joint_actions: list[JointAction], histories: list[History]) -> list[Outcome]:
        return self.judge(items, joint_actions, histories, evaluation=True)

    def judge(
        self, items: list[dict], joint_actions: list[JointAction], histories: list[History], evaluation: bool
    ) -> list[Outcome]:
        """Scores joint actions, in training or in an evaluation."""
        return judge(self.task, items, joint_actions, histories, evaluation)

    def resume_settings(self) -> dict[str, Any]:
        return resume_settings(self.task)
