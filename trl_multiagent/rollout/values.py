"""
Learning targets of critics, and the advantages that follow from them.

A critic has stored its values on the nodes that it reads, in `node.values[critic]`: one value for each joint action.
The values of a critic of states, V(h), are equal at a node; the values of a critic of actions, Q(h, a), differ. A
critic of one agent is named after the agent's role, and reads the nodes at which the agent acts. Its rewards are the
role's.
"""

from collections.abc import Sequence
from statistics import fmean, pvariance

from trl_multiagent.rollout.tree import Node


ROUNDING = 1e-6  # relative error of numbers that were computed in float32


def state_value(node: Node, critic: str) -> float:
    """Returns V(h), or for a critic of actions the mean of Q(h, a) over the joint actions."""
    return fmean(node.values[critic])


def compute_targets(levels: Sequence[Sequence[Node]], critic: str, discount: float, gae_lambda: float) -> None:
    """
    Computes the targets of a critic, and stores them in `node.targets[critic]`, one number per joint action:

        y_j = r_j                                                               if the episode ends with j
        y_j = r_j + discount * ((1 - lambda) * V(h') + lambda * mean of y(h'))  otherwise

    h' is the node that follows the joint action j, and the mean is over the joint actions there. With `gae_lambda` 0
    this is the target of one step, with 1 the return of the tree. y_j - V(h) is the generalized advantage estimate. If
    the branch of j is not continued, as in a chain, y(h') is unknown, and V(h') replaces it. If the critic does not
    read h', the mean of y(h') replaces V(h').

    `levels` are the nodes of each turn, with their rewards and this critic's values.
    """
    for nodes in reversed(levels):
        for node in nodes:
            node.targets[critic] = list(node.rewards_of(critic))
            for joint_action, child in node.next_nodes.items():
                if critic not in child.values:
                    future = fmean(child.targets[critic])
                else:
                    future = state_value(child, critic)
                    if child.rewards:
                        future = (1 - gae_lambda) * future + gae_lambda * fmean(child.targets[critic])
                node.targets[critic][joint_action] += discount * future


def critic_advantages(node: Node, critic: str, role: str) -> list[float]:
    """
    Computes the advantages of an agent's completions at a node:

        A_g = mean over the joint actions j with completion g of y_j  -  baseline_g

    The baseline of a critic of states is V(h). The baseline of a critic of actions is the mean of Q(h, j) over the
    joint actions *without* completion g, because Q of the completion itself predicts y_j, so that y_j - Q would vanish
    as the critic learns. If there is a single completion, Q of its own joint actions is the baseline. The agent of
    `role` acts at the node.
    """
    advantages = []
    completions = node.completion_of(role)
    for completion in range(1 + max(completions)):
        own = [j for j, other in enumerate(completions) if other == completion]
        others = [j for j in range(len(completions)) if j not in own] or own
        baseline = fmean(node.values[critic][j] for j in others)
        advantages.append(fmean(node.targets[critic][j] for j in own) - baseline)
    return advantages


def explained_variance(targets: Sequence[float], values: Sequence[float]) -> float:
    """
    Computes 1 - Var(y - V) / Var(y): 1 for a perfect critic, 0 for a critic that predicts the mean, negative for a
    worse critic. It is 0 if all targets are equal, see [`all_equal`].
    """
    if all_equal(targets):
        return 0.0
    return 1.0 - pvariance(y - v for y, v in zip(targets, values, strict=True)) / pvariance(targets)


def all_equal(targets: Sequence[float]) -> bool:
    """Returns whether targets differ by no more than rounding errors."""
    return max(targets) - min(targets) <= ROUNDING * max(map(abs, targets))
