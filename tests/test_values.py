"""Targets and advantages of critics, against trees that were computed by hand."""

import pytest

from trl_multiagent.rollout.tree import Node
from trl_multiagent.trainers.base.actor_critic_trainer import compute_targets, critic_advantages, explained_variance


def node(rewards, values, children=None, indices=None):
    indices = indices or [(g, g) for g in range(len(rewards))]
    found = Node(
        {},
        (),
        {"a": "", "b": ""},
        indices=indices,
        rewards=rewards,
        children=children or {},
    )
    found.values["c"] = values if isinstance(values, list) else [values] * max(1, len(rewards))
    return found


def levels_of(root):
    levels = [[root]]
    while any(x.children for x in levels[-1]):
        levels.append([child for x in levels[-1] for child in x.children.values()])
    return levels


def targets(root, discount, gae_lambda):
    levels = levels_of(root)
    compute_targets(levels, "c", discount, gae_lambda)
    return [[x.targets["c"] for x in level] for level in levels]


@pytest.mark.parametrize("gae_lambda", [0.0, 0.95, 1.0])
def test_one_turn(gae_lambda):
    root = node([1.0, 3.0], 1.5)
    assert targets(root, 0.5, gae_lambda) == [[[1.0, 3.0]]]
    assert critic_advantages(root, "c", "a") == [-0.5, 1.5]


@pytest.mark.parametrize(
    ("gae_lambda", "first", "last"),
    [
        (0.0, 1 + 0.5 * 10, 3 + 0.5 * 20),
        (0.95, 1 + 0.5 * (0.05 * 10 + 0.95 * 6), 3 + 0.5 * (0.05 * 20 + 0.95 * 8)),
        (1.0, 1 + 0.5 * 6, 3 + 0.5 * 8),
    ],
)
def test_two_turns_of_a_tree(gae_lambda, first, last):
    root = node([1.0, 3.0], 4.0, {0: node([5.0, 7.0], 10.0), 1: node([8.0, 8.0], 20.0)})
    (found,), leaves = targets(root, 0.5, gae_lambda)
    assert found == pytest.approx([first, last])
    assert leaves == [[5.0, 7.0], [8.0, 8.0]]
    assert critic_advantages(root, "c", "b") == pytest.approx([first - 4, last - 4])


def test_the_advantage_is_the_generalized_advantage_estimate():
    """Three turns, one generation: the sum of (discount * lambda)^k times the error of step k."""
    discount, gae_lambda, rewards, values = 0.9, 0.8, [1.0, -2.0, 4.0], [0.5, 1.5, -1.0]
    leaf = node([rewards[2]], values[2])
    middle = node([rewards[1]], values[1], {0: leaf})
    root = node([rewards[0]], values[0], {0: middle})
    targets(root, discount, gae_lambda)
    deltas = [r + discount * v - u for r, v, u in zip(rewards, [*values[1:], 0.0], values, strict=True)]
    expected = sum((discount * gae_lambda) ** k * delta for k, delta in enumerate(deltas))
    assert critic_advantages(root, "c", "a") == pytest.approx([expected])
    assert critic_advantages(leaf, "c", "a") == pytest.approx([deltas[2]])


def test_a_branch_that_ends_early_has_no_value_after_it():
    root = node([1.0, 3.0], 4.0, {1: node([5.0, 7.0], 10.0)})
    assert targets(root, 0.5, 0.0)[0] == [[1.0, 3 + 0.5 * 10]]


@pytest.mark.parametrize(("gae_lambda", "after"), [(0.0, 10.0), (0.95, 0.05 * 10 + 0.95 * 3), (1.0, 3.0)])
def test_a_critic_skips_nodes_at_which_its_agent_does_not_act(gae_lambda, after):
    """Between two of its own, the mean over what the others did counts, discounted and with the role's own rewards."""
    leaf = node([2.0, 4.0], 10.0)
    idle = node([0.0, 0.0], 0.0, {0: leaf})
    idle.values, idle.role_rewards = {}, {"c": [5.0, 7.0], "b": [0.0, 0.0]}
    root = node([1.0, 3.0], 4.0, {0: idle})
    (found,), (of_idle,), _ = targets(root, 0.5, gae_lambda)
    assert of_idle == pytest.approx([5 + 0.5 * after, 7.0])
    assert found == pytest.approx([1 + 0.5 * (12 + 0.5 * after) / 2, 3.0])
    assert critic_advantages(root, "c", "a") == pytest.approx([found[0] - 4, 3 - 4])


def test_cross_mode_means_over_the_partners():
    indices = [(0, 0), (0, 1), (1, 0), (1, 1)]
    root = node([1.0, 2.0, 3.0, 6.0], 2.5, indices=indices)
    targets(root, 1.0, 0.0)
    assert critic_advantages(root, "c", "a") == [1.5 - 2.5, 4.5 - 2.5]
    assert critic_advantages(root, "c", "b") == [2.0 - 2.5, 4.0 - 2.5]


def test_a_critic_of_actions_is_a_baseline_through_the_other_completions():
    """A perfect critic of actions leaves an advantage."""
    root = node([1.0, 5.0], [1.0, 5.0])
    targets(root, 1.0, 0.0)
    assert critic_advantages(root, "c", "a") == [1.0 - 5.0, 5.0 - 1.0]
    indices = [(0, 0), (0, 1), (1, 0), (1, 1)]
    root = node([1.0, 2.0, 3.0, 6.0], [10.0, 20.0, 30.0, 50.0], indices=indices)
    targets(root, 1.0, 0.0)
    assert critic_advantages(root, "c", "a") == [1.5 - 40.0, 4.5 - 15.0]
    assert critic_advantages(root, "c", "b") == [2.0 - 35.0, 4.0 - 20.0]
    single = node([4.0], [3.0])
    targets(single, 1.0, 0.0)
    assert critic_advantages(single, "c", "a") == [1.0]


def test_the_next_value_of_a_critic_of_actions_is_its_mean():
    root = node([1.0], [0.0], {0: node([5.0, 7.0], [10.0, 30.0])})
    assert targets(root, 0.5, 0.0)[0] == [[1 + 0.5 * 20]]


def test_explained_variance():
    assert explained_variance([1.0, 2.0, 3.0], [1.0, 2.0, 3.0]) == 1.0
    assert explained_variance([1.0, 2.0, 3.0], [7.0, 7.0, 7.0]) == 0.0
    assert explained_variance([1.0, 3.0], [3.0, 1.0]) == -3.0
    assert explained_variance([2.0, 2.0], [1.0, 5.0]) == 0.0
    # Equal but for rounding: their variance is not zero, and says nothing
    assert explained_variance([0.1, 0.1, 0.1], [0.2, 0.3, 0.1]) == explained_variance([0.1 + 0.2, 0.3], [0, 1]) == 0.0
    assert explained_variance([0.0, 0.0], [0.0, 1.0]) == 0.0 and explained_variance([7.0], [7.0]) == 0.0
