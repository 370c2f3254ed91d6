"""One model that answers for all roles of a task: its prompt, and the division of its answer among the roles."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from trl_multiagent.environments.base import (
    Environment,
    History,
    JointAction,
    Outcome,
    Prompt,
    Prompts,
    Turn,
    ask,
    check_all_act,
    judge,
    scoring,
    scoring_context,
)
from trl_multiagent.environments.task_errors import TaskError
from trl_multiagent.environments.wrapper import EnvironmentWrapper
from trl_multiagent.models.joint_text import plain


CENTRAL_ROLE = "team"  # the role of the agent that answers for all roles
MISSING, DOUBLED = "missing_blocks", "doubled_blocks"


@dataclass
class Blocks:
    """
    An answer for all roles, split by role. Roles without a block (`missing`) or with several (`doubled`) have an empty
    answer.
    """

    answers: dict[str, str]
    missing: list[str]
    doubled: list[str]


def central_prompt(roles: Sequence[str], prompts: Mapping[str, Prompt]) -> str:
    """
    Writes the prompt of a model that answers for all roles, from the prompt of each role. It uses only the contents of
    chat messages.
    """
    check_all_act("One model for all roles", prompts, roles)
    texts = [f"<assignment of {role}>\n{plain(prompts[role]).strip()}\n</assignment of {role}>\n\n" for role in roles]
    tags = "\n".join(f"<{role}>\nanswer of {role}\n</{role}>" for role in roles)
    return (
        f"You answer for the roles {', '.join(roles)}, who solve one task together.\n\n{''.join(texts)}"
        f"Write the answers of all roles, each in its tags and with nothing else:\n{tags}\n\n"
    )


def split_blocks(text: str, roles: Sequence[str]) -> Blocks:
    """
    Divides an answer for all roles. Text outside of the blocks is dropped.

    A block begins with `<role>` and ends with `</role>`. A block without an end tag ends at the next block, or at the
    end of the text. The line breaks after the first tag and before the last one are removed.
    """
    start = re.compile(f"<({'|'.join(map(re.escape, roles))})>")
    ends = {role: text.rfind(f"</{role}>") for role in roles}  # the last end tag of each role
    found: dict[str, list[str]] = {role: [] for role in roles}
    tag = start.search(text)
    while tag:
        role, begin = tag[1], tag.end()
        last = text.index(f"</{role}>", begin) if begin <= ends[role] else None
        tag = start.search(text, begin if last is None else last)
        if last is None:
            last = tag.start() if tag else len(text)
        found[role].append(text[begin:last].removeprefix("\n").removesuffix("\n"))
    return Blocks(
        answers={role: blocks[0] if len(blocks) == 1 else "" for role, blocks in found.items()},
        missing=[role for role, blocks in found.items() if not blocks],
        doubled=[role for role, blocks in found.items() if len(blocks) > 1],
    )


class CentralizedEnvironment(EnvironmentWrapper):
    """
    A task of several roles as a task of one agent, which answers for all of them in tagged blocks, see
    [`central_prompt`] and [`split_blocks`]. The joint reward is the task's. As a control, it shows the gain of a team
    over one model that has all roles.

    Episodes have one turn. The metrics `missing_blocks` and `doubled_blocks` are the numbers of roles with no block
    and with several. Raises `ValueError` if the task has one role.
    """

    def __init__(self, task: Environment):
        if len(task.roles) < 2:
            raise ValueError(
                f"The task has a single role, {task.roles[0]!r}, so one agent answers for all roles anyway."
            )
        super().__init__(task)
        self.roles = (CENTRAL_ROLE,)

    def next_prompts(self, items: list[dict], histories: list[History]) -> list[Prompts]:
        if any(histories):
            raise TaskError("A model that answers for all roles plays one turn.")
        roles = self.task.roles
        return [{CENTRAL_ROLE: central_prompt(roles, prompts)} for prompts in ask(self.task, items, histories)]

    def check_turns(self, num_turns: int | None, are_episodes: bool = True) -> int:
        if (num_turns or 1) > 1:
            raise ValueError(f"`num_turns` is {num_turns}, but a model that answers for all roles plays one turn.")
        return self.task.check_turns(1, are_episodes)

    def judge(
        self, items: list[dict], joint_actions: list[JointAction], histories: list[History], evaluation: bool
    ) -> list[Outcome]:
        roles, context = self.task.roles, scoring_context()
        blocks = [split_blocks(joint_action[CENTRAL_ROLE], roles) for joint_action in joint_actions]
        # The token ids belong to the whole answer, not to the answers of roles, so the task gets none
        task_context = replace(
            context,
            prompts=ask(self.task, items, histories),
            completion_ids=None,
            chat_roles=frozenset(roles if context.chat_roles else ()),
        )
        with scoring(task_context):
            outcomes = judge(self.task, items, [split.answers for split in blocks], histories, evaluation)
        for outcome, split in zip(outcomes, blocks, strict=True):
            outcome.metrics |= {MISSING: float(len(split.missing)), DOUBLED: float(len(split.doubled))}
            outcome.extra |= {f"answer/{role}": text for role, text in split.answers.items()}
        return outcomes

    def group_rewards(self, item: dict, histories: list[History]) -> Sequence[float] | None:
        roles = self.task.roles

        def of_roles(turn: Turn) -> Turn:
            answers = split_blocks(turn.joint_action[CENTRAL_ROLE], roles).answers
            return replace(turn, prompts=dict.fromkeys(roles, turn.prompts[CENTRAL_ROLE]), joint_action=answers)

        return self.task.group_rewards(item, [[of_roles(turn) for turn in history] for history in histories])

    def resume_settings(self) -> dict[str, Any]:
        return {**super().resume_settings(), "task": type(self.task).__name__}
