"""Environments around another one."""

import inspect

import pytest

from trl_multiagent.environments import Environment, FunctionEnvironment
from trl_multiagent.environments.base import AgentCall, call_of, with_call
from trl_multiagent.environments.wrapper import EnvironmentWrapper


def test_a_wrapper_asks_its_task_in_everything():
    """A method that `Environment` gains must be delegated, or a wrapped task would lose it."""
    public = {name for name, _ in inspect.getmembers(Environment) if not name.startswith("_")}
    own = {name for name in vars(EnvironmentWrapper) if not name.startswith("_")}
    # The first two are read from `unwrapped`, the next two by the task's own `show_answers` and `resume_settings`; the
    # turns of a wrapper may be others than its task's
    assert public - own == {"watched_metrics", "metric_ranges", "unseen", "task_settings", "order"}


@pytest.mark.parametrize("prompt", ["Answer.", [{"role": "user", "content": "Answer."}]])
def test_a_prompt_with_the_answers_of_others_is_asked_alike(prompt):
    asked = with_call(prompt, AgentCall(("\n",), 5))
    task = FunctionEnvironment({"a": "x", "b": "y"}, lambda completions, **columns: [0.0] * len(completions))
    shown = task.show_answers("b", asked, {"a": "yes"})
    assert "yes" in str(shown) and call_of(shown) == AgentCall(("\n",), 5)


def test_a_wrapper_does_what_its_task_does():
    task = FunctionEnvironment(
        {"poet": "About {topic}:", "critic": "Judge {topic}:"}, lambda completions, **columns: [2.0] * len(completions)
    )
    wrapper = EnvironmentWrapper(EnvironmentWrapper(task))
    items = [{"topic": "rain"}, {"topic": "iron"}]
    actions = [{"poet": "a", "critic": "b"}] * 2
    assert wrapper.unwrapped is task and wrapper.roles == ("poet", "critic")
    assert wrapper.next_prompts(items, [(), ()]) == task.next_prompts(items, [(), ()])
    assert wrapper.prompts(items[0], ()) == task.prompts(items[0], ())
    for method in ("score", "evaluate"):
        rewards = [outcome.reward for outcome in getattr(wrapper, method)(items, actions, [(), ()])]
        assert rewards == [2.0, 2.0]
    assert wrapper.resume_settings() == task.resume_settings()
    assert repr(wrapper) == f"EnvironmentWrapper(EnvironmentWrapper({task!r}))"
