"""
Workflows: tasks that play an episode as a coroutine.

`await agents.writer(prompt)` is the turn of the agent `writer`. All branches of a batch run on one event loop until
each one waits for agents or has ended; what they ask is one turn, sampled in one call. The value that the coroutine
returns is its reward.

In a group of episodes, a coroutine lives from its first turn to its end, so that it may hold a game, a process or a
connection. It is closed on every way out. In a tree, a branch is replayed from its answers: the coroutine must depend
on the item and the answers alone.
"""

import asyncio
import contextlib
import contextvars
import copy
import dataclasses
import inspect
import math
import os
import signal
import sys
import threading
import traceback
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterator, Mapping, Sequence
from typing import Any

from trl_multiagent.environments.base import (
    MAX_TURNS,
    AgentCall,
    Environment,
    History,
    JointAction,
    Outcome,
    Prompt,
    Prompts,
    Reply,
    call_of,
    check_prompt,
    check_roles,
    scoring_context,
    with_call,
)
from trl_multiagent.environments.task_errors import (
    TaskError,
    UnavailableError,
    as_number,
    as_rewards,
    describe,
    show,
    task_code,
)
from trl_multiagent.jobs.event_loop import CLOSING_SECONDS, Blocked, is_blocked, run_on_loop
from trl_multiagent.jobs.signals import closing_at_exit


PASSES = 3  # of the event loop without a new question, after which an episode waits for its agents
MOST_REFUSED = 100  # questions after the last turn, until a workflow that goes on asking is stopped

EPISODE = contextvars.ContextVar[Any]("EPISODE", default=None)  # in which a task was started


class OutOfTurns(Exception):
    """
    Raised by `await agents.role(...)` when an episode has used all its turns. A workflow may catch it and return a
    reward for what it reached. Otherwise it has earned what it was paid so far.
    """


class NotAwaited(asyncio.Future):
    """An agent's answer, which is there when it has been awaited. Python's messages show the name of this class."""

    def __str__(self) -> str:
        raise TypeError("an agent was asked without `await`: its answer is not there yet.")


class Agents:
    """
    The agents as a workflow sees them. If `writer` is the first role of a task, `agents.writer`, `agents["writer"]`
    and `agents[0]` are this agent. A call asks the agent and returns its answer when awaited.
    """

    def __init__(self, episode: "Episode", roles: Sequence[str]):
        self._episode, self._roles = episode, roles

    def _check(self, role: Any) -> str:
        name = self._roles[role] if role in range(len(self._roles)) else role
        if name not in self._roles:
            raise AttributeError(f"There is no role {role!r}; the roles are {', '.join(self._roles)}.")
        return name

    def __getitem__(self, role: str | int) -> Callable[..., Awaitable[str]]:
        name = self._check(role)

        def call(
            prompt: Prompt, *, stop: str | Sequence[str] = (), max_tokens: int | None = None, memory: bool = True
        ) -> Awaitable[str]:
            check_prompt(f"The workflow, for {name!r},", prompt)
            if not isinstance(prompt, str):  # the workflow may go on writing into its messages
                prompt = [dict(message) for message in prompt]
            stops = (stop,) if isinstance(stop, str) else tuple(stop)
            if not all(isinstance(text, str) and text for text in stops):
                raise TypeError(f"`stop` is {show(stop)}; it needs texts that are not empty.")
            if max_tokens is not None and (type(max_tokens) is not int or max_tokens < 1):
                raise TypeError(f"`max_tokens` is {show(max_tokens)}; it must be a whole number of at least 1.")
            return self._episode.ask(name, with_call(prompt, AgentCall(stops, max_tokens, memory)))

        return call

    def __getattr__(self, role: str) -> Callable[..., Awaitable[str]]:
        return self[role]

    def reward(self, number: float, role: str | None = None) -> None:
        """Pays a role, or all of them, for what has happened since the last turn."""
        if as_number(number) is None:
            raise TypeError(f"`agents.reward` got {show(number)}; it needs a number.")
        for name in self._roles if role is None else [self._check(role)]:
            self._episode.paid[name] += float(number)
        self._episode.was_paid = True

    def log(self, name: str, number: float) -> None:
        """Adds a metric, logged as `turn_{k}/{name}`."""
        self._episode.metrics[name] = float(number)

    def note(self, column: str, text: Any) -> None:
        """Adds a column to the rows of the trace."""
        self._episode.notes[column] = text


def start_task(loop: asyncio.AbstractEventLoop, coroutine: Any, **settings: Any) -> asyncio.Task:
    """Starts a task, which ends at the latest with its episode."""
    task, episode = asyncio.Task(coroutine, loop=loop, **settings), EPISODE.get()
    if episode is not None:
        episode.parts.add(task)
        task.add_done_callback(episode.parts.discard)
    return task


class Episode:
    """A running workflow: what its agents are asked, and what it has earned since the last turn."""

    def __init__(self, run: Callable[..., Coroutine], item: dict, roles: Sequence[str]):
        self.asked: dict[str, tuple[Prompt, asyncio.Future]] = {}
        self.paid, self.was_paid = dict.fromkeys(roles, 0.0), False
        self.metrics: dict[str, float] = {}
        self.notes: dict[str, Any] = {}
        self.item, self.out_of_turns, self.num_refused, self.is_over = item, False, 0, False
        self.had_turn = False
        self.ready = asyncio.Event()
        self.parts = set[asyncio.Task]()  # that the workflow has started beside itself, and that still run
        loop, context = asyncio.get_running_loop(), contextvars.copy_context()
        loop.set_task_factory(start_task)
        context.run(EPISODE.set, self)
        self.task = context.run(loop.create_task, run(copy.deepcopy(item), Agents(self, roles)))
        self.task.add_done_callback(lambda task: self.ready.set())

    def ask(self, role: str, prompt: Prompt) -> asyncio.Future:
        if role in self.asked:
            raise RuntimeError(f"{role!r} is asked twice in one turn: await its first answer, then ask again.")
        future = NotAwaited()
        if self.out_of_turns:
            self.num_refused += 1
            if self.num_refused > MOST_REFUSED:
                raise asyncio.CancelledError  # which `except Exception` in a loop does not catch
            future.set_exception(OutOfTurns("The episode has used all its turns."))
        else:
            self.asked[role] = (prompt, future)
            self.ready.set()
        return future

    @property
    def prompts(self) -> Prompts:
        return {role: prompt for role, (prompt, _) in self.asked.items()}

    def answer(self, joint_action: JointAction) -> None:
        """Hands the agents' answers to the workflow, which runs on when the event loop does."""
        self.had_turn = True
        for role, text in joint_action.items():
            if role in self.asked:
                _, future = self.asked.pop(role)
                if not future.done():
                    future.set_result(text if isinstance(text, Reply) else Reply.of(text))
        if not self.asked and not self.task.done():  # a part of a `gather` may have asked while the agents answered
            self.ready.clear()

    def end(self) -> None:
        """Raises [`OutOfTurns`] where the workflow waits for agents."""
        asked, self.asked, self.out_of_turns = self.asked, {}, True
        self.ready.clear()
        for _, future in asked.values():
            if not future.done():
                future.set_exception(OutOfTurns("The episode has used all its turns."))

    def earned(self) -> tuple[dict[str, float], dict[str, float], dict[str, Any]]:
        """Returns payments, metrics and notes since the last turn. Nothing is earned after the end."""
        self.is_over = self.task.done()
        since = self.paid, self.metrics, self.notes
        self.paid, self.metrics, self.notes = dict.fromkeys(self.paid, 0.0), {}, {}
        return since

    def line(self) -> str:
        """Returns where the workflow stands in its own code."""
        frames = self.task.get_stack()
        return f" (line {frames[-1].f_lineno} of {os.path.basename(frames[-1].f_code.co_filename)})" if frames else ""


class WorkflowEnvironment(Environment):
    """
    A task that plays an episode as a coroutine. [`workflow`] makes one.

    Args:
        run (`Callable`): `async def run(item, agents)`, which returns the reward: a number, a dict with one per role,
            an [`Outcome`], or `None` if `agents.reward` has paid.
        roles (`Sequence[str]`): The roles.
        live (`bool`, *optional*, defaults to `False`): Whether the coroutine holds something that cannot be replayed.
            Such a workflow needs `branching: episodes`.
        max_turns (`int`, *optional*, defaults to `20`): Most turns of an episode if `num_turns` is not given.
        timeout (`float`, *optional*): Seconds that a workflow may wait for anything but agents, per turn, or be in a
            call that is not awaited.
        max_open (`int`, *optional*): Most episodes that may be open at once.
        group_reward (`Callable`, *optional*): `group_reward(item, episodes) -> list[float]`, called once per item with
            the turns of all its finished branches. What it returns is added to the last reward of each.
        metric_ranges (`Mapping`, *optional*): See [`Environment`].

    [`Task`] stores its settings in `settings`. A checkpoint can only be resumed with the same ones.
    """

    def __init__(
        self,
        run: Callable[..., Coroutine],
        roles: Sequence[str],
        *,
        live: bool = False,
        max_turns: int = MAX_TURNS,
        timeout: float | None = None,
        max_open: int | None = None,
        group_reward: Callable[[dict, list[History]], Sequence[float]] | None = None,
        metric_ranges: Mapping[str, tuple[float, float]] | None = None,
    ):
        if not asyncio.iscoroutinefunction(run):
            raise TypeError(f"A workflow is an `async def` function of `item` and `agents`, not {show(run)}.")
        try:
            inspect.signature(run).bind("item", "agents")
        except TypeError:
            given = f"{run.__name__}{inspect.signature(run)}"
            raise TypeError(f"A workflow takes two arguments, `item` and `agents`; this one is `{given}`.") from None
        if max_turns < 1 or (timeout is not None and timeout <= 0):
            raise ValueError("`max_turns` must be at least 1, and `timeout` above 0.")
        taken = [role for role in roles if hasattr(Agents, role)]
        if taken:
            raise ValueError(f"`agents.{taken[0]}` is a method: choose another name for the role.")
        self.run, self.roles, self.live, self.max_turns = run, check_roles(roles), live, max_turns
        self.timeout, self.max_open, self.group_reward = timeout, max_open, group_reward
        self.metric_ranges, self.settings = metric_ranges or {}, dict[str, Any]()
        self.name = f"The workflow `{run.__name__}`"
        self._num_turns: int | None = None
        self._seats: frozenset[str] = frozenset()
        self._open: dict[int, Episode] | None = None  # the living episodes by the id of their item
        self._asked: dict[tuple, Prompts] | None = None  # what branches were asked, while trees are played

    def __repr__(self) -> str:
        return f"workflow {self.run.__module__}.{self.run.__name__}"

    def resume_settings(self) -> dict[str, Any]:
        workflow = {"workflow": self.run.__name__, "roles": self.roles, "max_turns": self.max_turns}
        return {**workflow, "live": self.live, **self.settings}

    def check_turns(self, num_turns: int | None, are_episodes: bool = True) -> int:
        if self.live and not are_episodes:
            raise TaskError(f"{self.name} lives in its episodes and cannot be replayed: set `branching: episodes`.")
        if num_turns is None and not are_episodes:
            raise TaskError(
                f"{self.name} goes on until it ends, so a tree needs its number of turns: set `num_turns`, or "
                "`branching: episodes`."
            )
        return num_turns or self.max_turns

    @contextlib.contextmanager
    def playing(self, num_turns: int | None, are_episodes: bool, seats: Collection[str] = ()) -> Iterator[None]:
        self.check_turns(num_turns or 1, are_episodes)
        self._num_turns, self._open, self._seats = num_turns, {} if are_episodes else None, frozenset(seats)
        self._asked = None if are_episodes else {}
        try:
            with closing_at_sigterm(), closing_at_exit(self._close):
                yield
        finally:
            self._close()
            self._num_turns, self._open, self._seats, self._asked = None, None, frozenset(), None

    def _close(self) -> None:
        """Closes the episodes that are open. Nothing can close them while one of them blocks the event loop."""
        if self._open and not is_blocked():
            with contextlib.suppress(Blocked):  # by its own clean-up
                run_on_loop(close([*self._open.values()]), CLOSING_SECONDS)

    def prompts(self, item: dict, history: History) -> Prompts:
        return self.next_prompts([item], [history])[0]

    def next_prompts(self, items: list[dict], histories: list[History]) -> list[Prompts]:
        async def turn() -> list[Prompts]:
            async with self._reached(items, histories) as episodes:
                prompts = [episode.prompts for episode in episodes]
                if self._asked is not None:
                    self._asked.update(zip(map(branch_of, items, histories), prompts, strict=True))
                return prompts

        return self._wait(turn())

    def score(self, items: list[dict], joint_actions: list[JointAction], histories: list[History]) -> list[Outcome]:
        context = scoring_context()

        async def turn() -> list[Outcome]:
            async with self._reached(items, histories) as episodes:
                if self._asked is not None:
                    for episode, item, history in zip(episodes, items, histories, strict=True):
                        self._check_replay(episode, self._asked.get(branch_of(item, history), episode.prompts))
                over = [episode for episode in episodes if episode.is_over]  # with answers that were altered
                for episode, joint_action in zip(episodes, joint_actions, strict=True):
                    episode.answer(joint_action)
                await self._settle(episodes)
                last = [
                    episode
                    for episode, history, action in zip(episodes, histories, joint_actions, strict=True)
                    if not episode.task.done()
                    and self._is_out_of_turns(episode, [*(turn.joint_action for turn in history), action])
                ]
                for episode in last:
                    episode.end()
                await self._settle(last)
                return [Outcome(0.0) if x in over else self._outcome(x, context.reward_none) for x in episodes]

        outcomes = self._wait(turn())
        for failure in dict.fromkeys(x.extra["failure"] for x in outcomes if "failure" in x.extra):
            if context.reward_none != "drop":
                raise UnavailableError(f"{failure}. With `reward_none: drop`, the other episodes go on.")
            print(failure, flush=True)
        return outcomes

    def _is_out_of_turns(self, episode: Episode, joint_actions: list[JointAction]) -> bool:
        """
        Returns whether a branch has used its turns. Those in which only seats acted do not count, and follow the last;
        `max_turns` of them in a row are the most.
        """
        trained = [not action.keys() <= self._seats for action in joint_actions]
        if episode.asked.keys() <= self._seats:
            return len(trained) >= self.max_turns and not any(trained[-self.max_turns :])
        return sum(trained) >= (self._num_turns or self.max_turns)

    def group_rewards(self, item: dict, histories: list[History]) -> Sequence[float] | None:
        if self.group_reward is None:
            return None
        name = f"The group reward of `{self.run.__name__}`"
        with task_code(name):
            added: list[Any] = as_rewards(name, self.group_reward(item, histories), len(histories))
        return [x or 0.0 for x in added]

    @contextlib.asynccontextmanager
    async def _reached(self, items: list[dict], histories: Sequence[History]) -> Any:
        """Yields the episode of each branch after its history: the living one, or one that is replayed and closed."""
        opened = self._open
        if opened is not None:
            new = [
                item for item, history in zip(items, histories, strict=True) if not history and id(item) not in opened
            ]
            number = len(new) + sum(not episode.task.done() for episode in opened.values())
            is_played = self._num_turns is not None  # else, the first prompts are looked at
            if is_played and self.max_open is not None and number > self.max_open:
                raise TaskError(
                    f"{self.name} would hold {number} open episodes, but `max_open` is {self.max_open}: lower "
                    "`items_per_device` or `num_generations`."
                )
            for item in new:
                opened[id(item)] = Episode(self.run, item, self.roles)
            episodes = [opened[id(item)] for item in items]
            await self._settle(episodes)
            yield episodes
            return
        if self.live and any(histories):
            raise TaskError(f"{self.name} lives in its episodes: nothing can be scored after they have ended.")
        episodes = [Episode(self.run, item, self.roles) for item in items]
        try:
            await self._settle(episodes)
            for k in range(max(map(len, histories), default=0)):
                behind = [(x, history[k]) for x, history in zip(episodes, histories, strict=True) if k < len(history)]
                for episode, past in behind:
                    if not past.altered:
                        self._check_replay(episode, past.prompts)
                    said = past.joint_action
                    if past.altered:  # other roles may be asked then
                        said = {role: said.get(role, "") for role in episode.asked}
                    episode.answer(said)
                await self._settle([episode for episode, _ in behind])
                for episode, _ in behind:
                    episode.earned()
            yield episodes
        finally:
            await close(episodes)

    def _check_replay(self, episode: Episode, asked: Mapping[str, Prompt]) -> None:
        now = episode.prompts
        if now != asked or any(call_of(now[role]) != call_of(asked[role]) for role in now):
            raise TaskError(
                f"{self.name} asked something else when it was replayed{episode.line()}: in a tree it must depend on "
                "the item and the answers alone. Set `branching: episodes`, in which it lives."
            )

    async def _settle(self, episodes: Sequence[Episode]) -> None:
        """Runs until each episode waits for agents or has ended, and raises the first error."""
        try:
            await asyncio.wait_for(asyncio.gather(*(self._ready(episode) for episode in episodes)), self.timeout)
        except TimeoutError:
            late = next(episode for episode in episodes if not episode.ready.is_set())
            raise TaskError(f"{self.name} waited for more than {self.timeout:g} s{late.line()}.") from None
        quiet, number = 0, -1
        while quiet < PASSES:  # parts that run side by side may ask, too
            await asyncio.sleep(0)
            now = sum(len(episode.asked) for episode in episodes)
            quiet, number = (quiet + 1, now) if now == number else (0, now)
        for episode in episodes:
            await self._ready(episode)

    async def _ready(self, episode: Episode) -> None:
        """Waits until an episode has asked or has ended, and raises its error."""
        await episode.ready.wait()
        if not episode.task.done():
            return
        error = asyncio.CancelledError() if episode.task.cancelled() else episode.task.exception()
        if isinstance(error, UnavailableError):
            if episode.had_turn:
                return  # its reward is missing, see `score`
            raise error
        if error is not None and not (episode.out_of_turns and isinstance(error, OutOfTurns | asyncio.CancelledError)):
            if isinstance(error, TaskError):
                raise TaskError(f"{error}{self._line_of(error)}") from error
            problem = f"{self.name} raised {describe(error)}{self._line_of(error)}."
            raise TaskError(problem).with_traceback(error.__traceback__) from None  # which ends in the workflow
        left = [role for role, (_, future) in episode.asked.items() if not future.done()]
        if left:
            raise TaskError(f"{self.name} ended before its question to {left[0]!r} was answered: `await` it.")
        for part in episode.parts:
            part.cancel()

    def _line_of(self, error: BaseException) -> str:
        """Returns the last line of the workflow's own file in a traceback."""
        return self._line_in(traceback.extract_tb(error.__traceback__))

    def _line_in(self, frames: traceback.StackSummary) -> str:
        own = [x for x in frames if x.filename == self.run.__code__.co_filename]
        return f" (line {own[-1].lineno} of {os.path.basename(own[-1].filename)})" if own else ""

    def _outcome(self, episode: Episode, reward_none: str) -> Outcome:
        """Returns what was earned since the last turn, with the result of a workflow that has ended."""
        paid, metrics, notes = episode.earned()
        ended = episode.task.done() and not episode.task.cancelled()
        error = episode.task.exception() if ended else None
        is_lost = isinstance(error, UnavailableError)
        if is_lost:
            notes["failure"] = str(error)
        result = math.nan if is_lost else episode.task.result() if ended and error is None else 0.0
        if episode.out_of_turns:
            metrics["out_of_turns"] = 1.0
        elif episode.task.done():
            metrics["out_of_turns"] = 0.0
        outcome = result if isinstance(result, Outcome) else Outcome(result)
        reward: Any = outcome.reward
        if reward is None:
            if not episode.was_paid and reward_none != "drop":
                raise TaskError(f"{self.name} returned None; it must return a reward, or pay with `agents.reward`.")
            reward = 0.0 if episode.was_paid else math.nan
        returned = reward if isinstance(reward, Mapping) else dict.fromkeys(self.roles, reward)
        is_wrong = returned.keys() != paid.keys() or any(as_number(x) is None for x in returned.values())
        if is_wrong or (outcome.reward is not None and not is_lost and any(math.isnan(x) for x in returned.values())):
            raise TaskError(
                f"{self.name} returned {show(reward)}; it must return a number, an `Outcome`, or a dict with a number "
                f"for each of {', '.join(self.roles)}."
            )
        is_shared = returned is not reward and len(set(paid.values())) == 1
        reward = {role: float(returned[role]) + paid[role] for role in self.roles}
        return dataclasses.replace(
            outcome,
            reward=reward[self.roles[0]] if is_shared else reward,
            metrics={**metrics, **outcome.metrics},
            extra={**notes, **outcome.extra},
        )

    def _wait(self, coroutine: Coroutine) -> Any:
        """Runs a coroutine on the event loop of this process, and returns its result."""
        try:
            return run_on_loop(coroutine, self.timeout)
        except Blocked as error:
            raise TaskError(
                f"{self.name} waited for more than {self.timeout:g} s{self._line_in(error.frames)}, in a call that is "
                "not awaited."
            ) from error


def branch_of(item: dict, history: History) -> tuple:
    return (id(item), *(tuple(sorted(turn.joint_action.items())) for turn in history))


@contextlib.contextmanager
def closing_at_sigterm() -> Iterator[None]:
    """Makes SIGTERM end the program by an exception, which closes its episodes, unless it has a meaning already."""
    is_free = signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    # One of several processes may wait for the others, where Python calls no handler
    is_free &= os.environ.get("WORLD_SIZE", "1") == "1"
    if not is_free or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


async def close(episodes: Sequence[Episode]) -> None:
    """Ends episodes that still run: their `finally` and `async with` blocks run."""
    running = [task for episode in episodes for task in (episode.task, *episode.parts) if not task.done()]
    for episode in episodes:
        episode.out_of_turns = True
    for task in running:
        task.cancel()
    if running:
        await asyncio.wait(running, timeout=CLOSING_SECONDS)
    for task in running:
        if task.done() and not task.cancelled():
            task.exception()  # an error while it ends has been seen


def workflow(
    *wrong: Any, roles: Sequence[str] = (), **settings: Any
) -> Callable[[Callable[..., Coroutine]], WorkflowEnvironment]:
    """
    Makes a task of an `async def` function of `item` and `agents`. For the settings, see [`WorkflowEnvironment`].

    Example:

    ```python
    >>> from trl_multiagent import workflow
    >>> @workflow(roles=("describer", "guesser"))
    ... async def taboo(item, agents):
    ...     hint = await agents.describer(f"Describe the word {item['word']} without writing it.")
    ...     if item["word"] in hint.lower():
    ...         return 0.0
    ...     guess = await agents.guesser(f"Hint: {hint}\\nWhich word is it?")
    ...     return float(item["word"] in guess.lower())
    >>> taboo.prompts({"word": "milk"}, [])
    {'describer': 'Describe the word milk without writing it.'}

    ```
    """
    if wrong or not roles:
        raise TypeError('a workflow needs its roles: write `@workflow(roles=("writer", "editor"))`.')
    return lambda run: WorkflowEnvironment(run, roles, **settings)
