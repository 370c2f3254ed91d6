"""
Trains games, by default all, plays the teams, and writes their rows into the table of README.md:

    python scripts/measure_games.py [GAME ...]

A training whose result is in outputs/games is not repeated.
"""

import re
import sys
from collections import Counter
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from trl_multiagent import AgentTeam, Environment, FunctionSeat, SeatedEnvironment, cli
from trl_multiagent.configs.recipes.games import hanabi, nim
from trl_multiagent.environments.dataset_rows import Dataset
from trl_multiagent.evaluation.statistics import t_interval
from trl_multiagent.models.packaged import smollm2
from trl_multiagent.tasks.seeded import Seeds


README = Path(__file__).parents[1] / "recipes" / "games" / "README.md"
ROLES = ("player_0", "player_1")


@dataclass
class Measured:
    """A game: what is played, its random legal player, the untrained model, and how it is sampled."""

    environment: Any
    items: Dataset
    legal: Any
    untrained: Any
    seeds: tuple[int, ...] = (1, 2, 3)
    sampling: dict = field(default_factory=lambda: {"max_new_tokens": 3, "use_chat_template": False})


def games() -> dict[str, Measured]:
    real = {"max_new_tokens": 3, "use_chat_template": False, "temperature": 0.7}
    _, stones = nim.load_datasets(None)
    few = nim.load_short(None)[1].select(range(125))
    seeds = Seeds().load("test[:252]")
    return {
        "nim": Measured(nim.nim, stones, nim.random_legal, nim.DEMO.path),
        "together": Measured(nim.together, stones, nim.random_legal, nim.DEMO.path),
        "nim_smollm2": Measured(nim.nim, few, nim.random_legal, smollm2, sampling=real),
        "together_smollm2": Measured(nim.together, few, nim.random_legal, smollm2, sampling=real),
        "hanabi": Measured(
            hanabi.make_environment(), seeds, hanabi.random_legal, hanabi.DEMO.path, sampling={"max_new_tokens": 16}
        ),
    }


def trained(name: str, seed: int, folder: Path) -> Path:
    """Returns the folder of a run, which is trained if it is not there."""
    base = folder / name / str(seed)
    if not list(base.glob("*/team.json")):
        cli.main(["run", "magrpo", "--config", name, "--seed", str(seed), "--override", f"output.base_dir={base}"])
    (run,) = (path.parent for path in base.glob("*/team.json"))
    return run


def play(game: Measured, *models: Path | str) -> tuple[np.ndarray, np.ndarray]:
    """
    Plays a game of each item. `models`: folders of player 0 and of player 1, who is the random legal player if there
    is none. Returns the rewards of player 0, and the share of its moves that are invalid if player 1 makes none.
    """
    moves = Counter[str]()

    def count(item: dict, prompt: str, history: Any) -> str:
        moves[item["item_id"]] += 1
        return game.legal(item, prompt, history)

    environment: Environment = game.environment
    if len(models) == 1:
        environment = SeatedEnvironment(environment, {"player_1": FunctionSeat(count)})
    team = AgentTeam.from_pretrained([*map(str, models)], roles=ROLES[: len(models)])
    episodes = team.collaborate(game.items, environment, num_turns=20, seed=0, **game.sampling)
    rewards = [sum(x.outcome.role_rewards.get("player_0", x.outcome.reward) for x in turns) for turns in episodes]
    invalid = [
        turns[-1].outcome.metrics["invalid_moves"] * (len(turns) + moves[item["item_id"]]) / len(turns)
        for turns, item in zip(episodes, game.items, strict=True)
    ]
    return np.array(rewards), np.array(invalid)


def with_interval(values: np.ndarray) -> str:
    low, high = t_interval(values, 0.95)
    is_same = np.ptp(values) == 0
    return f"{values.mean():.2f} in every game" if is_same else f"{values.mean():.2f} [{low:.2f}, {high:.2f}]"


@cache
def exact(game: str, stones: int, is_first: bool, best: bool) -> float:
    """Returns the mean reward of a random legal player 0, or of the best one, with a random legal player 1."""
    if not stones:
        return float(is_first) if game == "together" else 1.0 - 2.0 * is_first
    values = [exact(game, stones - move, not is_first, best) for move in (1, 2, 3) if move <= stones]
    return max(values) if best and is_first else fmean(values)


def rows(name: str, game: Measured, folder: Path):
    is_cooperative = not name.startswith("nim")
    for who in ("random legal", "best possible") if "stones" in game.items.column_names else ():
        rules, is_best = name.partition("_")[0], who == "best possible"
        mean = fmean(exact(rules, stones, True, is_best) for stones in game.items["stones"])
        yield name, who, "0 %", f"{mean:.2f}, exact", "", ""
    start = game.untrained()
    rewards, invalid = play(game, start)
    pair = with_interval(play(game, start, start)[0]) if is_cooperative else ""
    yield name, "untrained", f"{100 * invalid.mean():.0f} %", with_interval(rewards), "", pair
    for seed in game.seeds:
        run = trained(name, seed, folder)
        first = min(run.glob("checkpoint-*"), key=lambda path: int(path.name.partition("-")[2]))
        own, partner = (run / "agents" / role for role in ROLES)
        rewards, invalid = play(game, own)
        against = play(game, own, first / "agents" / ROLES[is_cooperative])[0]
        pair = with_interval(play(game, own, partner)[0]) if is_cooperative else ""
        shown = with_interval(rewards), with_interval(against), pair
        yield name, f"seed {seed}", f"{100 * invalid.mean():.0f} %", *shown


def main() -> None:
    for name, game in games().items():
        if name in sys.argv[1:] or len(sys.argv) == 1:
            lines = ""
            for row in rows(name, game, Path("outputs/games")):
                lines += f"| {' | '.join(row)} |\n"
                print(lines.splitlines()[-1], flush=True)
            README.write_text(re.sub(rf"(?m)(^\| {name} \|.*\n)+", lines, README.read_text()))


if __name__ == "__main__":
    main()
