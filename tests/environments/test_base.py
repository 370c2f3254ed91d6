import asyncio
import doctest

import pytest

from trl_multiagent.environments import base
from trl_multiagent.environments.base import FunctionEnvironment, Outcome, Turn


ITEMS = [{"topic": "rain", "level": 1}, {"topic": "snow", "level": 2}]
ACTIONS = [{"poet": "rain rain", "critic": "rain"}, {"poet": "sun", "critic": "snow"}]
PROMPTS = {"poet": "Write about {topic}.", "critic": lambda item: [{"role": "user", "content": item["topic"]}]}


def matches(completions, **columns):
    return [float(completion["critic"] in completion["poet"]) for completion in completions]


def levels(level, **columns):
    return [float(value) for value in level]


def environment(**settings):
    return FunctionEnvironment(**{"prompts": PROMPTS, "reward_funcs": matches, **settings})


def score(env, items=ITEMS, actions=ACTIONS):
    return env.score(items, actions, [[] for _ in items])


def test_the_docstring_example_runs():
    results = doctest.testmod(base)
    assert results.attempted == 2 and results.failed == 0


def test_roles_and_prompts_come_from_templates_and_functions():
    env = environment()
    assert env.roles == ("poet", "critic")
    assert env.prompts(ITEMS[0], []) == {
        "poet": "Write about rain.",
        "critic": [{"role": "user", "content": "rain"}],
    }


def test_a_template_that_needs_a_missing_column_says_which():
    env = environment(prompts={"poet": "Write about {subject}."})
    with pytest.raises(ValueError, match="`poet` needs the column 'subject'; the items have topic, level"):
        env.prompts(ITEMS[0], [])


def test_reward_functions_get_prompts_completions_and_columns():
    seen = {}

    def spy(**kwargs):
        seen.update(kwargs)
        return [0.0, 0.0]

    score(environment(reward_funcs=spy))
    assert seen["topic"] == ["rain", "snow"] and seen["level"] == [1, 2]
    assert seen["completions"] == ACTIONS
    assert [prompts["poet"] for prompts in seen["prompts"]] == ["Write about rain.", "Write about snow."]


def test_several_rewards_are_weighted_and_logged_unweighted():
    outcomes = score(environment(reward_funcs=[matches, levels], reward_weights=[2.0, 0.5]))
    assert [outcome.reward for outcome in outcomes] == [2.0 * 1 + 0.5 * 1, 2.0 * 0 + 0.5 * 2]
    assert outcomes[1].metrics == {"rewards/matches": 0.0, "rewards/levels": 2.0}


def test_async_rewards_run_side_by_side_and_keep_their_order():
    started = []

    async def slow(completions, **columns):
        started.append("slow")
        while len(started) < 2:  # ends only if the other one runs meanwhile
            await asyncio.sleep(0)
        return [1.0 for _ in completions]

    async def quick(completions, **columns):
        started.append("quick")
        return [10.0 for _ in completions]

    outcomes = score(environment(reward_funcs=[slow, levels, quick], reward_weights=[1.0, 100.0, 1.0]))
    assert [outcome.reward for outcome in outcomes] == [111.0, 211.0]
    assert outcomes[0].metrics == {"rewards/slow": 1.0, "rewards/levels": 1.0, "rewards/quick": 10.0}


@pytest.mark.parametrize("is_async", [False, True])
def test_scoring_works_inside_a_running_event_loop(is_async):
    async def late(completions, **columns):
        return matches(completions)

    async def notebook():
        return score(environment(reward_funcs=late if is_async else matches))

    assert [outcome.reward for outcome in asyncio.run(notebook())] == [1.0, 0.0]


def test_none_does_not_count():
    def first_only(completions, **columns):
        return [3.0, None]

    outcomes = score(environment(reward_funcs=[matches, first_only]))
    assert [outcome.reward for outcome in outcomes] == [4.0, 0.0]
    assert "rewards/first_only" not in outcomes[1].metrics


def test_an_action_that_nobody_scores_is_an_error():
    with pytest.raises(ValueError, match="returned None for the joint action"):
        score(environment(reward_funcs=lambda completions, **columns: [1.0, None]))


@pytest.mark.parametrize("rewards", [[1.0], [1.0, 2.0, 3.0]])
def test_a_wrong_number_of_rewards_is_an_error(rewards):
    def miscounted(**columns):
        return rewards

    with pytest.raises(ValueError, match=f"`miscounted` returned {len(rewards)} rewards for 2 joint actions"):
        score(environment(reward_funcs=miscounted))


def test_a_wrong_number_of_weights_is_an_error():
    with pytest.raises(ValueError, match="1 entries for 2 reward functions"):
        environment(reward_funcs=[matches, levels], reward_weights=[1.0])


def test_an_exception_in_a_reward_function_is_not_hidden():
    async def broken(**columns):
        raise KeyError("no such column")

    with pytest.raises(KeyError, match="no such column"):
        score(environment(reward_funcs=[matches, broken]))


def test_later_turns_come_from_the_transition():
    history = [Turn({"poet": "p", "critic": "c"}, ACTIONS[0], Outcome(0.5))]
    env = environment(
        transition=lambda item, history: dict.fromkeys(PROMPTS, f"{item['topic']} {history[-1].outcome.reward}")
    )
    assert env.prompts(ITEMS[0], history) == {"poet": "rain 0.5", "critic": "rain 0.5"}
    with pytest.raises(ValueError, match="needs a `transition`"):
        environment().prompts(ITEMS[0], history)
