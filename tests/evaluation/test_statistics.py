"""pass@k and confidence intervals, against definitions and by hand."""

import itertools
import re
from types import SimpleNamespace

import numpy as np
import pytest

from trl_multiagent.evaluation.config import EvaluationConfig
from trl_multiagent.evaluation.players import Policy
from trl_multiagent.evaluation.statistics import (
    Result,
    bounded_intervals,
    compute_result,
    estimates,
    numbers_of,
    pass_at_k,
    smallest_difference,
    speed_of,
    t_quantile,
    total_cost,
)
from trl_multiagent.report.evaluation import Report, cross_play_lines, mixes, show_difference, summarize_cross_play


def test_pass_at_k_is_the_share_of_subsets_with_an_answer_that_passes():
    for n in range(1, 8):
        for c in range(n + 1):
            answers = [k < c for k in range(n)]
            for k in range(1, n + 1):
                subsets = list(itertools.combinations(answers, k))
                assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, subsets)) / len(subsets))


def drawing(number, confidence=0.95):
    return EvaluationConfig(num_bootstraps=number, confidence=confidence, seed=0)


COSTS = ("calls", "generated_tokens", "waited_tokens", "wall_seconds")
UNIT, UNKNOWN = [(0.0, 1.0)], [(-np.inf, np.inf)]


def test_the_interval_of_zeros_and_ones_is_that_of_clopper_and_pearson():
    def interval(passed, items):
        values = (np.arange(items) < passed).astype(float)
        (estimate,) = estimates(values[None, :, None], UNIT, drawing(100_000))
        return estimate[:3]

    # With no or all passes, the far end solves (1 - p)^n = 0.025; the others are from a table
    assert interval(0, 20) == pytest.approx((0.0, 0.0, 1 - 0.025 ** (1 / 20)), abs=2e-3)
    assert interval(20, 20) == pytest.approx((1.0, 0.025 ** (1 / 20), 1.0), abs=2e-3)
    assert interval(1, 10) == pytest.approx((0.1, 0.0025, 0.4450), abs=4e-3)
    assert interval(5, 10) == pytest.approx((0.5, 0.1871, 0.8129), abs=4e-3)


def test_the_interval_of_values_without_bounds_is_students():
    assert t_quantile(0.975, 1) == pytest.approx(12.7062, abs=1e-3)
    assert t_quantile(0.975, 2) == pytest.approx(4.3027, abs=1e-4)
    assert t_quantile(0.95, 30) == pytest.approx(1.6973, abs=1e-4)
    (estimate,) = estimates(np.array([[[1.0], [2.0], [6.0]]]), UNKNOWN, drawing(100))
    radius = 4.3027 * np.sqrt(7 / 3)
    assert estimate == pytest.approx((3.0, *[3 - radius, 3 + radius] * 2), abs=1e-3)
    for values in ([[[3.0]]], [[[3.0], [3.0]]]):  # nothing from which to compute an interval
        (equal,) = estimates(np.array(values), UNKNOWN, drawing(100))
        assert equal.mean == 3.0 and np.isnan(equal[1:]).all()


def test_missing_values_do_not_count():
    values = np.array([[[0.0, np.nan], [1.0, 2.0], [2.0, 4.0]]])
    for bounds in (UNKNOWN * 2, [(0.0, 4.0)] * 2):
        assert [x.mean for x in estimates(values, bounds, drawing(200, 0.9))] == [1.0, 3.0]
        kept = estimates(values[:, 1:, 1:], bounds[1:], drawing(20_000, 0.9))
        assert estimates(values, bounds, drawing(20_000, 0.9))[1] == pytest.approx(kept[0], abs=0.05)


def coverage(values, truth, bounds):
    """The share of the trials, the last dimension of `values`, whose 95 % interval contains the truth."""
    ends = bounded_intervals(values, np.repeat(np.array([bounds]).T, values.shape[1], axis=1), 1000, 0.95, seed=0)
    return np.mean((ends[0] <= truth) & (truth <= ends[1]))


@pytest.mark.parametrize("rate", [0.003, 0.02, 0.5, 0.98])
@pytest.mark.parametrize("num_items", [20, 100])
def test_intervals_of_rates_cover_near_zero_and_one(rate, num_items):
    """One answer per item; ten answers of items that differ much, and of items that differ little; k = 5 of 10."""
    generator = np.random.default_rng(0)
    shape = (num_items, 400)
    once = (generator.random(shape) < rate).astype(float)
    assert coverage(once, rate, (0, 1)) >= 0.93
    for alike in (0.1, 2.0, 50.0):
        passed = generator.binomial(10, generator.beta(alike * rate, alike * (1 - rate), shape))
        assert coverage(passed / 10, rate, (0, 1)) >= 0.93
        best_of_5 = np.array([pass_at_k(10, c, 5) for c in range(11)])
        many = generator.binomial(10, generator.beta(alike * rate, alike * (1 - rate), 200_000))
        assert coverage(best_of_5[passed], best_of_5[many].mean(), (0, 1)) >= 0.93
    other = generator.random(shape) < rate / 2  # a paired difference
    assert coverage(once - other, rate / 2, (-1, 1)) >= 0.93


@pytest.mark.parametrize("teams", [1, 2, 3, 8])
@pytest.mark.parametrize("spread", [0.1, 0.5])
def test_intervals_over_teams_cover_the_truth(teams, spread):
    """The mean of the population is 0. With several teams, their own levels vary, too."""
    generator = np.random.default_rng(0)
    levels = spread * generator.standard_normal((teams, 1, 400)) * (teams > 1)
    values = levels + generator.standard_normal((1, 60, 400)) + 0.3 * generator.standard_normal((teams, 60, 400))
    found = estimates(values, UNKNOWN * 400, drawing(100))
    assert np.mean([x.low <= 0 <= x.high for x in found]) >= 0.93


def policy(name="team", kind="team", **others):
    return Policy(name, kind, SimpleNamespace(unwrapped=SimpleNamespace(metric_ranges={})), None, 6, **others)


def record(item, episode, rewards, passed):
    """
    An episode of a batch of two that took 1 s, in which aux generated for 0.1 s and main for 0.3 s in every turn.
    """
    numbers = {"tokens": {"aux": 2, "main": 3}, "prompt_tokens": {"aux": 1, "main": 1}}
    turns = [{"reward": r, "metrics": {"passed": p}, **numbers} for r, p in zip(rewards, passed, strict=True)]
    timing = {"batch_seconds": 1.0, "batch_episodes": 2}
    timing["generation_seconds"] = [{"aux": 0.1, "main": 0.3}] * len(turns)
    return {"item": item, "name": f"item {item}", "episode": episode, "timing": timing, "turns": turns}


def test_numbers_of_transcripts_by_hand():
    config = EvaluationConfig(num_episodes=2, k=[1, 2], discount=0.5, num_bootstraps=100)
    records = [record(0, 0, [1, 2], [0, 1]), record(0, 1, [3, 2], [0, 0]), record(1, 0, [0, 4], [1, 1])]
    records.append(record(1, 1, [0, 4], [1, 1]))
    result = compute_result(policy(), records, 2, config)
    numbers = {turn: {k: x.mean for k, x in of.items()} for turn, of in numbers_of([result], config).items()}
    assert list(numbers) == ["turn_1", "turn_2", "final"]
    assert numbers["turn_1"] == {"reward": 1.0, "pass@1": 0.5, "pass@2": 0.5, "passed": 0.5}
    assert numbers["turn_2"] == {"reward": 3.0, "pass@1": 0.75, "pass@2": 1.0, "passed": 0.75}
    assert numbers["final"] == {"return": 2.5, **numbers["turn_2"]}
    cost = {"episodes": 4, "calls": 16, "generated_tokens": 40, "waited_tokens": 24}
    cost |= {"prompt_tokens": 16, "wall_seconds": 2.0}
    assert result.cost == cost
    gap = numbers_of([result], config, [result])
    assert gap["final"]["pass@1"].low < -0.5 and gap["final"]["pass@1"].high > 0.5  # two equal items show little
    # A task without `passed` has no pass@k
    for each in records:
        each["turns"] = [{**turn, "metrics": {}} for turn in each["turns"]]
    assert compute_result(policy(), records, 2, config).column("pass@1") is None


def test_an_answer_without_a_reward_leaves_the_pass_rate_of_the_others():
    records = [record(0, k, [1], [1]) for k in range(3)] + [record(0, 3, [float("nan")], [0])]
    for each in records[:3]:
        each["turns"][0]["metrics"]["reward_none"] = 0.0
    records[3]["turns"][0]["metrics"] = {"reward_none": 1.0}
    config = EvaluationConfig(num_episodes=4, k=[1, 4])
    result = compute_result(policy(), records, 1, config)
    assert result.column("pass@1") == result.column("passed") == [1.0] and result.column("pass@4") is None
    records[3]["turns"][0]["metrics"]["passed"] = 0.0
    result = compute_result(policy(), records, 1, config)
    assert result.column("pass@1") == result.column("passed") == [0.75] and result.column("pass@4") == [1.0]


def test_one_waits_for_all_agents_of_a_pipeline():
    turns = [{"tokens": {"aux": 3, "main": 5}, "prompt_tokens": {"aux": 1, "main": 1}}] * 2
    records = [{"turns": turns, "timing": {"batch_seconds": 1.0, "batch_episodes": 1}}]
    assert [total_cost(records, is_pipeline)["waited_tokens"] for is_pipeline in (False, True)] == [10, 16]


def test_speed_of_the_agents_and_of_the_team_by_hand():
    records = [record(0, k, [1, 2], [0, 1]) for k in range(4)]  # two batches
    speed = speed_of(records)
    assert speed["episodes"] == 2
    aux, main = speed["agents"]["aux"], speed["agents"]["main"]  # two turns each
    assert (aux, main) == (pytest.approx((0.2, 16 / 0.4)), pytest.approx((0.6, 24 / 1.2)))
    assert (speed["latency"], speed["tokens_per_second"]) == pytest.approx((0.8, 40 / 1.6))
    for each in records:  # both agents in one call
        each["timing"]["generation_seconds"] = [{"aux + main": 0.3}] * 2
    assert speed_of(records)["agents"] == {"aux + main": pytest.approx((0.6, 40 / 1.2))}


def test_percentages_of_the_maximum_and_hidden_tests_are_in_the_table():
    config = EvaluationConfig(num_episodes=1, k=[1], discount=0.5, num_bootstraps=100)
    records = [record(item, 0, [1, 2], [0, 1]) for item in range(4)]
    for each in records:
        each["turns"][1]["metrics"]["passed_hidden"] = float(each["item"] < 1)
    team = policy()
    team.environment.unwrapped.metric_ranges = {"reward": (0.0, 4.0), "other": (0.0, 1.0)}
    result = compute_result(team, records, 4, config)
    assert result.bounds("return") == (0.0, 6.0) and result.bounds("unknown") == (-np.inf, np.inf)
    report = Report(config, [result], 4)
    shares = report.to_json()["policies"]["team"]["percent_of_maximum"]
    assert shares == {"reward": 50.0, "return": pytest.approx(100 / 3)}
    table = report.table()
    for text in ("50.0 % of 4", "pass@1, hidden tests", "25.0% [", "wall s"):
        assert text in table, text
    assert "It counts all tests, also those that feedback has shown" in table


def test_the_table_names_intervals_that_need_a_range():
    """Student's interval of rare rewards covers .3 of the time with 8 items, and nothing in the values shows it."""
    config = EvaluationConfig(num_episodes=1, k=[1], num_bootstraps=100)
    records = [record(item, 0, [1, 2], [0, 1]) for item in range(4)]
    note = "known range (`metric_ranges`), such as reward, have Student's t interval, which is too narrow"
    for ranges, has_note in (({}, True), ({"reward": (0.0, 4.0)}, False)):
        team = policy()
        team.environment.unwrapped.metric_ranges = ranges
        report = Report(config, [compute_result(team, records, 4, config)], 4)
        assert (note in report.table()) == (note in report.to_json()["range_note"]) == has_note


def test_ranges_of_penalties_and_of_episodes_that_end_early():
    config = EvaluationConfig(num_episodes=1, k=[1], num_bootstraps=100)
    records = [record(item, 0, rewards, [0] * len(rewards)) for item, rewards in enumerate([[1, 2], [1]])]
    for reward, total in (((-2.0, 0.0), (-4.0, 0.0)), ((1.0, 2.0), (0.0, 4.0)), ((-2.0, -1.0), (-4.0, 0.0))):
        team = policy()
        team.environment.unwrapped.metric_ranges = {"reward": reward}
        result = compute_result(team, records, 2, config)
        assert result.bounds("return") == total
        shares = Report(config, [result], 2).to_json()["policies"]["team"]["percent_of_maximum"]
        assert ("reward" in shares) == (reward[1] > 0)


def test_all_teams_of_two_seeds_have_an_interval_over_teams():
    config = EvaluationConfig(num_episodes=1, k=[1], num_bootstraps=100)
    episodes = [[record(item, 0, [1], [float(item < number)]) for item in range(40)] for number in (20, 24)]
    results = [compute_result(policy(f"{k}"), x, 40, config) for k, x in enumerate(episodes)]
    report = Report(config, results, 40)
    both = report.over_teams["final"]["pass@1"]
    assert both.mean == 0.55 and both.low == 0.0 and both.high == 1.0  # t with one degree of freedom: 12.7 x 5 %
    assert "by Student's t, n = 2; over items alone if all teams have the same mean." in report.table()
    equal = [compute_result(policy(f"{k}"), episodes[0], 40, config) for k in range(2)]
    one = numbers_of(equal[:1], config)["final"]["pass@1"]
    assert numbers_of(equal, config)["final"]["pass@1"] == pytest.approx(one)


def test_a_difference_that_all_items_have_is_shown():
    def shown(values, bounds):
        (estimate,) = estimates(np.array(values)[None, :, None], bounds, drawing(10_000))
        return show_difference(estimate, "return")

    assert shown([1.0] * 5, UNKNOWN) == "1.000 (no spread)" and shown([0.0] * 5, UNKNOWN) == "0.000 (no spread)"
    assert shown([1.0] * 33, [(-1, 1)]).startswith("1.000 [0.") and "no difference" in shown([0.0] * 33, [(-1, 1)])
    assert shown([0.3] * 4, [(-1, 1)]).endswith("] (no spread)")  # although the interval is as wide as four allow
    assert "no difference shown" in shown([-1.0, 0.5, 1.0], UNKNOWN)
    # Four of 33 items got better. Student's interval shows it, the one that assumes nothing does not
    assert shown([1.0] * 5 + [0.0] * 28, [(-1, 1)]).endswith("] only t excludes 0")


def test_a_comparison_without_a_common_item_has_no_number():
    config, costs = EvaluationConfig(num_bootstraps=100), {"episodes": 2, **dict.fromkeys(COSTS, 1)}

    def result(name, kind, values, mix=()):
        values = {("final", "return"): np.zeros(2), ("final", "pass@1"): np.array(values)}
        played = Result(policy(name, kind, mix=mix), values, costs, {}, {}, ())
        played.policy.environment.roles = ("aux", "main")
        return played

    one, other = [np.nan, 1.0], [0.0, np.nan]
    report = Report(config, [result("team", "team", one), result("base", "baseline", other)], 2)
    assert "nan" not in report.table() and report.to_json()["differences"]["base"]["final"]["pass@1"]["mean"] is None
    played = mixes(2, ("aux", "main"))
    kinds = ["team" if len(set(mix)) == 1 else "pair" for mix in played]
    values = [one if mix[0] else other for mix in played]
    report = Report(config, [*map(result, map(str, played), kinds, values, played)], 2)
    assert "nan" not in report.table()
    assert report.to_json()["cross_play"]["pass@1"]["matrices"] == {"aux": [[None] * 2] * 2}


@pytest.mark.parametrize("num_items", [6, 33, 200])
def test_the_smallest_difference_that_so_many_items_can_show(num_items):
    smallest = smallest_difference(num_items, 0.95)
    values = smallest * np.repeat([[0.97, 1.03]], num_items, axis=0)
    low, _ = bounded_intervals(values, np.array([[-1.0, -1.0], [1.0, 1.0]]), 100_000, 0.95, seed=0)
    assert low[0] < 0 < low[1]


@pytest.mark.parametrize("roles", [("aux", "main"), ("a", "b", "c")])
def test_cross_play_compares_the_diagonal_with_the_rest(roles):
    """Agents of the same run agree and get 1; others get as much as the item is worth."""
    config = EvaluationConfig(num_bootstraps=500)
    worth = np.array([0.0, 0.2, 0.4, 0.2])
    played = mixes(3, roles)
    assert len(played) == len(set(played)) == (9 if len(roles) == 2 else 3 + 3 * 6)
    team = policy()
    team.environment.roles = roles
    results = {
        mix: Result(team, {("final", "return"): worth if len(set(mix)) > 1 else worth * 0 + 1}, {}, {}, {}, ())
        for mix in played
    }
    found = summarize_cross_play(results, 3, "return", config)
    assert list(found.matrices) == (["aux"] if len(roles) == 2 else list(roles))
    assert np.allclose(found.matrices[roles[0]], np.where(np.eye(3), 1.0, 0.2))
    assert (found.diagonal.mean, found.off_diagonal.mean) == pytest.approx((1.0, 0.2)) and np.isnan(found.diagonal.low)
    radius = t_quantile(0.975, 3) * worth.std(ddof=1) / 2
    assert found.difference == pytest.approx((0.8, *[0.8 - radius, 0.8 + radius] * 2))
    lines = "\n".join(cross_play_lines("return", found))
    assert re.search(r"agents trained together +1\.000\n", lines) and "over runs" not in lines
    for played, result in results.items():  # the table has no interval over runs in any row
        kind = "team" if len(set(played)) == 1 else "pair"
        result.policy, result.cost = policy(str(played), kind, mix=played), {"episodes": 4, **dict.fromkeys(COSTS, 1)}
        result.policy.environment.roles = roles
    assert "all teams" not in Report(config, [*results.values()], 4).table()
    # If all teams are equally good, no difference is claimed
    generator = np.random.default_rng(0)
    for result in results.values():
        result.values = {("final", "return"): worth + 0.1 * generator.standard_normal(4)}
    same = summarize_cross_play(results, 3, "return", config)
    assert same.difference.low < 0 < same.difference.high


def test_settings_that_contradict_each_other():
    assert EvaluationConfig(num_episodes=7).pass_at == [1, 5]
    for wrong, message in [
        ({"num_episodes": 3, "k": [1, 5]}, "pass@5 needs at least 5 episodes per item, but `num_episodes` is 3"),
        ({"temperature": 0.0}, "`temperature` is 0, so all episodes"),
        ({"baselines": ["debate"]}, "it must be .raw_single_agent"),
    ]:
        with pytest.raises(ValueError, match=message):
            EvaluationConfig(**wrong)
