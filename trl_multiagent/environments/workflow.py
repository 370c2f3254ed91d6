"""
Workflows: tasks that play an episode as a coroutine.

`await agents.writer(prompt)` is the turn of the agent `writer`. All branches of a batch run on one event loop until
each one waits for agents or has ended; what they ask is one turn, sampled in one call. The value that the coroutine
returns is its reward.

In a group of episodes, a coroutine lives from its first turn to its end, so that it may hold a game, a process or a
connection. It is closed on every way out. In a tree, the first joint action of a node continues the coroutine that
asked. The others are forks, for which it runs again with the answers so far: it must depend on the item and the
answers alone.
"""

import asyncio
import contextvars
import copy
import dataclasses
import inspect
import math
import os
import pickle
import signal
import traceback
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from threading import Thread
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
    prompts_of_one,
    scoring_context,
    with_call,
)
from trl_multiagent.environments.task_errors import (
    TaskError,
    Terminated,
    UnavailableError,
    as_list,
    as_number,
    describe,
    function_name,
    raise_in_place,
    show,
    task_code,
)
from trl_multiagent.jobs.event_loop import (
    CLOSING_SECONDS,
    Blocked,
    Part,
    event_loop,
    is_blocked,
    run_on_loop,
    waits_outside,
)
from trl_multiagent.jobs.signals import closing_at_exit, handling


SHORTEST_PAUSE, LONGEST_PAUSE = 0.0005, 0.02  # seconds between two looks at episodes that wait for something else
MOST_PASSES = 1000  # of the event loop, after which a task that only yields keeps a turn waiting no longer
LONG = 600  # seconds after which a line says what a turn waits for
MOST_REFUSED = 100  # questions after the last turn, until a workflow that goes on asking is stopped

EPISODE = contextvars.ContextVar[Any]("EPISODE", default=None)  # in which a task was started


class OutOfTurns(Exception):
    """
    Raised by `await agents.role(...)` when an episode has used all its turns. A workflow may catch it and return a
    reward for what it reached. Otherwise it has earned what it was paid so far.
    """


class NotAwaited(asyncio.Future):
    """
    An agent's answer, or the result of a call, which is there when it has been awaited. Python's messages show the
    name of this class. `prompt`: the question to the agent.
    """

    prompt: Prompt

    def __str__(self) -> str:
        raise TypeError("an agent was asked, or a function called, without `await`: the answer is not there yet.")


@dataclasses.dataclass(eq=False)
class Agents:
    """
    The agents as a workflow sees them. If `writer` is the first role of a task, `agents.writer`, `agents["writer"]`
    and `agents[0]` are this agent. A call asks the agent and returns its answer when awaited.
    """

    _episode: "Episode"
    _roles: Sequence[str]

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
            if (stop, max_tokens, memory) != ((), None, True):
                stops = (stop,) if isinstance(stop, str) else tuple(stop)
                if not all(isinstance(text, str) and text for text in stops):
                    raise TypeError(f"`stop` is {show(stop)}; it needs texts that are not empty.")
                if max_tokens is not None and (type(max_tokens) is not int or max_tokens < 1):
                    raise TypeError(f"`max_tokens` is {show(max_tokens)}; it must be a whole number of at least 1.")
                prompt = with_call(prompt, AgentCall(stops, max_tokens, memory))
            return self._episode.ask(name, prompt)

        call.agents = self  # type: ignore[attr-defined]  # for `start_task`
        return call

    def __getattr__(self, role: str) -> Callable[..., Awaitable[str]]:
        return self[role]

    def call(self, function: Callable[[list], Sequence], argument: Any) -> Awaitable[Any]:
        """
        Calls a function, such as a judge or a sandbox, in a thread, once for all branches that wait for it. It gets a
        list of their arguments and returns a list of results, of which each branch gets its own. In a tree, a branch
        that runs again gets its earlier results. Of two calls with one argument in an episode, each has its own.
        """
        if self._episode.is_closing:
            raise RuntimeError("`agents.call` calls nothing for an episode that is closed.")
        hash(function)  # an error of the workflow, not of the thread
        if asyncio.iscoroutinefunction(function):
            raise TypeError(f"`agents.call` got {show(function)}; it needs a function that is not `async`.")
        episode, future = self._episode, NotAwaited()
        content: Any = future  # of what cannot be compared; a `repr` leaves the middle of a long array out
        with suppress(Exception):
            content = pickle.dumps(argument)
        place = function, id(episode.item), content
        episode.num_calls[place] += 1
        episode.calls.append(((*place, episode.num_calls[place]), argument, future))
        return future

    def reward(self, number: float, role: str | None = None) -> None:
        """Pays a role, or all of them, for what has happened since the last turn."""
        if as_number(number) is None:
            raise TypeError(f"`agents.reward` got {show(number)}; it needs a number.")
        for name in self._roles if role is None else [self._check(role)]:
            self._episode.paid[name] += float(number)
        self._episode.was_paid = True

    def log(self, name: str, number: float) -> None:
        """Adds a metric, logged as `turn_{k}/{name}` and, over whole episodes, as `episode/{name}`."""
        self._episode.metrics[name] = float(number)

    def note(self, column: str, text: Any) -> None:
        """Adds a column to the rows of the trace."""
        self._episode.notes[column] = text


def start_task(loop: asyncio.AbstractEventLoop, coroutine: Any, **settings: Any) -> asyncio.Task:
    """Starts a task, which ends at the latest with its episode."""
    task, episode = Part(coroutine, loop=loop, **settings), EPISODE.get()
    task.counts = any(  # it can ask
        isinstance(x, Agents)
        for value in inspect.getcoroutinelocals(coroutine).values()
        for x in (value, *getattr(value, "__dict__", {}).values())
    )
    if episode is not None:
        episode.parts.append(task)
        task.add_done_callback(episode.end_part)
    return task


class Episode:
    """A running workflow: what its agents are asked, and what it has earned since the last turn."""

    def __init__(self, environment: "WorkflowEnvironment", item: dict):
        self.environment, run, roles = environment, environment.run, environment.roles
        self.asked: dict[str, NotAwaited] = {}
        self.calls, self.num_calls, self.item = environment._calls, Counter[Any](), item
        self.paid, self.was_paid = dict.fromkeys(roles, 0.0), False
        self.metrics: dict[str, float] = {}
        self.notes: dict[str, Any] = {}
        self.out_of_turns, self.is_closing, self.num_refused = False, False, 0
        self.said: list[JointAction] = []
        self.failure = ""  # of a resource
        self.anchor: Any = None  # of the branch that goes on with it, see `anchor_of`
        context = contextvars.copy_context()
        context.run(EPISODE.set, self)
        self.task = asyncio.Task(run(copy.deepcopy(item), Agents(self, roles)), context=context)
        self.parts: list[asyncio.Task] = [self.task]  # and others, while they run

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
            self.asked[role], future.prompt = future, prompt
        return future

    def end_part(self, part: asyncio.Task) -> None:
        self.parts.remove(part)
        if self.out_of_turns and not self.is_closing:
            error = error_of(part)  # which counts as seen then: an [`OutOfTurns`] is no fault
            if error is not None and not isinstance(error, OutOfTurns | asyncio.CancelledError):
                part.get_loop().call_exception_handler({"message": "A part of an episode failed", "exception": error})

    @property
    def prompts(self) -> Prompts:
        return {role: future.prompt for role, future in self.asked.items()}

    def rests(self) -> bool:
        """Returns whether each part has asked, has ended or waits for another part, so that a turn or calls begin."""
        waits = bool(self.calls or self.asked)
        return self.task.done() or (
            waits and not any(waits_outside(part, self.environment.folder) for part in self.parts)
        )

    def answer(self, joint_action: JointAction) -> None:
        """
        Hands the agents' answers to the workflow, which runs on when the event loop does. An empty one is for roles
        that were not asked, because an ablation has changed the prompts.
        """
        self.said.append(joint_action)
        for role in [*joint_action, *self.asked]:
            future, text = self.asked.pop(role, None), joint_action.get(role, "")
            if future is not None and not future.done():
                future.set_result(text if isinstance(text, Reply) else Reply.of(text))

    def end(self) -> None:
        """Raises [`OutOfTurns`] where the workflow waits for agents."""
        asked, self.asked, self.out_of_turns = self.asked, {}, True
        for future in asked.values():
            if not future.done():
                future.set_exception(OutOfTurns("The episode has used all its turns."))

    def earned(self) -> tuple[dict[str, float], dict[str, float], dict[str, Any]]:
        """Returns payments, metrics and notes since the last turn."""
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
        timeout (`float`, *optional*): Seconds that a workflow may wait for anything but agents, also in `agents.call`,
            per turn, or be in a call that is not awaited.
        max_open (`int`, *optional*): Most episodes that may be open at once.
        group_reward (`Callable`, *optional*): `group_reward(item, episodes) -> list[float]`, called once per item with
            the turns of all its finished branches. What it returns is added to the last reward of each.
        metric_ranges (`Mapping`, *optional*): See [`Environment`].

    [`Task`] stores its settings in `task_settings`. A checkpoint can only be resumed with the same ones.
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
        if not asyncio.iscoroutinefunction(run) or not hasattr(run, "__code__"):  # a `partial` has none
            raise TypeError(f"A workflow is an `async def` function of `item` and `agents`, not {show(run)}.")
        try:
            inspect.signature(run).bind("item", "agents")
        except TypeError:
            raise TypeError(
                "A workflow takes two arguments, `item` and `agents`; this one is "
                f"`{run.__name__}{inspect.signature(run)}`."
            ) from None
        if max_turns < 1 or (timeout is not None and timeout <= 0):
            raise ValueError("`max_turns` must be at least 1, and `timeout` above 0.")
        taken = [role for role in roles if hasattr(Agents, role)]
        if taken:
            raise ValueError(f"`agents.{taken[0]}` is a method: choose another name for the role.")
        self.run, self.roles, self.live, self.max_turns = run, check_roles(roles), live, max_turns
        self.timeout, self.max_open, self.group_reward = timeout, max_open, group_reward
        self.metric_ranges = metric_ranges or {}
        self.__name__, self.folder = run.__name__, os.path.dirname(run.__code__.co_filename) or "<"
        self.name = f"The workflow `{run.__name__}`"
        self._open: Any = None  # its episodes, while it is played
        # The result of each call in a batch, by function, item, argument, and the number of such calls in the episode
        self._results: Any = {}

    def __repr__(self) -> str:
        return f"workflow {self.run.__module__}.{self.__name__}"

    def resume_settings(self) -> dict[str, Any]:
        return {
            "workflow": self.__name__,
            "roles": self.roles,
            "max_turns": self.max_turns,
            "live": self.live,
            **self.task_settings,
        }

    def check_turns(self, num_turns: int | None, are_episodes: bool = True) -> int:
        if self.live and not are_episodes:
            raise self._lives()
        if num_turns is None and not are_episodes:
            raise TaskError(
                f"{self.name} goes on until it ends, so a tree needs its number of turns: set `num_turns`, or "
                "`branching: episodes`."
            )
        return num_turns or self.max_turns

    @contextmanager
    def playing(self, num_turns: int | None, are_episodes: bool, seats: Collection[str] = ()) -> Iterator[None]:
        self.check_turns(num_turns or 1, are_episodes)
        self._num_turns, self._seats, self._open = num_turns, frozenset(seats), list[Episode]()
        self._waiting = dict[int, Episode]()  # by the id of their anchor
        self._calls: Any = []  # that wait for a result
        event_loop(os.getpid()).set_task_factory(start_task)
        # Without a number, the first prompts are looked at
        self._limit = (num_turns and are_episodes and self.max_open) or math.inf
        try:
            with closing_at_sigterm(), closing_at_exit(self._close):
                yield
        finally:
            self._close()
            self._open, self._waiting = None, {}

    def _close(self) -> None:
        """Closes the episodes that are open. Nothing can close them while one of them blocks the event loop."""
        if self._open and not is_blocked():
            with suppress(Blocked):  # by its own clean-up
                run_on_loop(close(self._open), CLOSING_SECONDS)

    prompts = prompts_of_one

    def next_prompts(self, items: list[dict], histories: list[History]) -> list[Prompts]:
        async def turn() -> list[Prompts]:
            if not self._waiting:  # a batch begins
                self._results.clear()
            episodes = await self._reached(items, histories)
            prompts = [episode.prompts for episode in episodes]
            self._leave(map(anchor_of, items, histories), episodes)
            return prompts

        return self._play(turn)

    def score(self, items: list[dict], joint_actions: list[JointAction], histories: list[History]) -> list[Outcome]:
        context = scoring_context()

        async def turn() -> list[Outcome]:
            episodes = await self._reached(items, histories)
            # With answers that were altered, an episode may be over
            over = [episode for episode in episodes if episode.task.done() and not episode.asked]
            for episode, joint_action in zip(episodes, joint_actions, strict=True):
                episode.answer(joint_action)
            await self._settle(episodes)
            last = [x for x in episodes if not x.task.done() and self._is_out_of_turns(x)]
            for episode in last:
                episode.end()
            await self._settle(last)
            outcomes = [Outcome(0.0) if x in over else self._outcome(x, context.reward_none) for x in episodes]
            self._leave(outcomes, episodes)
            for failure in dict.fromkeys(x.failure for x in episodes if x.failure):
                print(failure, flush=True)
            return outcomes

        return self._play(turn)

    def _is_out_of_turns(self, episode: Episode) -> bool:
        """
        Returns whether an episode waits for agents and has used its turns. Those in which only seats acted do not
        count, and follow the last.
        """
        number = sum(not action.keys() <= self._seats for action in episode.said)
        return not episode.asked.keys() <= self._seats and number >= (self._num_turns or self.max_turns)

    def group_rewards(self, item: dict, histories: list[History]) -> Sequence[float] | None:
        if self.group_reward is None:
            return None
        rewards = self.group_reward(item, histories)
        return () if rewards is None else rewards  # too few, which is an error

    async def _reached(self, items: list[dict], histories: Sequence[History]) -> list[Episode]:
        """
        Returns the episode of each branch after its history: the one that waits there, or a fork, which is replayed.
        """
        episodes, forks = list[Episode](), list[tuple[Episode, History]]()
        waiting: Any = [self._waiting.pop(id(anchor_of(*x)), None) for x in zip(items, histories, strict=True)]
        number = waiting.count(None) + sum(not episode.task.done() for episode in self._open)
        if number > self._limit:
            raise TaskError(
                f"{self.name} would hold {number} open episodes, but `max_open` is {self.max_open}: lower "
                "`items_per_device` or `num_generations`."
            )
        started = {id(episode.item) for episode in self._open}
        for item, history, episode in zip(items, histories, waiting, strict=True):
            if episode is None:
                if self.live and (history or id(item) in started):
                    raise self._lives()
                episode = Episode(self, item)
                self._open.append(episode)
                forks.append((episode, history))
            episodes.append(episode)
        while forks:
            await self._settle([episode for episode, _ in forks])
            settled, forks = forks, []
            for episode, history in settled:
                turn = len(episode.said)
                if turn:
                    episode.earned()
                if turn < len(history):
                    if not history[turn].altered:  # other roles may be asked then
                        self._check_replay(episode, history[turn].prompts)
                    episode.answer(history[turn].joint_action)
                    forks.append((episode, history))
        asked = dict[int, Prompts]()
        for item, history, episode in zip(items, histories, episodes, strict=True):
            first = asked.setdefault(id(anchor_of(item, history)), prompts := episode.prompts)
            if first is not prompts:
                self._check_replay(episode, first)
        return episodes

    def _leave(self, anchors: Iterable[Any], episodes: list[Episode]) -> None:
        """Lets episodes wait for the first call that comes to their anchors."""
        for anchor, episode in zip(anchors, episodes, strict=True):
            episode.anchor = anchor
            self._waiting[id(anchor)] = episode

    def _check_replay(self, episode: Episode, asked: Mapping[str, Prompt]) -> None:
        now = episode.prompts
        if now != asked or any(call_of(now[role]) != call_of(asked[role]) for role in now):
            raise TaskError(
                f"{self.name} asked something else when it was replayed{episode.line()}: in a tree it must depend on "
                "the item and the answers alone. Set `branching: episodes`, in which it lives."
            )

    async def _settle(self, episodes: Sequence[Episode]) -> None:
        """
        Runs until each episode waits for agents or has ended, and raises the first error. Neither a turn nor a call
        for all depends on time: nothing is left to run when it begins.
        """
        loop: Any = asyncio.get_running_loop()
        deadline, pause, is_quiet = loop.time() + (self.timeout or math.inf), 0.0, not episodes
        moving, passes, told = None, 0, loop.time() + LONG
        while moving or self._calls or not is_quiet:
            number = loop.num_callbacks
            await asyncio.sleep(pause)
            is_quiet = loop.num_callbacks == number + 1 or passes > MOST_PASSES  # the one is of this coroutine
            for episode in episodes:
                self._check_end(episode)
            moving = next((episode for episode in episodes if not episode.rests()), None)
            passes = 0 if moving else passes + 1
            if moving and loop.time() > deadline:
                raise TaskError(f"{self.name} waited for more than {self.timeout:g} s{moving.line()}.")
            if moving and loop.time() > told:
                print(f"{self.name} still waits{moving.line()}. `timeout` would end it.", flush=True)
                told = math.inf
            pause = min(pause + SHORTEST_PAUSE, LONGEST_PAUSE) if is_quiet else 0.0
            if self._calls and is_quiet and not moving:
                calls, self._calls[:] = [*self._calls], []
                is_quiet = False
                for function in dict.fromkeys(place[0] for place, *_ in calls):
                    if own := {p: x for p, x, _ in calls if p[0] == function and p not in self._results}:
                        await self._call(function, own, deadline - loop.time())
                for place, _, future in calls:  # together and in their order, so that a fork goes on as its branch did
                    result, give = self._results[place], future.set_result
                    if isinstance(result, TaskError | KeyboardInterrupt):
                        give = future.set_exception
                    else:
                        with suppress(Exception):  # what cannot be copied is shared
                            result = pickle.loads(pickle.dumps(result))
                    if not future.done():
                        give(result)

    async def _call(self, function: Callable, own: dict[Any, Any], seconds: float) -> None:
        """Calls a function once for all calls that wait for it, for at most `seconds`, and keeps their results."""
        loop, done, name = asyncio.get_running_loop(), asyncio.Event(), f"`{function_name(function)}`"

        def work() -> None:
            try:
                with task_code(f"The function {name}"):
                    results = as_list(f"The function {name}", function([*own.values()]), len(own), "results")
                self._results |= zip(own, results, strict=True)
            except BaseException as error:
                self._results |= dict.fromkeys(own, error)
            finally:
                loop.call_soon_threadsafe(done.set)

        # The threads of an executor would keep the process until they end
        Thread(target=contextvars.copy_context().run, args=(work,), daemon=True).start()
        try:
            await asyncio.wait_for(done.wait(), seconds)
        except TimeoutError:
            raise TaskError(
                f"{self.name} waited for more than {self.timeout:g} s for {name}, in `agents.call`."
            ) from None

    def _check_end(self, episode: Episode) -> None:
        """Raises the error of an episode that has ended, and ends its parts."""
        if not episode.task.done():
            return
        error = error_of(episode.task)
        if isinstance(error, UnavailableError):
            if episode.said:
                return  # its reward is missing, see `score`
            raise error
        if error is not None and not (episode.out_of_turns and isinstance(error, OutOfTurns | asyncio.CancelledError)):
            line = self._line_in(traceback.extract_tb(error.__traceback__))
            if not isinstance(error, TaskError):
                raise_in_place(f"{self.name} raised {describe(error)}{line}.", error)
            error.args = (f"{error}{line}",)
            raise error
        for role, future in episode.asked.items():
            if not future.done():
                raise TaskError(f"{self.name} ended before its question to {role!r} was answered: `await` it.")
        for part in episode.parts:
            part.cancel()

    def _lives(self) -> TaskError:
        return TaskError(
            f"{self.name} lives in its episodes and cannot be replayed: set `branching: episodes`, and no `credit`."
        )

    def _line_in(self, frames: traceback.StackSummary) -> str:
        own = [x for x in frames if x.filename == self.run.__code__.co_filename]
        return f" (line {own[-1].lineno} of {os.path.basename(own[-1].filename)})" if own else ""

    def _outcome(self, episode: Episode, reward_none: str) -> Outcome:
        """Returns what was earned since the last turn, with the result of a workflow that has ended."""
        paid, metrics, notes = episode.earned()
        task, was_paid = episode.task, episode.was_paid
        result: Any = 0.0
        if task.done():
            error = error_of(task)
            if isinstance(error, UnavailableError):
                if reward_none != "drop":
                    raise UnavailableError(f"{error}. With `reward_none: drop`, the other episodes go on.")
                notes["failure"] = episode.failure = str(error)
                result, was_paid = None, False
            elif error is None:
                result = task.result()
        if task.done() or episode.out_of_turns:
            metrics["out_of_turns"] = float(episode.out_of_turns)
        outcome = dataclasses.replace(result) if isinstance(result, Outcome) else Outcome(result)
        reward: Any = outcome.reward
        if reward is None:
            if not was_paid and reward_none != "drop":
                raise TaskError(f"{self.name} returned None; it must return a reward, or pay with `agents.reward`.")
            reward = 0.0 if was_paid else math.nan
        returned = reward if isinstance(reward, Mapping) else dict.fromkeys(self.roles, reward)
        is_wrong = returned.keys() != paid.keys() or any(as_number(x) is None for x in returned.values())
        if is_wrong or (outcome.reward is not None and any(map(math.isnan, returned.values()))):
            raise TaskError(
                f"{self.name} returned {show(reward)}; it must return a number, an `Outcome`, or a dict with a number "
                f"for each of {', '.join(self.roles)}."
            )
        is_shared = returned is not reward and len(set(paid.values())) == 1
        reward = {role: float(returned[role]) + paid[role] for role in self.roles}
        outcome.reward = reward[self.roles[0]] if is_shared else reward
        outcome.metrics, outcome.extra = {**metrics, **outcome.metrics}, {**notes, **outcome.extra}
        return outcome

    def _play(self, turn: Callable[[], Coroutine]) -> Any:
        """Runs a part of a turn on the event loop of this process."""
        if self._open is None:
            self._results.clear()
            with self.playing(None, True):
                return self._play(turn)
        try:
            return run_on_loop(turn(), self.timeout)
        except Blocked as error:
            raise TaskError(
                f"{self.name} waited for more than {self.timeout:g} s{self._line_in(error.frames)}, in a call "
                "that is not awaited."
            ) from error


def anchor_of(item: dict, history: History) -> Any:
    """Returns the object by which an episode is found that waits after a history; a new one if it was altered."""
    if not history:
        return item
    return history if history[-1].altered else history[-1].outcome


def closing_at_sigterm() -> AbstractContextManager[None]:
    """Makes SIGTERM end the program by an exception, which closes its episodes, unless it has a meaning already."""
    is_free = signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    # One of several processes may wait for the others, where Python calls no handler
    is_free &= os.environ.get("WORLD_SIZE", "1") == "1"

    def end(number: int, frame: Any) -> None:
        raise Terminated(128 + number)

    return handling(end, [signal.SIGTERM] if is_free else [])


def error_of(task: asyncio.Task) -> BaseException | None:
    """Returns the error that ended a task; of a group, as an `asyncio.TaskGroup` raises it, the first."""
    error = asyncio.CancelledError() if task.cancelled() else task.exception()
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


async def close(episodes: Sequence[Episode]) -> None:
    """Ends episodes that still run: their `finally` and `async with` blocks run."""
    tasks = [task for episode in episodes for task in episode.parts]  # in the order in which they were started
    for episode in episodes:
        episode.out_of_turns = episode.is_closing = True
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks, timeout=CLOSING_SECONDS)
    for task in tasks:
        if task.done():
            error_of(task)  # has been seen: it came while the task ended, or after another error


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
