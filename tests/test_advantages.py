import pytest
import torch

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
