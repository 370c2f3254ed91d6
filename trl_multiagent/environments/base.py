"""What a task family must provide, and the shortest way to provide it: templates and TRL reward functions."""

import asyncio
import inspect
import keyword
import unicodedata
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any


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

    @abstractmethod
    def score(
        self, items: list[dict], joint_actions: list[JointAction], histories: list[Sequence[Turn]]
    ) -> list[Outcome]:
        """
        Judges a batch of joint actions; entry k of each list belongs together.

        Returns:
            `list[Outcome]`: One outcome per joint action, in order.
        """

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
        self.reward_funcs = reward_funcs if isinstance(reward_funcs, list) else [reward_funcs]
        self.reward_weights = reward_weights or [1.0] * len(self.reward_funcs)
        if len(self.reward_weights) != len(self.reward_funcs):
            raise ValueError(
                f"`reward_weights` has {len(self.reward_weights)} entries for {len(self.reward_funcs)} reward functions."
            )
        self.transition = transition

    def __repr__(self) -> str:
        names = ", ".join(function.__name__ for function in self.reward_funcs)
        return f"FunctionEnvironment(reward_funcs=[{names}], reward_weights={self.reward_weights})"

    def prompts(self, item: dict, history: Sequence[Turn]) -> dict[str, Prompt]:
        if not history:
            return {
                role: template(item) if callable(template) else _fill(role, template, item)
                for role, template in self.templates.items()
            }
        if self.transition is None:
            raise ValueError("More than one turn needs a `transition` that builds the next turn's prompts.")
        return self.transition(item, history)

    def score(
        self, items: list[dict], joint_actions: list[JointAction], histories: list[Sequence[Turn]]
    ) -> list[Outcome]:
        kwargs = {name: [item[name] for item in items] for name in items[0]}
        kwargs["prompts"] = [self.prompts(item, history) for item, history in zip(items, histories, strict=True)]
        kwargs["completions"] = joint_actions
        outputs = [function(**kwargs) for function in self.reward_funcs]
        if any(inspect.isawaitable(output) for output in outputs):
            with ThreadPoolExecutor(1) as thread:  # a notebook already runs an event loop in this one
                outputs = thread.submit(asyncio.run, _gather(outputs)).result()
        outcomes = [Outcome(reward=0.0) for _ in joint_actions]
        for function, weight, rewards in zip(self.reward_funcs, self.reward_weights, outputs, strict=True):
            if len(rewards) != len(joint_actions):
                raise ValueError(
                    f"The reward function `{function.__name__}` returned {len(rewards)} rewards for "
                    f"{len(joint_actions)} joint actions; it must return one each."
                )
            for outcome, reward in zip(outcomes, rewards, strict=True):
                if reward is not None:
                    outcome.reward += weight * reward
                    outcome.metrics[f"rewards/{function.__name__}"] = float(reward)
        unscored = next((k for k, outcome in enumerate(outcomes) if not outcome.metrics), None)
        if unscored is not None:
            raise ValueError(
                f"Every reward function returned None for the joint action {joint_actions[unscored]!r} of item "
                f"{items[unscored]!r}; at least one must score it."
            )
        return outcomes


def _fill(role: str, template: str, item: dict) -> str:
    try:
        return template.format(**item)
    except KeyError as error:
        raise ValueError(
            f"The prompt template of `{role}` needs the column {error}; the items have {', '.join(item)}."
        ) from None


async def _gather(outputs: list) -> list:
    """Awaits the results of `async` reward functions side by side; the others are results already."""
    awaited = iter(await asyncio.gather(*(output for output in outputs if inspect.isawaitable(output))))
    return [next(awaited) if inspect.isawaitable(output) else output for output in outputs]
