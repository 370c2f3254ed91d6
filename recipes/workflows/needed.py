"""The base model of the games of `needed`: a speaker that ignores its facts, and a decider that reads at times."""

import random
from pathlib import Path

from trl_multiagent.models.imitation import ImitationModel
from trl_multiagent.tasks import needed
from trl_multiagent.tasks.needed import PRIVATE, SHARED, Game, decider_prompt, solo_prompt, speaker_prompt


STEPS = 1000
SPEAKING, SILENT = 0.2, 0.05  # shares of a speaker's demonstrations, and of a decider's in which it hears nothing


def demonstrate(game: Game, facts: str, literacy: float, rng: random.Random) -> tuple[str, str]:
    """Draws a prompt of the training split and an agent's answer."""
    item = game.item(rng)
    while not game.in_split(item, "train"):
        item = game.item(rng)
    words = []
    if facts != PRIVATE:
        prompt = solo_prompt(game, item, facts)
        words = game.truth(item) if facts == SHARED else []
    elif rng.random() < SPEAKING:
        role = rng.choice(game.speakers)
        return speaker_prompt(game, item, role), " ".join(game.speak(role, rng))
    else:
        if rng.random() >= SILENT:
            words = [word for role in game.speakers for word in game.speak(role, rng)]
        prompt = decider_prompt(game, item, words)
    return prompt, game.read(item, words if rng.random() < literacy else [], rng)


def base_model(game: Game, facts: str, literacy: float, seed: int) -> ImitationModel:
    """Returns the base model of a game, which takes 15 seconds of one core to build."""

    def demonstrations(number: int, rng: random.Random) -> list[tuple[str, str]]:
        return [demonstrate(game, facts, literacy, rng) for _ in range(number)]

    return ImitationModel(
        f"needed-{type(game).__name__.lower()}",
        demonstrations,
        STEPS,
        sources=[Path(needed.__file__)],
        vocabulary=[*game.vocabulary, "said", ":", "?"],
        architecture={"hidden_size": 64, "intermediate_size": 128},  # 84,000 parameters
        batch_size=32,
        seed=seed,
        variant=f"{game!r} {facts} {literacy}",
    )
