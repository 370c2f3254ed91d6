"""
Tools: an environment of TRL's `environment_factory`, whose methods an agent calls in its answers.

[`Tools`] is such an environment in a workflow of your own. [`tool_workflow`] plays it as [`~trl.GRPOTrainer`] does. In
a group of episodes the environment lives as long as its episode, so that each call is made once.
"""

import contextlib
import inspect
import json
from collections.abc import Callable, Mapping
from typing import Any

from transformers.utils import get_json_schema

from trl_multiagent.environments.base import Prompt
from trl_multiagent.environments.function_environment import first_prompt
from trl_multiagent.environments.task_errors import show, task_code
from trl_multiagent.environments.workflow import Agents, OutOfTurns, WorkflowEnvironment
from trl_multiagent.models.tool_calls import INSTRUCTIONS, JSON, find_calls, from_text, read_calls


class Tools:
    """
    The tools of one episode: an object with a method `reset`, which is called with the columns of the item, and whose
    other public methods are tools, except for `get_reward`. `observation` is the text that `reset` returned.

    Args:
        environment (`Any`): The object.
        item (`dict`): The columns.
        calls (`Callable[[str], list]`, *optional*): Returns the tool calls in an answer, each with `name` and
            `arguments`, as a dict or as a text for [`read_calls`]. By default [`find_calls`].

    Example:

    ```python
    >>> from trl_multiagent import workflow
    >>> from trl_multiagent.environments.tools import Tools
    >>> @workflow(roles=("agent", "judge"), live=True)
    ... async def play(item, agents):
    ...     tools = Tools(Guess(), item)
    ...     said = await agents.agent(f"{tools.instructions}\\n\\nGuess! {tools.observation}", stop="</tool_call>")
    ...     results = await tools.answer(said)
    ...     return float("right" in await agents.judge(f"The agent wrote {said}, the tools {results}."))

    ```
    """

    def __init__(self, environment: Any, item: Mapping[str, Any], calls: Callable[[str], list[Any]] | None = None):
        self.environment, self.calls, self.name = environment, calls or find_calls, type(environment).__name__
        self.tools = [x for x in methods_of(environment) if x not in ("reset", "get_reward") and x[0] != "_"]
        with task_code(f"`{self.name}.reset`"):
            self.observation: str = environment.reset(**item) or ""

    @property
    def instructions(self) -> str:
        """
        A text for prompts that describes the tools and the form of a call. As in TRL, tools need type hints and
        docstrings.
        """
        methods = [getattr(self.environment, name) for name in self.tools]
        return INSTRUCTIONS.format("\n".join(json.dumps(get_json_schema(method)) for method in methods))

    async def answer(self, text: str) -> str | None:
        """
        Makes the calls in an agent's answer. Returns the results, each on a line of its own, and `None` without a
        call. If a tool fails, its error is the result, as in TRL.
        """
        with task_code(f"The tools of `{self.name}`"):
            found = self.calls(text)
        return "\n".join([await self._results(call) for call in found]) if found else None

    async def reward(self) -> float:
        """Returns the result of `get_reward`."""
        with task_code(f"`{self.name}.get_reward`"):
            return await finished(self.environment.get_reward())

    async def _results(self, call: Any) -> str:
        try:
            calls = read_calls(call) if isinstance(call, str) else [call]
        except Exception as error:  # the agent reads it, in TRL's form
            return str({"error": str(error)})
        return "\n".join([await self._result(call) for call in calls])

    async def _result(self, call: Any) -> str:
        try:
            call = call.get("function", call) if isinstance(call, Mapping) else call  # OpenAI's form
            if isinstance(call, Mapping) and "tool_name" in call:  # Cohere's
                call = {"name": call["tool_name"], **call}
            if not isinstance(call, Mapping) or "name" not in call:
                raise ValueError(f"A call is an object with 'name' and 'arguments'; {show(call)} has no 'name'.")
            if call["name"] not in self.tools:
                raise ValueError(f"Tool {call['name']} not found.")
            method = getattr(self.environment, call["name"])
            arguments = call.get("arguments", call.get("parameters", {}))
            arguments = JSON.decode(arguments or "{}") if isinstance(arguments, str) else arguments
            if not isinstance(arguments, Mapping):
                raise ValueError(f"The 'arguments' of {call['name']} are {show(arguments)}; they must be an object.")
            parameters = inspect.signature(method).parameters
            for name, text in call.get("texts", {}).items():
                is_text = name not in parameters or parameters[name].annotation is str
                arguments = {**arguments, name: text if is_text else from_text(text)}
            return str(await finished(method(**arguments)))
        except Exception as error:
            return str({"error": str(error)})


async def finished(value: Any) -> Any:
    """Returns the result of a plain or an `async` method."""
    return await value if inspect.isawaitable(value) else value


def methods_of(environment: Any) -> list[str]:
    """Returns the names of an environment's methods. Raises `ValueError` if it has no `reset`."""
    names = [name for name, _ in inspect.getmembers(type(environment), inspect.isfunction)]
    if "reset" not in names:
        raise ValueError(f"`environment_factory` made {show(environment)}, which needs a method `reset`.")
    return names


def tool_workflow(
    environment_factory: Callable[[], Any] | Mapping[str, Callable[[], Any]],
    prompt: str | Callable[[dict], Prompt] = "{prompt}",
    *,
    role: str = "agent",
    results: str | None = None,
    calls: Callable[[str], list[Any]] | None = None,
    **settings: Any,
) -> WorkflowEnvironment:
    """
    Makes a task of an environment for [`~trl.GRPOTrainer`]: the agent calls tools until it answers without a call, and
    `get_reward` is its reward. As in TRL, an environment is used again after `reset`.

    Args:
        environment_factory (`Callable` or `dict[str, Callable]`): Makes the environment. With a dict, the item's
            column `environment` names the one that it needs.
        prompt (`str` or `Callable[[dict], Prompt]`, *optional*): The prompt, as in [`FunctionEnvironment`]; by default
            the item's column `prompt`. The tools are described in front of it, and what `reset` returns is added.
        role (`str`, *optional*, defaults to `"agent"`): The agent.
        results (`str`, *optional*): Template of the prompts with `{results}` of the calls. By default they are
            messages of the role `tool`, or of the user, if the chat template does not take the former.
        calls (`Callable`, *optional*): See [`Tools`].
        settings: See [`WorkflowEnvironment`].

    Raises:
        ValueError: An environment has no method `reset` or no `get_reward`.
    """
    is_dict = isinstance(environment_factory, Mapping)
    factories = environment_factory if isinstance(environment_factory, Mapping) else {"": environment_factory}
    free = {name: [factory()] for name, factory in factories.items()}
    for (environment,) in free.values():
        if "get_reward" not in methods_of(environment):
            raise ValueError(f"{show(environment)} has no method `get_reward`: write a workflow with `Tools`.")

    async def play(item: dict, agents: Agents) -> float:
        name = item["environment"] if is_dict else ""
        if name not in factories:
            raise ValueError(f"The column `environment` has {name!r}; the environments are {', '.join(factories)}.")
        environment = free[name].pop() if free[name] else factories[name]()
        try:
            tools = Tools(environment, {k: x for k, x in item.items() if not is_dict or k != "environment"}, calls)
            asked = first_prompt(role, prompt, item)
            *before, last = [{"content": asked}] if isinstance(asked, str) else asked
            content = f"{tools.instructions}\n\n{last['content']}{tools.observation}"
            with contextlib.suppress(OutOfTurns):
                said = await agents[role](
                    content if isinstance(asked, str) else [*before, {**last, "content": content}]
                )
                while (found := await tools.answer(said)) is not None:
                    shown = results.format(results=found) if results else [{"role": "tool", "content": found}]
                    said = await agents[role](shown)
            return await tools.reward()
        finally:
            free[name].append(environment)

    return WorkflowEnvironment(play, [role], **settings)
