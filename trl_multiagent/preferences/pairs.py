"""Makes pairs of joint answers with different rewards, and draws pairs of earlier rounds to train on again."""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from trl_multiagent.limits import check_arguments, setting
from trl_multiagent.rollout.tree import grouped


# Rewards with a smaller difference count as equal, because 0.1 + 0.2 and 0.3 are different floating-point numbers
ROUNDING = 1e-12


@dataclass(frozen=True)
class Candidate:
    """One joint answer to an item."""

    texts: dict[str, str]  # the completion of each role
    reward: float  # the joint reward
    metrics: dict[str, Any] = field(default_factory=dict)  # the components of the reward
    by: str = "current"  # the policy that sampled it
    answers: dict[str, str] = field(default_factory=dict)  # of roles that reason before they answer
    ids: dict[str, list[int]] = field(default_factory=dict)  # token ids, where the prompt had the team's

    @property
    def key(self) -> frozenset[tuple[str, str]]:
        """Key for deduplicating candidates by text."""
        return frozenset(self.texts.items())


@dataclass(frozen=True)
class Pair:
    """Two joint answers to an item."""

    chosen: Candidate  # the one with the greater reward
    rejected: Candidate
    comparator_reward: float = 0.0  # of the one that the comparator sampled, if there is a comparator

    @property
    def gap(self) -> float:
        """The difference of the rewards, chosen minus rejected, which is positive."""
        return self.chosen.reward - self.rejected.reward


def all_pairs(candidates: list[Candidate]) -> list[Pair]:
    """
    Returns every pair of different rewards, ordered by the position of the chosen and then of the rejected candidate.
    Candidates with the same text count once. A candidate in which every role is silent is never the chosen one.
    """
    distinct = [same[0] for same in grouped((candidate.key, candidate) for candidate in candidates).values()]
    return [Pair(one, other) for one in distinct for other in distinct if _can_be_chosen(one, other)]


def matched_pairs(candidates: list[Candidate], others: list[Candidate]) -> list[Pair]:
    """
    Pairs the k-th candidate of the team with the k-th of a comparator, in either order. Drops ties and repeated pairs.
    """
    pairs: dict[Any, Pair] = {}
    for candidate, other in zip(candidates, others, strict=False):
        for chosen, rejected in ((candidate, other), (other, candidate)):
            if _can_be_chosen(chosen, rejected):
                pairs.setdefault((chosen.key, rejected.key), Pair(chosen, rejected, other.reward))
    return list(pairs.values())


def _can_be_chosen(chosen: Candidate, rejected: Candidate) -> bool:
    tied = math.isclose(chosen.reward, rejected.reward, rel_tol=ROUNDING, abs_tol=ROUNDING)
    differ = chosen.reward > rejected.reward and not tied and chosen.key != rejected.key
    return differ and any(text.strip() for text in chosen.texts.values())


def select_pairs(pairs: list[Pair], selection: str, limit: int | None, seed: int | str = 0) -> list[Pair]:
    """
    Selects the first `limit` pairs of an item in the order `selection`: `"reward_gap"`, the largest gap first;
    `"comparator_reward"`, the greatest reward of the comparator first, and among equals the largest gap; `"random"`, a
    random order, by `seed`; `"all"`, the order of the candidates. Equal pairs keep their order.
    """
    if selection == "reward_gap":
        pairs = sorted(pairs, key=lambda pair: -pair.gap)
    elif selection == "comparator_reward":
        pairs = sorted(pairs, key=lambda pair: (-pair.comparator_reward, -pair.gap))
    elif selection == "random":
        pairs = random.Random(seed).sample(pairs, len(pairs))
    return pairs[:limit]


# Replay

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
    mode = config.preference_replay_mode
    newest = {"none": 1, "current": 1, "last_k": config.preference_replay_k, "nearest_k": config.preference_replay_k}
    decay = config.preference_replay_lambda if mode == "lambda_decay" else 1.0  # CoMLRL's factor 1 - lambda cancels
    weights = [decay**age * (age < newest.get(mode, num_rounds)) for age in range(num_rounds - 1, -1, -1)]
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
    size = config.preference_replay_sample_size or sizes[-1]
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
