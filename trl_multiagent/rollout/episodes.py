"""
Episodes: one sampled answer of the team after another, without branches and without a trainer.

Whatever plays a team without training it uses [`play_episodes`]: `AgentTeam.collaborate`, a trainer's evaluation, the demo.
"""

from collections.abc import Callable

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
) -> list[list[Node]]:
    """
    Plays episodes, all of them together, one turn after the other.

    Args:
        items (`list[dict]`):
            Dataset rows.
        environment ([`Environment`]):
            Gives the roles and the prompts, and judges the joint actions.
        sample (`Callable`):
            `(nodes, 1) -> samples` of each role at each node, called once per turn.
        score (`Callable`, *optional*):
            `nodes -> outcomes`, called once per turn. By default the environment's `evaluate`.
        num_turns (`int`, *optional*, defaults to `1`):
            Turns of an episode.
        num_episodes (`int`, *optional*, defaults to `1`):
            Episodes of each item.
        discount (`float`, *optional*, defaults to `1.0`):
            Weight of the next turn's return in a return.
        process_reward (`Callable[[float], float]`, *optional*):
            Applied to every reward.

    Returns:
        `list[list[Node]]`: The nodes of each turn, each with one joint action. Episode e of item i is entry
        `i * num_episodes + e` of every turn.
    """
    return grow_trees(
        [dict(item) for item in items for _ in range(num_episodes)],
        environment,
        sample,
        score or (lambda nodes: judge_nodes(environment, nodes, evaluation=True)),
        num_turns=num_turns,
        num_generations=1,
        discount=discount,
        process_reward=process_reward,
    )


def turns_of_episodes(levels: list[list[Node]]) -> list[list[Turn]]:
    """The turns of each episode that [`play_episodes`] played."""
    return [[*node.history, node.turn(0)] for node in levels[-1]]
