"""Environments in which the agents do not read what the others wrote, to find out whether a team uses its messages."""

import hashlib
import json
from dataclasses import replace
from typing import Any

from trl_multiagent.environments.base import Environment, History, Prompt, ask
from trl_multiagent.environments.task_errors import TaskError
from trl_multiagent.environments.wrapper import EnvironmentWrapper


CUT, SHUFFLED = "cut", "shuffled"


class MessageAblation(EnvironmentWrapper):
    """
    An environment whose prompts are made from other answers of the partners than theirs. An agent's own answers stay, and so do all scores and what the
    outcomes of past turns say. It has no effect around a [`~rollout.seats.SeatedEnvironment`]: give that an ablated task.

    Args:
        task ([`Environment`]): The task.
        how (`str`): `"cut"`: the answers of others are empty. `"shuffled"`: they are those to another item that is played at the same time, always
            the same one.
    """

    def __init__(self, task: Environment, how: str):
        super().__init__(task)
        self.how = how

    def resume_settings(self) -> dict[str, Any]:
        return {**super().resume_settings(), "messages": self.how}

    def next_prompts(self, items: list[dict], histories: list[History]) -> list[dict[str, Prompt]]:
        if not any(histories):
            return ask(self.task, items, histories)
        others = [histories[k] for k in partners_of(items)] if self.how == SHUFFLED else [()] * len(items)
        prompts: list[dict[str, Prompt]] = [{} for _ in items]
        for role in self.roles:
            read = [with_answers_of(*x, role) for x in zip(histories, others, strict=True)]
            for of_item, asked in zip(prompts, ask(self.task, items, read), strict=True):
                of_item |= {role: asked[role]} if role in asked else {}
        return prompts


def with_answers_of(history: History, partner: History, role: str) -> History:
    """Returns the history that an agent reads: the answers of others are those in the history of its partner, or empty."""
    turns = []
    for number, turn in enumerate(history):
        others = partner[number].joint_action if partner else {}
        answers = {each: text if each == role else others.get(each, "") for each, text in turn.joint_action.items()}
        turns.append(replace(turn, joint_action=answers))
    return turns


def partners_of(items: list[dict]) -> list[int]:
    """
    Returns for each branch that of another item. The order in which the items follow each other depends on them alone. Raises [`TaskError`] if
    there is one item only.
    """
    branches: dict[str, list[int]] = {}
    for position, item in enumerate(items):
        branches.setdefault(json.dumps(item, sort_keys=True, default=str), []).append(position)
    if len(branches) < 2:
        raise TaskError("Messages can only be exchanged between different items: play at least two of them at a time.")
    # By a cryptographic hash: sorted by a checksum, neighbours would be alike
    order = sorted(branches, key=lambda key: hashlib.sha256(key.encode()).digest())
    partners = [0] * len(items)
    for key, following in zip(order, [*order[1:], order[0]], strict=True):
        for number, position in enumerate(branches[key]):
            partners[position] = branches[following][number % len(branches[following])]
    return partners
