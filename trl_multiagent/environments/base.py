"""What a task family must provide, and the shortest way to provide it: templates and TRL reward functions."""

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

# Names that saved teams use otherwise: the folder of shared weights, and what PEFT calls an adapter without a name
RESERVED_ROLES = ("shared", "default")


def check_roles(roles: Sequence[str]) -> tuple[str, ...]:
    """
    Refuses roles that cannot name the agents of a team.

    Args:
        roles (`Sequence[str]`): The agents' names, in order.

    Returns:
        `tuple[str, ...]`: The same names.

    Raises:
        ValueError: not a list of distinct names, or a name that cannot be a folder and a module. Names that differ only
            in upper and lower case count as the same, because many file systems do not tell them apart.
    """
    if isinstance(roles, str) or not isinstance(roles, Sequence):
        raise ValueError(f"`roles` must be a list with one name per agent, such as ['aux', 'main'], not {roles!r}.")
    if not roles:
        raise ValueError("A team needs at least one agent, but the list of roles is empty.")
    seen = {}
    for role in roles:
        if not isinstance(role, str) or not role.isidentifier() or keyword.iskeyword(role):
            raise ValueError(
                f"A role names a folder and a module: {role!r} must be a Python identifier and no keyword of Python."
            )
        name = unicodedata.normalize("NFKC", role).casefold()
        if name in RESERVED_ROLES:
            raise ValueError(f"The role {role!r} is a name that the files of a team need: choose another one.")
        if name in seen:
            same = "twice" if seen[name] == role else f"and {seen[name]!r}, which differ only in case"
            raise ValueError(f"The roles {list(roles)} contain {role!r} {same}: every agent needs a name of its own.")
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
            Numbers to log; averaged over the joint actions of a turn and logged as `turn_{k}/{name}`.
        info (`Any`, *optional*):
            Whatever the environment needs to build the next turn's prompts. The trainer only hands it back.
    """

    reward: float
    metrics: dict[str, float] = field(default_factory=dict)
    info: Any = None


@dataclass
class Turn:
    """One past turn of a branch: the prompts each agent saw, the joint action handed on, and its outcome."""

    prompts: dict[str, Prompt]
    joint_action: JointAction
    outcome: Outcome


class Environment(ABC):
    """
    One task family: the team's roles, what each agent is asked at each turn, and the joint reward. Subclass it.

    The `repr` of an environment stands in the model card of the team; it can name a version of the reward.

    An environment holds no state of an episode: everything that happened is in the history that it is given, so any
    number of branches of a rollout tree can be played at once.
    """

    roles: tuple[str, ...]

    @abstractmethod
    def prompts(self, item: dict, history: Sequence[Turn]) -> dict[str, Prompt]:
        """
        What each agent is asked next.

        Args:
            item (`dict`): The dataset row.
            history (`Sequence[Turn]`): The branch's past turns, oldest first; empty at the first turn.

        Returns:
            `dict[str, Prompt]`: One new prompt per role. The trainer puts the agent's own past prompts and responses
            before it.
        """

    def next_prompts(self, items: list[dict], histories: list[Sequence[Turn]]) -> list[dict[str, Prompt]]:
        """
        The prompts of a whole turn: those of all items, or of all branches of their trees. By default [`~Environment.prompts`]
        of each. Override it where asking for many at once is faster, as with another model that writes feedback.

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
        Judges a batch of joint actions; entry k of each list belongs together.

        Returns:
            `list[Outcome]`: One outcome per joint action, in order.
        """

    def evaluate(
        self, items: list[dict], joint_actions: list[JointAction], histories: list[Sequence[Turn]]
    ) -> list[Outcome]:
        """
        Judges a batch of joint actions outside of training. The same as [`~Environment.score`], unless there is more to report
        than training needs.
        """
        return self.score(items, joint_actions, histories)

    def metrics(self) -> dict[str, float]:
        """
        Numbers about the scoring itself, since the last call of this method. They are added up over the processes and
        logged as `reward/{name}`, once per optimizer step. None by default.
        """
        return {}

    def state_dict(self) -> dict[str, Any]:
        """
        What the next scores and prompts depend on besides their arguments, random number generators of its own for
        example, so that a resumed run goes on with it. Plain values and tensors; none by default.
        """
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from what [`~Environment.state_dict`] gave. Called only if that was not empty."""
        raise NotImplementedError(f"{type(self).__name__} has a `state_dict`, so it needs a `load_state_dict`.")

    def resume_settings(self) -> dict[str, Any]:
        """
        What a run must have in common with a checkpoint that it continues, by name, in plain values: the settings that
        prompts and rewards depend on. A checkpoint with other ones is refused. None by default.
        """
        return {}


# Calls of an environment, with its answers checked


def ask(environment: Environment, items: list[dict], histories: list[Sequence[Turn]]) -> list[dict[str, Prompt]]:
    """
    The environment's prompts for a whole turn.

    Raises:
        TaskError: the environment failed, left an item or a role out, or gave something that is no prompt.
    """
    name = f"`{type(environment).__name__}.next_prompts`"
    with task_code(name):
        prompts = environment.next_prompts(items, histories)
    if not isinstance(prompts, list | tuple) or len(prompts) != len(items):
        raise TaskError(
            f"{name} returned {show(prompts)}; it must return a list with a dict for each of {len(items)}."
        )
    for of_item in prompts:
        check_prompts(name, of_item, environment.roles)
    return list(prompts)


def ask_one(environment: Environment, item: dict, history: Sequence[Turn]) -> dict[str, Prompt]:
    """The environment's [`~Environment.prompts`] for one item and history, checked as [`ask`] does."""
    name = f"`{type(environment).__name__}.prompts`"
    with task_code(name):
        prompts = environment.prompts(item, history)
    check_prompts(name, prompts, environment.roles)
    return prompts


def check_prompts(name: str, prompts: Any, roles: Sequence[str]) -> None:
    """Refuses what is not one prompt for each of the roles; `name` says who gave it."""
    if not isinstance(prompts, Mapping):
        raise TaskError(f"{name} returned {show(prompts)}; it must return a dict with one prompt per role.")
    missing = [role for role in roles if role not in prompts]
    if missing:
        raise TaskError(f"{name} returned no prompt for {', '.join(missing)}; it gave {', '.join(map(str, prompts))}.")
    for role in roles:
        check_prompt(f"{name}, for {role!r},", prompts[role])


def check_prompt(name: str, prompt: Any) -> None:
    """Refuses what is neither text nor chat messages; `name` says who gave it."""
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
    The environment's outcomes of a batch of joint actions, with `float` rewards and metrics, for training or for an
    evaluation.

    Raises:
        TaskError: the environment failed, or gave something else than one outcome with a finite reward per joint action.
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
    """What the environment's `metrics` returns, as `float`."""
    name = f"`{type(environment).__name__}.metrics`"
    with task_code(name):
        metrics = environment.metrics()
    return numbers_by_name(name, metrics)


def resume_settings(environment: Environment) -> dict[str, Any]:
    """What the environment's `resume_settings` returns, as it is after being read from JSON."""
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
    """Metrics as `float`; `name` says who gave them."""
    if not isinstance(metrics, Mapping):
        raise TaskError(f"{name} returned the metrics {show(metrics)}; they must be a dict of numbers.")
    numbers = {key: as_number(value) for key, value in metrics.items()}
    for key, number in numbers.items():
        if not isinstance(key, str) or number is None:
            raise TaskError(
                f"{name} returned the metric {key!r} with the value {show(metrics[key])}; it must be a number."
            )
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
            `(item, history) -> {role: prompt}`, builds the prompts of the second turn and later ones. Needed only
            for `num_turns > 1`.

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
                raise TypeError(f"`reward_funcs` has {show(function)}, which is no function.")
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
        """Templates and weights, and the names of functions, whose code is not compared."""
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
            with ThreadPoolExecutor(1) as thread:  # a notebook already runs an event loop in this one
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
    """The names, with a number behind those that occurred before."""
    seen = Counter()
    distinct = []
    for name in names:
        seen[name] += 1
        distinct.append(name if seen[name] == 1 else f"{name}_{seen[name]}")
    return distinct


async def _gather(names: list[str], outputs: list) -> list:
    """Awaits the results of `async` reward functions side by side; the others are results already."""
    tasks = {
        k: asyncio.ensure_future(_result(names[k], output))
        for k, output in enumerate(outputs)
        if inspect.isawaitable(output)
    }
    try:
        results = dict(zip(tasks, await asyncio.gather(*tasks.values()), strict=True))
    finally:  # when one failed, the others are of no use
        for task in tasks.values():
            task.cancel()
        await asyncio.gather(*tasks.values(), return_exceptions=True)
    return [results.get(k, output) for k, output in enumerate(outputs)]


async def _result(name: str, output: Awaitable) -> Any:
    with task_code(name):
        return await output
