"""The tree itself, with agents and rewards that are written down here."""

import math

import pytest

from trl_multiagent.environments import Environment, Outcome, TaskError
from trl_multiagent.rollout.tree import Samples, grow_trees, joint_action_indices


class Letters(Environment):
    """Agents write a letter per sibling; the reward is looked up by the branch's texts."""

    def __init__(self, rewards=None, roles=("aux", "main")):
        self.roles = roles
        self.rewards = rewards or {}
        self.calls = []

    def prompts(self, item, history):
        return {role: f"{item['id']}/{role}/{len(history)}" for role in self.roles}

    def next_prompts(self, items, histories):
        self.calls.append(("prompts", len(items)))
        return [self.prompts(item, history) for item, history in zip(items, histories, strict=True)]

    def sample(self, nodes, num_generations):
        self.calls.append(("samples", len(nodes)))
        ids = [[g] for g in range(num_generations)]
        return {
            role: [Samples([1], ids, [f"{role[0]}{g}" for g in range(num_generations)]) for _ in nodes]
            for role in self.roles
        }

    def score(self, nodes):
        return [[Outcome(self.rewards.get(self.path(node, x), 0.0)) for x in node.joint_actions] for node in nodes]

    @staticmethod
    def path(node, action):
        return " ".join("+".join(texts.values()) for texts in [*(turn.joint_action for turn in node.history), action])


def grow(environment, items=({"id": 0},), num_generations=2, **settings):
    settings = {"num_turns": 1, "num_generations": num_generations, **settings}
    return grow_trees(list(items), environment, environment.sample, environment.score, **settings)


def test_joint_actions():
    assert joint_action_indices("align", 3, 2) == [(0, 0, 0), (1, 1, 1)]
    assert joint_action_indices("cross", 2, 2) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert len(joint_action_indices("cross", 2, 3)) == 9
    assert len(joint_action_indices("cross", 3, 2)) == 8


@pytest.mark.parametrize(("mode", "sizes"), [("align", [3, 6, 12]), ("cross", [3, 12, 48])])
def test_tree_sizes_and_one_call_per_turn(mode, sizes):
    environment = Letters()
    turns = grow(environment, [{"id": k} for k in range(3)], num_turns=3, joint_mode=mode)
    assert [len(nodes) for nodes in turns] == sizes
    assert environment.calls == [(what, size) for size in sizes for what in ("prompts", "samples")]


def test_returns_of_a_tree_by_hand():
    rewards = {"a0+m0": 1.0, "a1+m1": 2.0, "a0+m0 a0+m0": 3.0, "a0+m0 a1+m1": 5.0}
    rewards |= {"a1+m1 a0+m0": -1.0, "a1+m1 a1+m1": 0.0}
    root = grow(Letters(rewards), num_turns=2, discount=0.5)[0][0]
    assert root.returns == [1.0 + 0.5 * 4.0, 2.0 + 0.5 * -0.5]
    assert root.children[0].returns == [3.0, 5.0]
    assert root.agent_returns("aux") == root.agent_returns("main") == root.returns


def test_returns_without_a_reward():
    """They count in no mean: over the children, over the teammates, of early termination, and for the handoff."""
    nan = float("nan")
    root = grow(Letters({"a0+m0 a0+m0": nan, "a0+m0 a1+m1": 5.0, "a1+m1": nan}), num_turns=2)[0][0]
    assert root.returns[0] == 5.0 and math.isnan(root.returns[1]) and len(root.children) == 2
    root = grow(Letters({"a0+m0": nan, "a0+m1": 2.0, "a1+m0": 5.0, "a1+m1": 10.0}), joint_mode="cross")[0][0]
    assert root.agent_returns("aux") == [2.0, 7.5] and root.agent_returns("main") == [5.0, 6.0]
    rewards = {"a0+m0": nan, "a1+m1": 2.0}
    assert grow(Letters(rewards), num_turns=2, early_termination_threshold=1.9)[0][0].ended_early
    assert [*grow(Letters(rewards), num_turns=2, handoff="best")[0][0].children] == [1]


def test_cross_returns_are_means_over_the_teammates():
    rewards = {"a0+m0": 1.0, "a0+m1": 2.0, "a1+m0": 5.0, "a1+m1": 10.0}
    root = grow(Letters(rewards), joint_mode="cross")[0][0]
    assert root.agent_returns("aux") == [1.5, 7.5]
    assert root.agent_returns("main") == [3.0, 6.0]


def test_three_agents_cross():
    environment = Letters({"a0+m0+t1": 8.0}, roles=("aux", "main", "tests"))
    root = grow(environment, joint_mode="cross")[0][0]
    assert [root.agent_returns(role) for role in environment.roles] == [[2.0, 0.0], [2.0, 0.0], [0.0, 2.0]]


def test_rewards_are_processed_before_anything_looks_at_them():
    rewards = {"a0+m0": 1.0, "a1+m1": 3.0}
    turns = grow(Letters(rewards), num_turns=2, early_termination_threshold=-0.5, process_reward=lambda x: 2 * x - 4)
    assert turns[0][0].rewards == [-2.0, 2.0]
    assert turns[0][0].ended_early  # their mean, 0, is above the threshold


@pytest.mark.parametrize(("threshold", "leaf"), [(1.4999, True), (1.5, False), (None, False)])
def test_early_termination_is_strict_and_ends_one_branch(threshold, leaf):
    rewards = {"a0+m0": 1.0, "a1+m1": 2.0, "a0+m0 a0+m0": 9.0}
    turns = grow(Letters(rewards), num_turns=3, early_termination_threshold=threshold)
    root = turns[0][0]
    assert root.ended_early == leaf
    assert [len(nodes) for nodes in turns] == ([1, 0, 0] if leaf else [1, 2, 4 if threshold is None else 2])
    if leaf:
        assert root.returns == root.rewards
    elif threshold is not None:
        assert [child.ended_early for child in root.children.values()] == [True, False]


def test_histories_are_the_branch_s_own():
    turns = grow(Letters(), num_turns=3)
    last = turns[2][-1]
    assert [turn.joint_action for turn in last.history] == [{"aux": "a1", "main": "m1"}] * 2
    assert [turn.prompts["aux"] for turn in last.history] == ["0/aux/0", "0/aux/1"]
    assert last.prompts["main"] == "0/main/2"


def test_an_environment_ends_some_branches_of_a_node():
    environment = Letters({"a0+m0": 4.0, "a1+m1": 1.0, "a1+m1 a0+m0": 2.0, "a1+m1 a1+m1": 4.0})
    asked = environment.prompts
    environment.prompts = lambda item, history: (
        {} if history and history[0].joint_action["aux"] == "a0" else asked(item, history)
    )
    turns = grow(environment, num_turns=2)
    root = turns[0][0]
    assert root.ended == [0] and list(root.children) == [1] and len(turns[1]) == 1 and turns[1][0].ended == []
    assert root.returns == [4.0, 1.0 + 3.0]
    assert grow(environment, num_turns=2, handoff="best")[1] == []  # the best joint action is the one that ends


def test_best_handoff_is_a_chain_of_first_maxima():
    rewards = {"a0+m0": 1.0, "a1+m1": 3.0, "a2+m2": 3.0, "a1+m1 a0+m0": 7.0}
    turns = grow(Letters(rewards), num_generations=3, num_turns=2, handoff="best", discount=0.9)
    assert [len(nodes) for nodes in turns] == [1, 1]
    assert list(turns[0][0].children) == [1]
    assert turns[0][0].returns == [1.0, 3.0, 3.0]  # immediate rewards only
    assert turns[1][0].returns == [7.0, 0.0, 0.0]


class Compared(Letters):
    """Adds to the reward of each branch what it is told to."""

    def __init__(self, compare):
        super().__init__()
        self.compare, self.outcome = compare, Outcome(1.0)

    def score(self, nodes):
        return [[self.outcome for _ in node.indices] for node in nodes]  # the same in all batches

    def group_rewards(self, item, histories):
        return self.compare(histories)


def test_finished_branches_are_compared():
    environment = Compared(lambda histories: [float(k) for k in range(len(histories))])
    for _ in range(2):
        ((node,),) = grow(environment)
        assert node.rewards == [1.0, 2.0]


def test_a_chain_compares_the_joint_actions_of_its_last_node():
    seen = []
    environment = Compared(lambda histories: seen.append([*map(len, histories)]) or [3.0] * len(histories))
    turns = grow(environment, num_generations=3, num_turns=2, handoff="best")
    assert [node.rewards for (node,) in turns] == [[1.0] * 3, [4.0] * 3] and seen == [[2] * 3]


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ([1.0], "`Compared` returned a list of 1; it must return a list of 2 numbers"),
        ([1.0, math.nan], "`Compared` returned the reward nan for joint action 2 of 2"),
        (["a", 1.0], "`Compared` returned the reward 'a'"),
        ([{"aux": 1.0}] * 2, "`Compared` returned rewards by role; it must return a number for each episode"),
        (ZeroDivisionError("by zero"), "`Compared` raised ZeroDivisionError: by zero"),
    ],
)
def test_a_comparison_that_fails_is_named(answer, message):
    def compare(histories):
        if isinstance(answer, Exception):
            raise answer
        return answer

    with pytest.raises(TaskError, match=f"The group reward of {message}"):
        grow(Compared(compare))


def test_random_handoff_draws_every_sibling():
    def draw(numbers, seed="0/step 1"):
        settings = {"num_generations": 3, "num_turns": 3, "handoff": "random", "seed": seed}
        turns = grow(Letters(), [{"id": k} for k in numbers], numbers=numbers, **settings)
        return [[next(iter(node.children)) for node in nodes] for nodes in turns[:2]]

    drawn = draw(range(300))
    assert all(70 < of_turn.count(g) < 130 for of_turn in drawn for g in range(3))
    assert drawn[0] != drawn[1] and drawn != draw(range(300), "0/step 2")
    # As two processes draw, each for half of the items
    assert drawn == [a + b for a, b in zip(draw(range(150)), draw(range(150, 300)), strict=True)]
