"""The interface of a task family, [`Environment`], and its simplest implementation: templates and TRL reward functions."""

import asyncio
import inspect
import json
import keyword
import math
import unicodedata
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from trl_multiagent.environments.task_errors import (
    TaskError,
    as_number,
    as_rewards,
    function_name,
    show,
    task_code,
)


Prompt = str | list[dict[str, str]]  # plain text, or chat messages with "role" and "content"
JointAction = dict[str, str]  # role -> completion

# Names with another meaning in saved teams: the folder of shared weights, and PEFT's name for an adapter without a name
RESERVED_ROLES = ("shared", "default")


def check_roles(roles: Sequence[str]) -> tuple[str, ...]:
    """
    Refuses roles that cannot be the names of a team's agents.

    Args:
        roles (`Sequence[str]`): The agents' names, in order.

    Returns:
        `tuple[str, ...]`: The same names.

    Raises:
        ValueError: the roles are not a list of distinct names, or one cannot be the name of a folder and a module. Names that
            only differ in upper and lower case count as equal, because many file systems do not distinguish them.
    """
    if isinstance(roles, str) or not isinstance(roles, Sequence):
        raise ValueError(f"`roles` must be a list with one name per agent, such as ['aux', 'main'], not {roles!r}.")
    if not roles:
        raise ValueError("A team needs at least one agent, but the list of roles is empty.")
    seen: dict[str, str] = {}  # for each name, the role as it was given
    for role in roles:
        if not isinstance(role, str) or not role.isidentifier() or keyword.iskeyword(role):
            raise ValueError(
                f"A role is the name of a folder and of a module, so {role!r} must be a Python identifier and no keyword."
            )
        name = unicodedata.normalize("NFKC", role).casefold()
        if name in RESERVED_ROLES:
            raise ValueError(f"{role!r} is a name that the files of a team need: choose another name for this role.")
        if name in seen:
            same = "twice" if seen[name] == role else f"and {seen[name]!r}, which differ only in case"
            raise ValueError(f"The roles {list(roles)} contain {role!r} {same}: every agent needs a different name.")
        seen[name] = role
    return tuple(roles)


@dataclass
class Outcome:
    """
    The environment's verdict on one joint action.

    Args:
        reward (`float`):
            Joint reward, shared by all agents.
        metrics (`dict[str, float]`, *optional*):
            Numbers to log. Their means over the joint actions of a turn are logged as `turn_{k}/{name}`.
        info (`Any`, *optional*):
            Data from which the environment builds the next turn's prompts. The trainer only stores it.
    """

    reward: float
    metrics: dict[str, float] = field(default_factory=dict)
    info: Any = None


@dataclass
class Turn:
    """One past turn of a branch: the prompt of each agent, the joint action that was continued, and its outcome."""

    prompts: dict[str, Prompt]
    joint_action: JointAction
    outcome: Outcome


class Environment(ABC):
    """
    Base class of a task family: the team's roles, the prompts of each turn, and the joint reward.

    The model card of the team contains the `repr` of its environment, which may include a version of the reward.

    An environment must not store the state of an episode. Its methods get the history of each branch, so many branches of
    a rollout tree can be played at once.
    """

    roles: tuple[str, ...]

    @abstractmethod
    def prompts(self, item: dict, history: Sequence[Turn]) -> dict[str, Prompt]:
        """
        Makes the prompts of one turn.

        Args:
            item (`dict`): The dataset row.
            history (`Sequence[Turn]`): The branch's past turns, oldest first; empty at the first turn.

        Returns:
            `dict[str, Prompt]`: One new prompt per role. The trainer adds the agent's own past prompts and responses in front of
            it.
        """

    def next_prompts(self, items: list[dict], histories: list[Sequence[Turn]]) -> list[dict[str, Prompt]]:
        """
        Makes the prompts of a whole turn, for all branches of all trees. By default it calls [`~Environment.prompts`] for each
        branch. Override it if making many prompts at once is faster, for example if another model writes feedback.

        Args:
            items (`list[dict]`): The dataset rows; an item occurs once per branch.
            histories (`list[Sequence[Turn]]`): The past turns of each branch, oldest first; empty at the first turn.

        Returns:
            `list[dict[str, Prompt]]`: The prompts of each branch, in order.
        """
        return [ask_one(self, item, history) for item, history in zip(items, histories, strict=True)]

    @abstractmethod
    def score(
        self, items: list[dict], joint_actions: list[JointAction], histories: list[Sequence[Turn]]
    ) -> list[Outcome]:
        """
        Scores a batch of joint actions.

        Args:
            items (`list[dict]`): The dataset row of each joint action.
            joint_actions (`list[JointAction]`): The agents' completions, by role.
            histories (`list[Sequence[Turn]]`): The past turns of each branch, oldest first; empty at the first turn.

        Returns:
            `list[Outcome]`: One outcome per joint action, in order.
        """

    def evaluate(
        self, items: list[dict], joint_actions: list[JointAction], histories: list[Sequence[Turn]]
    ) -> list[Outcome]:
        """
        Scores a batch of joint actions in an evaluation. By default it calls [`~Environment.score`]. Override it to report metrics
        that training does not need.
        """
        return self.score(items, joint_actions, histories)

    def metrics(self) -> dict[str, float]:
        """
        Numbers about the scoring since the last call of this method. They are summed over the processes and logged as
        `reward/{name}` once per optimizer step. Empty by default.
        """
        return {}

    def state_dict(self) -> dict[str, Any]:
        """
        The state on which the next scores and prompts depend, such as that of the environment's own random number generators.
        It is saved in checkpoints. It may contain plain values and tensors, and is empty by default.
        """
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores a state that [`~Environment.state_dict`] returned. It is only called if that state was not empty."""
        raise NotImplementedError(f"{type(self).__name__} has a `state_dict`, so it needs a `load_state_dict`.")

    def resume_settings(self) -> dict[str, Any]:
        """
        The settings on which prompts and rewards depend, by name, as plain values. A run can only continue a checkpoint that
        has the same settings. Empty by default.
        """
        return {}


# Calls of an environment's methods that check what they return


def ask(environment: Environment, items: list[dict], histories: list[Sequence[Turn]]) -> list[dict[str, Prompt]]:
    """
    Calls [`~Environment.next_prompts`] and checks the prompts.

    Raises:
        TaskError: the environment failed, did not return prompts for each item and role, or returned an invalid prompt.
    """
    name = f"`{type(environment).__name__}.next_prompts`"
    with task_code(name):
        prompts = environment.next_prompts(items, histories)
    if not isinstance(prompts, list | tuple) or len(prompts) != len(items):
        raise TaskError(f"{name} returned {show(prompts)}; it must return a list of {len(items)} dicts, one per item.")
    for of_item in prompts:
        check_prompts(name, of_item, environment.roles)
    return list(prompts)


def ask_one(environment: Environment, item: dict, history: Sequence[Turn]) -> dict[str, Prompt]:
    """Calls [`~Environment.prompts`] for one item and history, and checks the prompts as [`ask`] does."""
    name = f"`{type(environment).__name__}.prompts`"
    with task_code(name):
        prompts = environment.prompts(item, history)
    check_prompts(name, prompts, environment.roles)
    return prompts


def check_prompts(name: str, prompts: Any, roles: Sequence[str]) -> None:
    """Refuses a value that is not a dict with one prompt per role. `name` is the function that returned it."""
    if not isinstance(prompts, Mapping):
        raise TaskError(f"{name} returned {show(prompts)}; it must return a dict with one prompt per role.")
    missing = [role for role in roles if role not in prompts]
    if missing:
        raise TaskError(f"{name} returned no prompt for {', '.join(missing)}; it gave {', '.join(map(str, prompts))}.")
    for role in roles:
        check_prompt(f"{name}, for {role!r},", prompts[role])


def check_prompt(name: str, prompt: Any) -> None:
    """Refuses a value that is neither text nor chat messages. `name` is the function that returned it."""
    if isinstance(prompt, str):
        return
    if not isinstance(prompt, list) or not prompt or not all(map(_is_message, prompt)):
        raise TaskError(
            f"{name} returned {show(prompt)}; a prompt is text, or a list of messages with the texts 'role' and 'content'."
        )


def _is_message(message: Any) -> bool:
    return isinstance(message, Mapping) and all(isinstance(message.get(key), str) for key in ("role", "content"))


def judge(
    environment: Environment,
    items: list[dict],
    joint_actions: list[JointAction],
    histories: list[Sequence[Turn]],
    evaluation: bool = False,
) -> list[Outcome]:
    """
    Calls [`~Environment.score`], or [`~Environment.evaluate`] in an evaluation, and checks the outcomes. Rewards and metrics are
    converted to `float`.

    Raises:
        TaskError: the environment failed, or did not return one outcome with a finite reward per joint action.
    """
    name, count = f"`{type(environment).__name__}.score`", len(joint_actions)
    with task_code(name):
        method = environment.evaluate if evaluation else environment.score
        outcomes = method(items, joint_actions, histories)
    if not isinstance(outcomes, list | tuple):
        raise TaskError(f"{name} returned {show(outcomes)}; it must return a list of {count} outcomes.")
    if len(outcomes) != count:
        raise TaskError(
            f"{name} returned {len(outcomes)} outcomes for {count} joint actions; it must return one each."
        )
    for position, outcome in enumerate(outcomes):
        where = f"for joint action {position + 1} of {count}"
        if not isinstance(outcome, Outcome):
            raise TaskError(f"{name} returned {show(outcome)} {where}; it must return an `Outcome`.")
        reward = as_number(outcome.reward)
        if reward is None:
            raise TaskError(f"{name} returned the reward {show(outcome.reward)} {where}; it must be a number.")
        if not math.isfinite(reward):
            raise TaskError(f"{name} returned the reward {reward} {where}", position)
        outcome.reward = reward
        outcome.metrics = numbers_by_name(name, outcome.metrics)
    return list(outcomes)


def scoring_metrics(environment: Environment) -> dict[str, float]:
    """Calls [`~Environment.metrics`] and converts the numbers to `float`."""
    name = f"`{type(environment).__name__}.metrics`"
    with task_code(name):
        metrics = environment.metrics()
    return numbers_by_name(name, metrics)


def resume_settings(environment: Environment) -> dict[str, Any]:
    """Calls [`~Environment.resume_settings`] and converts the values to those that JSON has."""
    name = f"`{type(environment).__name__}.resume_settings`"
    with task_code(name):
        settings = environment.resume_settings()
    try:
        plain = json.loads(json.dumps(settings))
    except (TypeError, ValueError) as error:
        raise TaskError(f"{name} returned {show(settings)}; it must be a dict of plain values: {error}.") from error
    if not isinstance(plain, dict):
        raise TaskError(f"{name} returned {show(settings)}; it must be a dict of plain values.")
    return plain


def numbers_by_name(name: str, metrics: Any) -> dict[str, float]:
    """Converts metrics to `float`. `name` is the function that returned them."""
    if not isinstance(metrics, Mapping):
        raise TaskError(f"{name} returned the metrics {show(metrics)}; they must be a dict of numbers.")
    numbers = {}
    for key, value in metrics.items():
        number = as_number(value)
        if not isinstance(key, str) or number is None:
            raise TaskError(f"{name} returned the metric {key!r} with the value {show(value)}; it must be a number.")
        numbers[key] = number
    return numbers


class FunctionEnvironment(Environment):
    """
    An environment made of prompt templates and TRL reward functions.

    Args:
        prompts (`dict[str, str | Callable[[dict], Prompt]]`):
            One entry per role, in the order of the agents: a `str.format` template filled with the item's columns, or
            a function from the item to a prompt.
        reward_funcs (`Callable` or `list[Callable]`):
            TRL reward functions, plain or `async`. Each is called with `prompts` (list of `{role: prompt}`),
            `completions` (list of `{role: text}`) and every column of the items as keyword arguments, and returns one
            float per joint action, or `None` where it does not apply.
        reward_weights (`list[float]`, *optional*):
            Weight of each reward function, all 1.0 by default.
        transition (`Callable[[dict, Sequence[Turn]], dict[str, Prompt]]`, *optional*):
            Function `(item, history) -> {role: prompt}` that builds the prompts of the second and later turns. It is only
            needed if `num_turns > 1`.

    Example:

    ```python
    >>> environment = FunctionEnvironment(
    ...     prompts={"poet": "Write a line about {topic}.", "critic": "Name a word for {topic}."},
    ...     reward_funcs=lambda completions, **columns: [float(c["critic"] in c["poet"]) for c in completions],
    ... )
    >>> environment.prompts({"topic": "rain"}, [])
    {'poet': 'Write a line about rain.', 'critic': 'Name a word for rain.'}

    ```
    """

    def __init__(
        self,
        prompts: dict[str, str | Callable[[dict], Prompt]],
        reward_funcs: Callable | list[Callable],
        reward_weights: list[float] | None = None,
        transition: Callable[[dict, Sequence[Turn]], dict[str, Prompt]] | None = None,
    ):
        if not isinstance(prompts, dict):
            raise ValueError(f"`prompts` must be a dict with one entry per role, not {prompts!r}.")
        self.roles = check_roles(list(prompts))
        self.templates = prompts
        self.reward_funcs = list(reward_funcs) if isinstance(reward_funcs, list | tuple) else [reward_funcs]
        for function in self.reward_funcs:
            if not callable(function):
                raise TypeError(f"`reward_funcs` contains {show(function)}, which is not a function.")
        self.reward_weights = reward_weights or [1.0] * len(self.reward_funcs)
        if len(self.reward_weights) != len(self.reward_funcs):
            raise ValueError(
                f"`reward_weights` has {len(self.reward_weights)} entries for {len(self.reward_funcs)} reward functions."
            )
        self.transition = transition
        self.reward_names = _distinct([function_name(function) for function in self.reward_funcs])

    def __repr__(self) -> str:
        names = ", ".join(self.reward_names)
        return f"FunctionEnvironment(reward_funcs=[{names}], reward_weights={self.reward_weights})"

    def prompts(self, item: dict, history: Sequence[Turn]) -> dict[str, Prompt]:
        if not history:
            return {role: self._first_prompt(role, template, item) for role, template in self.templates.items()}
        if self.transition is None:
            raise TaskError("More than one turn needs a `transition` that builds the next turn's prompts.")
        name = f"The transition `{function_name(self.transition)}`"
        with task_code(name):
            prompts = self.transition(item, history)
        check_prompts(name, prompts, self.roles)
        return prompts

    def resume_settings(self) -> dict[str, Any]:
        """The templates, the weights, and the names of the functions. The code of the functions is not compared."""
        return {
            "prompts": {
                role: f"function {function_name(template)}" if callable(template) else template
                for role, template in self.templates.items()
            },
            "reward_funcs": self.reward_names,
            "reward_weights": self.reward_weights,
            "transition": None if self.transition is None else function_name(self.transition),
        }

    @staticmethod
    def _first_prompt(role: str, template: str | Callable[[dict], Prompt], item: dict) -> Prompt:
        if not callable(template):
            return _fill(role, template, item)
        name = f"The prompt function `{function_name(template)}` of {role!r}"
        with task_code(name):
            prompt = template(item)
        check_prompt(name, prompt)
        return prompt

    def score(
        self, items: list[dict], joint_actions: list[JointAction], histories: list[Sequence[Turn]]
    ) -> list[Outcome]:
        kwargs = {name: [item[name] for item in items] for name in items[0]}
        kwargs["prompts"] = [self.prompts(item, history) for item, history in zip(items, histories, strict=True)]
        kwargs["completions"] = joint_actions
        names = [f"The reward function `{name}`" for name in self.reward_names]
        outputs = []
        for name, function in zip(names, self.reward_funcs, strict=True):
            with task_code(name):
                outputs.append(function(**kwargs))
        if any(inspect.isawaitable(output) for output in outputs):
            with ThreadPoolExecutor(1) as thread:  # in a notebook, the current thread already runs an event loop
                outputs = thread.submit(asyncio.run, _gather(names, outputs)).result()
        outcomes = [Outcome(reward=0.0) for _ in joint_actions]
        for name, key, weight, output in zip(names, self.reward_names, self.reward_weights, outputs, strict=True):
            for outcome, reward in zip(outcomes, as_rewards(name, output, len(joint_actions)), strict=True):
                if reward is not None:
                    outcome.reward += weight * reward
                    outcome.metrics[f"rewards/{key}"] = reward
        unscored = next((k for k, outcome in enumerate(outcomes) if not outcome.metrics), None)
        if unscored is not None:
            raise TaskError(
                f"Every reward function ({', '.join(self.reward_names)}) returned None for the joint action "
                f"{joint_actions[unscored]!r} of item {items[unscored]!r}; at least one must score it."
            )
        return outcomes


def _fill(role: str, template: str, item: dict) -> str:
    try:
        return template.format(**item)
    except KeyError as error:
        raise TaskError(
            f"The prompt template of `{role}` needs the column {error}; the items have {', '.join(item)}."
        ) from None
    except (IndexError, ValueError, AttributeError, TypeError) as error:
        raise TaskError(
            f"The prompt template of `{role}` cannot be filled: {error}. Write {{column}} for a column's value, and {{{{ "
            "or }} for a brace."
        ) from error


def _distinct(names: list[str]) -> list[str]:
    """The names. A number is appended to a name that occurred before."""
    seen: Counter[str] = Counter()
    distinct = []
    for name in names:
        seen[name] += 1
        distinct.append(name if seen[name] == 1 else f"{name}_{seen[name]}")
    return distinct


async def _gather(names: list[str], outputs: list) -> list:
    """Awaits the results of `async` reward functions concurrently. Results of other functions are returned as they are."""
    tasks = {
        k: asyncio.ensure_future(_result(names[k], output))
        for k, output in enumerate(outputs)
        if inspect.isawaitable(output)
    }
    try:
        results = dict(zip(tasks, await asyncio.gather(*tasks.values()), strict=True))
    finally:  # if one function failed, the results of the others are not needed
        for task in tasks.values():
            task.cancel()
        await asyncio.gather(*tasks.values(), return_exceptions=True)
    return [results.get(k, output) for k, output in enumerate(outputs)]


async def _result(name: str, output: Awaitable) -> Any:
    with task_code(name):
        return await output
