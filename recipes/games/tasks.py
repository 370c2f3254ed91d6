"""
Two games of TextArena, with base models that are made on the spot: they have seen moves of random players.

    trl-multiagent train magrpo --config nim
    trl-multiagent train magrpo --config hanabi
"""

import dataclasses

from trl_multiagent.configs.recipes.games import players
from trl_multiagent.models.imitation import ImitationModel
from trl_multiagent.tasks.textarena import TASK


def game(name, game, player, careless):
    demonstrate = players.demonstrations(game, player, careless)
    model = ImitationModel(f"{name}-demo", demonstrate, steps=300, architecture=SMALL)
    return dataclasses.replace(TASK, models={"demo": model.path})


SMALL = {"hidden_size": 64, "intermediate_size": 192}
NIM = game("nim", {"game": "Nim-v0", "options": {"piles": [2, 3, 4]}}, players.nim, players.any_pile)
HANABI = game(
    "hanabi",
    {"game": "trl_multiagent.configs.recipes.games.short_hanabi:ShortHanabi"},
    players.hanabi,
    players.any_move,
)
