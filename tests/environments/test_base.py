import asyncio
import doctest
from functools import partial

import numpy
import pytest
import torch

from trl_multiagent.environments import (
    Environment,
    FunctionEnvironment,
    Outcome,
    TaskError,
    Turn,
    function_environment,
)
from trl_multiagent.environments.base import ask, judge, scoring_metrics
from trl_multiagent.environments.reward_functions import role_reward


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
    results = doctest.testmod(function_environment)
    assert results.attempted == 2 and results.failed == 0


def test_roles_and_prompts_come_from_templates_and_functions():
    env = environment()
    assert env.roles == ("poet", "critic")
    assert env.prompts(ITEMS[0], []) == {"poet": "Write about rain.", "critic": [{"role": "user", "content": "rain"}]}


def test_messages_are_templates_that_a_run_is_resumed_with():
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "On {topic}.", "name": "reader"}]
    env = environment(prompts={"poet": chat})
    assert env.prompts(ITEMS[0], []) == {"poet": [chat[0], {**chat[1], "content": "On rain."}]}
    other = environment(prompts={"poet": [{**chat[0], "content": "Be long."}, chat[1]]})
    assert env.resume_settings()["prompts"] == {"poet": chat} != other.resume_settings()["prompts"]
    with pytest.raises(ValueError, match=r"has \{poet\}, but 'poet' never answers before it"):
        environment(prompts={"poet": [{"role": "user", "content": "{poet}"}]})


@pytest.mark.parametrize("template", ["On {subject}.", [{"role": "user", "content": "On {subject}."}]])
def test_a_template_that_needs_a_missing_column_says_which(template):
    env = environment(prompts={"poet": template})
    with pytest.raises(ValueError, match="`poet` needs the column 'subject'; items have topic, level"):
        env.prompts(ITEMS[0], [])


@pytest.mark.parametrize(
    ("template", "item", "message"),
    [
        ("About {topic}", {"topic": None}, "'topic' is None in this item"),
        ("About {topic[sea]}", {"topic": {"sea": None}}, "'topic[sea]' is None in this item"),
        ("About {level:.1f}", {"level": float("nan")}, "'level' is nan in this item"),
        ("About {topics}", {"topics": ["sea", {"name": None}]}, "'topics' is ['sea', {'name': None}] in this item"),
        ("About {topic}", {"topic": b"sea"}, "'topic' is b'sea' in this item"),
        ('Answer with {"x": 1}', {"x": 1}, """needs the column '"x"'; items have x. Write {column} for a column's"""),
    ],
)
def test_a_prompt_never_says_something_else_than_its_template(template, item, message):
    with pytest.raises(TaskError) as error:
        environment(prompts={"poet": template}).prompts(item, [])
    assert message in str(error.value) and "{{ or }} for a brace" in str(error.value)


def in_order(prompts, order):
    return FunctionEnvironment(prompts, lambda completions, **_: [0.0] * len(completions), order=order)


def test_a_role_in_a_template_is_one_that_has_answered():
    for order in ([["editor"], ["writer"]], None):
        with pytest.raises(ValueError, match=r"The prompt of `editor` has \{writer\}, but 'writer' never answers"):
            in_order({"editor": "Edit {writer}", "writer": "Write"}, order)
    later = in_order({"editor": "Edit {writer}", "writer": "Write"}, [["editor", "writer"], ["editor"]])
    assert later.prompts({}, [])["editor"] == "Edit "
    with pytest.raises(TaskError, match="'writer' is a column of the items and a role"):
        later.prompts({"writer": "Ann"}, [])


def test_several_rewards_are_weighted_and_logged_unweighted():
    outcomes = score(environment(reward_funcs=[matches, levels], reward_weights=[2.0, 0.5]))
    assert [outcome.reward for outcome in outcomes] == [2.0 * 1 + 0.5 * 1, 2.0 * 0 + 0.5 * 2]
    assert outcomes[1].metrics == {"rewards/matches": 0.0, "rewards/levels": 2.0}


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


# Reward functions that fail


class Stop(BaseException):
    pass


class Unprintable(Exception):
    def __str__(self):
        raise ValueError("no text")


RETURNED = {
    "None": (lambda: None, "returned None; it must return a list of 2 numbers"),
    "too few": (lambda: [1.0], "returned a list of 1; it must return a list of 2 numbers"),
    "a generator": (lambda: (x for x in [1.0, 2.0]), "(generator); it must return a list"),
    "a matrix": (lambda: numpy.zeros((2, 3)), "(ndarray) for joint action 1 of 2; it must be a number."),
    "texts": (lambda: [1.0, "2.0"], "returned the reward '2.0' (str) for joint action 2 of 2"),
    "nan": (lambda: [1.0, float("nan")], "returned the reward nan for joint action 2 of 2"),
}
RAISED = {
    "sys.exit()": (SystemExit(), "called sys.exit()."),
    "KeyError": (KeyError("no such column"), "raised KeyError: 'no such column'"),
    "a function for one agent": (KeyError(0), "raised KeyError: 0. A completion is a dict by role: `role_reward("),
    "a function for texts": (TypeError("expected string, got 'dict'"), "A completion is a dict by role"),
    "CancelledError": (asyncio.CancelledError(), "raised CancelledError"),
    "another BaseException": (Stop("enough"), "raised Stop: enough"),
    "one without a text": (Unprintable(1), "raised Unprintable"),
}


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("case", [*RETURNED, *RAISED])
def test_a_reward_function_that_fails_is_named(case, is_async):
    def failing(**columns):
        if case in RAISED:
            raise RAISED[case][0]
        return RETURNED[case][0]()

    async def failing_later(**columns):
        await asyncio.sleep(0)
        return failing()

    async def endless(**columns):
        await asyncio.sleep(1000)

    # One that waits meanwhile is not waited for
    waiting = [endless] if is_async and case in RAISED else []
    with pytest.raises(TaskError) as error:
        score(environment(reward_funcs=[matches, *waiting, failing_later if is_async else failing]))
    message = {**RETURNED, **RAISED}[case][1]
    name = "failing_later" if is_async else "failing"
    assert str(error.value).startswith(f"The reward function `{name}` ") and message in str(error.value)
    assert "\n" not in str(error.value)


def test_an_interrupt_stays_one():
    def interrupted(**columns):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        score(environment(reward_funcs=interrupted))


@pytest.mark.parametrize(
    "rewards",
    [
        [True, 2],
        numpy.array([1, 2], "float16"),
        torch.tensor([[1.0], [2.0]]),
        [torch.tensor(1), numpy.float32(2)],
    ],
    ids=repr,
)  # fmt: skip
def test_rewards_may_be_any_list_of_numbers(rewards):
    outcomes = score(environment(reward_funcs=lambda **columns: rewards))
    assert [outcome.reward for outcome in outcomes] == [1.0, 2.0]
    assert all(type(outcome.reward) is float for outcome in outcomes)


class Judge:
    def __init__(self, value):
        self.value = value

    def __call__(self, completions, **columns):
        return [self.value] * len(completions)

    def method(self, completions, **columns):
        return [self.value] * len(completions)


def scaled(completions, scale, **columns):
    return [scale] * len(completions)


def test_partial_functions_and_callable_objects():
    functions = [partial(scaled, scale=1.0), Judge(2.0), Judge(3.0).method, partial(partial(scaled), scale=4.0)]
    env = environment(reward_funcs=(*functions, Judge(5.0)))
    found = score(env)[0].metrics
    assert found == {f"rewards/{x}": k + 1.0 for k, x in enumerate("scaled Judge method scaled_2 Judge_2".split())}
    assert "reward_funcs=[scaled, Judge, method, scaled_2, Judge_2]" in repr(env)
    with pytest.raises(TaskError, match=r"The reward function `Judge` returned the reward \[\] \(list\) for"):
        score(environment(reward_funcs=Judge([])))


def generator(completions, **columns):
    yield from [1.0, 2.0]


async def async_generator(completions, **columns):
    yield 1.0


def positional(completions, /, **columns):
    return [1.0, 2.0]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"reward_funcs": [matches, 3]}, r"`reward_funcs` contains 3 \(int\), which is not a function"),
        ({"reward_funcs": None}, "contains None, which is not a function"),
        ({"reward_funcs": Judge}, "the class `Judge`: pass an instance"),
        ({"reward_funcs": generator}, "`generator` contains `yield`"),
        ({"reward_funcs": role_reward("poet", async_generator)}, "`async_generator` contains `yield`"),
        ({"reward_funcs": positional}, "its parameter `completions` is positional only"),
        ({"reward_funcs": partial(scaled, 1, 2, 3)}, "its arguments do not fit"),
        ({"reward_funcs": []}, "`reward_funcs` is empty"),
        ({"reward_funcs": "org/reward-model"}, "The reward model 'org/reward-model' cannot be loaded"),
        ({"reward_funcs": role_reward("actor", matches)}, r"the role 'actor', but the roles are \['poet', 'critic'\]"),
        ({"reward_weights": [1.0, 2.0]}, "2 entries for 1 reward functions"),
        ({"reward_weights": [float("nan")]}, "must be a list of finite numbers"),
        ({"prompts": {"poet": None}}, "The prompt of `poet` is None"),
        ({"prompts": {"poet": [{"role": "user"}]}}, r"The prompt of `poet` is \[{'role': 'user'}\]"),
    ],
)
def test_what_cannot_be_used_is_refused_when_the_environment_is_made(settings, message):
    with pytest.raises((TypeError, ValueError), match=message) as error:
        environment(**settings)
    assert "\n" not in str(error.value)


def test_later_turns_come_from_the_transition():
    history = [Turn({"poet": "p", "critic": "c"}, ACTIONS[0], Outcome(0.5))]
    env = environment(
        transition=lambda item, history: dict.fromkeys(PROMPTS, f"{item['topic']} {history[-1].outcome.reward}")
    )
    assert env.prompts(ITEMS[0], history) == {"poet": "rain 0.5", "critic": "rain 0.5"}
    with pytest.raises(ValueError, match="no `transition` makes the prompts"):
        environment().check_turns(2)

    class Repeats(FunctionEnvironment):
        def prompts(self, item, history):
            return super().prompts(item, [])

    assert Repeats(PROMPTS, matches).check_turns(2) == 2


# Environments of a user's own


class Own(Environment):
    """Gives what it is told to, or raises it."""

    roles = ("poet", "critic")

    def __init__(self, answer):
        self.answer = answer

    def prompts(self, item, history):
        return self.answered()

    def score(self, items, joint_actions, histories):
        return self.answered()

    def metrics(self):
        return self.answered()

    def answered(self):
        if isinstance(self.answer, BaseException):
            raise self.answer
        return self.answer


BAD_OUTCOMES = [
    (None, "`Own.score` returned None; it must return a list of 2 outcomes."),
    ([Outcome(1.0)], "`Own.score` returned a list of 1; it must return a list of 2 outcomes."),
    ([Outcome(1.0), "good"], "returned 'good' (str) for joint action 2 of 2; it must return an `Outcome`"),
    ([1.0, float("nan")], "`Own.score` returned the reward nan for joint action 2 of 2"),
    ([Outcome(None), Outcome(1.0)], "`Own.score` returned the reward None for joint action 1 of 2"),
    ([Outcome(1.0, {"length": "long"}), Outcome(1.0)], "`Own.score` returned the metric 'length' with the value"),
    ([Outcome(1.0, None), Outcome(1.0)], "`Own.score` returned the metrics None"),
    (SystemExit(0), "`Own.score` called sys.exit(0)."),
    (ZeroDivisionError("by zero"), "`Own.score` raised ZeroDivisionError: by zero"),
]
BAD_PROMPTS = [
    (None, "`Own.prompts` returned None; it must return a dict with a prompt for each role that acts."),
    ({"poet": "p", "editor": "p"}, "`Own.prompts` returned a prompt for editor; the roles are poet, critic."),
    ({}, "`Own.prompts` returned no prompt at the first turn: an episode must not end before"),
    ({"poet": "p", "critic": None}, "`Own.prompts`, for 'critic', returned None; a prompt is text, or messages"),
    ({"poet": "p", "critic": [{"role": "user"}]}, "a prompt is text, or messages"),
    (SystemExit(3), "`Own.prompts` called sys.exit(3)."),
    (KeyError("topic"), "`Own.prompts` raised KeyError: 'topic'"),
]
BAD_METRICS = [
    (None, "`Own.metrics` returned the metrics None"),
    ({"calls": "many"}, "`Own.metrics` returned the metric 'calls'"),
    (SystemExit(), "`Own.metrics` called sys.exit()."),
]


@pytest.mark.parametrize(("answer", "message"), [*BAD_OUTCOMES, *BAD_PROMPTS, *BAD_METRICS])
def test_what_a_task_must_not_answer_is_named(answer, message):
    task = Own(answer)
    with pytest.raises(TaskError) as error:
        if (answer, message) in BAD_OUTCOMES:
            judge(task, ITEMS, ACTIONS, [[], []])
        elif (answer, message) in BAD_PROMPTS:
            ask(task, ITEMS[:1], [[]])
        else:
            scoring_metrics(task)
    assert message in str(error.value)


def test_outcomes_become_plain_numbers():
    given = (Outcome(torch.tensor(1.5), {"length": numpy.int64(3), "ok": True}), 2)
    outcomes = judge(Own(given), ITEMS, ACTIONS, [[], []])
    assert [outcome.reward for outcome in outcomes] == [1.5, 2.0] and outcomes[0].metrics == {"length": 3.0, "ok": 1.0}
    assert all(type(x) is float for x in [outcomes[1].reward, *outcomes[0].metrics.values()])


def test_an_outcome_that_stands_for_several_joint_actions_is_copied():
    shared = Outcome({"poet": 1.0, "critic": 2.0})
    first, second = judge(Own([shared] * 2), ITEMS, ACTIONS, [[], []])
    assert first is shared and first == second == Outcome(1.5, role_rewards={"poet": 1.0, "critic": 2.0})
    first.reward, first.metrics["a"], first.extra["b"] = 9.0, 1.0, 2
    assert second == Outcome(1.5, role_rewards={"poet": 1.0, "critic": 2.0})


@pytest.mark.parametrize(
    ("changes", "history", "message"),
    [
        ({"prompts": {"poet": "{topic:d}"}}, [], "template of `poet` cannot be filled"),
        ({"prompts": {"poet": lambda item: item["topic"][99]}}, [], "prompt function `<lambda>` of 'poet' raised Ind"),
        ({"prompts": {"poet": lambda item: None}}, [], "The prompt function `<lambda>` of 'poet' returned None"),
        ({"transition": lambda item, history: {"x": ""}}, [1], "The transition `<lambda>` returned a prompt for x"),
        ({"transition": Judge(1)}, [1], "The transition `Judge` raised TypeError"),
    ],
)
def test_templates_and_transitions_that_fail_are_named(changes, history, message):
    with pytest.raises(TaskError) as error:
        ask(environment(**changes), ITEMS[:1], [history])
    assert message in str(error.value)
