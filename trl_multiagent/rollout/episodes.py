"""Plays episodes: sequences of turns without branches, each with one joint action."""

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

from trl_multiagent.environments.base import Environment, Outcome, Turn
from trl_multiagent.rollout.tree import Node, Samples, grow_trees, judge_nodes


def play_episodes(
    items: list[dict],
    environment: Environment,
    sample: Callable[[list[Node], int], dict[str, list[Samples]]],
    score: Callable[[list[Node]], list[list[Outcome]]] | None = None,
    *,
    num_turns: int = 1,
    num_episodes: int = 1,
    discount: float = 1.0,
    process_reward: Callable[[float], float] = float,
    numbers: Sequence[int] | None = None,
) -> list[list[Node]]:
    """
    Plays a batch of episodes, turn by turn.

    Args:
        items, environment, sample, num_turns, discount, process_reward, numbers: See [`~rollout.tree.grow_trees`].
        score (`Callable`, *optional*): `nodes -> outcomes` of each node's joint action. Called once per turn. By
            default, the environment's `evaluate`.
        num_episodes (`int`, *optional*, defaults to `1`): Number of episodes per item.

    Returns:
        `list[list[Node]]`: The nodes of each turn, each with one joint action. Episode e of item i is entry
        `i * num_episodes + e` of the first turn; episodes that the environment has ended are missing in later turns.

    Raises:
        ValueError: `num_turns` or `num_episodes` is not a positive whole number.
    """
    for name, value in (("num_turns", num_turns), ("num_episodes", num_episodes)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"`{name}` is {value!r}; it must be a whole number of at least 1.")
    return grow_trees(
        items,
        environment,
        sample,
        score or (lambda nodes: judge_nodes(environment, nodes, evaluation=True)),
        num_turns=num_turns,
        num_generations=1,
        num_episodes=num_episodes,
        discount=discount,
        process_reward=process_reward,
        numbers=numbers,
    )


def nodes_of_episode(root: Node) -> list[Node]:
    """Returns the nodes of an episode that [`play_episodes`] played, in order."""
    nodes = [root]
    while nodes[-1].children:
        nodes.append(nodes[-1].children[0])
    return nodes


def turns_of_episodes(levels: list[list[Node]]) -> list[list[Turn]]:
    """Returns the turns of each episode that [`play_episodes`] played."""
    return [[node.turn(0) for node in nodes_of_episode(root)] for root in levels[0]]


def derive_seed(*parts: Any) -> int:
    """Returns a seed of 32 bits that depends on all parts."""
    return int.from_bytes(hashlib.sha256("/".join(map(str, parts)).encode()).digest()[:4], "big")
