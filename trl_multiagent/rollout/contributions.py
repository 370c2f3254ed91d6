"""
Splits the variance of the rewards of a node into the agents' main effects and their interaction.

In a node of kind `cross`, every completion of an agent meets every combination of the others' completions. The rewards are then a full
factorial design with one factor per agent, and their variance is the sum of the effects of all subsets of agents (Sobol 1993;
Efron and Stein 1981). All variances are those of the G^N rewards themselves, divided by their number. They are not corrected for the
finite number of completions, so an interaction also adds a share of about 1/G to the main effects.
"""

import itertools
from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from statistics import fmean

from trl_multiagent.rollout.tree import Node


@dataclass(frozen=True)
class Contributions:
    """
    The variance of a node's rewards and its parts, in squared units of the reward.

    Args:
        variance (`float`): The variance of the rewards.
        main (`list[float]`): For each agent, the variance of the mean reward of its completions. What is left of
            the variance is interaction.
        total (`list[float]`): For each agent, the mean variance over its completions while the others' are fixed. It is zero if the
            reward does not depend on what the agent answers.
    """

    variance: float
    main: list[float]
    total: list[float]

    @property
    def interaction(self) -> float:
        """The variance that no agent explains alone."""
        return max(0.0, self.variance - sum(self.main))


def contributions(node: Node) -> Contributions | None:
    """
    Computes the contributions of the agents at a node.

    Args:
        node ([`Node`]): A node with rewards.

    Returns:
        [`Contributions`] or `None`: `None` if the joint actions are not all combinations of at least two completions of
        at least two agents.
    """
    num_agents = len(node.indices[0])
    completions = sorted({index[0] for index in node.indices})
    if num_agents < 2 or len(completions) < 2:
        return None
    if sorted(node.indices) != list(itertools.product(completions, repeat=num_agents)):
        return None
    return Contributions(
        variance=variance(node.rewards),
        main=[variance([fmean(rewards) for rewards in rewards_by_own(node, k)]) for k in range(num_agents)],
        total=[fmean(map(variance, rewards_by_others(node, k))) for k in range(num_agents)],
    )


def rewards_by_own(node: Node, agent: int) -> list[list[float]]:
    """The rewards of a node in groups, one for each completion of an agent."""
    return grouped(node, lambda index: index[agent])


def rewards_by_others(node: Node, agent: int) -> list[list[float]]:
    """The rewards of a node in groups, one for each combination of the other agents' completions."""
    return grouped(node, lambda index: (*index[:agent], *index[agent + 1 :]))


def grouped(node: Node, key: Callable[[tuple[int, ...]], Hashable]) -> list[list[float]]:
    """The rewards of a node, in groups whose joint actions have the same key."""
    groups: defaultdict[Hashable, list[float]] = defaultdict(list)
    for index, reward in zip(node.indices, node.rewards, strict=True):
        groups[key(index)].append(reward)
    return list(groups.values())


def variance(values: Sequence[float]) -> float:
    """The variance of the values as a whole population. Exactly zero if all are equal."""
    if min(values) == max(values):
        return 0.0
    mean = fmean(values)
    return fmean((value - mean) ** 2 for value in values)
