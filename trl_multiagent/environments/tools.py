"""
Tools: an agent calls the methods of an environment of TRL's `environment_factory` in its answers.

[`Tools`] is such an environment in a workflow of your own. [`tool_workflow`] plays it as [`~trl.GRPOTrainer`] does. In
a group of episodes the environment lives as long as its episode, so that each call is made once.
"""

import contextlib
import inspect
import json
from collections.abc import Callable, Mapping
from typing import Any, get_type_hints

from pydantic import TypeAdapter, ValidationError
from transformers.utils import get_json_schema

from trl_multiagent.environments.base import Prompt, as_messages
from trl_multiagent.environments.function_environment import first_prompt
from trl_multiagent.environments.task_errors import show, task_code
from trl_multiagent.environments.workflow import Agents, OutOfTurns, WorkflowEnvironment
from trl_multiagent.models.tool_calls import INSTRUCTIONS, JSON, find_calls, from_text, read_calls


MAX_CHARACTERS = 8000  # about 2000 tokens


class Tools:
    """
    The tools of one episode: an object with a method `reset`, which is called with the columns of the item. Its other
    public methods are tools, except for `get_reward`. `observation` is the text that `reset` returned.

    Args:
        environment (`Any`): The object.
        item (`dict`): The columns.
        max_characters (`int`, *optional*, defaults to `8000`): Most characters of the results of an answer, which its
            calls share. A longer result is cut, with a note.
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

    def __init__(
        self,
        environment: Any,
        item: Mapping[str, Any],
        calls: Callable[[str], list[Any]] | None = None,
        max_characters: int = MAX_CHARACTERS,
    ):
        self.max_characters = max_characters
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
        results = [result for call in found for result in await self._results(call)]
        return "\n".join(cut(result, self.max_characters // len(results)) for result in results) if found else None

    async def reward(self) -> float:
        """Returns the result of `get_reward`."""
        with task_code(f"`{self.name}.get_reward`"):
            return await finished(self.environment.get_reward())

    async def _results(self, call: Any) -> list[str]:
        try:
            calls = read_calls(call) if isinstance(call, str) else [call]
        except Exception as error:  # the agent reads it, in TRL's form
            return [str({"error": str(error)})]
        return [await self._result(call) for call in calls]

    async def _result(self, call: Any) -> str:
        try:
            call = call.get("function", call) if isinstance(call, Mapping) else call  # OpenAI's form
            keys = call.keys() if isinstance(call, Mapping) else ()
            # The other keys are those of Cohere, Llama and LangChain
            tool = next((call[key] for key in ("name", "tool_name", "action") if key in keys), None)
            if tool is None:
                raise ValueError(f"A call is an object with 'name' and 'arguments'; {show(call)} has no 'name'.")
            if tool not in self.tools:
                raise ValueError(f"Tool {tool} not found.")
            method = getattr(self.environment, tool)
            arguments: Any = next(
                (call[key] for key in ("arguments", "parameters", "action_input") if key in keys), {}
            )
            types = get_type_hints(method)
            names = [*inspect.signature(method).parameters]
            if isinstance(arguments, str):
                text = arguments.strip()
                arguments = JSON.decode(text or "{}") if text[:1] in ("", "{") else from_text(text)
                # As ReAct gives the argument of a tool that has one
                arguments = {names[0]: text} if not isinstance(arguments, Mapping) and len(names) == 1 else arguments
            if not isinstance(arguments, Mapping):
                raise ValueError(f"The 'arguments' of {tool} are {show(arguments)}; they must be an object.")
            texts = {k: x if k in types or k not in names else from_text(x) for k, x in call.get("texts", {}).items()}
            given = {name: as_type(name, x, types.get(name, Any)) for name, x in {**arguments, **texts}.items()}
            return str(await finished(method(**given)))
        except Exception as error:
            return str({"error": str(error)})


def cut(text: str, length: int) -> str:
    """Returns at most the first `length` characters of a text, with a note if there are more."""
    return text if len(text) <= length else f"{text[:length]}\n[cut: {length} of {len(text)} characters are shown]"


def as_type(name: str, value: Any, annotation: Any) -> Any:
    """
    Returns an argument as its annotation says, such as 1 for the text `1` and `int`. Raises `ValueError` if it cannot
    be converted.
    """
    type_of = TypeAdapter(annotation)
    for form in (value, from_text(value) if isinstance(value, str) else json.dumps(value)):
        with contextlib.suppress(ValidationError):
            return type_of.validate_python(form)
    raise ValueError(f"The argument {name!r} is {show(value)}; it must be {inspect.formatannotation(annotation)}.")


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
    max_characters: int = MAX_CHARACTERS,
    **settings: Any,
) -> WorkflowEnvironment:
    """
    Makes a task of an environment for [`~trl.GRPOTrainer`]: the agent calls tools until it answers without a call, and
    `get_reward` is its reward. As in TRL, an environment is used again after `reset`. The metric `no_call` is the
    share of answers without a call.

    Args:
        environment_factory (`Callable` or `dict[str, Callable]`): Makes the environment. With a dict, the item's
            column `environment` names the one that it needs.
        prompt (`str` or `Callable[[dict], Prompt]`, *optional*): The prompt, as in [`FunctionEnvironment`]; by default
            the item's column `prompt`. The tools are described in front of it, and what `reset` returns is added.
        role (`str`, *optional*, defaults to `"agent"`): The agent.
        results (`str`, *optional*): Template of the prompts with `{results}` of the calls. By default they are
            messages of the role `tool`, or of the user, if the chat template does not take the former.
        calls (`Callable`, *optional*): See [`Tools`].
        max_characters (`int`, *optional*, defaults to `8000`): See [`Tools`].
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
        columns = {**item}
        name = columns.pop("environment") if is_dict else ""
        if name not in factories:
            raise ValueError(f"The column `environment` has {name!r}; the environments are {', '.join(factories)}.")
        environment = free[name].pop() if free[name] else factories[name]()
        try:
            tools = Tools(environment, columns, calls, max_characters)
            asked = first_prompt(role, prompt, item)
            *before, last = as_messages(asked)
            content = f"{tools.instructions}\n\n{last['content']}{tools.observation}"
            shown: Prompt = content if isinstance(asked, str) else [*before, {**last, "content": content}]
            with contextlib.suppress(OutOfTurns):
                while True:
                    found = await tools.answer(await agents[role](shown))
                    agents.log("no_call", float(found is None))
                    if found is None:
                        break
                    shown = results.format(results=found) if results else [{"role": "tool", "content": found}]
            return await tools.reward()
        finally:
            free[name].append(environment)

    settings["metric_ranges"] = {"no_call": (0.0, 1.0), **(settings.get("metric_ranges") or {})}
    return WorkflowEnvironment(play, [role], **settings)
