"""Rollout metrics of two processes, computed from trees that are defined here by hand."""

import statistics

import pytest

from trl_multiagent import FunctionEnvironment
from trl_multiagent.environments import Outcome, TaskError
from trl_multiagent.rollout.tree import Node, Samples, acting, grow_trees, judge_nodes
from trl_multiagent.trainers.base.metrics import RolloutTotals, rollout_totals


def node(rewards, returns, *completions, metrics=()):
    node = Node({}, (), {"solo": "Ask"}, {"solo": Samples([1, 2], list(completions), ["a"] * len(completions))})
    node.indices = [(k,) for k in range(len(rewards))]
    node.outcomes = [Outcome(reward, dict(metrics)) for reward in rewards]
    node.rewards, node.returns = rewards, returns
    return node


HERE = [
    [node([1.0, 3.0], [1.5, 4.5], [5, 9], [5])],
    [node([0.5, 0.5], [0.5, 0.5], [9], [5, 5, 9], metrics={"m": 2.0})],
]
HERE[0][0].children = {0: HERE[1][0]}
THERE = [[node([2.0, 2.0], [2.0, 2.0], [9], [9])]]  # ended at its first turn


def totals(turns, **settings):
    return rollout_totals(
        turns, {"solo": [9]}, **{"scoring": {"seconds": 1.5, "failures": 0.0}, "training": True, **settings}
    )


def test_totals_of_processes_with_different_trees_add_up():
    whole = totals(HERE) + totals(THERE)
    rewards = [1.0, 3.0, 0.5, 0.5, 2.0, 2.0]
    means = {name: total.mean for name, total in whole.totals.items()}
    assert means["reward"] == pytest.approx(statistics.fmean(rewards))
    assert whole.totals["reward"].std == pytest.approx(statistics.stdev(rewards))
    assert means["turn_1/reward_mean"] == 2.0 and means["turn_2/reward_mean"] == 0.5
    assert means["turn_1/expected_return"] == 2.5
    assert means["return"] == means["turn_1/expected_return"] == 2.5
    assert means["final_turn/reward"] == pytest.approx(statistics.fmean(rewards[2:]))
    assert means["turn_2/m"] == 2.0
    assert means["frac_reward_zero_std"] == pytest.approx(2 / 3)
    assert means["agents/solo/completions/mean_length"] == pytest.approx(9 / 6)
    assert means["agents/solo/completions/clipped_ratio"] == pytest.approx(1 / 6)
    assert whole.sums["num_tokens"] == 6 * 2 + 9
    assert whole.sums["reward/seconds"] == 3.0 and "reward/failures" in whole.sums


def test_a_branch_that_the_environment_ends_counts_as_its_last_turn(monkeypatch):
    monkeypatch.setattr(HERE[0][0], "ended", [1])
    assert totals(HERE).totals["final_turn/reward"].mean == pytest.approx((3.0 + 0.5 + 0.5) / 3)


def test_metrics_of_episodes_are_means_of_the_last_values_of_those_that_have_ended(monkeypatch):
    root, (child,) = HERE[0][0], HERE[1]
    monkeypatch.setattr(root, "ended", [1])
    monkeypatch.setattr(root, "outcomes", [Outcome(1.0, {"told": 4.0}), Outcome(3.0, {"m": 5.0})])
    monkeypatch.setattr(child, "history", (root.turn(0),))
    found = {name: total.mean for name, total in totals(HERE).totals.items() if name.startswith("episode/")}
    assert found == {"episode/length": (1 + 2 + 2) / 3, "episode/m": (5 + 2 + 2) / 3, "episode/told": 4.0}
    assert "episode/length" not in totals(HERE, num_turns=1).totals


def test_an_evaluation_has_no_metrics_of_groups():
    names = totals(HERE, training=False).totals
    assert "reward" in names and not {"frac_reward_zero_std", "turn_1/early_terminated"} & names.keys()


def test_the_deviation_of_a_single_reward_is_zero():
    assert totals([[node([2.0], [2.0], [9])]]).totals["reward"].std == 0.0


def test_numbers_that_reward_functions_log():
    parts = [totals(HERE, logged={"length": [1.0, 2.0]}), totals(THERE, logged={"length": [6.0]}), totals(THERE)]
    assert sum(parts, RolloutTotals()).totals["length"].mean == 3.0
    for name in ("reward", "turn_2/m", "env_step"):
        with pytest.raises(TaskError, match=f"logged the metric '{name}', a name that the trainer uses"):
            totals(HERE, logged={name: [1.0]})


def test_the_most_common_text_is_counted_over_all_processes():
    here, there = ([[node([1.0, 2.0], [1.0, 2.0], [9], [9])]] for _ in range(2))
    here[0][0].samples["solo"].texts = ["a", "b"]
    there[0][0].samples["solo"].texts = ["b", "b"]
    name = "agents/solo/completions/most_common_ratio"
    assert name not in totals(here).metrics()  # a single item may well have one answer
    assert (totals(here) + totals(there)).metrics()[name] == 0.75


def test_roles_that_do_not_act_and_rewards_at_the_end_alone():
    """
    Two episodes of an item, of which one ends before main acts: nothing is known of how main's answers differ between
    items.
    """

    def reward(completions, **columns):
        return [{"aux": float(len(x["aux"])), "main": 2.0} for x in completions]

    class Ending(FunctionEnvironment):
        def prompts(self, item, history):
            return {} if history and history[-1].joint_action["aux"] == "" else super().prompts(item, history)

    def sample(nodes, number):
        samples = {role: Samples([1, 2], [[5, 9]], ["a" if role == "aux" else "b"]) for role in ("aux", "main")}
        short = Samples([1, 2], [[9]], [""])
        return {role: [x if node.episode else short for node in acting(role, nodes)] for role, x in samples.items()}

    environment = Ending({"aux": "A", "main": "{aux}"}, reward, order=[["aux"], ["main"]])
    settings = {"num_turns": 2, "num_generations": 1, "num_episodes": 2}
    turns = grow_trees([{}], environment, sample, lambda x: judge_nodes(environment, x), **settings)
    found = rollout_totals(turns, {"aux": [9], "main": [9]}, {}, training=True)
    metrics = found.metrics()
    assert [metrics[f"agents/{role}/return"] for role in ("aux", "main")] == [0.5, 1.0]
    # Over all turns, as the team's, which is the mean over the roles
    assert [metrics[f"agents/{role}/reward"] for role in ("aux", "main")] == pytest.approx([1 / 3, 2 / 3])
    assert metrics["reward"] == pytest.approx(1 / 2)
    assert (
        metrics["final_turn/reward"] == 0.75 and metrics["return"] == 0.75 and metrics["frac_reward_zero_std"] == 0.5
    )
    assert metrics["agents/aux/completions/mean_length"] == 1.5 and found.sums["num_tokens"] == 3 * 2 + 5
    common = [f"agents/{role}/completions/most_common_ratio" for role in ("aux", "main")]
    assert not {*common} & metrics.keys()
    assert [(found + found).metrics()[name] for name in common] == [0.5, 1.0]


def test_repetition_is_the_share_of_phrases_that_were_there_before():
    loop, varied = [5, 6] * 12, [*range(20)]
    means = {
        name: total.mean
        for name, total in totals([[node([1.0] * 3, [1.0] * 3, loop, varied, [5] * 9)]]).totals.items()
    }
    assert means["agents/solo/completions/repetition"] == pytest.approx((1 - 2 / 17 + 0) / 2)  # the last one is short
    assert "agents/solo/completions/repetition" not in totals(HERE).totals
