"""The tasks `textarena` and `reasoning_gym`, which play games and puzzles of other packages."""

import contextlib
import functools
import importlib.util
import os
import random
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import measure_games
import numpy as np
import pytest
import yaml
from local_server import LocalServer

from trl_multiagent import cli
from trl_multiagent.environments.task import TaskSettings
from trl_multiagent.environments.task_errors import TaskError, UnavailableError
from trl_multiagent.rollout.tree import Samples, grow_trees, judge_nodes
from trl_multiagent.tasks import openenv, reasoning_gym, textarena
from trl_multiagent.tasks.seeded import OwnDraws, Seeds

from prepared import parse_recipe
from random_games import HANABI, PLAYERS, environment_of, play, play_by
from tiny import tiny_team, tiny_trainer


@pytest.fixture
def games():
    pytest.importorskip("textarena")


@pytest.fixture
def puzzles():
    pytest.importorskip("reasoning_gym")


def test_each_user_of_the_global_generators_has_its_own_draws():
    def draw():
        return random.random(), np.random.random()

    first, second = OwnDraws(3), OwnDraws(3)
    random.seed(0), np.random.seed(0)
    outside = [draw()]
    with first:
        one = [draw()]
    with second:
        other = [draw(), draw()]
    outside.append(draw())
    with first:
        one.append(draw())
    assert one == other
    random.seed(0), np.random.seed(0)
    assert outside == [draw(), draw()]


def test_seeds_of_the_splits_differ():
    rows = Seeds()
    train, test = rows.load(None), rows.load("test[:9]")
    assert len(train) == 2048 and len(test) == 9 and not set(train["seed"]) & set(test["seed"])
    assert Seeds().load("test[:9]").to_list() == test.to_list()
    assert Seeds(seed=2).load("test[:9]").to_list() != test.to_list()


@pytest.mark.parametrize(
    "name", ["KuhnPoker-v0", "Crusade-v0", "ThreePlayerGOPS-v0", "SecretMafia-v0", "Taboo-v0", HANABI]
)
def test_random_players_reach_the_end(games, name):
    for turns in play(name, range(5)):
        rewards, metrics = turns[-1].outcome.role_rewards, turns[-1].outcome.metrics
        assert metrics["out_of_turns"] == 0 and metrics["invalid_moves"] < 0.2
        assert len(rewards) == PLAYERS[name][0] and all(not any(x.outcome.role_rewards.values()) for x in turns[:-1])
        if name == "KuhnPoker-v0":
            assert sum(rewards.values()) == 0  # zero-sum
        if name == HANABI:
            assert len(set(rewards.values())) == 1  # cooperative


def test_a_cooperative_score_is_paid(games):
    def first_card(rng, text):
        return "[Play] 0"

    assert max(turns[-1].outcome.role_rewards["player_0"] for turns in play(HANABI, range(20), move=first_card)) > 0


@pytest.mark.parametrize("name", ["KuhnPoker-v0", "PigDice-v0-short", "Sokoban-v0"])
def test_games_side_by_side_are_those_played_alone(games, name):
    def facts(episodes):
        return [[(turn.prompts, turn.outcome.reward) for turn in turns] for turns in episodes]

    before = random.getstate()
    together = facts(play(name, range(2), num_episodes=2))
    assert together == [x for seed in range(2) for x in facts(play(name, [seed], num_episodes=2))]
    assert random.getstate() == before


def test_a_prompt_has_only_what_is_new(games):
    (turns,) = play("TicTacToe-v0", [1])
    own = [turn.prompts["player_0"] for turn in turns if "player_0" in turn.prompts]
    assert "You are Player 0" in own[0] and not any("You are Player 0" in prompt for prompt in own[1:])
    assert all("[Player 0]" not in prompt and "[Player 1]" in prompt for prompt in own[1:])


def test_without_a_memory_a_prompt_has_all_that_happened(games):
    """Kuhn poker tells its rules and the card once."""

    class Settings:
        sections = {"textarena": textarena.Game("KuhnPoker-v0", memory=False)}

    (turns,) = play_by(textarena.make_environment(Settings), [1], lambda node, role: "[check]")
    own = [str(turn.prompts["player_0"]) for turn in turns if "player_0" in turn.prompts]
    assert len(own) > 1 and all("Kuhn Poker" in prompt and "Your card is" in prompt for prompt in own)
    assert all("[check]" in prompt for prompt in own[1:])


def test_invalid_moves_end_the_game_as_it_says_and_are_counted(games):
    (turns,) = play("KuhnPoker-v0", [1], move=lambda rng, text: "what?")
    assert [turn.outcome.metrics["invalid_moves"] for turn in turns] == [1, 1]  # it allows one more try
    (loser,) = turns[-1].prompts
    assert turns[-1].outcome.role_rewards[loser] == -1 and "attempted an invalid move" in turns[1].prompts[loser]

    class Settings:
        sections = {"textarena": textarena.Game("KuhnPoker-v0", invalid_cost=0.5)}

    (turns,) = play_by(textarena.make_environment(Settings), [1], lambda node, role: "what?")
    assert [turn.outcome.role_rewards[loser] for turn in turns] == [-0.5, -1.5]


def test_games_live_in_episodes_and_may_run_out_of_turns(games):
    with pytest.raises(TaskError, match="set `branching: episodes`"):
        with environment_of("KuhnPoker-v0").playing(2, are_episodes=False):
            pass
    (turns,) = play("KuhnPoker-v0", [1], num_turns=2)
    assert turns[-1].outcome.metrics["out_of_turns"] == 1 and turns[-1].outcome.reward == 0


def test_a_game_trains(games, tmp_path):
    from datasets import Dataset

    trainer = tiny_trainer(
        tmp_path, tiny_team(roles=("player_0", "player_1")), environment_of("KuhnPoker-v0", max_rounds=1),
        branching="episodes", num_turns=3, num_generations=4, items_per_device=2, max_completion_length=4,
        train_dataset=Dataset.from_dict({"seed": [1, 2]}), max_steps=1, logging_steps=1,
    )  # fmt: skip
    trainer.train()
    logged = trainer.state.log_history[0]  # player 1 begins, and loses with two invalid moves
    assert logged["turn_2/invalid_moves"] == 1
    assert logged["agents/player_0/return"] == -logged["agents/player_1/return"] == 1


def test_a_seat_plays_against_the_trained_player(games):
    from trl_multiagent import FunctionSeat, SeatedEnvironment

    def opponent(item, prompt, history):
        return PLAYERS["TicTacToe-v0"][1](random.Random(prompt), prompt)

    environment = SeatedEnvironment(environment_of("TicTacToe-v0"), {"player_1": FunctionSeat(opponent)})

    def answer(node, role):
        return opponent(node.item, node.prompts[role], ())

    for turns in play_by(environment, range(20), answer, num_turns=5):  # its squares
        assert turns[-1].outcome.metrics["out_of_turns"] == 0


def recipe(tmp_path, **settings):
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump({"agent_model": {"name": "m"}, **settings}))
    return parse_recipe("magrpo", None, ["--config", str(path)])


def settings_of(recipe):
    return TaskSettings(recipe.sections, recipe.num_agents, None)


def test_settings_of_a_game(games, tmp_path):
    three = recipe(tmp_path, task="textarena", textarena={"game": "ThreePlayerGOPS-v0", "players": 3})
    assert three.num_agents == 3
    environment = textarena.make_environment(settings_of(three))
    assert environment.roles == ("player_0", "player_1", "player_2")
    for section, message in [
        ({"game": "Nope-v0"}, "Environment Nope-v0 not found"),
        ({"players": 3}, "number of players has to be 2"),
        ({"options": {"depth": 2}}, "unexpected keyword argument 'depth'"),
    ]:
        with pytest.raises(ValueError, match=message):
            textarena.Game(**section)
    with pytest.raises(ValueError, match=r"`dataset.name` is 'chess', but the items are seeds"):
        Seeds(name="chess")


@pytest.mark.parametrize(
    "task, needed", [("textarena", "textarena<"), ("reasoning_gym", "reasoning-gym<"), ("openenv", "openenv<")]
)
def test_a_missing_package_is_one_line_that_says_how_to_install_it(monkeypatch, refused, task, needed):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    line = refused(cli.main, ["train", "magrpo", "--task", task, "--model_name", "m", "--dry_run"])
    assert f'pip install "{needed}' in line


def puzzle_task(tmp_path, name="chain_sum", **dataset):
    dataset = {"name": f"reasoning_gym:{name}", "train_split": "train[:60]", "eval_split": "test[:20]", **dataset}
    settings = settings_of(recipe(tmp_path, task="reasoning_gym", dataset=dataset))
    return reasoning_gym.make_environment(settings), *reasoning_gym.load_datasets(settings), settings


def test_puzzles_to_evaluate_on_are_not_trained_on(puzzles, tmp_path):
    _, train, held_out, _ = puzzle_task(tmp_path)
    assert len(held_out) == 20 and len(train) == 60 and train[0]["question"] != train[1]["question"]
    options = {"min_trials": 3, "max_trials": 4}
    _, train, held_out, _ = puzzle_task(tmp_path, "coin_flip", options=options)
    assert len(train) < 60 and not set(train["question"]) & set(held_out["question"])


def solve(environment, item, answers, num_turns):
    """Plays one branch in a tree, in which the workflow is replayed."""
    said = iter(answers)

    def sample(nodes, number):
        (role,) = nodes[0].prompts if nodes else [None]
        return {role: [Samples([1], [[1]], [next(said)])]} if nodes else {}

    def score(nodes):
        return judge_nodes(environment, nodes)

    turns = grow_trees([item], environment, sample, score, num_turns=num_turns, num_generations=1)
    return [nodes[0] for nodes in turns if nodes]


def test_a_checker_sends_the_solver_back(puzzles, tmp_path):
    environment, train, _, settings = puzzle_task(tmp_path)
    item = train[0]
    right = settings.dataset.puzzle(item["seed"])[1]["answer"]
    for answers, num_turns, expected in [
        ([f"<answer>{right}</answer>", "Right."], 3, {"solver": 1, "checker": 1}),
        (["no idea", "right"], 3, {"solver": 0, "checker": 0}),
        (["no idea", "It is not a number.", right], 3, {"solver": 1, "checker": 1}),
        ([right, "Wrong.", "no idea"], 3, {"solver": 0, "checker": 0}),
        ([right, "Wrong."], 2, {"solver": 1, "checker": 0}),  # without a turn for another answer, the first counts
    ]:
        nodes = solve(environment, item, answers, num_turns)
        assert len(nodes) == len(answers)
        assert nodes[-1].outcomes[0].role_rewards == pytest.approx(expected, abs=0.1)
    assert "It is not a number." in solve(environment, item, ["1", "It is not a number.", "2"], 3)[2].prompts["solver"]


@pytest.mark.parametrize("name", ["list_functions", "pool_matrix", "prime_factorization"])
def test_generators_that_draw_globally_or_fail_on_an_answer(puzzles, tmp_path, name):
    """The first two draw from the global generators, and the verifier of the last raises on other texts."""
    environment, train, _, settings = puzzle_task(tmp_path, name, train_split="train[:3]", eval_split=None)
    before = random.getstate(), np.random.get_state()[1].tolist()
    for row in train:
        assert settings.dataset.puzzle(row["seed"])[1]["question"] == row["question"]
        assert solve(environment, row, ["no idea", "right"], 2)[-1].outcomes[0].role_rewards["solver"] < 0.1
    assert before == (random.getstate(), np.random.get_state()[1].tolist())


def test_wrong_names_of_generators(puzzles):
    for settings, message in [
        ({"name": "reasoning_gym:nope"}, "'nope' not registered"),
        ({"options": {"terms": 3}}, "unexpected keyword argument 'terms'"),
    ]:
        with pytest.raises(ValueError, match=message):
            reasoning_gym.Puzzles(**settings)


@pytest.mark.parametrize("name", ["nim", "together", "hanabi"])
def test_a_recipe_of_a_game(games, tmp_path, tiny_model, monkeypatch, name):
    from trl_multiagent.configs.recipes.games import hanabi, nim

    monkeypatch.chdir(tmp_path)
    override = [f"agent_model.name={tiny_model}", "magrpo.max_steps=1", "magrpo.num_generations=2"]
    cli.main(["run", "magrpo", "--config", name, "--override", *override, "output.base_dir=run"])
    environment = hanabi.make_environment() if name == "hanabi" else getattr(nim, name)
    legal = (hanabi if name == "hanabi" else nim).random_legal
    items = [{"seed": k, "item_id": k, "stones": 2 + k % 9, "moves": (1, 2, 3)} for k in range(50)]

    games = play_by(environment, items, lambda node, role: legal(node.item, node.prompts[role], node.history))
    ends = [turns[-1].outcome for turns in games]
    assert not any(end.metrics["invalid_moves"] or end.metrics["out_of_turns"] for end in ends)
    one, other = ([end.role_rewards.get(role, end.reward) for end in ends] for role in environment.roles)
    assert other == ([-x for x in one] if name == "nim" else one)
    assert {"nim": {1, -1}, "together": {0, 1}, "hanabi": {0, 1, 2}}[name] <= {*one} <= {*range(-1, 7)}


def test_an_invalid_move_costs_its_player_alone():
    from trl_multiagent.configs.recipes.games.nim import nim, together

    for environment in (nim, together):
        for answers, paid in [(["2", "4"], [0, -1]), (["2", "1 or 2"], [0, -1]), (["none"], [-1, 0])]:
            (turns,) = play_by(
                environment, [{"stones": 5, "moves": (3, 2, 1)}], lambda node, role, x=answers: x[len(node.history)]
            )
            assert [*turns[-1].outcome.role_rewards.values()] == paid


@pytest.fixture(scope="module")
def servers():
    """Starts three servers of OpenEnv. Returns their addresses and process ids."""
    pytest.importorskip("openenv")
    free = [socket.create_server(("127.0.0.1", 0)) for _ in range(3)]
    ports = [str(x.getsockname()[1]) for x in free]
    for x in free:
        x.close()
    program = Path(__file__).parents[1] / "helpers" / "openenv_server.py"
    with subprocess.Popen([sys.executable, program, *ports], stdout=subprocess.PIPE, text=True) as started:
        pids = [int(started.stdout.readline()) for _ in ports]
    for port in ports:
        while os.path.exists(f"/proc/{pids[0]}"):
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"http://127.0.0.1:{port}/text/schema", timeout=9)
                break
            time.sleep(0.1)
    yield [(f"http://127.0.0.1:{port}", pid) for port, pid in zip(ports, pids, strict=True)]
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def act(urls, answer, seeds, reward_none="error", **section):
    """Plays an episode for each seed. `answer(history)` is what all agents say. Returns the turns of the episodes."""

    class Settings:
        sections = {"openenv": openenv.Servers(urls, **section)}

    environment = openenv.TASK.make_environment(Settings)
    return play_by(environment, seeds, lambda node, role: answer(node.history), num_turns=4, reward_none=reward_none)


def test_agents_act_on_a_server(servers):
    text, form, tools = (f"{servers[0][0]}/{path}" for path in ("text", "form", "tools"))
    (turns,) = act(
        [f"{text}/"], lambda history: ["x", "2", "4"][len(history)], [11], roles=["a", "b"], reset={"top": 7}
    )
    assert turns[0].prompts == {"a": "Guess a number below 7."}
    assert turns[1].prompts["b"].startswith("Guess a number below 7.\n[a] x\nInvalid:")
    assert turns[2].prompts["a"].startswith("Invalid:") and turns[2].prompts["a"].endswith("\n[b] 2\n2 is wrong")
    assert [turn.outcome.reward for turn in turns] == [0, 0, 1]
    assert turns[2].outcome.metrics == {"invalid_actions": pytest.approx(1 / 3), "out_of_turns": 0}

    (turns,) = act([form], lambda history: ["3", 'So: {"x": 1, "y": 1}'][len(history)], [2])
    assert '"required": ["x", "y"]' in turns[0].prompts["agent"]
    assert [(turn.outcome.reward, turn.outcome.metrics["invalid_actions"]) for turn in turns] == [(0, 1), (1, 0.5)]

    calls = '<tool_call>{"name": "add", "arguments": {"number": 2}}</tool_call>', "add", '{"name": "nope"}'
    (turns,) = act([tools], lambda history: calls[min(len(history), 2)], [5])
    prompts = [turn.prompts["agent"] for turn in turns]
    assert '"name": "add", "description": "Adds a number."' in prompts[0] and '"data": 7' in prompts[1]
    assert prompts[2].startswith("Invalid:") and "Unknown tool" in prompts[3]
    assert turns[-1].outcome.metrics["out_of_turns"] == 1


def test_a_server_that_has_lost_the_session_ends_the_run(servers, monkeypatch):
    from openenv import GenericEnvClient

    step = GenericEnvClient._step_async

    async def step_after_restart(self, action):
        await self._ws.close()
        return await step(self, action)

    monkeypatch.setattr(GenericEnvClient, "_step_async", step_after_restart)
    with pytest.raises(UnavailableError, match="failed: ConnectionError: the session was lost"):
        act([f"{servers[0][0]}/text"], lambda history: "1", [0])


def test_episodes_of_other_servers_go_on(servers, capfd, monkeypatch):
    from openenv.core import env_client

    monkeypatch.setattr(env_client, "ws_connect", functools.partial(env_client.ws_connect, close_timeout=0.5))
    urls, (_, dead, hanging) = zip(*[(f"{url}/text", pid) for url, pid in servers], strict=True)

    def answer(history):
        if len(history) == 1:
            os.kill(dead, signal.SIGKILL), os.kill(hanging, signal.SIGSTOP)
        return str(len(history))

    ends = [turns[-1].outcome for turns in act(urls, answer, [3, 4, 5, 6], reward_none="drop", timeout=2.0)]
    assert [end.metrics["reward_none"] for end in ends] == [0, 1, 1, 0]
    assert [end.reward for end in ends if not end.metrics["reward_none"]] == [1, 0]
    lines = capfd.readouterr().out.splitlines()
    assert len(lines) == 2 and all(f"server {url} failed: " in "\n".join(lines) for url in urls[1:])
    with pytest.raises(ValueError, match=f"{urls[1]} is no server of OpenEnv: .*refused"):
        act(urls[1:2], answer, [0])


def test_the_script_of_the_table_has_its_games(games):
    assert {name: len(game.items) for name, game in measure_games.games().items()}["hanabi"] == 252


@pytest.mark.parametrize("schema", [b"[" * 200_000, b"[]", b'{"action": 5}', b'{"action": null}', b"\xff", None])
def test_what_is_no_server_of_openenv_is_one_line(schema, monkeypatch):
    class Server(LocalServer):
        def respond(self, request, body):
            location = {} if schema else {"Location": f"{other.url}/schema"}
            request.reply(200 if schema else 302, schema or b"", **location)

    class Other(LocalServer):
        def respond(self, request, body):
            request.reply(200, {"action": {"title": "Action"}})

    monkeypatch.setattr(openenv, "check_package", lambda *args: None)
    with Other() as other, Server() as server, pytest.raises(ValueError, match="is no server of OpenEnv") as raised:
        openenv.ServedEnvironment(openenv.Servers([server.url])).prepare(1)
    assert "\n" not in str(raised.value)
    with pytest.raises(ValueError, match=r"`openenv\.servers` must be a URL"):
        openenv.Servers(["file:///etc"])
