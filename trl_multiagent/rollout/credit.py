"""
Counterfactual rewards: the rewards of joint actions in which one agent's answer is replaced.

With these rewards, the return of agent i for the joint action a is

    R(a) - r(a with a_i replaced)

where R is the joint return and r the reward of this turn. The second term does not depend on a_i, so subtracting it
does not change the expected gradient. It removes the reward that the others earn without agent i, as the difference
rewards of [Wolpert and Tumer](https://doi.org/10.1142/S0219525901000188) do. If a sibling's answer replaces a_i, then
a_i replaces the answer of another sibling, which is in the baseline: this turn's part of the expected update is G / (G
- 1) times as large, but has the same direction.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from trl_multiagent.environments.base import Environment
from trl_multiagent.environments.task_errors import TaskError
from trl_multiagent.rollout.tree import Node, Samples, judge_nodes


def add_counterfactuals(
    nodes: Sequence[Node],
    environment: Environment,
    roles: Sequence[str],
    replacement: str,
    process_reward: Callable[[float], float],
    **context: Any,
) -> None:
    """
    Stores the counterfactual rewards of some roles in `node.counterfactuals`, one per joint action.

    Args:
        nodes (`Sequence[Node]`): Nodes of a turn. Their joint actions are scored.
        environment ([`Environment`]): Scores the changed joint actions in one call, each of them once.
        roles (`Sequence[str]`): The roles that get counterfactual rewards, at the nodes where they act.
        replacement (`str`): `"nothing"` replaces an answer by an empty text, `"sibling"` by the agent's next
            completion at the node.
        process_reward (`Callable[[float], float]`): Applied to each reward.
        context: See [`~rollout.tree.judge_nodes`].

    Raises:
        TaskError: The environment fails, or gives each role a reward of its own.
    """
    if any(node.role_rewards for node in nodes):
        raise TaskError("`credit` divides a reward that all roles share, but the environment gives each role its own.")
    wanted = []
    for node in nodes:
        for role in (role for role in node.roles if role in roles):
            agent, size = node.roles.index(role), len(node.samples[role].texts)
            others = [0 if replacement == "nothing" else (g + 1) % size for g in range(size)]
            indices = [(*index[:agent], others[index[agent]], *index[agent + 1 :]) for index in node.indices]
            other = replace(node, indices=list(dict.fromkeys(indices)))
            if replacement == "nothing":
                other.samples = {**node.samples, role: Samples(node.samples[role].prompt_ids, [[]], [""])}
            wanted.append((node, role, indices, other))
    outcomes = judge_nodes(environment, [other for *_, other in wanted], **context)
    for (node, role, indices, other), node_outcomes in zip(wanted, outcomes, strict=True):
        rewards = {x: process_reward(y.reward) for x, y in zip(other.indices, node_outcomes, strict=True)}
        node.counterfactuals[role] = [rewards[index] for index in indices]
