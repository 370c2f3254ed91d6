"""
Splits the variance of the rewards of a node into the agents' main effects and their interaction.

In a node of kind `cross`, every completion of an agent meets every combination of the others' completions. The rewards
are then a full factorial design with one factor per agent, and their variance is the sum of the effects of all subsets
of agents (Sobol 1993; Efron and Stein 1981). All variances are those of the G^N rewards themselves, divided by their
number. They are not corrected for the finite number of completions, so an interaction also adds a share of about 1/G
to the main effects.
"""

import itertools
from dataclasses import dataclass

import numpy as np

from trl_multiagent.rollout.tree import Node


@dataclass(frozen=True)
class Contributions:
    """The variance of a node's rewards and its parts, in squared units of the reward."""

    variance: float
    main: list[float]  # for each agent, the variance of the mean reward of its completions
    # For each agent, the mean variance over its completions while the others' are fixed. Zero if the reward does not
    # depend on its answer
    total: list[float]

    @property
    def interaction(self) -> float:
        """The variance that no agent explains alone."""
        return max(0.0, self.variance - sum(self.main))


def contributions(node: Node) -> Contributions | None:
    """
    Computes the contributions of the agents at a node with rewards. Returns `None` if each agent has a reward of its
    own, or if the joint actions are not all combinations of at least two completions of at least two agents.
    """
    num_agents, size = len(node.indices[0]), 1 + max(index[0] for index in node.indices)
    if (
        node.role_rewards
        or num_agents < 2
        or size < 2
        or sorted(node.indices) != [*itertools.product(range(size), repeat=num_agents)]
    ):
        return None
    rewards = np.empty([size] * num_agents)
    for index, reward in zip(node.indices, node.rewards, strict=True):
        rewards[index] = reward
    agents = range(num_agents)
    other_axes = [tuple(other for other in agents if other != agent) for agent in agents]
    return Contributions(
        variance=float(variances(rewards.ravel(), 0)),
        main=[float(variances(rewards.mean(axis=axes), 0)) for axes in other_axes],
        total=[float(variances(rewards, agent).mean()) for agent in agents],
    )


def variances(values: np.ndarray, axis: int) -> np.ndarray:
    """Computes population variances along an axis. They are exactly zero where all values are equal."""
    return np.where(np.ptp(values, axis=axis) == 0.0, 0.0, values.var(axis=axis))
