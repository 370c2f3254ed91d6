"""An environment in which agents do not read each other's answers. It shows whether a team uses its messages."""

import hashlib
import json
from dataclasses import replace
from typing import Any

from trl_multiagent.environments.base import Environment, EnvironmentWrapper, History, Prompt, ask
from trl_multiagent.environments.task_errors import TaskError


CUT, SHUFFLED = "cut", "shuffled"


class MessageAblation(EnvironmentWrapper):
    """
    An environment that replaces the answers of an agent's partners before it makes the agent's prompt. The agent's own
    answers, all scores and the outcomes of past turns stay. It has no effect around a
    [`~rollout.seats.SeatedEnvironment`]: wrap the task inside instead.

    Args:
        task ([`Environment`]): The task.
        how (`str`): The replacement: `"cut"` for empty answers, `"shuffled"` for the answers to another item that is
            played at the same time, always the same one.
    """

    def __init__(self, task: Environment, how: str):
        super().__init__(task)
        self.how = how

    def resume_settings(self) -> dict[str, Any]:
        return {**super().resume_settings(), "messages": self.how}

    def next_prompts(self, items: list[dict], histories: list[History]) -> list[dict[str, Prompt]]:
        if not any(histories):
            return ask(self.task, items, histories)
        sources = [histories[k] for k in partners_of(items)] if self.how == SHUFFLED else [()] * len(items)
        prompts: list[dict[str, Prompt]] = [{} for _ in items]
        for role in self.roles:
            read = [with_answers_of(*pair, role) for pair in zip(histories, sources, strict=True)]
            for item_prompts, asked in zip(prompts, ask(self.task, items, read), strict=True):
                if role in asked:
                    item_prompts[role] = asked[role]
        return prompts


def with_answers_of(history: History, source: History, role: str) -> History:
    """
    Returns the history that an agent reads. It has the other agents' answers from the history `source`, or empty ones
    without it.
    """
    turns = []
    for number, turn in enumerate(history):
        answers = source[number].joint_action if source else {}
        read = {name: text if name == role else answers.get(name, "") for name, text in turn.joint_action.items()}
        turns.append(replace(turn, joint_action=read))
    return turns


def partners_of(items: list[dict]) -> list[int]:
    """
    Returns, for each branch, the position of a branch of another item. The pairs of items depend on the items alone.
    Raises [`TaskError`] if there is only one item.
    """
    branches: dict[str, list[int]] = {}
    for position, item in enumerate(items):
        branches.setdefault(json.dumps(item, sort_keys=True, default=str), []).append(position)
    if len(branches) < 2:
        raise TaskError("Messages can only be exchanged between different items: play at least two of them at a time.")
    # The hash is cryptographic, because items with neighbouring checksums are alike
    order = sorted(branches, key=lambda key: hashlib.sha256(key.encode()).digest())
    partners = [0] * len(items)
    for key, following in zip(order, [*order[1:], order[0]], strict=True):
        for number, position in enumerate(branches[key]):
            partners[position] = branches[following][number % len(branches[following])]
    return partners
