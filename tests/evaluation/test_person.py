"""The command `play`: a person answers through a pipe, beside the agents of a saved team."""

import os
import sys

import pytest

from trl_multiagent import cli
from trl_multiagent.configs.recipes.games import nim
from trl_multiagent.configs.recipes.real import hidden
from trl_multiagent.runs.person import random_answer

from tiny import tiny_team


RECIPES = "trl_multiagent.configs.recipes"
HIDDEN = ("--task", f"{RECIPES}.real.hidden:TASK")
NIM = ("--task", f"{RECIPES}.games.nim:NIM")
PLAYERS = ("player_0", "player_1")


@pytest.fixture
def play(tmp_path, monkeypatch, capsys):
    """Plays with a tiny team, and returns what was printed to the person who types the lines."""

    def run(roles, lines, *argv):
        tiny_team(roles).save_pretrained(tmp_path / "team")
        reading, writing = os.pipe()
        with os.fdopen(reading) as stdin, os.fdopen(writing, "w") as typed:
            print(*lines, sep="\n", file=typed)
            typed.close()
            monkeypatch.setattr(sys, "stdin", stdin)
            cli.main(["play", str(tmp_path / "team"), "--max_completion_length", "4", *argv])
        return capsys.readouterr().out

    return run


def test_a_person_speaks_and_reads_the_decider_and_the_reward(play):
    first, second = hidden.load_datasets(None)[1].to_list()[:2]
    out = play(hidden.hidden.roles, [f"It is a {first['word']}.", "\\", "so"], *HIDDEN, "--seat", "speaker=human")
    assert f"A {first['word']} is hidden in a box." in out and f"A {second['word']} is hidden" in out
    before, _, after = out.partition("speaker> ")
    assert "What is in the box" not in before + after  # only the decider is asked
    places = [after.index(x) for x in ("decider: ", "Reward of speaker: ", "Item 2 of 64", "speaker> > ")]
    assert places == sorted(places)


def test_a_person_decides_after_another_speaker(play):
    (item, *_), answers = hidden.load_datasets(None)[1].to_list(), ["--seat", "decider=human", "--seat"]
    prompt = f"What is in the box: {item['options']}?"
    out = play(hidden.hidden.roles, [f"a {item['word']}"], *HIDDEN, *answers, "speaker=random")
    said = out.partition("speaker: ")[2].split("\n")[0]
    assert f"Your friend says: {said}\n{prompt}" in out and "Reward of decider: 1\n" in out


def test_a_person_plays_nim(play):
    items = nim.load_datasets(None)[1].to_list()
    out = play(PLAYERS, ["2", "3"], *NIM, "--seat", "player_1=random")
    won = "player_0> Reward of player_0: 1\nReward of player_1: -1\n"
    assert [item["stones"] for item in items[:2]] == [2, 3]
    assert f"{nim.asked(2)}\n{won}" in out and f"{nim.asked(3)}\n{won}" in out
    assert out.count("player_0> ") == 3 and "\nplayer_0: " not in out  # the third game ends with the input


def test_a_person_plays_kuhn_poker(play):
    pytest.importorskip("textarena")
    game = ["--task", "textarena", "--split", "test[:1]", "--override", "textarena.options={max_rounds: 1}"]
    out = play(PLAYERS, ["[bet]", "[call]"], *game, "--seat", "player_0=human", "--seat", "player_1=random")
    assert "Your card is: " in out and "player_1: [" in out and out.count("Reward of player_0: ") == 1


@pytest.mark.parametrize("seat", ["player_2=human", "player_0", "player_0="])
def test_a_wrong_seat_is_told(play, capsys, seat):
    with pytest.raises(SystemExit):
        play(PLAYERS, [], *NIM, "--seat", seat)
    assert "ROLE=PLAYER, and the roles are player_0, player_1" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("prompt", "choices"),
    [
        (nim.asked(2), {"1", "2"}),
        ("[GAME] Your actions are: '[check]', '[bet]'", {"[check]", "[bet]"}),
        ([{"role": "user", "content": "yes or no"}], {"yes", "or", "no"}),
    ],
)
def test_random_answers_are_choices_of_the_prompt(prompt, choices):
    drawn = {random_answer({"id": k}, prompt, ()) for k in range(30)}
    assert drawn == choices
