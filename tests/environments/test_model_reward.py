"""The environment whose reward in training comes from a model, and the comparison of its reward with the task's."""

import pytest

from trl_multiagent import FunctionEnvironment, workflow
from trl_multiagent.environments.base import ScoringContext, judge, scoring
from trl_multiagent.environments.reward_models import ModelRewardEnvironment
from trl_multiagent.environments.task_errors import TaskError

from tiny import Workflow, tiny_trainer


ITEMS = [{"x": "1"}, {"x": "2"}, {"x": "3"}]
ACTIONS = [{"aux": "a" * k, "main": "b"} for k in (1, 2, 4)]


def wrapped(**arguments):
    def length(completions, **columns):
        return [float(len(completion["aux"])) for completion in completions]

    seen = []

    def model(prompts, completions):
        seen.append(prompts)
        return [-2.0 * len(completion["aux"]) + 1 for completion in completions]

    task = FunctionEnvironment({"aux": "Help with {x}.", "main": "Do {x}."}, length)
    return ModelRewardEnvironment(task, model, **arguments), seen


def test_training_has_the_reward_of_the_model_and_evaluation_that_of_the_task():
    environment, seen = wrapped(version="7")
    context = ScoringContext()
    with scoring(context):
        outcomes = judge(environment, ITEMS, ACTIONS, [()] * 3)
    assert [outcome.reward for outcome in outcomes] == [-1.0, -3.0, -7.0]
    assert [outcome.metrics["rewards/task"] for outcome in outcomes] == [1.0, 2.0, 4.0]
    assert [outcome.metrics["rewards/model"] for outcome in outcomes] == [-1.0, -3.0, -7.0]
    assert context.metrics == {"rewards/correlation": [pytest.approx(-1.0)]}
    assert seen[0] == environment.next_prompts(ITEMS, [()] * 3) and environment.unwrapped is environment.task
    evaluated = judge(environment, ITEMS, ACTIONS, [()] * 3, evaluation=True)
    assert [outcome.reward for outcome in evaluated] == [1.0, 2.0, 4.0]
    assert [outcome.metrics["rewards/model"] for outcome in evaluated] == [-1.0, -3.0, -7.0]
    assert environment.resume_settings()["reward_model"] == "7"
    assert environment.score([], [], []) == [] == environment.evaluate([], [], [])


def test_without_the_task_in_training():
    environment, _ = wrapped(score_task=False)
    outcomes = environment.score(ITEMS, ACTIONS, [()] * 3)
    assert [outcome.metrics for outcome in outcomes] == [{"rewards/model": x} for x in (-1.0, -3.0, -7.0)]
    assert [outcome.reward for outcome in environment.evaluate(ITEMS, ACTIONS, [()] * 3)] == [1.0, 2.0, 4.0]


def test_the_task_pays_groups_in_evaluations_alone():
    @workflow(roles=("a",), group_reward=lambda item, episodes: [5.0] * len(episodes))
    async def task(item, agents):
        return float(len(await agents.a("Go:")))

    environment = ModelRewardEnvironment(task, lambda prompts, completions: [0.25] * len(completions))
    for evaluation, expected in ((False, None), (True, [5.0, 5.0])):
        judge(environment, [{}] * 2, [{"a": "x"}] * 2, [()] * 2, evaluation=evaluation)
        assert environment.group_rewards({}, [(), ()]) == expected


def test_joint_actions_without_a_reward_of_the_task_are_in_no_metric():
    task = FunctionEnvironment({"aux": "{x}", "main": "{x}"}, lambda completions, **columns: [1.0, 2.0, None])
    environment = ModelRewardEnvironment(task, lambda prompts, completions: [1.0, 2.0, 3.0])
    context = ScoringContext([environment.prompts(x, ()) for x in ITEMS], reward_none="drop")
    with scoring(context):
        outcomes = judge(environment, ITEMS, ACTIONS, [()] * 3)
    assert [outcome.metrics.get("rewards/task") for outcome in outcomes] == [1.0, 2.0, None]
    assert context.metrics["rewards/correlation"] == [pytest.approx(1.0)]


def test_every_role_acts():
    environment = ModelRewardEnvironment(Workflow(), lambda **_: [])
    prompts = environment.next_prompts([{"x": "12"}], [()])
    assert [*prompts[0]] == ["aux", "main"]
    with pytest.raises(
        TaskError, match="A joint reward model needs the answers of all roles in every turn, but main does not act"
    ):
        environment.next_prompts([{"x": "12"}, {"x": "1"}], [(), ()])


def test_a_trainer_logs_both(tmp_path):
    environment, _ = wrapped()
    trainer = tiny_trainer(tmp_path, environment=environment)
    trainer.train()
    log = trainer.state.log_history[0]
    assert log["reward"] == log["turn_1/rewards/model"] == pytest.approx(1 - 2 * log["turn_1/rewards/task"])
    assert log["rewards/correlation"] == pytest.approx(-1.0)
