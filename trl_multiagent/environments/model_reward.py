"""An environment whose reward in training comes from a model, while evaluation keeps the reward of the task."""

import math
from collections.abc import Callable, Sequence
from statistics import StatisticsError, correlation
from typing import Any

from trl_multiagent.environments.base import (
    Environment,
    EnvironmentWrapper,
    History,
    JointAction,
    Outcome,
    Prompt,
    ask,
    check_all_act,
    judge,
    resume_settings,
    scoring_context,
)


MODEL, TASK, CORRELATION = "rewards/model", "rewards/task", "rewards/correlation"


class ModelRewardEnvironment(EnvironmentWrapper):
    """
    A task whose reward in training comes from a model. Prompts and evaluation are those of the task.

    The metrics show both rewards, `rewards/model` and `rewards/task`, and their correlation over a batch,
    `rewards/correlation`.

    Args:
        task ([`Environment`]): The task.
        reward (`Callable`): Reward function for the answers of all roles, such as a [`JointRewardModel`].
        score_task (`bool`, *optional*, defaults to `True`): Whether the task's reward is computed in training, too. It
            is only logged.
        version (`str`, *optional*): Name of the reward model in checkpoints. A run with another reward model cannot
            resume them.
    """

    def __init__(
        self,
        task: Environment,
        reward: Callable[..., list[float]],
        score_task: bool = True,
        version: str = "",
    ):
        super().__init__(task)
        self.reward, self.score_task, self.version = reward, score_task, version

    def __repr__(self) -> str:
        return f"ModelRewardEnvironment({self.task!r}, version={self.version!r})"

    def next_prompts(self, items: list[dict], histories: list[History]) -> list[dict[str, Prompt]]:
        prompts = ask(self.task, items, histories)
        for by_role in filter(None, prompts):
            check_all_act("A joint reward model", by_role, self.roles)
        return prompts

    def score(self, items: list[dict], joint_actions: list[JointAction], histories: list[History]) -> list[Outcome]:
        scores = self._scores(items, joint_actions, histories)
        if not self.score_task:
            return [Outcome(score, {MODEL: score}) for score in scores]
        outcomes = judge(self.task, items, joint_actions, histories)
        rewards = [outcome.reward for outcome in outcomes]
        r = pearson(scores, rewards)
        if r is not None:
            scoring_context().metrics.setdefault(CORRELATION, []).append(r)
        for outcome, score in zip(outcomes, scores, strict=True):
            outcome.metrics |= {MODEL: score, TASK: outcome.reward}
            outcome.reward, outcome.role_rewards = score, {}
        return outcomes

    def evaluate(self, items: list[dict], joint_actions: list[JointAction], histories: list[History]) -> list[Outcome]:
        """Scores joint actions with the reward of the task. The model's is a metric."""
        outcomes = judge(self.task, items, joint_actions, histories, evaluation=True)
        for outcome, score in zip(outcomes, self._scores(items, joint_actions, histories), strict=True):
            outcome.metrics |= {MODEL: score, TASK: outcome.reward}
        return outcomes

    def resume_settings(self) -> dict[str, Any]:
        return {**resume_settings(self.task), "reward_model": self.version}

    def _scores(self, items: list[dict], joint_actions: list[JointAction], histories: list[History]) -> list[float]:
        if not items:
            return []
        prompts = scoring_context().prompts
        if prompts is None or len(prompts) != len(items):  # the environment was called directly
            prompts = self.task.next_prompts(items, histories)
        return self.reward(prompts=prompts, completions=joint_actions)


def pearson(one: Sequence[float], other: Sequence[float]) -> float | None:
    """Computes Pearson's correlation; `None` if one of the two is constant."""
    try:
        r = correlation(one, other)
    except StatisticsError:
        return None
    return r if math.isfinite(r) else None
