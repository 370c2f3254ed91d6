"""The interface of a task, [`Environment`], and the functions that call its methods and check what they return."""

import contextlib
import hashlib
import json
import keyword
import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from statistics import fmean
from types import MappingProxyType
from typing import Any, ClassVar

from trl_multiagent.environments.task_errors import TaskError, as_list, as_number, as_reward, show, task_code
from trl_multiagent.jobs.signals import in_task_code


Prompt = str | list[dict[str, str]]  # plain text, or chat messages with "role" and "content"
Prompts = dict[str, Prompt]  # role -> prompt
JointAction = dict[str, str]  # role -> completion


@dataclass(frozen=True)
class AgentCall:
    """Settings of one question to an agent: `stop` strings, most tokens, and whether it sees its own past turns."""

    stop: tuple[str, ...] = ()
    max_tokens: int | None = None
    memory: bool = True


PLAIN = AgentCall()  # of a question without settings


class TextPrompt(str):
    """A prompt with settings of its own."""

    call: AgentCall


class ChatPrompt(list):
    """Chat messages with settings of their own."""

    call: AgentCall


def with_call(prompt: Prompt, call: AgentCall) -> Prompt:
    """Returns a prompt with settings of its own."""
    if call == PLAIN:
        return prompt
    made = TextPrompt(prompt) if isinstance(prompt, str) else ChatPrompt(prompt)
    made.call = call
    return made


def call_of(prompt: Prompt) -> AgentCall:
    """Returns the settings of a prompt."""
    return getattr(prompt, "call", PLAIN)


def as_messages(text: Any, role: str = "user") -> list[dict[str, str]]:
    """Returns a text as a list of one chat message, and chat messages unchanged."""
    return [{"role": role, "content": text}] if isinstance(text, str) else text


class Reply(str):
    """
    An agent's answer. `full`: with its reasoning. `truncated`: whether it was cut off at its length limit. `message`:
    the fields of its message in the agent's own history.
    """

    full: str
    truncated: bool
    message: dict[str, str]

    @classmethod
    def of(
        cls, text: str, full: str | None = None, truncated: bool = False, message: dict[str, str] | None = None
    ) -> "Reply":
        reply = cls(text)
        reply.full, reply.truncated = text if full is None else full, truncated
        reply.message = message or {"content": text}
        return reply


# A metric with this name says whether a joint action solves its item: 1.0 or 0.0. Its mean is pass@1
PASSED = "passed"
# The same, counting only the tests that no feedback between turns shows
PASSED_HIDDEN = "passed_hidden"

# Metrics of a turn that a trainer logs
LOGGED = {"reward_mean", "expected_return", "early_terminated"}

ID_COLUMNS = ("item_id", "task_id", "id")  # columns that name an item

# Names with another meaning in saved teams: the folder of shared weights, and PEFT's name for an adapter without a
# name
RESERVED_ROLES = ("shared", "default")
MAX_ROLE = 100  # characters; names are in prompts, too
MAX_TURNS = 20  # of a workflow, if neither it nor `num_turns` sets another bound


def item_id(item: dict) -> str:
    """Returns the id of a dataset row: one of its columns, or a hash of all of them."""
    for name in ID_COLUMNS:
        if name in item:
            return str(item[name])
    return hashlib.sha256(json.dumps(item, sort_keys=True, default=repr).encode()).hexdigest()[:12]


def check_roles(roles: Sequence[str]) -> tuple[str, ...]:
    """
    Returns roles as a tuple. Raises `ValueError` if they are not a list of distinct names, or if a name cannot be used
    for a folder and a module. Names that differ only in case are equal, because many file systems ignore case.
    """
    if isinstance(roles, str) or not isinstance(roles, Sequence):
        raise ValueError(f"`roles` must be a list with one name per agent, such as ['aux', 'main'], not {roles!r}.")
    if not roles:
        raise ValueError("A team needs at least one agent, but the list of roles is empty.")
    for role in roles:
        if not isinstance(role, str) or not role.isidentifier() or keyword.iskeyword(role) or len(role) > MAX_ROLE:
            raise ValueError(
                f"Roles name folders and modules: {str(role)[:MAX_ROLE]!r} must be a Python identifier and no "
                f"keyword, of at most {MAX_ROLE} characters."
            )
        if role.casefold() in RESERVED_ROLES:
            raise ValueError(f"{role!r} is a name that the files of a team need: choose another name for this role.")
    if len({role.casefold() for role in roles}) < len(roles):
        raise ValueError(f"Every agent needs its own name, but {list(roles)} has one twice (case does not count).")
    return tuple(roles)


@dataclass
class Outcome:
    """
    The environment's verdict on one joint action.

    Args:
        reward (`float` or `dict[str, float]`): Joint reward, shared by all agents, or one reward per role of the
            environment, also for roles that do not act. [`judge`] moves these to `role_rewards` and leaves their mean,
            the team's reward.
        metrics (`dict[str, float]`, *optional*): Numbers to log. Their means over the joint actions of a turn are
            logged as `turn_{k}/{name}`. The metric `passed` is 1.0 for a joint action that solves its item and 0.0 for
            any other; pass@k is computed from it. `passed_hidden` is the same for the tests that no feedback between
            turns shows.
        info (`Any`, *optional*): Data from which the environment builds the next turn's prompts. The trainer only
            stores it.
        extra (`dict[str, Any]`, *optional*): More columns of the joint action's row in the tables of completions and
            in the trace.
        role_rewards (`dict[str, float]`, *optional*): The reward of each role; empty if all share one. Set by
            [`judge`].
    """

    reward: float
    metrics: dict[str, float] = field(default_factory=dict)
    info: Any = None
    extra: dict[str, Any] = field(default_factory=dict)
    role_rewards: dict[str, float] = field(default_factory=dict)

    def set_role_rewards(self, rewards: dict[str, float]) -> None:
        """Sets the reward of each role. The team's is their mean."""
        self.role_rewards, self.reward = rewards, fmean(rewards.values())


@dataclass
class Turn:
    """
    One past turn of a branch: the prompts and answers of the roles that acted, and the outcome of their joint action.
    `altered`: whether an ablation has replaced answers, so that the prompts belong to other ones.
    """

    prompts: Prompts
    joint_action: JointAction
    outcome: Outcome
    altered: bool = False


History = Sequence[Turn]  # the past turns of a branch, oldest first


class Environment(ABC):
    """
    Base class of a task family: the team's roles, the prompts of each turn, and the joint reward.

    An environment must not store the state of an episode. Its methods get the history of each branch, so many branches
    of a rollout tree can be played at once. The model card of the team contains its `repr`, which may include a
    version of the reward.

    `watched_metrics` maps metrics of the outcomes that are near zero if something is wrong to a description of the
    problem. A training warns if one of them stays near zero in the first turn.

    `metric_ranges` holds the smallest and the largest possible value of metrics of the outcomes, and of `reward` and
    `return`. An evaluation uses them for confidence intervals and for percentages of the largest value. By default,
    the range of `return` is that of a `reward` in every possible turn.

    `order` holds the roles that act at each turn, if they are the same in all episodes. After these turns, the
    episodes end.

    `unseen` is the sentence in prompts that says that agents do not see each other's answers, and its replacement in
    [`~Environment.show_answers`].
    """

    roles: tuple[str, ...]
    metric_ranges: Mapping[str, tuple[float, float]] = MappingProxyType({})
    watched_metrics: ClassVar[Mapping[str, str]] = MappingProxyType({})
    order: tuple[tuple[str, ...], ...] | None = None
    unseen: ClassVar[tuple[str, str]] = ("", "")
    task_settings: Mapping[str, Any] = MappingProxyType({})  # of the task's own sections, which a [`Task`] stores

    @property
    def unwrapped(self) -> "Environment":
        """The task itself. An environment that wraps another one returns the inner task."""
        return self

    @abstractmethod
    def prompts(self, item: dict, history: History) -> Prompts:
        """
        Returns the prompts of one turn. The roles with a prompt act in this turn; the others do not answer and are not
        trained on it. No prompt for any role ends the episode. At the first turn, at least one role acts.

        Args:
            item (`dict`): The dataset row.
            history (`History`): The branch's past turns, oldest first; empty at the first turn.

        Returns:
            `dict[str, Prompt]`: The new prompt of each role that acts. The trainer adds the agent's own past prompts
            and responses in front of it.
        """

    def next_prompts(self, items: list[dict], histories: list[History]) -> list[Prompts]:
        """
        Returns the prompts of a whole turn, for all branches of all trees. By default it calls
        [`~Environment.prompts`] for each branch. Override it if making many prompts at once is faster, for example if
        another model writes feedback.

        Args:
            items (`list[dict]`): The dataset rows; an item occurs once per branch.
            histories (`list[History]`): The past turns of each branch, oldest first.

        Returns:
            `list[dict[str, Prompt]]`: The prompts of each branch, in order.
        """
        return [self.prompts(item, history) for item, history in zip(items, histories, strict=True)]

    def check_turns(self, num_turns: int | None, are_episodes: bool = True) -> int:
        """
        Returns the largest number of turns of an episode: `num_turns` or, if it is `None`, by default 1. Raises
        `ValueError` if this environment cannot play so many turns, by default if its `order` has more. It must not
        load anything.

        Args:
            num_turns (`int`, *optional*): The setting `num_turns`.
            are_episodes (`bool`, *optional*, defaults to `True`): Whether branches never divide.
        """
        number = num_turns or 1
        if self.order is not None and number < len(self.order):
            raise ValueError(f"`num_turns` is {number}, but an episode has {len(self.order)}: set it to that.")
        return number

    def playing(
        self, num_turns: int | None, are_episodes: bool, seats: Collection[str] = ()
    ) -> contextlib.AbstractContextManager[None]:
        """
        Entered while a batch of trees or episodes is played. An environment that holds episodes closes them at its
        exit. By default it does nothing.

        Args:
            num_turns (`int`, *optional*): Largest number of turns of a branch.
            are_episodes (`bool`): Whether branches never divide, so that each `item` object belongs to one episode.
            seats (`Collection[str]`, *optional*): Roles that are not trained. `num_turns` does not count turns in
                which only they act.
        """
        return contextlib.nullcontext()

    def group_rewards(self, item: dict, histories: list[History]) -> Sequence[float] | None:
        """
        Compares the finished branches of an item, each given by all its turns. Returns a number for each, which is
        added to its last reward. By default `None`: nothing is added.
        """
        return None

    def prepare(self, num_turns: int) -> None:  # noqa: B027
        """
        Checks or loads the outside resources of an episode of `num_turns`, such as another model, before any data or
        agent is loaded. Raises [`UnavailableError`] if one is missing. A dry run does not call this method. By default
        it does nothing.
        """

    def plan(self, items: Sequence[dict], num_later_prompts: int, answer_tokens: int) -> dict[str, str]:
        """
        Describes the cost of the environment itself, for the plan of a dry run. It must not load or contact anything.
        Empty by default.

        Args:
            items (`Sequence[dict]`): The items to train on; none if they are not known.
            num_later_prompts (`int`): Upper bound of the number of branches, after the first turn, for which prompts
                will be made.
            answer_tokens (`int`): Largest number of tokens of an agent's answer.

        Returns:
            `dict[str, str]`: Lines of the plan, by name.
        """
        return {}

    @abstractmethod
    def score(self, items: list[dict], joint_actions: list[JointAction], histories: list[History]) -> list[Outcome]:
        """
        Scores a batch of joint actions.

        Args:
            items (`list[dict]`): The dataset row of each joint action.
            joint_actions (`list[JointAction]`): The agents' completions, by role.
            histories (`list[History]`): The past turns of each branch, oldest first; empty at the first turn.

        Returns:
            `list[Outcome]`: One outcome per joint action, in order. A number is short for an outcome with this reward.
            An array or a tensor of shape (number of joint actions,) may replace the list.
        """

    def evaluate(self, items: list[dict], joint_actions: list[JointAction], histories: list[History]) -> list[Outcome]:
        """
        Scores joint actions in an evaluation, by default with [`~Environment.score`]. Override it to report more
        metrics.
        """
        return self.score(items, joint_actions, histories)

    def show_answers(self, role: str, prompt: Prompt, answers: Mapping[str, str]) -> Prompt:
        """
        Adds the answers of other agents to an agent's prompt, by default in front of it. Training never calls this: it
        is for baselines in which agents see each other's answers. In a prompt that is text, it also replaces the
        sentence `unseen`.

        Args:
            role (`str`): The agent.
            prompt (`Prompt`): Its prompt, as [`~Environment.next_prompts`] made it.
            answers (`Mapping[str, str]`): The answers of other agents, by role.
        """
        shown = "".join(f"The answer of {other}:\n\n{answer.strip()}\n\n" for other, answer in answers.items())
        if isinstance(prompt, str):
            return with_call(shown + prompt.replace(*self.unseen), call_of(prompt))
        *before, last = prompt
        return with_call([*before, {**last, "content": shown + last["content"]}], call_of(prompt))

    def metrics(self) -> dict[str, float]:
        """
        Returns numbers about the scoring since the last call. They are summed over the processes and logged as
        `reward/{name}` once per optimizer step. Empty by default.
        """
        return {}

    def state_dict(self) -> dict[str, Any]:
        """
        Returns the state on which the next scores and prompts depend, such as the state of the environment's own
        random number generators, as plain values and tensors. It is saved in checkpoints. Empty by default.
        """
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """
        Restores a state that [`~Environment.state_dict`] returned. It is only called if that state was not empty.
        """
        raise NotImplementedError(f"{type(self).__name__} has a `state_dict`, so it needs a `load_state_dict`.")

    def resume_settings(self) -> dict[str, Any]:
        """
        Returns the settings on which prompts and rewards depend, by name, as plain values. A run can only continue a
        checkpoint that has the same settings. By default, those of the task's own sections.
        """
        return {**self.task_settings}


def prompts_of_one(self: Environment, item: dict, history: History) -> Prompts:
    """Is the method `prompts` of environments that override [`~Environment.next_prompts`]."""
    return self.next_prompts([item], [history])[0]


# The context in which an environment scores a batch of joint actions


@dataclass
class ScoringContext:
    """
    Facts about the joint actions that an environment scores, in addition to the arguments of `Environment.score`.
    """

    prompts: list[Prompts] | None = None  # of each joint action
    completion_ids: list[dict[str, list[int]]] | None = None  # of each joint action, by role
    chat_roles: frozenset[str] = frozenset()  # the roles with chat messages as prompts
    trainer_state: Any = None  # transformers' `TrainerState`; `None` without a trainer
    reward_none: str = "error"  # with "drop", NaN is the reward of a joint action that nothing scores
    metrics: dict[str, list[float]] = field(default_factory=dict)  # numbers to log, to which the environment adds
    trees: list[int] | None = None  # the number of the item of each joint action
    # The environment, if its rewards are only compared with others of the same item. What adds the same to all of them
    # then changes no update, so it may estimate that. An environment around it may do more with its rewards
    compared: "Environment | None" = None


_CONTEXT: ContextVar[ScoringContext | None] = ContextVar("scoring_context", default=None)


def scoring_context() -> ScoringContext:
    """Returns the context of the current batch; an empty one if the environment was called directly."""
    return _CONTEXT.get() or ScoringContext()


@contextlib.contextmanager
def scoring(context: ScoringContext) -> Iterator[None]:
    """Makes [`scoring_context`] return `context` within the block."""
    token = _CONTEXT.set(context)
    try:
        yield
    finally:
        _CONTEXT.reset(token)


# Functions that call an environment's methods and check the return values


def ask(environment: Environment, items: list[dict], histories: list[History]) -> list[Prompts]:
    """
    Calls [`~Environment.next_prompts`], by default [`~Environment.prompts`], and sorts the prompts of each item in the
    order of the roles. Raises [`TaskError`] if the method fails, does not return a dict of valid prompts for each
    item, or returns no prompt for an item at its first turn.
    """
    method = "prompts" if type(environment).next_prompts is Environment.next_prompts else "next_prompts"
    name = f"`{type(environment).__name__}.{method}`"
    with in_task_code(), task_code(name):
        prompts = environment.next_prompts(items, histories)
    prompts = as_list(name, prompts, len(items), "dicts, one per item")
    for item_prompts, history in zip(prompts, histories, strict=True):
        check_prompts(name, item_prompts, environment.roles)
        if not item_prompts and not history:
            raise TaskError(
                f"{name} returned no prompt at the first turn: an episode must not end before one of the trained "
                f"roles ({', '.join(environment.roles)}) has acted. Leave such items out, or train a role that begins."
            )
    return [{role: by_role[role] for role in environment.roles if role in by_role} for by_role in prompts]


def check_prompts(name: str, prompts: Any, roles: Sequence[str]) -> None:
    """Raises [`TaskError`] if the return value of the function `name` is not a dict with prompts of roles."""
    if not isinstance(prompts, Mapping):
        raise TaskError(
            f"{name} returned {show(prompts)}; it must return a dict with a prompt for each role that acts."
        )
    unknown = [str(role) for role in prompts if role not in roles]
    if unknown:
        raise TaskError(f"{name} returned a prompt for {', '.join(unknown)}; the roles are {', '.join(roles)}.")
    for role, prompt in prompts.items():
        check_prompt(f"{name}, for {role!r},", prompt)


def check_all_act(subject: str, prompts: Mapping[str, Prompt], roles: Sequence[str]) -> None:
    """
    Raises [`TaskError`] if one of the `roles` has no prompt. The message says that `subject` needs the answers of all
    roles.
    """
    idle = [role for role in roles if role not in prompts]
    if idle:
        raise TaskError(f"{subject} needs the answers of all roles in every turn, but {', '.join(idle)} does not act.")


def is_message(value: Any) -> bool:
    """Returns whether a value is a chat message with text."""
    return isinstance(value, Mapping) and all(isinstance(value.get(key), str) for key in ("role", "content"))


def check_prompt(name: str, prompt: Any) -> None:
    """Raises [`TaskError`] if the return value of the function `name` is neither text nor chat messages."""
    if not isinstance(prompt, str) and not (isinstance(prompt, list) and prompt and all(map(is_message, prompt))):
        raise TaskError(f"{name} returned {show(prompt)}; a prompt is text, or messages with 'role' and 'content'.")


def judge(
    environment: Environment,
    items: list[dict],
    joint_actions: list[JointAction],
    histories: list[History],
    evaluation: bool = False,
) -> list[Outcome]:
    """
    Calls [`~Environment.score`], or [`~Environment.evaluate`] in an evaluation, and converts rewards and metrics to
    `float`. A reward per role becomes the outcome's `role_rewards`, and their mean its reward. Raises [`TaskError`] if
    the method fails, or does not return one outcome with finite rewards per joint action.
    """
    name, count = f"`{type(environment).__name__}.score`", len(joint_actions)
    drops = scoring_context().reward_none == "drop"  # then, NaN is the reward of what nothing scores
    with in_task_code(), task_code(name):
        method = environment.evaluate if evaluation else environment.score
        outcomes = method(items, joint_actions, histories)
    values = as_list(name, outcomes, count, "outcomes")
    places = dict[int, int]()
    for position, outcome in enumerate(values):
        where = f"for joint action {position + 1} of {count}"
        if not isinstance(outcome, Outcome):
            if as_number(outcome) is None and not isinstance(outcome, Mapping):
                raise TaskError(f"{name} returned {show(outcome)} {where}; it must return an `Outcome` or a number.")
            outcome = values[position] = Outcome(outcome)
        elif places.setdefault(id(outcome), position) < position:  # an environment around this one changes each
            outcome = values[position] = replace(outcome, extra={**outcome.extra})
        reward = outcome.reward
        if isinstance(reward, Mapping):
            if set(reward) != set(environment.roles):
                raise TaskError(
                    f"{name} returned rewards of {', '.join(map(str, reward))} {where}; it must return one number, or "
                    f"one for each of the roles {', '.join(environment.roles)}."
                )
            outcome.set_role_rewards(
                {x: as_reward(name, reward[x], f"for {x!r}, {where}", position, drops) for x in environment.roles}
            )
        outcome.reward = as_reward(name, outcome.reward, where, position, drops)
        outcome.metrics = numbers_by_name(name, outcome.metrics)
        for key in sorted(outcome.metrics.keys() & LOGGED):
            raise TaskError(f"{name} returned the metric {key!r}, which is logged anyway: choose another name.")
        if drops:
            outcome.metrics["reward_none"] = float(math.isnan(outcome.reward))
    return values


def scoring_metrics(environment: Environment) -> dict[str, float]:
    """Calls [`~Environment.metrics`] and converts the numbers to `float`."""
    name = f"`{type(environment).__name__}.metrics`"
    with task_code(name):
        metrics = environment.metrics()
    return numbers_by_name(name, metrics)


def resume_settings(environment: Environment) -> dict[str, Any]:
    """Calls [`~Environment.resume_settings`] and converts the values to types of JSON."""
    name = f"`{type(environment).__name__}.resume_settings`"
    with task_code(name):
        settings = environment.resume_settings()
    try:
        return {**json.loads(json.dumps(settings))}
    except (TypeError, ValueError) as error:
        raise TaskError(f"{name} returned {show(settings)}; it must be a dict of plain values: {error}.") from error


def describe_environment(environment: Environment) -> dict[str, Any]:
    """Returns the settings of an environment that a checkpoint must match, in addition to [`describe_run`]."""
    return {"environment": type(environment).__name__, "environment settings": resume_settings(environment)}


def numbers_by_name(name: str, metrics: Any) -> dict[str, float]:
    """Converts metrics that the function `name` returned to `float`."""
    if not isinstance(metrics, Mapping):
        raise TaskError(f"{name} returned the metrics {show(metrics)}; they must be a dict of numbers.")
    numbers = {}
    for key, value in metrics.items():
        number = as_number(value)
        if not isinstance(key, str) or number is None:
            raise TaskError(f"{name} returned the metric {key!r} with the value {show(value)}; it must be a number.")
        numbers[key] = number
    return numbers
