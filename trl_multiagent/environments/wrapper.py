"""Base class of environments that change a part of another environment."""

from collections.abc import Mapping, Sequence
from typing import Any

from trl_multiagent.environments.base import (
    Environment,
    History,
    JointAction,
    Outcome,
    Prompt,
    judge,
    resume_settings,
)


class EnvironmentWrapper(Environment):
    """An environment around a task. It delegates everything to the task; a subclass overrides what it changes."""

    def __init__(self, task: Environment):
        self.task = task
        self.roles = task.roles

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.task!r})"

    @property
    def unwrapped(self) -> Environment:
        return self.task.unwrapped

    def answers(self, joint_action: JointAction) -> JointAction:
        return self.task.answers(joint_action)

    def show_answers(self, role: str, prompt: Prompt, answers: Mapping[str, str]) -> Prompt:
        return self.task.show_answers(role, prompt, answers)

    def prompts(self, item: dict, history: History) -> dict[str, Prompt]:
        return self.next_prompts([item], [history])[0]

    def next_prompts(self, items: list[dict], histories: list[History]) -> list[dict[str, Prompt]]:
        return self.task.next_prompts(items, histories)

    def check_turns(self, num_turns: int) -> None:
        self.task.check_turns(num_turns)

    def prepare(self, num_turns: int) -> None:
        self.task.prepare(num_turns)

    def plan(self, items: Sequence[dict], num_later_prompts: int, answer_tokens: int) -> dict[str, str]:
        return self.task.plan(items, num_later_prompts, answer_tokens)

    def score(self, items: list[dict], joint_actions: list[JointAction], histories: list[History]) -> list[Outcome]:
        return self.judge(items, joint_actions, histories, evaluation=False)

    def evaluate(self, items: list[dict], joint_actions: list[JointAction], histories: list[History]) -> list[Outcome]:
        return self.judge(items, joint_actions, histories, evaluation=True)

    def judge(
        self, items: list[dict], joint_actions: list[JointAction], histories: list[History], evaluation: bool
    ) -> list[Outcome]:
        """Scores joint actions, in training or in an evaluation."""
        return judge(self.task, items, joint_actions, histories, evaluation)

    def metrics(self) -> dict[str, float]:
        return self.task.metrics()

    def state_dict(self) -> dict[str, Any]:
        return self.task.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.task.load_state_dict(state)

    def resume_settings(self) -> dict[str, Any]:
        return resume_settings(self.task)
