"""
Tools: an environment of TRL's `environment_factory` plays a role, such as `tools`, after an agent that calls its
methods.

Such an environment holds the state of one episode, but here many branches are played at once. So the seat restores the
state before each answer: it calls `reset` with the columns of the item, and repeats the calls of the branch so far.
Results must depend on these alone; the seat checks this.
"""

import asyncio
import contextlib
import inspect
import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from transformers.utils import get_json_schema

from trl_multiagent.environments.base import JointAction
from trl_multiagent.environments.function_environment import event_loop
from trl_multiagent.environments.task_errors import TaskError, show, task_code
from trl_multiagent.rollout.seats import Branch, Seat


# What stands around a call in the answers of Hermes, Qwen and GLM, Qwen3-Coder, Mistral, Llama, DeepSeek and gpt-oss
CALL = re.compile(
    r"<tool_call>(.*?)(?:</tool_call>|\Z)|(<function=.*?)(?:</function>|\Z)|\[TOOL_CALLS\]((?:(?!\[TOOL_CALLS\]).)*)"
    r"|<\|python_tag\|>(.*)|<｜tool▁call▁begin｜>(.*?)(?:<｜tool▁call▁end｜>|\Z)|to=functions\.(\w[^{]*\{.*)",
    re.DOTALL,
)
# A call whose arguments, in JSON, follow its name
NAMED = re.compile(r"(?:function<｜tool▁sep｜>)?(?:<function=)?([\w.-]+)(?![\w.-])[^{]*(?=\{)")
TEXTS = re.compile(
    r"<parameter=([^<>]+)>\n?((?:(?!<parameter=).)*?)\n?</parameter>"
    r"|<arg_key>([^<]*)</arg_key>\s*<arg_value>((?:(?!<arg_key>).)*?)</arg_value>",
    re.DOTALL,
)
JSON = json.JSONDecoder(strict=False)
# The tags and the JSON are those in the chat templates of these models
INSTRUCTIONS = (
    "You have tools. Each line between these tags describes one:\n<tools>\n{}\n</tools>\n\nTo use one, write its "
    'name and its arguments as JSON between these tags:\n<tool_call>\n{{"name": <name>, "arguments": <JSON '
    "object>}}\n</tool_call>"
)


class ToolSeat(Seat):
    """
    Plays a role with the tools of an environment for [`~trl.GRPOTrainer`]: a class with a method `reset`, whose other
    public methods are tools, except for `get_reward`. The seat makes the calls in the texts of other roles since its
    last answer, and answers with the results, each on a line of its own. If a tool fails, its error is the result, as
    in TRL. Without calls, the answer is empty.

    Args:
        environment_factory (`Callable[[], Any]`): Makes the environment. As TRL does, the seat uses it again after
            `reset`.
        calls (`Callable[[str], list]`, *optional*): Returns the tool calls in an answer, each with `name` and
            `arguments`, as a dict or as a text for [`read_calls`]. By default [`find_calls`].
    """

    def __init__(self, environment_factory: Callable[[], Any], calls: Callable[[str], list[Any]] | None = None):
        self.environment, self.calls = environment_factory(), calls or find_calls
        self.name = type(self.environment).__name__
        self.methods = [name for name, _ in inspect.getmembers(type(self.environment), inspect.isfunction)]
        if "reset" not in self.methods:
            raise ValueError(f"`environment_factory` made {show(self.environment)}, which needs a method `reset`.")
        self.tools = [x for x in self.methods if x not in ("reset", "get_reward") and not x.startswith("_")]

    @property
    def instructions(self) -> str:
        """
        A text for prompts that describes the tools and the form of a call. As in TRL, tools need type hints and
        docstrings.
        """
        methods = [getattr(self.environment, name) for name in self.tools]
        return INSTRUCTIONS.format("\n".join(json.dumps(get_json_schema(method)) for method in methods))

    def observation(self, item: dict) -> str:
        """
        Returns the text that `reset` returns for an item, which TRL appends to the prompt; empty if it returns
        nothing.
        """
        with task_code(f"`{self.name}.reset`"):
            return self.environment.reset(**item) or ""

    def answer(self, role: str, branches: Sequence[Branch]) -> list[str]:
        return [self._call(self._replay(role, x.item, [turn.joint_action for turn in x.history])) for x in branches]

    def reward(self, role: str, item: dict, joint_actions: Sequence[JointAction]) -> float:
        """Returns the result of `get_reward` after the calls in an episode that the role has answered."""
        self._replay(role, item, joint_actions)
        return finished(self.environment.get_reward())

    def describe(self) -> dict[str, Any]:
        return {"tools": self.name}

    def _replay(self, role: str, item: dict, joint_actions: Sequence[JointAction]) -> list[str]:
        """
        Resets the environment and repeats the calls that the role has answered. Returns the texts after its last
        answer.
        """
        self.observation(item)
        texts: list[str] = []
        for joint_action in joint_actions:
            if role in joint_action:
                answer = self._call(texts)
                if answer != joint_action[role]:
                    raise TaskError(
                        f"The tools of `{self.name}` returned {show(joint_action[role])}, and {show(answer)} when "
                        "the same calls were made again: after `reset`, results must depend on the item and the calls "
                        "alone."
                    )
                texts = []
            texts += [text for other, text in joint_action.items() if other != role]
        return texts

    def _call(self, texts: Sequence[str]) -> str:
        """Makes the calls in the texts, and returns their results."""
        with task_code(f"The tools of `{self.name}`"):
            return "\n".join(self._results(call) for text in texts for call in self.calls(text))

    def _results(self, call: Any) -> str:
        try:
            calls = read_calls(call) if isinstance(call, str) else [call]
            return "\n".join(map(self._result, calls))
        except Exception as error:  # the agent reads it, in TRL's form
            return str({"error": str(error)})

    def _result(self, call: Any) -> str:
        try:
            call = call.get("function", call) if isinstance(call, Mapping) else call  # OpenAI's form
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
            return str(finished(method(**arguments)))
        except Exception as error:
            return str({"error": str(error)})


def find_calls(answer: str) -> list[str]:
    """
    Returns the texts of the tool calls in an answer, in the forms that open models write. An answer may also consist
    of calls in JSON, as those of Llama and of OpenAI's interface do.
    """
    if answer.strip()[:1] in ("{", "["):
        with contextlib.suppress(ValueError, RecursionError):
            calls = read_calls(answer)
            if calls and all(is_call(call) for call in calls):
                return [answer]
    return [next(text for text in match.groups() if text is not None) for match in CALL.finditer(answer)]


def is_call(value: Any) -> bool:
    """Returns whether a JSON value has the keys of a tool call."""
    keys = {*value} if isinstance(value, Mapping) else set()
    return "function" in keys or ("name" in keys and not keys.isdisjoint(("arguments", "parameters")))


def read_calls(text: str) -> list[Any]:
    """Reads the calls in a text that [`find_calls`] returned. Raises `ValueError` if they are malformed."""
    text, found = text.strip(), TEXTS.findall(text)
    named = NAMED.match(text)
    if found or (named is None and text[:1] not in ("{", "[")):  # the arguments are texts
        name = re.split(r"[<>\s]", text.removeprefix("<function="), maxsplit=1)[0]
        return [{"name": name, "texts": {(a or c).strip(): b or d for a, b, c, d in found}}]
    try:
        value, _ = JSON.raw_decode(text, named.end() if named else 0)
    except json.JSONDecodeError as error:
        rest = text[error.pos :][:20]
        raise ValueError(f"The call is not complete JSON: {error.msg}, but there is {rest or 'nothing'!r}.") from None
    if named:
        return [{"name": named[1], "arguments": value}]
    value = value.get("tool_calls", value) if isinstance(value, dict) else value
    return value if isinstance(value, list) else [value]


def from_text(text: str) -> Any:
    """Returns the JSON value that a text is, or the text."""
    try:
        return JSON.decode(text)
    except ValueError:
        return text


def finished(value: Any) -> Any:
    """Returns the result of a plain or an `async` method."""
    if not inspect.iscoroutine(value):
        return value
    return asyncio.run_coroutine_threadsafe(value, event_loop(os.getpid())).result()


def tool_reward(tools: ToolSeat, role: str = "tools") -> Callable[..., list[float]]:
    """
    Makes a reward function for [`FunctionEnvironment`] from the `get_reward` of an environment whose tools play a
    role.
    """
    if "get_reward" not in tools.methods:
        raise ValueError(f"`{tools.name}` has no method `get_reward`: write a reward function.")

    def get_reward(episodes: Sequence[Sequence[JointAction]], **arguments: Any) -> list[float]:
        no_columns = ("prompts", "completions", "completion_ids", "trainer_state", "log_metric", "log_extra")
        columns = {name: values for name, values in arguments.items() if name not in no_columns}
        items = [{name: values[k] for name, values in columns.items()} for k in range(len(episodes))]
        return [tools.reward(role, *episode) for episode in zip(items, episodes, strict=True)]

    get_reward.__name__ = tools.name  # as TRL names this reward
    return get_reward
