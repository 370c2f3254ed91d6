"""Pairs and replay, against cases that are worked out by hand."""

from collections import Counter

import pytest

from trl_multiagent.preferences.pairs import (
    Candidate,
    ReplayConfig,
    all_pairs,
    matched_pairs,
    replay,
    replay_weights,
    select_pairs,
)


def candidates(*rewards, by="current"):
    """Candidates a, b, c, ... with these rewards."""
    return [Candidate({"aux": chr(97 + k), "main": by}, reward, by=by) for k, reward in enumerate(rewards)]


def names(pairs):
    return [pair.chosen.texts["aux"] + pair.rejected.texts["aux"] for pair in pairs]


def test_all_pairs_of_different_rewards_in_the_order_of_the_candidates():
    assert names(all_pairs(candidates(1.0, 3.0, 1.0, 2.0))) == ["ba", "bc", "bd", "da", "dc"]
    assert names(all_pairs(candidates(2.0, 2.0, 2.0))) == []
    assert names(all_pairs(candidates(0.0, -0.0))) == []
    assert names(all_pairs(candidates(1.0, 1.0 + 1e-9))) == ["ba"]  # no gap is too small
    assert names(all_pairs(candidates(0.3, 0.1 + 0.2))) == names(all_pairs(candidates(0.0, 0.1 + 0.2 - 0.3))) == []
    assert all_pairs([]) == [] and all_pairs(candidates(1.0)) == []


def test_candidates_with_the_same_text_are_one():
    a, b, c, d = candidates(1.0, 2.0, 3.0, 4.0)
    again = Candidate(dict(reversed(a.texts.items())), 1.0)  # the order of the roles is no difference
    assert names(all_pairs([a, b, again, a])) == ["ba"]
    noisy = Candidate(a.texts, 9.0)  # a reward that is not a function of the text: the first one counts
    assert names(all_pairs([a, noisy, b])) == ["ba"]
    half = Candidate({"aux": "a", "main": "other"}, 5.0)  # one role wrote the same
    assert len(all_pairs([a, half])) == 1
    assert names(all_pairs([d, c, d, c, a])) == ["dc", "da", "ca"]


def test_silence_is_never_chosen():
    silent = Candidate({"aux": " \n", "main": ""}, 5.0)
    (a,) = candidates(1.0)
    assert all_pairs([silent, a]) == []
    worse = Candidate({"aux": "", "main": ""}, 0.0)
    assert [pair.rejected for pair in all_pairs([worse, a])] == [worse]
    one = Candidate({"aux": "", "main": "x"}, 5.0)
    assert [pair.chosen for pair in all_pairs([one, a])] == [one]


def test_selections():
    pairs = all_pairs(candidates(0.0, 4.0, 1.0, 3.0))
    assert names(pairs) == ["ba", "bc", "bd", "ca", "da", "dc"]
    assert names(select_pairs(pairs, "reward_gap", None)) == ["ba", "bc", "da", "dc", "bd", "ca"]  # 4, 3, 3, 2, 1, 1
    assert names(select_pairs(pairs, "reward_gap", 2)) == ["ba", "bc"]
    assert names(select_pairs(pairs, "all", None)) == names(pairs)
    assert names(select_pairs(pairs[:2], "reward_gap", 16)) == ["ba", "bc"]
    assert select_pairs([], "reward_gap", 4) == select_pairs([], "random", 4, 1) == []
    drawn = [names(select_pairs(pairs, "random", 3, seed)) for seed in range(200)]
    assert drawn == [names(select_pairs(pairs, "random", 3, seed)) for seed in range(200)]
    counts = Counter(name for three in drawn for name in three)
    assert all(len(set(three)) == 3 for three in drawn) and all(70 < counts[name] < 130 for name in names(pairs))


def test_pairs_with_a_comparator():
    own, others = candidates(1.0, 2.0, 3.0, 0.0), candidates(2.0, 2.0, 0.0, 2.0, 9.0, by="history:round_1")
    pairs = matched_pairs(own, others)  # the second is a tie, the fifth answer of the comparator has no partner
    assert [pair.chosen.by for pair in pairs] == ["history:round_1", "current", "history:round_1"]
    assert [(pair.gap, pair.comparator_reward) for pair in pairs] == [(1.0, 2.0), (3.0, 0.0), (2.0, 2.0)]
    # the comparator's reward first, then the gap
    assert [pair.gap for pair in select_pairs(pairs, "comparator_reward", None)] == [2.0, 1.0, 3.0]
    assert [pair.gap for pair in select_pairs(pairs, "reward_gap", 2)] == [3.0, 2.0]
    assert len(matched_pairs([own[0]] * 3, [others[0]] * 3)) == 1  # the same pair of texts
    assert matched_pairs([own[0]], [Candidate(own[0].texts, 7.0, by="other")]) == []  # the same text


def config(mode, **changes):
    return ReplayConfig(**{f"preference_replay_{name}": value for name, value in {"mode": mode, **changes}.items()})


@pytest.mark.parametrize(
    ("settings", "weights"),
    [
        (config("none"), [0, 0, 0, 1]),
        (config("current"), [0, 0, 0, 1]),
        (config("all"), [0.25] * 4),
        (config("all_history"), [0.25] * 4),
        (config("last_k", k=1), [0, 0, 0, 1]),
        (config("nearest_k", k=3), [0, 1 / 3, 1 / 3, 1 / 3]),
        (config("last_k", k=9), [0.25] * 4),
        (config("lambda_decay", **{"lambda": 0.5}), [1 / 15, 2 / 15, 4 / 15, 8 / 15]),
        (config("lambda_decay", **{"lambda": 1.0}), [0.25] * 4),
        (config("lambda_decay", **{"lambda": 0.0}), [0, 0, 0, 1]),
    ],
)
def test_probabilities_of_the_rounds(settings, weights):
    assert replay_weights(4, settings) == pytest.approx(weights)
    assert replay_weights(1, settings) == [1.0]


def test_replay_draws_without_replacement_until_a_round_is_used_up():
    assert sorted(replay([9, 9, 5], config("none"))) == [(2, k) for k in range(5)]  # as many as the current round has
    assert Counter(Counter(replay([7, 3], config("none", sample_size=8))).values()) == {3: 2, 2: 1}
    drawn = replay([400, 400, 400], config("lambda_decay", **{"lambda": 0.5}, sample_size=700))
    assert len(drawn) == 700 and max(Counter(drawn).values()) == 1  # 400 of the last round at most, on average
    counts = Counter(number for number, _ in drawn)
    assert 80 < counts[0] < 120 and 170 < counts[1] < 230 and 360 < counts[2] < 440
    assert {number for number, _ in replay([4, 4, 4], config("last_k", k=2, sample_size=100))} == {1, 2}


def test_replay_depends_on_seed_and_round_alone():
    settings = config("all")
    assert replay([5, 5], settings, 1) == replay([5, 5], settings, 1) != replay([5, 5], settings, 2)
    assert replay([5], settings) != replay([5, 5], settings)


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"mode": "lambda"}, "it must be 'current', 'none'"),
        ({"mode": "last_k", "k": 0}, "`preference_replay_k` is 0; it must be at least 1"),
        ({"mode": "lambda_decay", "lambda": 1.5}, "`preference_replay_lambda` is 1.5"),
        ({"mode": "all", "sample_size": 0}, "`preference_replay_sample_size` is 0"),
    ],
)
def test_impossible_replay(settings, problem):
    with pytest.raises(ValueError, match=problem):
        config(**settings)
