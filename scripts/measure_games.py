"""
Trains both games with three seeds, plays the teams, and writes the table of README.md:

    python scripts/measure_games.py [FOLDER]

A training whose result is in the folder (by default outputs/games) is not repeated.
"""

import re
import sys
from collections import Counter
from pathlib import Path

import numpy as np

from trl_multiagent import AgentTeam, FunctionSeat, SeatedEnvironment, TeamSeat, cli
from trl_multiagent.configs.recipes.games import players
from trl_multiagent.configs.recipes.games.tasks import HANABI, NIM
from trl_multiagent.evaluation.statistics import t_interval
from trl_multiagent.tasks.seeded import Seeds
from trl_multiagent.tasks.textarena import Game, make_environment


README = Path(__file__).parents[1] / "recipes" / "games" / "README.md"
NUMBER = 256  # games of a row, each from a seed of its own, which no training has
GAMES = {
    "nim": (NIM, {"game": "Nim-v0", "options": {"piles": [2, 3, 4]}}, players.nim, 6),
    "hanabi": (HANABI, {"game": "trl_multiagent.configs.recipes.games.short_hanabi:ShortHanabi"}, players.hanabi, 16),
}


def trained(name, seed, folder):
    """Returns the folder of a run, which is trained if it is not there."""
    base = folder / name / str(seed)
    if not list(base.glob("*/team.json")):
        cli.main(["run", "magrpo", "--config", name, "--seed", str(seed), "--override", f"output.base_dir={base}"])
    (run,) = (path.parent for path in base.glob("*/team.json"))
    return run


def play(name, model, partner):
    """
    Plays `NUMBER` games of a model, as player 0, with a partner. Returns the rewards of player 0, and its share of
    invalid moves in each game if the partner makes none.
    """
    _, game, _, length = GAMES[name]

    class Settings:
        sections = {"textarena": Game(**game, memory=False)}

    moves = Counter()

    def count(item, prompt, history):
        moves[item["seed"]] += 1
        return partner(item, prompt, history)

    seat = partner if isinstance(partner, TeamSeat) else FunctionSeat(count)
    environment = SeatedEnvironment(make_environment(Settings), {"player_1": seat})
    team = AgentTeam.from_pretrained(model, roles=["player_0"])
    items = Seeds(name=name).load(f"test[:{NUMBER}]")
    episodes = team.collaborate(items, environment, num_turns=12, max_new_tokens=length, seed=0)
    rewards = [sum(turn.outcome.reward for turn in turns) for turns in episodes]
    invalid = [
        turns[-1].outcome.metrics["invalid_moves"] * (len(turns) + moves[item["seed"]]) / len(turns)
        for turns, item in zip(episodes, items, strict=True)
    ]
    return np.array(rewards), np.array(invalid)


def with_interval(values):
    low, high = t_interval(values, 0.95)
    return f"{values.mean():.2f} [{low:.2f}, {high:.2f}]"


def rows(name, folder):
    task, _, legal, length = GAMES[name]
    start = task.models["demo"]()
    rewards, invalid = play(name, start, legal)
    yield name, "untrained", f"{100 * invalid.mean():.0f} %", with_interval(rewards), ""
    for seed in (1, 2, 3):
        run = trained(name, seed, folder)
        first = min(run.glob("checkpoint-*"), key=lambda path: int(path.name.partition("-")[2]))
        model = str(run / "agents" / "player_0")
        rewards, invalid = play(name, model, legal)
        agent = "player_0" if name == "nim" else "player_1"
        against, _ = play(name, model, TeamSeat(str(first), agent=agent, max_new_tokens=length))
        yield name, f"seed {seed}", f"{100 * invalid.mean():.0f} %", with_interval(rewards), with_interval(against)


def main():
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "outputs/games")
    head = ("game", "player 0", "invalid moves", "with a random legal player", "with its own first checkpoint")
    table = [head, ("---",) * 5]
    for row in (row for name in GAMES for row in rows(name, folder)):
        print(*row, sep=" | ", flush=True)
        table.append(row)
    text = "\n".join(f"| {' | '.join(row)} |" for row in table)
    README.write_text(re.sub(r"(?s)\| game \| player 0.*?(?=\n\n)", text, README.read_text()))


if __name__ == "__main__":
    main()
