"""The context in which an environment scores a batch of joint actions."""

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING


if TYPE_CHECKING:
    from transformers import TrainerState

    from trl_multiagent.environments.base import Prompt


@dataclass
class ScoringContext:
    """
    Facts about the joint actions that an environment scores, in addition to the arguments of `Environment.score`.
    """

    prompts: "list[dict[str, Prompt]] | None" = None  # of each joint action
    completion_ids: list[dict[str, list[int]]] | None = None  # of each joint action, by role
    chat_roles: frozenset[str] = frozenset()  # the roles whose prompts are chat messages
    trainer_state: "TrainerState | None" = None  # `None` without a trainer
    reward_none: str = "error"  # with "drop", NaN is the reward of a joint action that nothing scores
    metrics: dict[str, list[float]] = field(default_factory=dict)  # numbers to log, to which the environment adds


_CONTEXT: ContextVar[ScoringContext | None] = ContextVar("scoring_context", default=None)


def scoring_context() -> ScoringContext:
    """Returns the context of the current batch; an empty one if the environment was called directly."""
    return _CONTEXT.get() or ScoringContext()


@contextlib.contextmanager
def scoring(context: ScoringContext) -> Iterator[None]:
    """Makes [`scoring_context`] return `context` within the block."""
    token = _CONTEXT.set(context)
    try:
        yield
    finally:
        _CONTEXT.reset(token)
