"""The contributions of agents to the variance of a node's rewards, against hand-computed designs."""

import itertools
import random
from statistics import fmean, pvariance
from types import SimpleNamespace

import pytest

from trl_multiagent.rollout.tree import Node
from trl_multiagent.trainers.base import metrics


def cross_node(reward, num_agents=2, num_generations=2):
    node = Node({}, (), {}, samples=dict.fromkeys("abc"[:num_agents]))
    node.indices = list(itertools.product(range(num_generations), repeat=num_agents))
    node.rewards = [float(reward(*index)) for index in node.indices]
    return node


def contributions(node):
    found = metrics.contributions(node)
    if not found:
        return None
    main, total = (
        [found[f"agents/{x}/{name}"] for x in node.samples] for name in ("contribution", "total_contribution")
    )
    return SimpleNamespace(
        variance=found["team/reward_variance"], main=main, total=total, interaction=found["team/interaction"]
    )


def test_an_agent_whose_answers_do_not_matter():
    parts = contributions(cross_node(lambda a, b: a))
    assert (parts.variance, parts.main, parts.total, parts.interaction) == (0.25, [0.25, 0.0], [0.25, 0.0], 0.0)


def test_sums_have_no_interaction():
    parts = contributions(cross_node(lambda a, b: a + 2 * b))
    assert parts.main == parts.total == [0.25, 1.0]
    assert parts.variance == 1.25 and parts.interaction == 0.0


def test_agreement_is_interaction_alone():
    parts = contributions(cross_node(lambda a, b: a == b))
    assert parts.main == [0.0, 0.0] and parts.total == [0.25, 0.25]
    assert parts.interaction == parts.variance == 0.25


def test_three_agents_against_sums_over_the_whole_design():
    rng = random.Random(0)
    rewards = {index: rng.random() for index in itertools.product(range(3), repeat=3)}
    parts = contributions(cross_node(lambda *index: rewards[index], num_agents=3, num_generations=3))
    assert parts.variance == pytest.approx(pvariance(rewards.values()))
    for agent in range(3):
        own = [fmean(r for index, r in rewards.items() if index[agent] == g) for g in range(3)]
        assert parts.main[agent] == pytest.approx(pvariance(own))
        # Law of total variance: what is left when the other agents' answers are given
        others = {}
        for index, r in rewards.items():
            others.setdefault(index[:agent] + index[agent + 1 :], []).append(r)
        explained = pvariance([fmean(group) for group in others.values()])
        assert parts.total[agent] == pytest.approx(parts.variance - explained)
    assert parts.interaction == pytest.approx(parts.variance - sum(parts.main))
    assert all(main <= total for main, total in zip(parts.main, parts.total, strict=True))


@pytest.mark.parametrize("rewards", [[0.1] * 4, [1e9 + 0.1] * 4])
def test_equal_rewards_have_no_variance_at_all(rewards):
    node = cross_node(lambda a, b: 0)
    node.rewards = rewards
    parts = contributions(node)
    assert parts.variance == 0.0 and parts.total == [0.0, 0.0]


def test_only_whole_designs_have_contributions():
    aligned = Node({}, (), {}, indices=[(0, 0), (1, 1)], rewards=[0.0, 1.0])
    assert contributions(aligned) is None
    assert contributions(cross_node(lambda a: a, num_agents=1)) is None
    assert contributions(cross_node(lambda a, b: 1, num_generations=1)) is None
