from types import SimpleNamespace

import pytest
import torch

from trl_multiagent import FunctionEnvironment
from trl_multiagent.environments.reward_models import ModelRewardEnvironment
from trl_multiagent.environments.task_errors import TaskError
from trl_multiagent.rollout.tree import Samples, acting, grow_trees, judge_nodes
from trl_multiagent.trainers.advantages import normalize_then_sum, weigh
from trl_multiagent.trainers.magrpo_trainer import sibling_advantages


RETURNS = torch.tensor([[1.0, 2.0, 6.0], [4.0, 4.0, 4.0]])


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("mean", [[-2.0, -1.0, 3.0], [0.0, 0.0, 0.0]]),
        ("rloo", [[1.0 - 4.0, 2.0 - 3.5, 6.0 - 1.5], [0.0, 0.0, 0.0]]),
        ("max", [[-5.0, -4.0, 0.0], [0.0, 0.0, 0.0]]),
        ("raw", [[1.0, 2.0, 6.0], [4.0, 4.0, 4.0]]),
    ],
)
def test_values(mode, expected):
    assert torch.allclose(sibling_advantages(RETURNS, mode), torch.tensor(expected))


@pytest.mark.parametrize("mode", ["mean", "rloo", "max", "raw"])
def test_normalized_modes_are_one(mode):
    std = (14 / 3) ** 0.5  # population
    expected = torch.tensor([[-2.0 / std, -1.0 / std, 3.0 / std], [0.0, 0.0, 0.0]])
    assert torch.allclose(sibling_advantages(RETURNS, mode, normalize=True), expected)


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("mode", ["mean", "rloo", "max", "raw"])
def test_a_sibling_without_a_reward_counts_in_no_baseline(mode, normalize):
    nan = float("nan")
    returns = torch.tensor([[1.0, nan, 2.0, 6.0], [nan, 3.0, nan, nan], [nan] * 4])
    expected = torch.full((3, 4), nan)
    expected[0, [0, 2, 3]] = sibling_advantages(RETURNS[0], mode, normalize, 4)
    expected[1, 1] = 3.0 if mode == "raw" and not normalize else 0.0
    assert torch.equal(sibling_advantages(returns, mode, normalize).nan_to_num(99.0), expected.nan_to_num(99.0))


def test_an_incomplete_set_of_siblings():
    """`mean` is (G - 1) / G times `rloo` for a set of any size, so that all turns of episodes have one scale."""
    for size in (1, 2, 3, 4):
        returns = torch.tensor([1.0, 2.0, 6.0, 8.0])[:size]
        found = sibling_advantages(returns, "mean", num_generations=4)
        assert torch.allclose(found, 0.75 * sibling_advantages(returns, "rloo"))
        assert size != 4 or torch.equal(found, sibling_advantages(returns, "mean"))
    for mode in ("mean", "rloo", "max"):
        assert sibling_advantages(torch.tensor([3.0]), mode, num_generations=4).tolist() == [0.0]
    assert sibling_advantages(torch.tensor([3.0]), "raw", num_generations=4).tolist() == [3.0]


def test_input_is_left_alone():
    returns = RETURNS.clone()
    sibling_advantages(returns, "raw").add_(1.0)
    assert torch.equal(returns, RETURNS)


@pytest.mark.parametrize("mode", ["mean", "rloo", "max"])
def test_equal_siblings_have_no_advantage_at_all(mode):
    for size in range(2, 12):
        returns = torch.full((1, size), 0.1)
        assert not sibling_advantages(returns, mode).any()


def length(completions, **columns):
    return [float(len(completion["editor"])) for completion in completions]


def grown(environment, num_turns):
    """The turns of a tree, with texts of different lengths."""
    lengths = iter([1, 2, 3, 5, 4, 9])

    def sample(nodes, number):
        return {
            role: [Samples([1], [[1]] * number, ["x" * next(lengths) for _ in range(number)]) for _ in own]
            for role in environment.roles
            if (own := acting(role, nodes))
        }

    settings = {"num_turns": num_turns, "num_generations": 2}
    return grow_trees([{}], environment, sample, lambda nodes: judge_nodes(environment, nodes), **settings)


def test_returns_of_reward_functions_pass_through_turns_of_other_roles():
    order = [["writer"], ["editor"]]
    environment = FunctionEnvironment({"writer": "Write.", "editor": "{writer}"}, length, order=order)
    (node,), children = grown(environment, 2)
    assert node.returns == [4.0, 6.5]
    for role, x, gap in (("writer", node, 2.5), ("editor", children[1], 5.0)):
        expected = torch.tensor([-gap, gap]) / 2 / (gap / 2**0.5 + 1e-4)
        assert torch.allclose(normalize_then_sum(environment, role, [x], 1.0), expected)


@pytest.mark.parametrize("score_task", [False, True])
def test_the_reward_of_a_model_has_no_reward_functions(score_task):
    task = FunctionEnvironment({"editor": "Write."}, length)
    environment = ModelRewardEnvironment(task, lambda prompts, completions: [0.0] * len(completions), score_task)
    args = SimpleNamespace(advantage_normalization="rewards", handoff=None, discount=1.0)
    with pytest.raises(TaskError, match="needs the reward functions of a `FunctionEnvironment`"):
        weigh(args, environment, environment.roles, grown(environment, 1), [[{}]])
