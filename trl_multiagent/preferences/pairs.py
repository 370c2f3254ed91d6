"""Makes pairs of joint answers with different rewards."""

import math
import random
from dataclasses import dataclass, field
from typing import Any


# Rewards with a smaller difference count as equal, because 0.1 + 0.2 and 0.3 are different floating-point numbers
ROUNDING = 1e-12


@dataclass(frozen=True)
class Candidate:
    """One joint answer to an item."""

    texts: dict[str, str]  # the completion of each role
    reward: float  # the joint reward
    metrics: dict[str, Any] = field(default_factory=dict)  # the components of the reward
    by: str = "current"  # the policy that sampled it

    @property
    def key(self) -> tuple[str, ...]:
        """Key for deduplicating candidates by text."""
        return tuple(self.texts[role] for role in sorted(self.texts))


@dataclass(frozen=True)
class Pair:
    """Two joint answers to an item."""

    chosen: Candidate  # the one with the greater reward
    rejected: Candidate
    comparator_reward: float | None = None  # of the one that the comparator sampled, if there is a comparator

    @property
    def gap(self) -> float:
        """The difference of the rewards, chosen minus rejected, which is positive."""
        return self.chosen.reward - self.rejected.reward


def distinct(candidates: list[Candidate]) -> list[Candidate]:
    """Drops candidates that have the same texts as an earlier one."""
    first: dict[tuple[str, ...], Candidate] = {}
    for candidate in candidates:
        first.setdefault(candidate.key, candidate)
    return list(first.values())


def all_pairs(candidates: list[Candidate]) -> list[Pair]:
    """
    Returns every pair of different rewards, ordered by the position of the chosen and then of the rejected candidate.
    Candidates with the same text count once. A candidate in which every role is silent is never the chosen one.
    """
    candidates = distinct(candidates)
    return [Pair(one, other) for one in candidates for other in candidates if _can_be_chosen(one, other)]


def matched_pairs(candidates: list[Candidate], others: list[Candidate]) -> list[Pair]:
    """
    Pairs the k-th candidate of the team with the k-th of a comparator, in either order. Drops ties and repeated pairs.
    """
    pairs: dict[tuple[tuple[str, ...], tuple[str, ...]], Pair] = {}
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
        pairs = sorted(pairs, key=lambda pair: (-(pair.comparator_reward or 0.0), -pair.gap))
    elif selection == "random":
        pairs = random.Random(seed).sample(pairs, len(pairs))
    return pairs[:limit]
