"""Tasks that are coroutines, in trees and in episodes that live, against computations in plain PyTorch."""

import asyncio
import itertools
import math
import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections import Counter
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial

import numpy as np
import pytest

from trl_multiagent import FunctionSeat, Outcome, OutOfTurns, SeatedEnvironment, cli, workflow
from trl_multiagent.environments.base import Turn
from trl_multiagent.environments.centralized import CentralizedEnvironment
from trl_multiagent.environments.task_errors import TaskError, UnavailableError
from trl_multiagent.evaluation.players import MessageAblation
from trl_multiagent.jobs.event_loop import event_loop
from trl_multiagent.report.trace_files import read_trace
from trl_multiagent.rollout.tree import Samples, first_nodes, grow_trees, judge_nodes

from by_hand import distance, one_update
from by_hand_workflows import expected_gradients, nonzero
from tiny import team_of, tiny_items, tiny_team, tiny_trainer


ROLES = ("aux", "main")


def debate(live=False, **settings):
    """Branches, a `gather`, a loop, rewards in between, and roles that act at some turns."""

    @workflow(roles=ROLES, live=live, **settings)
    async def run(item, agents):
        a, b = await asyncio.gather(agents.aux(f"{item['x']}: for"), agents["main"](f"{item['x']}: against"))
        agents.reward(len(set(a)) / 20, "aux")
        agents.log("longer", len(a) > len(b))
        while len(b) % 2 == 0:  # another word for main
            b = await agents[1](f"You said {b[:3]!r}. Again:")
            agents.reward(0.1)
            if len(b) > 6:
                break
        verdict = await agents.aux(f"Judge {a[:2]!r} and {b[:2]!r}:")
        agents.note("verdict", verdict)
        return {"aux": float(len(verdict) % 3), "main": float(len(b) % 2)}

    return run


TREE = {"num_generations": 2, "num_turns": 4}
EPISODES = {"num_generations": 6, "num_turns": 5, "branching": "episodes"}


@pytest.mark.parametrize(
    ("form", "settings"),
    [
        ("full", TREE),
        ("full", {"num_generations": 2, "num_turns": 3, "joint_mode": "cross", "num_agents": 2}),
        ("full", EPISODES),
        ("lora", TREE),
        ("shared", EPISODES),
    ],
    ids=["tree", "cross", "episodes", "lora in a tree", "shared in episodes"],
)
def test_gradients(tmp_path, form, settings):
    environment = debate()
    found, trainer, before = one_update(
        tmp_path,
        team_of(form),
        environment=environment,
        items_per_device=2,
        discount=0.7,
        max_completion_length=6,
        **settings,
    )
    assert distance(nonzero(found), nonzero(expected_gradients(trainer._turns, before, discount=0.7))) < 1e-5
    acting = {node.roles for nodes in trainer._turns for node in nodes}
    assert acting == {ROLES, ("main",), ("aux",)}


def scripted(answers):
    """Samples texts that depend on the role, the place and the past alone."""

    def sample(nodes, number):
        asked.append([node.prompts for node in nodes])

        def texts(node, role):
            key = (role, len(node.history), node.prompts[role])
            return [answers[hash_of(key, g) % len(answers)] for g in range(number)]

        roles = dict.fromkeys(role for node in nodes for role in node.prompts)
        return {
            role: [Samples([1], [[1]] * number, texts(node, role)) for node in nodes if role in node.prompts]
            for role in roles
        }

    asked = []
    sample.asked = asked
    return sample


def hash_of(*parts):
    return sum(map(ord, repr(parts)))


def play(environment, items, sample, num_turns=5, num_generations=1, **settings):
    def score(nodes):
        return judge_nodes(environment, nodes)

    return grow_trees(
        items, environment, sample, score, num_turns=num_turns, num_generations=num_generations, **settings
    )


ANSWERS = ["a", "bc", "def", "ghij", "klmnopq"]


def test_a_branch_that_is_replayed_equals_an_episode_that_lives():
    facts = []
    for num_episodes in (None, 1):
        turns = play(debate(), [{"x": str(k)} for k in range(30)], scripted(ANSWERS), num_episodes=num_episodes)
        nodes = [node for nodes in turns for node in nodes]
        facts.append([(x.prompts, x.joint_actions, x.rewards, x.role_rewards, x.outcomes[0].metrics) for x in nodes])
        assert len({len(nodes) for nodes in turns}) > 2  # episodes of several lengths
    assert facts[0] == facts[1]


def test_all_branches_of_a_turn_are_sampled_in_one_call():
    sample = scripted(ANSWERS)
    turns = play(debate(), [{"x": "1"}, {"x": "2"}], sample, num_generations=3, num_turns=3)
    assert len(sample.asked) == 3 and [len(x) for x in sample.asked] == [len(x) for x in turns]
    assert [*sample.asked[0][0]] == ["aux", "main"]  # `gather` is one turn of both


def test_a_turn_without_an_end_is_out_of_turns():
    @workflow(roles=("aux",))
    async def caught(item, agents):
        number = 0
        try:
            while True:
                await agents.aux("More:")
                number += 1
                agents.reward(1.0)
        except OutOfTurns:
            return 10.0 * number

    @workflow(roles=("aux",), max_turns=4)
    async def paid(item, agents):
        while True:
            agents.reward(0.5)
            await agents.aux("More:")

    (*_, last) = play(caught, [{}], scripted(ANSWERS), num_turns=3)
    assert last[0].rewards == [31.0] and last[0].outcomes[0].metrics == {"out_of_turns": 1.0}
    for num_episodes in (None, 1):
        turns = play(paid, [{}], scripted(ANSWERS), num_turns=4, num_episodes=num_episodes)
        assert [nodes[0].rewards for nodes in turns] == [[1.0], [0.5], [0.5], [0.5]]


class Held:
    """Something that an episode holds."""

    open = 0

    async def __aenter__(self):
        Held.open += 1
        self.database = sqlite3.connect(":memory:")
        self.database.execute("create table said (text)")
        return self

    async def __aexit__(self, *error):
        await asyncio.sleep(0)
        self.database.close()
        Held.open -= 1

    def add(self, text):
        self.database.execute("insert into said values (?)", [text])
        return self.database.execute("select count(*) from said").fetchone()[0]


def holding(fails=None):
    @workflow(roles=("aux",), live=True)
    async def run(item, agents):
        async with Held() as held:
            for number in range(1, 4):
                assert held.add(await agents.aux(f"{number}:")) == number
                if fails == (item["x"], number):
                    raise KeyError("lost")
        return 1.0

    return run


@pytest.mark.parametrize("num_turns", [2, 3, 5])
def test_what_an_episode_holds_lives_and_is_closed(num_turns):
    items = [{"x": k} for k in range(5)]
    turns = play(holding(), items, scripted(ANSWERS), num_turns=num_turns, num_episodes=3)
    assert len(turns[0]) == 15 and Held.open == 0
    assert turns[-1] == [] if num_turns > 3 else turns[-1][0].rewards == [float(num_turns == 3)]


def test_a_coroutine_is_awaited():
    """`asyncio.run` works in a terminal alone."""

    @workflow(roles=("aux",))
    async def run(item, agents):
        return asyncio.run(asyncio.sleep(0, 1.0))

    with pytest.raises(TaskError, match=r"cannot be called from a running event loop: `await` the coroutine instead"):
        play(run, [{"x": 1}], scripted(ANSWERS), num_episodes=1)


def test_an_error_closes_all_episodes_and_names_the_line():
    with pytest.raises(
        TaskError, match=r"workflow `run` raised KeyError: 'lost' \(line \d+ of test_workflow_functions.py"
    ):
        play(holding((2, 2)), [{"x": k} for k in range(5)], scripted(ANSWERS), num_episodes=1)
    assert Held.open == 0

    def interrupted(nodes, number):
        raise KeyboardInterrupt

    async def judged(item, agents):
        async with Held():
            await agents.call(ended, await agents.aux("Say:"))

    def ended(nodes, number=0):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(1)

    for task, broken, error in (
        (holding(), interrupted, KeyboardInterrupt),
        (holding(), ended, SystemExit),
        (workflow(roles=("aux",))(judged), scripted(ANSWERS), SystemExit),
    ):
        with pytest.raises(error):
            play(task, [{"x": 0}], broken, num_episodes=4)
        assert Held.open == 0
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


async def noting_its_end(ended, name):
    try:
        await asyncio.sleep(600)
    finally:
        ended.append(name)


def test_a_function_is_cleaned_up_before_the_tasks_that_it_has_started():
    ended = []

    @workflow(roles=("aux",))
    async def run(item, agents):
        run.kept = [asyncio.create_task(noting_its_end(ended, "task")) for _ in range(4)]
        try:
            await agents.aux("Say:")
        finally:
            ended.append("function")

    def interrupted(nodes, number):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        play(run, [{}], interrupted, num_episodes=1)
    assert ended == ["function", *["task"] * 4]


def test_a_configuration_names_a_workflow(tmp_path, tiny_model, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_task.py").write_text(
        "from trl_multiagent import workflow\n\n\n"
        "@workflow(roles=('a', 'b'), live=True)\n"
        "async def relay(item, agents):\n"
        "    said = await agents.a(item['x'])\n"
        "    return float(len(await agents.b(said + '?')))\n"
    )
    (tmp_path / "items.jsonl").write_text('{"x": "say"}\n' * 8)
    (tmp_path / "config.yaml").write_text(
        f"task: my_task.relay\nagent_model: {{name: {tiny_model}}}\ndataset: {{name: items.jsonl}}\n"
        "magrpo: {max_steps: 1, max_completion_length: 4, items_per_device: 2, trace_steps: 1}\n"
        "output: {base_dir: runs}\n"
    )
    train = ["run", "magrpo", "--config", "config.yaml", "--output_dir", "run", "--override"]
    with pytest.raises(SystemExit):
        cli.main([*train, "magrpo.branching=tree", "--dry_run"])
    assert "`relay` lives in its episodes and cannot be replayed" in capfd.readouterr().err
    cli.main([*train, "magrpo.branching=episodes"])
    assert read_trace(tmp_path / "run" / "trace")["turn"].max() == 2  # it goes on until the function ends
    evaluate = ["evaluate", "run", "--config", "run/config.yaml", "--dataset", "items.jsonl", "--num_episodes", "1"]
    cli.main([*evaluate, "--output_dir", "results", "--dry_run"])
    assert "episodes of 20 turns each" in capfd.readouterr().out


def test_a_tree_refuses_a_workflow_that_lives_or_has_no_number_of_turns(tmp_path):
    with pytest.raises(TaskError, match="set `branching: episodes`"):
        tiny_trainer(tmp_path, tiny_team(("aux",)), holding(), num_turns=2)
    with pytest.raises(TaskError, match="a tree needs its number of turns: set `num_turns`"):
        tiny_trainer(tmp_path, environment=debate())
    with pytest.raises(TaskError, match="set `branching: episodes`"):
        play(holding(), [{"x": 0}], scripted(ANSWERS), num_generations=2)


@pytest.mark.parametrize(("num_turns", "with_settings"), [(1, False), (2, False), (1, True)])
def test_a_replay_that_asks_something_else_names_the_line(num_turns, with_settings):
    calls = []

    @workflow(roles=("aux",))
    async def run(item, agents):
        calls.append(1)
        if with_settings:
            await agents.aux("Now:", max_tokens=len(calls))
        else:
            await agents.aux(f"Call {len(calls)}:")
        return 1.0

    with pytest.raises(
        TaskError, match=r"asked something else when it was replayed \(line \d+ of test_workflow_functions"
    ):
        play(run, [{}], scripted(ANSWERS), num_turns=num_turns, num_generations=2)


@pytest.mark.parametrize("num_episodes", [None, 1])
def test_what_a_workflow_has_started_ends_with_its_episode(num_episodes):
    ended = []

    @workflow(roles=("aux",))
    async def run(item, agents):
        run.kept = asyncio.create_task(noting_its_end(ended, item["x"]))
        await agents.aux("Say:")
        return 1.0

    play(run, [{"x": k} for k in range(3)], scripted(ANSWERS), num_episodes=num_episodes)
    assert {*ended} == {0, 1, 2} and not asyncio.all_tasks(event_loop(os.getpid()))


def test_a_workflow_that_stops_waiting_for_an_answer_is_paid():
    @workflow(roles=("aux",))
    async def run(item, agents):
        try:
            await asyncio.wait_for(agents.aux("Say:"), 0.01)
        except TimeoutError:
            return 0.5

    inner = scripted(ANSWERS)

    def slow(nodes, number):
        time.sleep(0.1)
        return inner(nodes, number)

    ((node,), *_) = play(run, [{}], slow, num_episodes=1)
    assert node.rewards == [0.5]


def test_an_item_may_change_between_calls_outside_of_a_run():
    @workflow(roles=("aux",))
    async def run(item, agents):
        return float(await agents.aux(f"Say {item['x']}:"))

    item = {"x": 1}
    assert run.prompts(item, []) == {"aux": "Say 1:"}
    item["x"] = 2
    assert run.score([item], [{"aux": "2"}], [[]])[0].reward == 2.0


def test_a_call_that_is_not_awaited_is_limited_too(monkeypatch):
    release = threading.Event()
    monkeypatch.setattr("trl_multiagent.jobs.event_loop.ANSWER_SECONDS", 0.5)

    @workflow(roles=("aux",), timeout=0.2)
    async def run(item, agents):
        await agents.aux("Go on:")
        release.wait(60)

    with pytest.raises(TaskError, match=r"more than 0.2 s \(line \d+ of test_workflow_functions.py\), in a call"):
        try:
            play(run, [{}], scripted(ANSWERS), num_turns=2)
        finally:
            release.set()


@pytest.mark.parametrize("settings", [TREE, EPISODES])
def test_an_episode_that_loses_its_resource_has_no_reward(tmp_path, settings, capfd):
    """Whatever it was paid before. It ends the run where a reward is needed."""

    @workflow(roles=ROLES)
    async def run(item, agents):
        answer = await agents.aux(f"{item['x']}:")
        agents.reward(float(len(answer)), "aux")
        await agents.main("Go on:")
        if len(item["x"]) % 2:
            raise UnavailableError("The judge at 127.0.0.1:1 failed: it is ill")
        return 1.0

    team, settings = tiny_team(ROLES), {**settings, "items_per_device": 4}
    tiny_trainer(tmp_path / "drop", team, run, reward_none="drop", **settings).train()
    lines = capfd.readouterr().out.splitlines()
    assert lines.count("The judge at 127.0.0.1:1 failed: it is ill") == 1
    with pytest.raises(UnavailableError, match=r"failed: it is ill\. With `reward_none: drop`, the other"):
        tiny_trainer(tmp_path / "error", team, run, **settings).train()


def test_an_episode_without_a_reward_is_in_no_mean(tmp_path):
    @workflow(roles=("aux",))
    async def run(item, agents):
        await agents.aux("Say:")  # earns 0.0, because an episode pays at its end
        agents.log("length", 7.0)
        await agents.aux("Again:")
        starts.append(item)
        if item == starts[0]:
            raise UnavailableError("gone")
        return {"aux": -4.0}

    starts = []
    settings = {"branching": "episodes", "num_generations": 2, "num_turns": 2, "items_per_device": 2}
    trainer = tiny_trainer(tmp_path, tiny_team(("aux",)), run, reward_none="drop", **settings)
    trainer.train()
    (logs,) = [log for log in trainer.state.log_history if "reward" in log]
    assert logs["return"] == -4.0 and logs["reward"] == logs["agents/aux/reward"] == -2.0
    assert logs["turn_1/reward_mean"] == 0.0 and logs["episode/length"] == 2.0 and logs["turn_1/length"] == 7.0
    assert logs["env_step"] == 4


def test_mistakes_get_a_sentence():
    async def unpaid(agents):
        await agents.aux("a")

    async def broken(agents):
        await agents.aux("a")
        return math.nan

    async def ends(agents):
        await agents.aux("a")
        sys.exit(3)

    async def is_cancelled(agents):
        await agents.aux("a")
        raise asyncio.CancelledError

    async def forgets(agents):
        await agents.main(f"Hint: {agents.aux('a')}")

    async def measures(agents):
        return len(agents.main("a"))

    async def leaves(agents):
        await agents.aux("a")
        agents.main("b")
        return 1.0

    async def pays(agents):
        await agents.aux("a")
        agents.reward(1.0, "mian")

    async def logs(agents):
        await agents.aux("a")
        agents.log("reward_mean", 5)
        return 1.0

    @dataclass
    class Unhashable:
        def __call__(self, texts):
            return texts

    def returns_none(numbers):
        pass

    def interrupts(numbers):
        raise KeyboardInterrupt("by itself")

    def asks(**settings):
        return lambda agents: agents.aux("a", **settings)

    for function, message in (
        (lambda agents: asyncio.gather(agents.aux("a"), agents.aux("b")), "'aux' is asked twice in one turn"),
        (unpaid, "returned None; it must return a reward"),
        (broken, "`mistaken` returned nan"),
        (lambda agents: agents.author("a"), "There is no role 'author'; the roles are aux, main"),
        (ends, "SystemExit: 3"),
        (is_cancelled, "CancelledError"),
        (forgets, "without `await`"),
        (measures, "'NotAwaited' has no len"),
        (lambda agents: agents[5]("a"), "no role 5; the roles are aux, main"),
        (lambda agents: agents.call(sum, "a"), r"`sum` raised TypeError.*line \d+ of test_workflow_functions"),
        (lambda agents: agents.call(Unhashable(), "a"), r"unhashable type: 'Unhashable' \(line \d+ of test_workflow"),
        (lambda agents: agents.call(returns_none, 1), r"`returns_none` returned None; it must return a list of 1 res"),
        (lambda agents: agents.call(lambda texts: [], "a"), "`<lambda>` returned a list of 0; it must return a list"),
        (lambda agents: agents.call(unpaid, 1), r"`agents.call` got <function .*unpaid.* that is not `async`.*line"),
        (lambda agents: agents.call(interrupts, 1), r"raised KeyboardInterrupt: by itself \(line \d+ of test_"),
        (leaves, "its question to 'main' was answered: `await` it"),
        (pays, "no role 'mian'"),
        (logs, "'reward_mean', which is logged anyway"),
        (lambda agents: agents.aux(3), r"3 \(int\).*line \d+ of test_workflow_functions"),
        (asks(stop=[""]), "`stop` is"),
        (asks(max_tokens=0), "`max_tokens` is 0"),
    ):

        @workflow(roles=ROLES)
        async def mistaken(item, agents, function=function):
            if item["x"]:
                return await function(agents)
            await asyncio.sleep(600)  # an error ends the run at once

        with pytest.raises(TaskError, match=message):
            play(mistaken, [{"x": 1}], scripted(ANSWERS), num_episodes=1)
    with pytest.raises(TaskError, match="`max_tokens` is 0"):
        play(mistaken, [{"x": 0}, {"x": 1}], scripted(ANSWERS), num_episodes=1)
    wrong_rewards = [([1.0], "a list of 3 numbers"), (["a"] * 3, "reward 'a'"), (None, "a list of 3 numbers")]
    for wrong, message in (*wrong_rewards, ([{"aux": 1.0}] * 3, "rewards by role")):
        with pytest.raises(TaskError, match=message):
            play(
                debate(group_reward=lambda item, episodes, wrong=wrong: wrong),
                [{"x": "1"}],
                scripted(ANSWERS),
                num_episodes=3,
            )

    @workflow(roles=ROLES, timeout=0.05)
    async def slow(item, agents):
        await asyncio.sleep(60)

    with pytest.raises(TaskError, match=r"waited for more than 0.05 s \(line \d+ of"):
        play(slow, [{}], scripted(ANSWERS))
    for wrong, message in (
        ({"max_turns": 0}, "at least 1"),
        ({"timeout": -1}, "above 0"),
        ({"roles": ["log"]}, "log"),
    ):
        with pytest.raises(ValueError, match=message):
            workflow(**{"roles": ROLES, **wrong})(slow.run)

    with pytest.raises(TypeError, match=r"write `@workflow\(roles="):
        workflow(slow.run)
    with pytest.raises(TypeError, match="A workflow takes two arguments, `item` and `agents`; this one is `ends"):
        workflow(roles=ROLES)(ends)
    for wrong in (lambda item, agents: 1.0, partial(slow.run, agents=1)):
        with pytest.raises(TypeError, match="`async def`"):
            workflow(roles=ROLES)(wrong)

    @workflow(roles=ROLES, max_open=4)
    async def opening(item, agents):
        pytest.fail("an episode more than may be open")

    with pytest.raises(TaskError, match="6 open episodes, but `max_open` is 4"):
        play(opening, [{"x": "1"}] * 2, scripted(ANSWERS), num_episodes=3)

    @workflow(roles=ROLES)
    async def nobody(item, agents):
        return 1.0

    with pytest.raises(TaskError, match=r"must not end before one of the trained roles \(aux, main\) has acted"):
        play(nobody, [{}], scripted(ANSWERS))


def test_an_episode_that_is_closed_calls_nothing():
    """Nothing would answer, so that its end would wait for it."""
    called, refused = [], []

    def clean(names):
        called.extend(names)
        return names

    @workflow(roles=ROLES)
    async def run(item, agents):
        said = await agents.aux("First.")
        try:
            await agents.main("Then.")
        finally:
            try:
                await agents.call(clean, said)
            except RuntimeError as error:
                refused.append(str(error))
        return float(len(said))

    (first, last) = play(run, [{}], scripted(ANSWERS), handoff="best", num_generations=3, num_turns=2)
    assert len(last) == 1 and called == first[0].samples["aux"].texts[:1]  # of the chain; the two others are closed
    assert refused == ["`agents.call` calls nothing for an episode that is closed."] * 2


def test_parts_end_with_the_turns_of_their_episode():
    """Without a message about an error that nothing has seen."""
    parts = []

    @workflow(roles=ROLES)
    async def run(item, agents):
        async def ask(role):
            await agents[role]("Go.")

        while True:
            parts[:] = [asyncio.create_task(ask(role)) for role in ROLES]
            for part in parts:
                await part

    play(run, [{}], scripted(ANSWERS), num_episodes=1, num_turns=1)
    assert [part._log_traceback for part in parts] == [False, False]


def test_a_part_that_fails_after_the_turns_is_told(caplog):
    @workflow(roles=ROLES)
    async def run(item, agents):
        async def ask():
            try:
                await agents.aux("Go.")
                await agents.aux("Go on.")
            except OutOfTurns:
                raise ValueError("a fault of the task") from None

        part = asyncio.create_task(ask())
        try:
            while True:
                await agents.main("Go.")
        except OutOfTurns:
            while not part.done():
                await asyncio.sleep(0)
            return 1.0

    play(run, [{}], scripted(ANSWERS), num_episodes=1, num_turns=1)
    assert [str(record.exc_info[1]) for record in caplog.records] == ["a fault of the task"]


def test_other_waits_run_side_by_side():
    barrier = []

    @workflow(roles=("aux",))
    async def run(item, agents):
        barrier.append(asyncio.Event())
        if len(barrier) == 8:
            for event in barrier:
                event.set()
        await asyncio.wait_for(barrier[-1].wait(), 60)  # for all the other branches
        await agents.aux("a")
        return 1.0

    turns = play(run, [{}] * 8, scripted(ANSWERS), num_episodes=1, num_turns=1)
    assert [node.rewards for node in turns[0]] == [[1.0]] * 8


def test_group_rewards_compare_the_branches_of_an_item():
    def shortest(item, episodes):
        lengths = [len(episode) for episode in episodes]
        return [float(x == min(lengths)) for x in lengths]

    environment = debate(group_reward=shortest)
    turns = play(environment, [{"x": "1"}, {"x": "2"}], scripted(ANSWERS), num_episodes=6)
    plain = play(debate(), [{"x": "1"}, {"x": "2"}], scripted(ANSWERS), num_episodes=6)
    ends = {
        (node.tree, node.episode): (len(node.history) + 1, node.rewards[0])
        for nodes in turns
        for node in nodes
        if not node.children
    }
    base = {(n.tree, n.episode): n.rewards[0] for nodes in plain for n in nodes if not n.children}
    for (tree, episode), (length, reward) in ends.items():
        least = min(number for (other, _), (number, _) in ends.items() if other == tree)
        assert reward == pytest.approx(base[tree, episode] + (length == least))


def test_seats_play_roles_of_a_workflow():
    environment = SeatedEnvironment(debate(), {"main": FunctionSeat(lambda item, prompt, history: "yes")})
    turns = play(environment, [{"x": "1"}], scripted(ANSWERS), num_episodes=2)
    assert all(node.roles == ("aux",) for nodes in turns for node in nodes)

    @workflow(roles=ROLES)
    async def ended(item, agents):
        await agents.main("Begin.")
        return 1.0

    with pytest.raises(TaskError, match=r"must not end before one of the trained roles \(aux\) has acted"):
        play(SeatedEnvironment(ended, {"main": FunctionSeat(lambda *_: "no")}), [{}], scripted(ANSWERS))


def test_a_seat_may_open_an_episode_that_lives(tmp_path):
    @workflow(roles=ROLES, live=True, max_open=4)
    async def run(item, agents):
        return float(len(await agents.aux(await agents.main("Begin."))))

    environment = SeatedEnvironment(run, {"main": FunctionSeat(lambda item, prompt, history: "no")})
    assert [node.prompts for node in first_nodes([{"x": "1"}] * 5, environment)] == [{"aux": "no"}] * 5
    arguments = {"num_turns": 1, "branching": "episodes", "num_generations": 2, "items_per_device": 2}
    trainer = tiny_trainer(tmp_path, tiny_team(roles=("aux",)), environment, max_steps=1, **arguments)
    trainer.train()  # it looks at the first prompts before it plays
    assert trainer.state.global_step == 1


def test_a_question_has_settings_of_its_own(tmp_path):
    seen = []

    @workflow(roles=("aux", "main"))
    async def run(item, agents):
        first = await agents.aux("First.", max_tokens=2)
        seen.append((first, first.truncated, first.full))
        second = await agents.aux("Second.", memory=False)
        third = await agents.aux("Third.", stop=list("abcdefghijklmnop0123456789"))
        seen.append((third, third.truncated))
        return float(len(second))

    trainer = tiny_trainer(tmp_path, environment=run, num_turns=3, num_generations=2, branching="episodes")
    turns = trainer._play_trees(tiny_items(2).to_list())
    tokens = [[len(ids) for node in nodes for ids in node.samples["aux"].completion_ids] for nodes in turns]
    assert max(tokens[0]) == 2 and max(tokens[1]) > 2
    prompts = [nodes[0].samples["aux"].prompt for nodes in turns]
    assert prompts[0] == "First." and prompts[1] == "Second." and "First." in prompts[2] and "Second." in prompts[2]
    assert all(x[0] == x[2] for x in seen if len(x) == 3) and any(x[1] for x in seen)


def test_thousands_of_episodes_leave_nothing():
    environment, counts = holding(), []
    for _ in range(10):
        play(environment, [{"x": k} for k in range(300)], scripted(ANSWERS), num_episodes=1, num_turns=2)
        counts.append((threading.active_count(), len(os.listdir("/proc/self/fd"))))
    assert Held.open == 0 and not asyncio.all_tasks(event_loop(os.getpid()))
    threads, files = zip(*counts, strict=True)
    assert len(set(threads)) == 1 and max(files) - min(files) < 100  # garbage of other tests may close files


@pytest.mark.parametrize("outcome", [Outcome(0.5, {"m": 2.0}), 0.5, {"aux": 0.5, "main": 0.25}])
def test_results_of_every_form(outcome):
    @workflow(roles=ROLES)
    async def run(item, agents):
        await agents.main("a")
        agents.reward(1.0, "main")
        return outcome

    ((node,), *_) = play(run, [{}], scripted(ANSWERS))
    main = (outcome["main"] if isinstance(outcome, dict) else 0.5) + 1.0
    assert node.role_rewards == {"aux": [0.5], "main": [main]}


async def gathered(agents, late):
    return await asyncio.gather(agents.aux("a"), late())


async def grouped(agents, late):
    async with asyncio.TaskGroup() as group:
        parts = [group.create_task(asyncio.wait_for(agents.aux("a"), 60)), group.create_task(late())]
    return [part.result() for part in parts]


async def beside(agents, late):
    part = asyncio.create_task(late())
    return [await agents.aux("a"), await asyncio.wait_for(part, 60)]


async def signalled(agents, late):
    """A part waits for another one, which waits for a call in a thread."""
    event, loop = asyncio.Event(), asyncio.get_running_loop()

    async def signal():
        await asyncio.wait([loop.run_in_executor(None, time.sleep, 0.02)])
        event.set()

    async def ask():
        await event.wait()
        return await late()

    a, b, _ = await asyncio.gather(agents.aux("a"), ask(), asyncio.shield(asyncio.gather(signal())))
    return [a, b]


async def timer():
    await asyncio.sleep(0.02)
    for _ in range(20):
        await asyncio.sleep(0)


async def thread():
    await asyncio.wait_for(asyncio.to_thread(time.sleep, 0.02), 60)


async def program():
    process = await asyncio.create_subprocess_exec("sh", "-c", "sleep 0.02; echo 1", stdout=subprocess.PIPE)
    assert await process.stdout.readline() == b"1\n" and await process.wait() == 0


async def stream():
    async def serve(reader, writer):
        await asyncio.sleep(0.02)
        writer.write(b"1\n")

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        assert await asyncio.wait_for(reader.readline(), 60) == b"1\n"
        writer.close()


class Client:
    def __await__(self):
        return timer().__await__()


class LibraryClient:
    def __await__(self):
        return (yield from timer().__await__())


async def client():
    await Client()
    await LibraryClient()


class Player:
    def __init__(self, agents, wait):
        self.agents, self.wait = agents, wait

    async def act(self):
        await self.wait()
        return await self.agents.main("late")


async def after(wait, ask):
    await wait()
    return await ask("late")


async def of_an_object(agents, late):
    part = asyncio.create_task(Player(agents, late.wait).act())
    return [await agents.aux("a"), await part]


async def of_a_question(agents, late):
    part = asyncio.create_task(after(late.wait, agents.main))
    return [await agents.aux("a"), await part]


@pytest.mark.parametrize("form", [gathered, grouped, beside, signalled, of_an_object, of_a_question])
@pytest.mark.parametrize("wait", [timer, thread, program, stream, client])
@pytest.mark.parametrize("num_episodes", [None, 2])
def test_a_turn_begins_when_every_part_has_asked(form, wait, num_episodes):
    """Whatever it waits for before. What nothing awaits, and sees no agents, goes on beside the turns."""

    @workflow(roles=ROLES)
    async def run(item, agents):
        async def late():
            await wait()
            return await agents.main("late")

        late.wait = wait
        heartbeats = {asyncio.create_task(asyncio.sleep(600))}
        for task in heartbeats:
            task.add_done_callback(heartbeats.discard)
        a, b = await form(agents, late)
        return float(len(a) + len(b))

    number = 1 if num_episodes else 2
    turns = play(run, [{}], scripted(["abc"]), num_turns=2, num_generations=number, num_episodes=num_episodes)
    assert all((node.roles, node.rewards) == (ROLES, [6.0] * number) for node in turns[0]) and turns[1] == []


class Acquired:
    """An object of one's own that waits for a lock."""

    def __init__(self, lock):
        self.lock = lock

    def __await__(self):
        return self.lock.acquire().__await__()


@pytest.mark.parametrize("acquire", [asyncio.Lock.acquire, Acquired])
@pytest.mark.parametrize("num_episodes", [None, 2])
def test_a_part_that_waits_for_a_lock_keeps_no_turn_waiting(num_episodes, acquire):
    @asynccontextmanager
    async def holding_it(lock):
        await acquire(lock)
        yield
        lock.release()

    @workflow(roles=ROLES, timeout=20)
    async def run(item, agents):
        async def ask(role):
            async with holding_it(lock):
                return len(await agents[role](f"{role}:"))

        lock = asyncio.Lock()
        return float(sum(await asyncio.gather(*map(ask, ROLES))))

    number = 1 if num_episodes else 2
    turns = play(run, [{}], scripted(["abc"]), num_turns=2, num_generations=number, num_episodes=num_episodes)
    assert all(node.roles == (role,) for nodes, role in zip(turns, ROLES, strict=True) for node in nodes)
    assert turns[1][0].rewards == [6.0] * number


def test_a_task_that_only_yields_goes_on_beside_the_turns():
    @workflow(roles=("aux",))
    async def run(item, agents):
        async def yielding():
            while True:
                await asyncio.sleep(0)

        run.kept = asyncio.create_task(yielding())
        await agents.aux("a")
        return 1.0

    assert play(run, [{}], scripted(ANSWERS), num_turns=1, num_episodes=1)[0][0].rewards == [1.0]


def recorded_judge():
    """A function of a list of texts that returns their lengths, and its calls."""
    calls = []

    def judge(texts):
        calls.append(texts)
        return [len(text) for text in texts]

    return judge, calls


@pytest.mark.parametrize("num_episodes", [None, 3])
def test_a_call_is_one_for_all_branches_and_no_fork_repeats_it(num_episodes):
    """A turn begins when a part that waited for a call has asked."""
    judge, calls = recorded_judge()

    @workflow(roles=ROLES)
    async def run(item, agents):
        said = await agents.aux(f"{item['x']}:")

        async def judged():
            length = await agents.call(judge, said)
            await agents.aux(f"{length} letters:")
            return length

        length, _ = await asyncio.gather(judged(), agents.main("And you?"))
        return float(length + await agents.call(judge, "end"))

    number = 1 if num_episodes else 3
    items, settings = [{"x": "1"}, {"x": "2"}], {"num_turns": 2, "num_episodes": num_episodes}
    turns = play(run, items, scripted(ANSWERS), num_generations=number, **settings)
    said = [node.texts(index)["aux"] for node in turns[0] for index in node.indices]
    assert [*map(sorted, calls)] == [sorted(said), ["end"] * (6 if num_episodes else 2)]
    for node in turns[1]:
        assert node.roles == ROLES and node.rewards == [len(node.history[0].joint_action["aux"]) + 3.0] * number
    with run.playing(2, False):  # as counterfactual credit does
        judge_nodes(run, turns[1])
    assert len(calls) == 2


def test_one_agent_for_all_roles_repeats_no_call():
    judge, calls = recorded_judge()

    @workflow(roles=ROLES)
    async def run(item, agents):
        length = await agents.call(judge, "begin")
        said, _ = await asyncio.gather(agents.aux(f"{length}:"), agents.main("And you?"))
        return float(len(said) + await agents.call(judge, "end"))

    sample = scripted(["<aux>\nab\n</aux>\n<main>\nc\n</main>"])
    ((node,),) = play(CentralizedEnvironment(run), [{}], sample, num_turns=1, num_generations=2)
    assert node.rewards == [5.0, 5.0] and calls == [["begin"], ["end"]]


def test_a_fork_goes_on_as_its_branch_did():
    """Branches that call other functions first change neither the order of results nor what is called."""
    calls = []

    def f(texts):
        calls.append(("f", *texts))
        return texts

    def g(texts):
        calls.append(("g", *texts))
        return texts

    @workflow(roles=ROLES)
    async def run(item, agents):
        heard = []

        async def part(*functions):
            for k, function in enumerate(functions):
                heard.append(await agents.call(function, f"{item['x']}{k}"))

        await asyncio.gather(*[part(g)] if item["x"] == "1" else [part(f, f, g), part(g, f)])
        await agents.aux(str(heard))
        return 1.0

    turns = play(run, [{"x": "1"}, {"x": "2"}], scripted(ANSWERS), num_turns=1, num_generations=2)
    assert [node.rewards for node in turns[0]] == [[1.0, 1.0]] * 2
    assert calls == [("g", "10", "20"), ("f", "20"), ("f", "21", "21"), ("g", "22")]


@pytest.mark.parametrize("is_random", [False, True])
def test_the_result_of_a_call_does_not_depend_on_when_others_are_made(is_random):
    """Two calls with one argument in an episode have two results."""
    calls, waits = [], itertools.count()

    def judge(arguments):
        calls.extend(arguments)
        return [len(calls) * is_random for _ in arguments]

    @workflow(roles=ROLES)
    async def run(item, agents):
        async def part(name):
            await asyncio.sleep(0.005 * (next(waits) * 7 % 5))
            return [await agents.call(judge, (item["x"], name)) for _ in range(2)]

        found = await asyncio.gather(*map(part, "abcd"))
        await agents.aux(f"{found}:")
        await agents.main(f"{found}:")
        return 1.0

    play(run, [{"x": 1}, {"x": 2}], scripted(ANSWERS), num_turns=2, num_generations=3)
    assert Counter(calls) == {(x, name): 2 for x in (1, 2) for name in "abcd"}


def test_results_of_calls_are_forgotten_outside_of_a_run():
    numbers = itertools.count()

    def judge(texts):
        return [next(numbers) for _ in texts]

    @workflow(roles=("aux",))
    async def run(item, agents):
        return await agents.call(judge, await agents.aux("Say:"))

    item = {}
    assert [run.score([item], [{"aux": "a"}], [()])[0].reward for _ in range(3)] == [0.0, 1.0, 2.0]


def test_a_branch_gets_its_own_result_of_its_own_argument():
    @workflow(roles=("aux",))
    async def run(item, agents):
        said = await agents.aux("Say:")
        seen = np.zeros(5000)  # of which `repr` leaves the middle out
        seen[2500] = len(said)
        found = await agents.call(sums, seen)
        await agents.aux("Again:")
        return found.pop("sum") - len(said)  # the next branch has it as well

    def sums(arrays):
        return [{"sum": array.sum()} for array in arrays]

    turns = play(run, [{}], scripted(ANSWERS), num_turns=2, num_generations=4)
    assert [node.rewards for node in turns[1]] == [[0.0] * 4] * 4


def test_a_workflow_goes_on_after_an_error_of_a_call():
    """A fork, too, and also after the one error that a thread cannot hand on."""
    calls = []

    def judge(texts):
        calls.append(texts)
        return [next(iter(text)) for text in texts]

    @workflow(roles=("aux",))
    async def run(item, agents):
        try:
            await agents.call(judge, "")
        except TaskError as error:
            await agents.aux(str(error))
        return 1.0

    ((node,),) = play(run, [{}], scripted(ANSWERS), num_turns=1, num_generations=2)
    assert "The function `judge` raised StopIteration" in node.prompts["aux"]
    assert node.rewards == [1.0, 1.0] and calls == [[""]]


def test_an_episode_has_no_reward_if_its_judge_is_gone():
    def judge(texts):
        raise UnavailableError("gone")

    @workflow(roles=("aux",))
    async def run(item, agents):
        return await agents.call(judge, await agents.aux("Say:"))

    def score(nodes):
        return judge_nodes(run, nodes, reward_none="drop")

    ((node,),) = grow_trees([{}], run, scripted(ANSWERS), score, num_turns=1, num_generations=2)
    assert all(map(math.isnan, node.rewards))


def test_the_timeout_of_a_turn_counts_its_calls():
    @workflow(roles=("aux",), timeout=1.5)
    async def run(item, agents):
        for k in range(2):
            await agents.call(judge, k)
        return float(len(await agents.aux("Say:")))

    def judge(numbers):
        time.sleep(0.9)
        return numbers

    with pytest.raises(TaskError, match=r"waited for more than 1\.5 s for `judge`, in `agents.call`"):
        play(run, [{}], scripted(ANSWERS), num_turns=1)


def test_a_judge_that_hangs_is_named_and_keeps_no_process():
    code = """
import time
from trl_multiagent import workflow

def hang(texts):
    time.sleep(600)

@workflow(roles=("a",), timeout=0.2)
async def run(item, agents):
    return await agents.call(hang, await agents.a("Say:"))

with run.playing(1, False):
    run.score([{}], [{"a": "x"}], [()])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    message = "TaskError: The workflow `run` waited for more than 0.2 s for `hang`, in `agents.call`."
    assert done.returncode == 1 and message in done.stderr


def test_a_note_may_have_any_name(capfd):
    @workflow(roles=("aux",))
    async def run(item, agents):
        agents.note("failure", ["t1", "t2"])
        return float(len(await agents.aux("Say:")))

    ((node,),) = play(run, [{}], scripted(["ab"]), num_turns=1)
    assert node.rewards == [2.0] and node.outcomes[0].extra == {"failure": ["t1", "t2"]}
    assert capfd.readouterr().out == ""


def test_a_fork_hears_its_roles_in_the_order_of_the_branch():
    @workflow(roles=ROLES)
    async def run(item, agents):
        said = []

        async def speak(role):
            said.append([role, await agents[role](f"{role}:")])

        await asyncio.gather(speak("main"), speak("aux"))
        await agents.aux(str(said))
        return 1.0

    turns = play(run, [{}], scripted(ANSWERS), num_turns=2, num_generations=2)
    assert all(node.prompts["aux"].startswith("[['aux'") for node in turns[1]) and len(turns[1]) == 2


def test_a_branch_goes_on_where_it_waits():
    """Only forks are replayed: one for each further joint action of a node."""
    starts = []

    @workflow(roles=("aux",))
    async def run(item, agents):
        starts.append(1)
        for k in range(3):
            await agents.aux(f"{k}:")
        return 1.0

    nodes = sum(map(len, play(run, [{}], scripted(ANSWERS), num_turns=3, num_generations=3)))
    assert nodes == 1 + 3 + 9 and len(starts) == 1 + 2 * nodes


@pytest.mark.parametrize("num_episodes", [None, 2])
def test_an_episode_has_its_own_item_and_messages(num_episodes):
    @workflow(roles=("aux",))
    async def run(item, agents):
        said = [{"role": "user", "content": f"Card {item['deck'].pop()}:"}]
        for _ in range(2):
            answer = await agents.aux(said)
            said += [{"role": "assistant", "content": answer}, {"role": "user", "content": "Again:"}]
        return 1.0

    number = 1 if num_episodes else 2
    turns = play(run, [{"deck": [1, 2, 3]}], scripted(ANSWERS), num_generations=number, num_episodes=num_episodes)
    first = [{"role": "user", "content": "Card 3:"}]
    assert all(node.prompts["aux"] == first for node in turns[0])
    assert len(turns[1]) == 2 and all(node.history[0].prompts["aux"] == first for node in turns[1])


def test_a_workflow_that_goes_on_asking_is_stopped():
    @workflow(roles=("aux",))
    async def run(item, agents):
        while True:
            try:
                await agents.aux("More:")
            except Exception:
                pass

    assert [nodes[0].rewards for nodes in play(run, [{}], scripted(ANSWERS), num_turns=2, num_episodes=1)] == [[0]] * 2


@pytest.mark.parametrize("seat", ROLES)
@pytest.mark.parametrize("num_episodes", [None, 1])
def test_turns_in_which_only_seats_act_do_not_count(seat, num_episodes):
    seen = []

    def compare(item, episodes):
        seen.append([{*turn.joint_action} for turn in episodes[0]])
        return [0.5] * len(episodes)

    @workflow(roles=ROLES, group_reward=compare)
    async def run(item, agents):
        for k in range(4):
            await agents.aux(f"{k}:")
            reply = await agents.main(f"{k}?")
            agents.reward(1.0 + reply.truncated)
        return 1.0

    environment = SeatedEnvironment(run, {seat: FunctionSeat(lambda item, prompt, history: "no")})
    turns = play(environment, [{}], scripted(ANSWERS), num_turns=4, num_episodes=num_episodes)
    assert sum(nodes[0].rewards[0] for nodes in turns) == turns[-1][0].outcomes[0].reward + 3 == 5.5
    assert seen == [[{"aux"}, {"main"}] * 4]


def test_a_role_that_an_ablation_has_not_asked_says_nothing():
    @workflow(roles=ROLES)
    async def run(item, agents):
        for _ in range(2):
            agents.reward(len("".join(await asyncio.gather(agents.aux("a"), agents.main("b")))))

    history = [Turn({"aux": "a", "main": "b"}, {"aux": "x"}, Outcome(1.0), altered=True)]
    assert run.score([{}], [{"main": "abcd"}], [history])[0].reward == 4.0


@pytest.mark.parametrize("how", ["cut", "shuffled"])
def test_messages_of_a_workflow_can_be_replaced(how):
    @workflow(roles=ROLES)
    async def run(item, agents):
        price = await agents.aux(f"{item['x']}:")
        for _ in range(3):
            answer = await agents.main(f"They offer {price}:")
            if len(answer) == 3:  # another role acts, or none
                break
            price = await agents.aux(f"They say {answer}:")
        return 1.0

    items = [{"x": str(k)} for k in range(12)]
    turns = play(MessageAblation(run, how), items, scripted(ANSWERS), num_turns=8, num_episodes=1)
    for root in turns[0]:
        node, total = root, root.rewards[0]
        while node.children:
            node = node.children[0]
            total += node.rewards[0]
        assert total in (0.0, 1.0)
