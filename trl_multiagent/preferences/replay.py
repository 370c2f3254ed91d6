"""Draws preferences of earlier rounds to train on again."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

from trl_multiagent.limits import check_arguments, setting


REPLAY_MODES = ("current", "none", "all_history", "all", "nearest_k", "last_k", "lambda_decay")  # with CoMLRL's names


@dataclass
class ReplayConfig:
    """The settings of the replay, part of the section of an iterative algorithm."""

    preference_replay_mode: str = setting(
        "Rounds that preferences are drawn from: none (only the current one), all, last_k, lambda_decay.",
        "none",
        choices=REPLAY_MODES,
    )
    preference_replay_k: int = setting("Number of rounds for last_k, the current one included.", 1, ge=1)
    preference_replay_lambda: float = setting("Factor of weights per round of age for lambda_decay.", 0.5, ge=0, le=1)
    preference_replay_sample_size: int | None = setting(
        "Preferences to train on in each round; by default as many as the current round has.", ge=1
    )

    def __post_init__(self) -> None:
        check_arguments(self)


def replay_weights(num_rounds: int, config: ReplayConfig) -> list[float]:
    """Computes the probability with which a preference is drawn from each round, the oldest first."""
    ages = range(num_rounds - 1, -1, -1)
    mode, decay = config.preference_replay_mode, config.preference_replay_lambda
    if mode in ("none", "current"):
        weights = [float(age == 0) for age in ages]
    elif mode in ("last_k", "nearest_k"):
        weights = [float(age < config.preference_replay_k) for age in ages]
    elif mode == "lambda_decay":
        weights = [decay**age for age in ages]  # the factor 1 - lambda of CoMLRL cancels
    else:
        weights = [1.0] * num_rounds
    return [weight / sum(weights) for weight in weights]


def replay(sizes: Sequence[int], config: ReplayConfig, seed: int = 42) -> list[tuple[int, int]]:
    """
    Draws the preferences that a round trains on.

    For each of them, a round is drawn with its probability, and then a preference of that round that was not drawn
    yet. When all preferences of a round have been drawn, all of them can be drawn again. Rounds without preferences
    are left out.

    Args:
        sizes (`Sequence[int]`): Number of preferences of each round, the oldest first and the current one last.
        config ([`ReplayConfig`]): The settings.
        seed (`int`, *optional*, defaults to 42): Seed of the run. The draw depends on it and on the number of rounds.

    Returns:
        `list[tuple[int, int]]`: For each preference, its round and its position in the round. It is empty if no round
        with a probability above 0 has preferences.
    """
    size = config.preference_replay_sample_size
    size = sizes[-1] if size is None else size
    weights = [w * (n > 0) for w, n in zip(replay_weights(len(sizes), config), sizes, strict=True)]
    if sum(weights) == 0.0:
        return []
    generator = random.Random(f"{seed}/{len(sizes)}")
    waiting: list[list[int]] = [[] for _ in sizes]  # of each round, the preferences that were not drawn yet
    drawn = []
    for number in generator.choices(range(len(sizes)), weights, k=size):
        if not waiting[number]:
            waiting[number] = generator.sample(range(sizes[number]), sizes[number])
        drawn.append((number, waiting[number].pop()))
    return drawn
