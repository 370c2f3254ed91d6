"""Divides the methods of a class among the agents."""

import itertools
from collections.abc import Iterator


DIVISIONS = ("balanced", "parameter_count")
EVEN = 0.2  # shares of the work that differ by less count as equal


def divide(item: dict, num_agents: int, division: str) -> list[list[str]]:
    """
    Divides the methods of an item.

    `"parameter_count"` gives methods whose only parameter is `self` to the first agent and all others to the second;
    agents beyond these get none. `"balanced"` gives every agent about the same number of statements of the reference,
    and of the ways to do so prefers those in which many methods call one of another agent. The first method belongs to
    the first agent.

    Returns:
        `list[list[str]]`: The names of each agent's methods, in the order of the class. A list may be empty: with
        `"parameter_count"`, or if there are fewer methods than agents.
    """
    names = item["methods"]
    if division == "parameter_count" and num_agents > 1:
        sides = [int(number != 1) for number in item["parameters"]]
    else:
        sides = _balanced(item, num_agents)
    return [[name for name, own in zip(names, sides, strict=True) if own == side] for side in range(num_agents)]


def _balanced(item: dict, num_agents: int) -> list[int]:
    """Improves the alternating division, by one or two changes at a time, until no change is better. Deterministic."""
    names, weights = item["methods"], item["weights"]
    calls = [(k, names.index(name)) for k, used in enumerate(item["uses"]) for name in used]

    def score(sides: list[int]) -> tuple[int, float, float, float]:
        work = [(side, weight / sum(weights)) for side, weight in zip(sides, weights, strict=True)]
        shares = [sum(part for side, part in work if side == agent) for agent in range(num_agents)]
        uneven = max(shares) - min(shares)
        crossing = sum(sides[a] != sides[b] for a, b in calls) / len(calls) if calls else 0.0
        return len({*sides}), -round(max(0.0, uneven - EVEN), 6), crossing, -round(uneven, 6)

    sides = [k % num_agents for k in range(len(names))]
    while True:
        best = max(_changes(sides, num_agents), key=score, default=sides)
        if score(best) <= score(sides):
            break
        sides = best
    order = [*dict.fromkeys(sides)]  # the agent with the first method is the first
    return [order.index(side) for side in sides]


def _changes(sides: list[int], num_agents: int) -> Iterator[list[int]]:
    """Gives every division in which at most two methods have another agent."""
    for a, b, first, second in itertools.product(*[range(len(sides))] * 2, *[range(num_agents)] * 2):
        changed = [*sides]
        changed[a], changed[b] = first, second
        yield changed
