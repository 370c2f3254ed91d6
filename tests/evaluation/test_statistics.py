"""pass@k and confidence intervals, against definitions and by hand."""

import itertools

import numpy as np
import pytest

from trl_multiagent.evaluation.config import EvaluationConfig
from trl_multiagent.evaluation.cross_play import mixes, summarize_cross_play
from trl_multiagent.evaluation.results import Result, compute_result, differences, numbers_of
from trl_multiagent.evaluation.statistics import estimates, pass_at_k


def test_pass_at_k_is_the_share_of_subsets_with_an_answer_that_passes():
    for n in range(1, 8):
        for c in range(n + 1):
            answers = [k < c for k in range(n)]
            for k in range(1, n + 1):
                subsets = list(itertools.combinations(answers, k))
                assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, subsets)) / len(subsets))
    for wrong in ((3, 4, 1), (3, 1, 4), (3, 1, 0), (3, -1, 1)):
        with pytest.raises(ValueError, match="is not defined"):
            pass_at_k(*wrong)


def test_interval_of_two_items_by_hand():
    """Resamples of the values 0 and 1 have the mean 0, 1/2 or 1, with probabilities 1/4, 1/2 and 1/4."""
    values = np.array([[[0.0], [1.0]]])
    assert estimates(values, 4000, 0.95, seed=0) == [(0.5, 0.0, 1.0)]
    (middle,) = estimates(values, 4000, 0.4, seed=0)  # the tails of 30 % reach into the middle
    assert middle == (0.5, 0.5, 0.5)
    (one,) = estimates(np.array([[[3.0]]]), 100, 0.95, seed=0)
    assert one == (3.0, 3.0, 3.0)


def test_missing_values_do_not_count():
    values = np.array([[[0.0, np.nan], [1.0, 2.0], [2.0, 4.0]]])
    assert [x.mean for x in estimates(values, 200, 0.9, seed=0)] == [1.0, 3.0]
    assert estimates(np.zeros((1, 3, 0)), 200, 0.9, seed=0) == []


@pytest.mark.parametrize(("teams", "spread"), [(1, 0.0), (8, 0.5)])
def test_intervals_cover_the_truth(teams, spread):
    """The mean of the population is 0. With several teams, their own levels vary, too."""
    generator = np.random.default_rng(0)
    covered = []
    for trial in range(200):
        levels = spread * generator.standard_normal((teams, 1))
        values = levels + generator.standard_normal((1, 60)) + 0.3 * generator.standard_normal((teams, 60))
        (estimate,) = estimates(values[:, :, None], 400, 0.9, seed=trial)
        covered.append(estimate.low <= 0 <= estimate.high)
    assert 0.78 < np.mean(covered) < 0.96


def record(item, episode, rewards, passed):
    turns = [
        {
            "reward": r,
            "metrics": {"passed": p},
            "tokens": {"aux": 2, "main": 3},
            "prompt_tokens": {"aux": 1, "main": 1},
        }
        for r, p in zip(rewards, passed, strict=True)
    ]
    return {"item": item, "episode": episode, "seconds": 0.5, "turns": turns}


def test_numbers_of_transcripts_by_hand():
    config = EvaluationConfig(num_episodes=2, k=[1, 2], discount=0.5, num_bootstraps=100)
    records = [record(0, 0, [1, 2], [0, 1]), record(0, 1, [3, 2], [0, 0]), record(1, 0, [0, 4], [1, 1])]
    records.append(record(1, 1, [0, 4], [1, 1]))
    result = compute_result("team", "team", "folder", records, 2, config)
    numbers = {turn: {k: x.mean for k, x in of.items()} for turn, of in numbers_of([result], config).items()}
    assert list(numbers) == ["turn_1", "turn_2", "final"]
    assert numbers["turn_1"] == {"reward": 1.0, "pass@1": 0.5, "pass@2": 0.5, "passed": 0.5}
    assert numbers["turn_2"] == {"reward": 3.0, "pass@1": 0.75, "pass@2": 1.0, "passed": 0.75}
    assert numbers["final"] == {"return": 2.5, **numbers["turn_2"]}
    assert result.cost == {"episodes": 4, "calls": 16, "generated_tokens": 40, "prompt_tokens": 16, "seconds": 2.0}
    # Every other turn is a draft
    final = compute_result("discussion", "baseline", "", records, 2, config, rounds=2)
    assert final.column("reward", "turn_1").tolist() == [2.0, 4.0] and final.cost == result.cost
    gap = differences([result], final, config)
    assert gap["final"]["return"].mean == 2.5 - 3.0 and gap["final"]["pass@1"] == (0.0, 0.0, 0.0)
    assert "turn_2" not in gap
    # A task without `passed` has no pass@k
    for each in records:
        each["turns"] = [{**turn, "metrics": {}} for turn in each["turns"]]
    assert compute_result("team", "team", "", records, 2, config).column("pass@1") is None


@pytest.mark.parametrize("roles", [("aux", "main"), ("a", "b", "c")])
def test_cross_play_compares_the_diagonal_with_the_rest(roles):
    """Agents of the same run agree and get 1; others get as much as the item is worth."""
    config = EvaluationConfig(num_bootstraps=500)
    worth = np.array([0.0, 0.2, 0.4, 0.2])
    played = mixes(3, roles)
    assert len(played) == len(set(played)) == (9 if len(roles) == 2 else 3 + 3 * 6)
    results = {
        mix: Result(
            "", "pair", "", [("final", "return")], (worth if len(set(mix)) > 1 else worth * 0 + 1)[:, None], {}
        )
        for mix in played
    }
    found = summarize_cross_play(results, ["x", "y", "z"], roles, "return", config)
    assert list(found.matrices) == (["aux"] if len(roles) == 2 else list(roles))
    assert np.allclose(found.matrices[roles[0]], np.where(np.eye(3), 1.0, 0.2))
    assert found.diagonal == (1.0, 1.0, 1.0) and found.off_diagonal.mean == pytest.approx(0.2)
    assert (
        found.difference.mean == pytest.approx(0.8)
        and 0.6 <= found.difference.low < 0.8 < found.difference.high <= 1.0
    )
    assert summarize_cross_play(results, ["x", "y", "z"], roles, "pass@1", config) is None
    # If all teams are equally good, no difference is claimed
    generator = np.random.default_rng(0)
    for result in results.values():
        result.values = worth[:, None] + 0.1 * generator.standard_normal((4, 1))
    same = summarize_cross_play(results, ["x", "y", "z"], roles, "return", config)
    assert same.difference.low < 0 < same.difference.high


def test_settings_that_contradict_each_other():
    assert EvaluationConfig(num_episodes=7).pass_at == [1, 5]
    for wrong, message in [
        ({"num_episodes": 3, "k": [1, 5]}, "pass@5 needs at least 5 episodes per item, but `num_episodes` is 3"),
        ({"temperature": 0.0}, "`temperature` is 0, so all 10 episodes"),
        ({"k": [1, 1]}, "different numbers"),
        ({"k": []}, "different numbers"),
        ({"k": [0]}, "at least 1"),
        ({"baselines": ["debate"]}, "none of raw_single_agent"),
    ]:
        with pytest.raises(ValueError, match=message):
            EvaluationConfig(**wrong)
