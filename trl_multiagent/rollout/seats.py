"""
Seats: players of roles that are not trained, such as a function, a saved team, or a model behind an endpoint.

[`SeatedEnvironment`] is the task as the trained agents see it. It has only their roles, so teams, trainers and
evaluations need no code for seats. If a seat acts together with trained agents, it answers once for each of their
joint actions. Turns in which only seats act are played at once, and their rewards are added to the turn before,
or to the first turn if they open the episode.
"""

import json
import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any

from trl_multiagent.endpoints import Answer, EndpointClient, EndpointError, Question
from trl_multiagent.environments.base import (
    Environment,
    History,
    JointAction,
    Outcome,
    Prompt,
    Prompts,
    Turn,
    as_messages,
    ask,
    call_of,
    item_id,
    judge,
    scoring,
    scoring_context,
    with_call,
)
from trl_multiagent.environments.task_errors import TaskError, UnavailableError, function_name, show, task_code
from trl_multiagent.environments.wrapper import EnvironmentWrapper
from trl_multiagent.models.reasoning import split_reasoning
from trl_multiagent.rollout.history import whole_prompt
from trl_multiagent.rollout.tree import derive_seed, grouped


MAX_TURNS_ALONE = 100  # in a row, in which only seats act


@dataclass
class Branch:
    """A branch of an episode of the whole task: its past turns, and the prompts of the next turn."""

    item: dict
    history: History = ()
    prompts: Prompts = field(default_factory=dict)
    num_paid: int = 0  # number of turns with their rewards in an outcome


class Seat(ABC):
    """Plays a role of a task without being trained."""

    @abstractmethod
    def answer(self, role: str, branches: Sequence[Branch]) -> list[str]:
        """
        Returns the answer to the prompt of the role in each branch. Raising an [`UnavailableError`] ends the run with
        one line.
        """

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """Returns the facts that must be the same when a run is resumed, as plain values."""

    def partners(self, role: str, items: Sequence[dict]) -> list[str] | None:
        """Returns the name of the member that plays the role for each item, if the seat has several members."""
        return None

    def release(self) -> None:  # noqa: B027
        """Frees memory, because the seat was not drawn in this call. It may be needed again."""


@dataclass(eq=False)
class FunctionSeat(Seat):
    """Plays a role with `function(item, prompt, history) -> str`, such as a simulated user, a tool or a referee."""

    function: Callable[[dict, Prompt, History], str]

    def answer(self, role: str, branches: Sequence[Branch]) -> list[str]:
        name, answers = f"The function `{function_name(self.function)}`, which plays {role!r},", []
        for branch in branches:
            with task_code(name):
                text = self.function(branch.item, branch.prompts[role], branch.history)
            if not isinstance(text, str):
                raise TaskError(f"{name} returned {show(text)}; it must return a text.")
            answers.append(text)
        return answers

    def describe(self) -> dict[str, Any]:
        return {"function": function_name(self.function)}


@dataclass(eq=False)
class EndpointSeat(Seat):
    """
    Plays a role with a model behind an endpoint. Answers are kept on the disk, so a resumed run does not pay for them
    again.
    """

    client: EndpointClient
    seed: int = 0

    def answer(self, role: str, branches: Sequence[Branch]) -> list[str]:
        calls = [call_of(branch.prompts[role]) for branch in branches]
        prompts = [
            with_call(whole_prompt(role, x.history if call.memory else (), x.prompts[role], as_chat=True), call)
            for x, call in zip(branches, calls, strict=True)
        ]
        place = f"{self.seed}/{role}/{training_step()}"
        seeds = [f"{place}/{item_id(x.item)}/{len(x.history)}" for x in branches]
        answers = ask_endpoint(self.client, prompts, seeds, f"The model that plays {role!r}")
        return [ended(text, call.stop) for text, call in zip(answers, calls, strict=True)]

    def describe(self) -> dict[str, Any]:
        return {"endpoint": self.client.endpoint.parameters, "seed": self.seed}


@dataclass(eq=False)
class Population(Seat):
    """
    Plays a role with one of several seats, drawn for each role, item and optimizer step. All episodes of an item have
    the same partner. `members` returns the seats of an optimizer step by name; with `None`, outside of a training,
    it returns all seats.
    """

    members: Callable[[int | None], Mapping[str, Seat]]
    description: Any
    seed: int = 0

    def answer(self, role: str, branches: Sequence[Branch]) -> list[str]:
        members = self.members(training_step())
        drawn = self._draw(members, role, [branch.item for branch in branches])
        answers: dict[int, str] = {}
        for name, member in members.items():
            if name not in drawn:
                member.release()
        for name, own in grouped((name, k) for k, name in enumerate(drawn)).items():
            answers |= zip(own, members[name].answer(role, [branches[k] for k in own]), strict=True)
        return [answers[k] for k in range(len(branches))]

    def partners(self, role: str, items: Sequence[dict]) -> list[str]:
        return self._draw(self.members(training_step()), role, items)

    def _draw(self, members: Mapping[str, Seat], role: str, items: Sequence[dict]) -> list[str]:
        names, place = [*members], (self.seed, training_step(), role)
        return [names[derive_seed(*place, item_id(item)) % len(names)] for item in items]

    def describe(self) -> dict[str, Any]:
        return {"population": self.description, "seed": self.seed}


class SeatedEnvironment(EnvironmentWrapper):
    """
    A task in which seats play some roles. The environment's own roles are the others.

    Args:
        task ([`Environment`]): The task with all roles. If it gives each role a reward of its own, the rewards of
            seats are left out.
        seats (`dict[str, Seat]`): The seats of the roles that are not trained.

    Raises:
        TypeError: A seat is not a [`Seat`].
        ValueError: A seat is for no role of the task, or no role is left to train.

    Example:

    ```python
    >>> from trl_multiagent import FunctionEnvironment, FunctionSeat, SeatedEnvironment
    >>> task = FunctionEnvironment(
    ...     prompts={"guesser": "Guess a number:", "referee": "{guesser}"},
    ...     order=[["guesser"], ["referee"]],
    ...     reward_funcs=lambda completions, **columns: [float(c["referee"] == "right") for c in completions],
    ... )
    >>> referee = FunctionSeat(lambda item, prompt, history: "right" if prompt == item["number"] else "wrong")
    >>> environment = SeatedEnvironment(task, {"referee": referee})
    >>> environment.roles
    ('guesser',)
    >>> environment.score([{"number": "7"}], [{"guesser": "7"}], [[]])[0].reward
    1.0

    ```
    """

    def __init__(self, task: Environment, seats: Mapping[str, Seat]):
        super().__init__(task)
        unknown = [role for role in seats if role not in task.roles]
        if unknown or len(seats) == len(task.roles):
            problem = f"{unknown[0]!r} is none of them" if unknown else "none is left to train"
            raise ValueError(
                f"`seats` has {', '.join(seats)}. The task has the roles {', '.join(task.roles)}: {problem}."
            )
        for role, seat in seats.items():
            if not isinstance(seat, Seat):
                raise TypeError(f"The seat of {role!r} is {show(seat)}; it must be a `Seat`, such as `FunctionSeat`.")
        self.seats = {role: seats[role] for role in task.roles if role in seats}
        self.roles = tuple(role for role in task.roles if role not in seats)
        if task.order is not None:
            turns = [tuple(role for role in turn if role in self.roles) for turn in task.order]
            self.order = tuple(turn for turn in turns if turn)
        # The episodes of the batch before the first turn of a trained agent, by the id of their item
        self._openings: dict[int, Branch] = {}

    def check_turns(self, num_turns: int | None, are_episodes: bool = True) -> int:
        if self.order is None:
            return self.task.check_turns(num_turns, are_episodes)
        return Environment.check_turns(self, num_turns, are_episodes)  # the task counts the turns of seats, too

    def playing(
        self, num_turns: int | None, are_episodes: bool, seats: Collection[str] = ()
    ) -> AbstractContextManager[None]:
        return super().playing(num_turns, are_episodes, {*seats, *self.seats})

    def group_rewards(self, item: dict, histories: list[History]) -> Sequence[float] | None:
        return self.task.group_rewards(item, [history[-1].outcome.info.history for history in histories])

    def next_prompts(self, items: list[dict], histories: list[History]) -> list[Prompts]:
        if any(histories):
            branches = [self._reached(*x) for x in zip(items, histories, strict=True)]
        else:  # a batch begins
            branches = self._advance([Branch(item) for item in items])
            self._openings = {id(branch.item): branch for branch in branches}
        return [{role: prompt for role, prompt in x.prompts.items() if role in self.roles} for x in branches]

    def judge(
        self, items: list[dict], joint_actions: list[JointAction], histories: list[History], evaluation: bool
    ) -> list[Outcome]:
        branches = [replace(self._reached(*x)) for x in zip(items, histories, strict=True)]
        self._play(branches, joint_actions, evaluation)
        outcomes = [self._outcome(branch) for branch in self._advance(branches, evaluation)]
        for role, seat in self.seats.items():
            for outcome, name in zip(outcomes, seat.partners(role, items) or (), strict=False):
                if not math.isnan(outcome.reward):
                    outcome.metrics[f"with/{role}/{name}"] = outcome.reward
        return outcomes

    def resume_settings(self) -> dict[str, Any]:
        return {**super().resume_settings(), "seats": {role: seat.describe() for role, seat in self.seats.items()}}

    def _reached(self, item: dict, history: History) -> Branch:
        """Returns the branch of the whole task after a history. The `info` of an outcome holds it."""
        if history:
            return history[-1].outcome.info
        return self._openings.get(id(item)) or self._advance([Branch(item)])[0]

    def _advance(self, branches: list[Branch], evaluation: bool = False) -> list[Branch]:
        """Asks the task for prompts, and plays turns in which only seats act, until there is none left."""
        waiting = branches
        for _ in range(MAX_TURNS_ALONE):
            asked = ask(self.task, [x.item for x in waiting], [x.history for x in waiting])
            for branch, prompts in zip(waiting, asked, strict=True):
                branch.prompts = prompts
            waiting = [x for x in waiting if x.prompts and x.prompts.keys() <= self.seats.keys()]
            if not waiting:
                return branches
            self._play(waiting, [{}] * len(waiting), evaluation)
        raise TaskError(f"Only seats acted in {MAX_TURNS_ALONE} turns in a row. The task has to end the episode.")

    def _play(self, branches: list[Branch], answers: Sequence[JointAction], evaluation: bool) -> None:
        """Plays a turn of each branch, in which trained agents have given these answers."""
        said = [{**by_role} for by_role in answers]
        for role, seat in self.seats.items():
            asked = [k for k, branch in enumerate(branches) if role in branch.prompts]
            texts = seat.answer(role, [branches[k] for k in asked]) if asked else ()
            for k, text in zip(asked, texts, strict=True):
                said[k][role] = text
        prompts = [branch.prompts for branch in branches]
        actions = [{role: said[k][role] for role in asked} for k, asked in enumerate(prompts)]
        items, histories = [x.item for x in branches], [x.history for x in branches]
        with scoring(replace(scoring_context(), prompts=prompts, completion_ids=None)):
            outcomes = judge(self.task, items, actions, histories, evaluation)
        for branch, action, outcome in zip(branches, actions, outcomes, strict=True):
            branch.history = (*branch.history, Turn(branch.prompts, action, outcome))

    def _outcome(self, branch: Branch) -> Outcome:
        """
        Adds up the rewards of the turns that no outcome has yet. A later metric replaces an earlier one of the same
        name.
        """
        turns = branch.history[branch.num_paid :]
        outcomes = [turn.outcome for turn in turns]
        joined, branch.num_paid = Outcome(sum(x.reward for x in outcomes), info=branch), len(branch.history)
        for turn in turns:
            joined.metrics |= turn.outcome.metrics
            joined.extra |= turn.outcome.extra
            joined.extra |= {f"answer/{role}": turn.joint_action[role] for role in self.seats if role in turn.prompts}
        if any(outcome.role_rewards for outcome in outcomes):
            joined.set_role_rewards(
                {role: sum(x.role_rewards.get(role, x.reward) for x in outcomes) for role in self.roles}
            )
        return joined


def ask_endpoint(client: EndpointClient, prompts: Sequence[Prompt], seeds: Sequence[str], name: str) -> list[str]:
    """
    Returns an answer to each prompt. Equal prompts get different answers. With the same seeds, cached answers are used
    again. Raises an [`UnavailableError`] that begins with `name` if an answer is missing.
    """
    questions, asked = [], Counter[str]()
    for prompt, seed in zip(prompts, seeds, strict=True):
        messages = tuple({key: message[key] for key in ("role", "content")} for message in as_messages(prompt))
        text = json.dumps([seed, messages])
        asked[text] += 1
        questions.append(Question(messages, f"{seed}/{asked[text]}", call_of(prompt).max_tokens))
    answers = client.ask(questions, stop_at_failure=True)
    failures = [answer for answer in answers if isinstance(answer, EndpointError)]
    if failures:
        raise UnavailableError(
            f"{name} gave no answer to {len(failures)} of {len(answers)} requests: {failures[0]}. Start again to "
            "continue: received answers are kept."
        )
    # A server without a parser of reasoning leaves it in the text
    return [split_reasoning(answer.text)[1] for answer in answers if isinstance(answer, Answer)]


def ended(text: str, stops: Sequence[str]) -> str:
    """Cuts a text off after the first of some strings."""
    return text[: min((text.index(stop) + len(stop) for stop in stops if stop in text), default=len(text))]


def training_step() -> int | None:
    """Returns the number of optimizer steps of the current training; `None` outside of a training."""
    state = scoring_context().trainer_state
    return None if state is None else state.global_step
