"""The size of a rollout tree, from the settings alone."""

import math


LARGEST_TREE = 1000000  # joint actions of one item


def check_tree_size(
    num_generations: int, num_turns: int, joint_mode: str, handoff: str | None, num_agents: int | None
) -> None:
    """
    Refuses a tree that no machine can play. The arguments are those of [`~trainers.base.rollout_config.RolloutConfig`].

    Raises:
        ValueError: one item's tree has more than `LARGEST_TREE` joint actions. The message contains the arithmetic.
    """
    # Level t of a tree has G^(N*t) joint actions (cross) or G^t (align). All levels of a chain are as large as the first
    agents = (num_agents or 1) if joint_mode.startswith("cross") else 1
    levels = [agents * turn for turn in range(1, num_turns + 1)] if handoff is None else [agents]
    digits = levels[-1] * math.log10(num_generations)
    if digits <= 9 and sum(num_generations**level for level in levels) <= LARGEST_TREE:
        return
    terms = [f"{num_generations}^{level}" for level in levels]
    if len(terms) > 3:
        terms[2:-1] = ["..."]
    raise ValueError(
        f"the rollout tree of an item is too large: `num_generations` {num_generations}, `num_turns` {num_turns} and "
        f"`joint_mode` {joint_mode!r} make {' + '.join(terms)} joint actions, about 1e{digits:.0f}; at most "
        f"{LARGEST_TREE} are possible. Lower `num_generations` or `num_turns`, or set `handoff`."
    )
