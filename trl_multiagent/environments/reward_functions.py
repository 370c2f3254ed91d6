"""
Reward functions of TRL, called as TRL's trainers do. They may be plain or `async`, and may score only one role.
"""

import asyncio
import functools
import inspect
import os
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import TimeoutError as FutureTimeout
from concurrent.futures import as_completed
from dataclasses import dataclass
from typing import Any

from trl_multiagent.environments.base import Outcome, as_messages, scoring_context
from trl_multiagent.environments.task_errors import TaskError, as_number, function_name, show, task_code
from trl_multiagent.jobs.event_loop import event_loop
from trl_multiagent.jobs.signals import at_most


RewardFunction = Callable | str  # a callable, a reward model, or a model id

READ_REASONING = ("think_format_reward", "reasoning_accuracy_reward")  # functions of TRL


def is_model(function: Any) -> bool:
    """
    Returns whether this is a reward model or its id. This does not import torch: before its import, there are no
    models.
    """
    torch = sys.modules.get("torch")
    return isinstance(function, str) or (torch is not None and isinstance(function, torch.nn.Module))


def load_if_model(function: Any) -> Any:
    """Wraps a reward model or its id in a reward function. Returns other functions unchanged."""
    if not is_model(function):
        return function
    from trl_multiagent.environments.reward_models import RewardModel  # imports torch and TRL

    return RewardModel(function)


def log_metric(name: str, metrics: dict[str, list[float]], metric: str, value: float) -> None:
    """Implements TRL's `log_metric` for the reward function `name`. The mean over a logging step is logged."""
    number = as_number(value)
    if not isinstance(metric, str) or number is None:
        raise TaskError(f"{name} logged the metric {metric!r} with the value {show(value)}; it must be a number.")
    metrics.setdefault(metric, []).append(number)


def log_extra(name: str, outcomes: list[Outcome], column: str, values: Sequence) -> None:
    """
    Implements TRL's `log_extra` for the reward function `name`. The values become a column of the tables of
    completions.
    """
    values = list(values)
    if len(values) != len(outcomes):
        raise TaskError(
            f"{name} logged {len(values)} values in the column {column!r} for {len(outcomes)} joint actions; it must "
            "log one each."
        )
    for outcome, value in zip(outcomes, values, strict=True):
        outcome.extra[column] = value


@dataclass(eq=False)
class RoleReward:
    """A reward function that scores one agent, see [`role_reward`]."""

    role: str
    function: Any
    conversational: bool | None = None

    @property
    def __name__(self) -> str:
        return f"{self.role}/{function_name(self.function)}"

    def __call__(self, prompts: Sequence[dict], completions: Sequence[dict], **kwargs: Any) -> Any:
        number = len(completions)
        scored = [k for k, by_role in enumerate(completions) if self.role in by_role]  # where the agent acts
        if not scored:
            return [None] * number
        own_prompts = [prompts[k][self.role] for k in scored]
        own_completions = [completions[k][self.role] for k in scored]
        if self._is_of_trl and unwrapped(self.function).__name__ in READ_REASONING:
            own_completions = [getattr(completion, "full", completion) for completion in own_completions]
        reads_messages = self.conversational
        if reads_messages is None:  # TRL's functions read messages only
            is_chat = self.role in scoring_context().chat_roles or any(isinstance(x, list) for x in own_prompts)
            reads_messages = self._is_of_trl or is_chat
        if reads_messages:
            own_prompts = [as_messages(prompt, "user") for prompt in own_prompts]
            own_completions = [as_messages(completion, "assistant") for completion in own_completions]
        kwargs = {name: [x[k] for k in scored] if isinstance(x, list) else x for name, x in kwargs.items()}
        if kwargs.get("completion_ids") is not None:
            kwargs["completion_ids"] = [by_role[self.role] for by_role in kwargs["completion_ids"]]
        kwargs |= {"prompts": own_prompts, "completions": own_completions}

        def spread(values: Any) -> list[Any]:
            """Puts values at their positions, and `None` elsewhere."""
            values = list(values)
            if len(values) != len(scored):
                raise ValueError(f"{self.role!r} has {len(scored)} completions here, but {len(values)} values")
            by_position = dict(zip(scored, values, strict=True))
            return [by_position.get(k) for k in range(number)]

        if log := kwargs.get("log_extra"):
            kwargs["log_extra"] = lambda column, values: log(column, spread(values))
        rewards = self.function(**accepted_arguments(self.function, kwargs))
        if len(scored) == number:
            return rewards

        async def spread_later() -> list[Any]:
            return spread(await rewards)

        return spread_later() if inspect.isawaitable(rewards) else spread(rewards)

    @property
    def _is_of_trl(self) -> bool:
        module = inspect.getmodule(unwrapped(self.function))
        return module is not None and module.__name__.startswith("trl.rewards")


def role_reward(role: str, function: Any, conversational: bool | None = None) -> RoleReward:
    """
    Creates a reward of one agent's completions from a reward function that was written for a single model.

    The role selects the completions that are scored, not the agent that learns from them: the score is added to the
    joint reward, on which every agent is trained.

    Args:
        role (`str`): The agent.
        function (`Callable`, `str` or [`~transformers.PreTrainedModel`]): A reward function in TRL's form, such as
            `trl.rewards.think_format_reward`, plain or `async`, or a reward model or its id. It gets the agent's
            prompts, completions and `completion_ids`. Completions are answers without their reasoning, except for
            those functions of TRL that look for the reasoning.
        conversational (`bool`, *optional*): Whether the function gets lists of chat messages instead of texts. By
            default it does if the agent's tokenizer has a chat template, so that its prompts are chat messages. TRL's
            own functions always get messages.

    Example:

    ```python
    from trl.rewards import think_format_reward

    environment = FunctionEnvironment(prompts, reward_funcs=[my_reward, role_reward("main", think_format_reward)])
    ```
    """
    return RoleReward(role, function, conversational)


def unwrapped(function: Any) -> Any:
    """Returns the function inside `functools.partial` objects and role rewards."""
    while isinstance(function, functools.partial | RoleReward):
        function = function.func if isinstance(function, functools.partial) else function.function
    return function


def is_async(function: Any) -> bool:
    """Returns whether a function is `async`, or an object with an `async` method `__call__`."""
    function = unwrapped(function)
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def check_reward_function(function: Any) -> None:
    """
    Raises `TypeError` for a value that is not a reward function: not callable, a class, a generator, or with
    positional-only parameters.
    """
    inner = unwrapped(function)
    if not callable(inner):
        raise TypeError(f"`reward_funcs` contains {show(inner)}, which is not a function.")
    name = function_name(inner)
    if isinstance(inner, type):
        raise TypeError(f"`reward_funcs` contains the class `{name}`: pass an instance with a method `__call__`.")
    if inspect.isgeneratorfunction(inner) or inspect.isasyncgenfunction(inner):
        raise TypeError(f"The reward function `{name}` contains `yield`; it must return a list of numbers instead.")
    parameters = parameters_of(function.function if isinstance(function, RoleReward) else function)
    if parameters is not None and not parameters:
        raise TypeError(f"The reward function `{name}` takes no arguments; it needs `completions`, and `**columns`.")
    for parameter in (parameters or {}).values():
        if parameter.kind == parameter.POSITIONAL_ONLY and parameter.default is parameter.empty:
            raise TypeError(
                f"The reward function `{name}` cannot be called with keyword arguments such as `completions=...`, "
                f"because its parameter `{parameter.name}` is positional only."
            )


def accepted_arguments(function: Callable, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments that a function names; all of them if it takes any (`**kwargs`)."""
    parameters = parameters_of(function)
    if parameters is None or any(x.kind == x.VAR_KEYWORD for x in parameters.values()):
        return dict(arguments)
    return {name: value for name, value in arguments.items() if name in parameters}


def parameters_of(function: Callable) -> Mapping[str, inspect.Parameter] | None:
    """Returns the parameters of a function; `None` if it is not written in Python and does not declare them."""
    try:
        return inspect.signature(function).parameters
    except ValueError as error:
        if isinstance(function, functools.partial):
            raise TypeError(f"`reward_funcs` contains {show(function)}: its arguments do not fit.") from error
        return None


def call_rewards(
    names: Sequence[str], functions: Sequence[Callable], arguments: list[dict], timeout: float | None
) -> list[Any]:
    """
    Calls reward functions with their arguments, and returns their results. `names`: their names in messages.

    `async` functions run on the event loop of this process, concurrently with each other and with plain functions,
    which run one after the other in this thread. All may take `timeout` seconds. Raises [`TaskError`] if a function
    fails, or does not finish in time.
    """
    outputs: list[Any] = [None] * len(functions)
    running = {}
    start = time.monotonic()

    def left() -> float | None:
        return None if timeout is None else max(0.0, start + timeout - time.monotonic())

    late = f"did not finish within {timeout} seconds: raise `reward_timeout` if needed"
    try:
        # `async` functions start first
        for k in sorted(range(len(functions)), key=lambda k: not is_async(functions[k])):
            with task_code(names[k]), at_most(left(), late):
                outputs[k] = functions[k](**accepted_arguments(functions[k], arguments[k]))
            if inspect.isawaitable(outputs[k]):
                coroutine = finish(names[k], outputs[k])
                running[asyncio.run_coroutine_threadsafe(coroutine, event_loop(os.getpid()))] = k
        for future in as_completed(running, left()):
            outputs[running[future]] = future.result()
    except FutureTimeout as error:
        name = next(names[k] for future, k in running.items() if not future.done())
        raise TaskError(f"{name} {late}.") from error
    finally:
        for future in running:
            future.cancel()  # has no effect on those that are done
    return outputs


async def finish(name: str, output: Awaitable) -> Any:
    """Awaits the result of the function `name`."""
    try:
        with task_code(name):
            return await output
    except TaskError:
        task = asyncio.current_task()
        if task is not None and task.cancelling():  # nobody reads an error, so asyncio would print it
            raise asyncio.CancelledError from None
        raise
