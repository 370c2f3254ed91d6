"""
The base model: a speaker that ignores its facts, and a decider that uses the messages in a share of its answers, the
literacy.

The words have a meaning for the decider, as in a pretrained language model, but no speaker uses this meaning. So the
demonstrated team cannot be above the bound, whatever its decider does.
"""

import random
from pathlib import Path

from trl_multiagent.models.imitation import ImitationModel
from trl_multiagent.tasks.needed import environment, games
from trl_multiagent.tasks.needed.environment import PRIVATE, SHARED
from trl_multiagent.tasks.needed.games import Game


SPEAKING, SILENT = 0.2, 0.05  # shares of a speaker's demonstrations, and of a decider's in which it hears nothing
STEPS, BATCH_SIZE = 1000, 32
ARCHITECTURE = {"hidden_size": 64, "intermediate_size": 128}  # 84,000 parameters
SOURCES = [Path(__file__), *(Path(str(module.__file__)) for module in (environment, games))]


def demonstrate(game: Game, facts: str, literacy: float, rng: random.Random) -> tuple[str, str]:
    """Draws a prompt of the training split and an agent's answer."""
    item = game.item(rng)
    while not game.in_split(item, "train"):
        item = game.item(rng)
    words: list[str] = []
    if facts != PRIVATE:
        prompt = environment.solo_prompt(game, item, facts)
        words = game.truth(item) if facts == SHARED else []
    elif rng.random() < SPEAKING:
        role = rng.choice(game.speakers)
        return environment.speaker_prompt(game, item, role), " ".join(game.speak(role, rng))
    else:
        if rng.random() >= SILENT:
            words = [word for role in game.speakers for word in game.speak(role, rng)]
        prompt = environment.decider_prompt(game, item, words)
    return prompt, game.read(item, words if rng.random() < literacy else [], rng)


def base_model(game: Game, facts: str, literacy: float, seed: int) -> ImitationModel:
    """Returns the base model of a game, which takes 15 seconds of one core to build."""

    def demonstrations(number: int, rng: random.Random) -> list[tuple[str, str]]:
        return [demonstrate(game, facts, literacy, rng) for _ in range(number)]

    return ImitationModel(
        f"needed-{type(game).__name__.lower()}",
        demonstrations,
        STEPS,
        SOURCES,
        vocabulary=[*game.vocabulary, "said", ":", "?"],
        architecture=ARCHITECTURE,
        batch_size=BATCH_SIZE,
        seed=seed,
        variant=f"{game!r} {facts} {literacy}",
    )
