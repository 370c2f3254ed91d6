"""
An environment built from prompt templates and TRL reward functions, see [`environments.reward_functions`].
"""

import functools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from string import Formatter
from typing import Any

from trl_multiagent.environments.base import (
    Environment,
    History,
    JointAction,
    Outcome,
    Prompt,
    Prompts,
    as_messages,
    check_prompt,
    check_prompts,
    check_roles,
    is_message,
    scoring,
    scoring_context,
)
from trl_multiagent.environments.reward_functions import (
    RewardFunction,
    RoleReward,
    call_rewards,
    check_reward_function,
    is_model,
    load_if_model,
    log_extra,
    log_metric,
)
from trl_multiagent.environments.task_errors import TaskError, as_number, as_rewards, function_name, show, task_code


BRACES = "Write {column} for a column's value, and {{ or }} for a brace."  # advice in messages


class FunctionEnvironment(Environment):
    """
    An environment built from prompt templates and TRL reward functions.

    Args:
        prompts (`dict[str, Prompt | Callable[[dict], Prompt]]`): One entry per role, in the order of the agents: a
            `str.format` template filled with the item's columns, chat messages with such templates, or a function from
            the item to a prompt.
        reward_funcs (`Callable` or `list[Callable]`): TRL reward functions, plain or `async`, see
            [`~trl.GRPOTrainer`]. Each is called with keyword arguments, and returns one float per joint action, or
            `None` where it does not apply, or a dict of floats by role, which only those roles get. It gets the
            arguments that it names, or all if it takes `**kwargs`: `prompts` (list of `{role: prompt}`), `completions`
            (list of `{role: text}`), `episodes` (list of the joint actions of all turns), `groups` (list of numbers:
            joint actions of one item have the same one, so that they can be ranked), every column of the items, and
            from a trainer or team also `completion_ids` (list of `{role: token ids}`), `trainer_state`,
            `log_metric` and `log_extra`. [`role_reward`] makes one for a single agent. A reward model or its id alone
            needs a single role, unless [`JointRewardTrainer`] trained it on these roles.
        reward_weights (`list[float]`, *optional*): Weight of each reward function, all 1.0 by default.
        transition (`Callable[[dict, History], dict[str, Prompt]]`, *optional*): Function `(item, history) -> {role:
            prompt}` that builds the prompts of the second and later turns. It is only needed if `num_turns > 1`.
        order (`list[list[str]]`, *optional*): The roles that act at each turn, such as `[["writer"], ["editor"]]`. By
            default all act. A template may then use a role as a column: `{writer}` is the writer's last answer, empty
            at turns before its first one. The reward functions score the end of the episode, with the last answer of
            every role; the rewards of earlier turns are 0.
        conversational (`bool`, *optional*, defaults to `False`): Whether `prompts` and `completions` contain lists of
            chat messages, as in TRL, instead of texts for the roles with a chat template.
        reward_timeout (`float`, *optional*, defaults to `600.0`): Seconds that the reward functions may take for a
            batch. With `None`, they may take forever.

    Raises:
        TypeError: A template or a reward function cannot be called.
        ValueError: The roles or the weights do not fit, or a reward model cannot be loaded.

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
        prompts: Mapping[str, Prompt | Callable[[dict], Prompt]],
        reward_funcs: RewardFunction | list[RewardFunction],
        reward_weights: Sequence[float] | None = None,
        transition: Callable[[dict, History], Prompts] | None = None,
        conversational: bool = False,
        reward_timeout: float | None = 600.0,
        order: Sequence[Sequence[str]] | None = None,
    ):
        if not isinstance(prompts, dict):
            raise TypeError(f"`prompts` is {show(prompts)}; it must be a dict with a template or a function per role.")
        self.roles = check_roles(list(prompts))
        self.order = None if order is None else check_order(order, self.roles)
        if order is not None and transition is not None:
            raise ValueError("`order` makes the prompts of all turns from the templates: leave `transition` out.")
        for role, template in prompts.items():
            messages = as_messages(template)
            if isinstance(messages, list) and messages and all(map(is_message, messages)):
                for message in messages:
                    self.check_heard(role, message["content"])
            elif not callable(template):
                raise TypeError(f"The prompt of `{role}` is {show(template)}; it must be a template or a function.")
        self.templates = prompts
        functions = list(reward_funcs) if isinstance(reward_funcs, list | tuple) else [reward_funcs]
        if not functions:
            raise ValueError("`reward_funcs` is empty: give at least one reward function.")
        self.reward_funcs = [self._reward_function(function) for function in functions]
        weights = [1.0] * len(functions) if reward_weights is None else list(reward_weights)
        if len(weights) != len(functions):
            raise ValueError(f"`reward_weights` has {len(weights)} entries for {len(functions)} reward functions.")
        self.reward_weights = [x for x in map(as_number, weights) if x is not None and math.isfinite(x)]
        if len(self.reward_weights) < len(weights):
            raise ValueError(f"`reward_weights` is {weights}; it must be a list of finite numbers.")
        self.transition, self.conversational, self.reward_timeout = transition, conversational, reward_timeout
        names = [function_name(function) for function in self.reward_funcs]
        counts = [names[:k].count(name) for k, name in enumerate(names, start=1)]
        self.reward_names = [name if n == 1 else f"{name}_{n}" for name, n in zip(names, counts, strict=True)]

    def check_heard(self, role: str, template: str) -> None:
        """
        Raises `ValueError` if a template names a role that has never answered when the prompt is made, or if one of
        its braces has no partner.
        """
        try:
            names = fields_of(template)
        except ValueError as error:
            raise ValueError(f"The prompt template of `{role}` cannot be filled: {error}. {BRACES}") from error
        order = self.order or [self.roles]
        last = max(k for k, turn in enumerate(order) if role in turn)
        heard = {other for turn in order[:last] for other in turn}
        for name in names:
            if name in self.roles and name not in heard:
                raise ValueError(
                    f"The prompt of `{role}` has {{{name}}}, but {name!r} never answers before it: see `order`."
                )

    def _reward_function(self, function: RewardFunction) -> Callable:
        """Checks a reward function. Wraps a reward model or its id in one."""
        if isinstance(function, RoleReward):
            if function.role not in self.roles:
                raise ValueError(f"A reward is for the role {function.role!r}, but the roles are {list(self.roles)}.")
            function = RoleReward(function.role, load_if_model(function.function), function.conversational)
        elif is_model(function):
            model = load_if_model(function)
            if model.roles is None and len(self.roles) == 1:
                return RoleReward(self.roles[0], model)
            if model.roles is None:
                raise ValueError(
                    f"A reward model judges the text of one agent: write `role_reward({self.roles[-1]!r}, ...)` "
                    f"instead of {show(function)}."
                )
            if model.roles != self.roles:
                raise ValueError(
                    f"The reward model {show(function)} was trained on answers of {list(model.roles)}, but the "
                    f"roles are {list(self.roles)}."
                )
            return model
        check_reward_function(function)
        return function  # type: ignore[return-value]  # it is not a model, and can be called

    def __repr__(self) -> str:
        names = ", ".join(self.reward_names)
        return f"FunctionEnvironment(reward_funcs=[{names}], reward_weights={self.reward_weights})"

    def check_turns(self, num_turns: int | None, are_episodes: bool = True) -> int:
        number = super().check_turns(num_turns, are_episodes)
        own = (type(self).prompts, type(self).next_prompts)  # a subclass's own may make later turns
        is_plain = own == (FunctionEnvironment.prompts, FunctionEnvironment.next_prompts)
        if is_plain and self.transition is None and number > len(self.order or [self.roles]):
            reason = "no `transition` makes the prompts of later turns"
            if self.order is not None:
                reason = f"`order` has {len(self.order)}"
            raise ValueError(f"`num_turns` is {number}, but {reason}.")
        return number

    def prompts(self, item: dict, history: History) -> Prompts:
        if self.order is not None:
            if clash := item.keys() & {*self.roles}:
                raise TaskError(f"{min(clash)!r} is a column of the items and a role: a template needs one meaning.")
            columns = {**item, **dict.fromkeys(self.roles, ""), **last_answers(history)}
            roles = self.order[len(history)] if len(history) < len(self.order) else ()
            return {role: first_prompt(role, self.templates[role], columns) for role in roles}
        if not history:
            return {role: first_prompt(role, template, item) for role, template in self.templates.items()}
        if self.transition is None:
            return {}
        name = f"The transition `{function_name(self.transition)}`"
        with task_code(name):
            prompts = self.transition(item, history)
        check_prompts(name, prompts, self.roles)
        return prompts

    def resume_settings(self) -> dict[str, Any]:
        """
        Returns the templates, the weights, and the names of the functions. The code of the functions is not compared.
        """
        return {
            "prompts": {role: function_name(x) if callable(x) else x for role, x in self.templates.items()},
            "reward_funcs": self.reward_names,
            "reward_weights": self.reward_weights,
            "transition": self.transition and function_name(self.transition),
            "conversational": self.conversational,
            "order": self.order,
            **self.task_settings,
        }

    def score(self, items: list[dict], joint_actions: list[JointAction], histories: list[History]) -> list[Outcome]:
        if self.order is None:
            return self._score(items, joint_actions, histories)
        outcomes = [Outcome(0.0) for _ in items]
        ends = [k for k, history in enumerate(histories) if len(history) + 1 == len(self.order)]
        last, past = [items[k] for k in ends], [histories[k] for k in ends]
        prompts = self.next_prompts(last, past)
        shown = [
            {role: prompt for turn in turns for role, prompt in turn.prompts.items()} | last_prompts
            for turns, last_prompts in zip(past, prompts, strict=True)
        ]
        heard = [last_answers(histories[k]) | joint_actions[k] for k in ends]
        answers = [{role: texts[role] for role in self.roles} for texts in heard]
        context = scoring_context()
        trees = [context.trees[k] for k in ends] if context.trees else None
        with scoring(replace(context, prompts=shown, completion_ids=None, trees=trees)):
            for k, outcome in zip(ends, self._score(last, answers, past), strict=True):
                outcomes[k] = outcome
        return outcomes

    def _score(self, items: list[dict], joint_actions: list[JointAction], histories: list[History]) -> list[Outcome]:
        """Calls the reward functions, and adds up their weighted rewards."""
        if not items:
            return []
        context, outcomes = scoring_context(), [Outcome(0.0) for _ in items]
        names = [f"The reward function `{name}`" for name in self.reward_names]
        arguments, calls = self._arguments(items, joint_actions, histories), []
        for name, function in zip(names, self.reward_funcs, strict=True):
            call = {**arguments, "log_metric": functools.partial(log_metric, name, context.metrics)}
            call["log_extra"] = functools.partial(log_extra, name, outcomes)
            if self.conversational and not isinstance(function, RoleReward):
                for key, speaker in (("prompts", "user"), ("completions", "assistant")):
                    call[key] = [
                        {
                            role: as_messages(x, speaker) if role in context.chat_roles else x
                            for role, x in texts.items()
                        }
                        for texts in arguments[key]
                    ]
            calls.append(call)
        outputs = call_rewards(names, self.reward_funcs, calls, self.reward_timeout)
        for name, key, weight, output in zip(names, self.reward_names, self.reward_weights, outputs, strict=True):
            for outcome, reward in zip(outcomes, as_rewards(name, output, len(items)), strict=True):
                of_roles = reward if isinstance(reward, dict) else {}
                if unknown := [role for role in of_roles if role not in self.roles]:
                    raise TaskError(
                        f"{name} returned a reward for {unknown[0]!r}; the roles are {', '.join(self.roles)}."
                    )
                for role, x in of_roles.items():
                    outcome.role_rewards[role] = outcome.role_rewards.get(role, 0.0) + weight * x
                    outcome.metrics[f"rewards/{key}/{role}"] = x
                if isinstance(reward, float):
                    outcome.reward += weight * reward
                    outcome.metrics[f"rewards/{key}"] = reward
        for outcome, item, joint_action in zip(outcomes, items, joint_actions, strict=True):
            if not outcome.metrics and context.reward_none == "drop":
                outcome.reward = math.nan
            elif not outcome.metrics:
                raise TaskError(
                    f"Every reward function ({', '.join(self.reward_names)}) returned None for the joint action "
                    f"{joint_action!r} of item {item!r}; at least one must score it. In a training, `reward_none: "
                    "drop` leaves such joint actions out."
                )
            if own := outcome.role_rewards:
                joint = outcome.reward
                outcome.set_role_rewards({role: joint + own.get(role, 0.0) for role in self.roles})
        return outcomes

    def _arguments(
        self, items: list[dict], joint_actions: list[JointAction], histories: list[History]
    ) -> dict[str, Any]:
        """Returns the arguments that all reward functions get."""
        context = scoring_context()
        trees = context.trees if context.trees and len(context.trees) == len(items) else [*map(items.index, items)]
        arguments = {"groups": trees} | {name: [item[name] for item in items] for name in items[0]}
        if context.prompts is not None and len(context.prompts) == len(items):
            arguments |= {"prompts": context.prompts, "completion_ids": context.completion_ids}
        else:  # the environment was called directly
            arguments["prompts"] = [self.prompts(*branch) for branch in zip(items, histories, strict=True)]
        last = self.order[-1] if self.order else ()
        episodes = [
            [*(turn.joint_action for turn in past), {role: answers[role] for role in last or answers}]
            for past, answers in zip(histories, joint_actions, strict=True)
        ]
        return arguments | {
            "completions": joint_actions,
            "trainer_state": context.trainer_state,
            "episodes": episodes,
        }


def check_order(order: Sequence[Sequence[str]], roles: Sequence[str]) -> tuple[tuple[str, ...], ...]:
    """
    Returns the roles of each turn. Raises `ValueError` if `order` is not a list of lists of roles, or if a role does
    not occur.
    """
    turns = order if isinstance(order, list | tuple) else ()
    if not turns or not all(isinstance(turn, list | tuple) and turn for turn in turns):
        raise ValueError(f"`order` is {show(order)}; it must be a list of lists of roles, such as [[{roles[0]}]].")
    named = dict.fromkeys(str(role) for turn in turns for role in turn)
    if named.keys() != {*roles}:
        raise ValueError(
            f"`order` names {', '.join(named)}; every role must act in it, and the roles are {', '.join(roles)}."
        )
    return tuple(tuple(role for role in roles if role in turn) for turn in turns)


def last_answers(history: History) -> dict[str, str]:
    """Returns the last answer of each role that has acted."""
    return {role: text for turn in history for role, text in turn.joint_action.items()}


def first_prompt(role: str, template: Prompt | Callable[[dict], Prompt], item: dict) -> Prompt:
    """Returns the prompt of a role from its template or its function."""
    if isinstance(template, str):
        return fill_template(role, template, item)
    if isinstance(template, list):
        return [{**message, "content": fill_template(role, message["content"], item)} for message in template]
    name = f"The prompt function `{function_name(template)}` of {role!r}"
    with task_code(name):
        prompt = template(item)
    check_prompt(name, prompt)
    return prompt


def fill_template(role: str, template: str, item: dict) -> str:
    """
    Fills a template with the columns of an item. Raises [`TaskError`] if a column is missing or has no value, or a
    brace has no partner.
    """
    try:
        return ColumnFormatter().vformat(template, (), item)
    except KeyError as error:
        raise TaskError(
            f"The prompt of `{role}` needs the column {error}; items have {', '.join(item)}. {BRACES}"
        ) from None
    except (IndexError, ValueError, AttributeError, TypeError) as error:
        raise TaskError(f"The prompt template of `{role}` cannot be filled: {error}. {BRACES}") from error


class ColumnFormatter(Formatter):
    """Formats texts with columns. It refuses values that would become None, nan, b'...' or [{'role': ...}]."""

    def get_field(self, field_name: str, args: Any, kwargs: Any) -> Any:
        value, used = super().get_field(field_name, args, kwargs)
        if is_no_text(value):
            raise ValueError(f"{field_name!r} is {value} in this item; remove such items, or write a function")
        messages = value if isinstance(value, list) else []
        if messages and all(isinstance(x, dict) and "role" in x and "content" in x for x in messages):
            raise ValueError(f"{field_name!r} has chat messages; take `lambda item: item[{field_name!r}]`")
        return value, used


def is_no_text(value: Any) -> bool:
    """Returns whether a value, or one in it, is missing or bytes."""
    if isinstance(value, list | dict):
        return any(map(is_no_text, value.values() if isinstance(value, dict) else value))
    return value is None or isinstance(value, bytes) or (isinstance(value, float) and math.isnan(value))


def fields_of(template: str) -> list[str]:
    """Returns the columns that a template names. Raises `ValueError` if a brace has no partner."""
    return [re.split(r"[.\[]", field)[0] for _, field, _, _ in Formatter().parse(template) if field is not None]
