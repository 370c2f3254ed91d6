"""The size of a rollout tree, from the settings alone."""

import math


MAX_JOINT_ACTIONS = 10000  # of one item, by default


def check_tree_size(
    num_generations: int,
    num_turns: int,
    joint_mode: str,
    handoff: str | None,
    num_agents: int | None,
    max_joint_actions: int = MAX_JOINT_ACTIONS,
) -> None:
    """
    Refuses a rollout tree that is too large. The arguments are those of [`~trainers.base.rollout_config.RolloutConfig`].

    Raises:
        ValueError: one item's tree has more than `max_joint_actions` joint actions. The message contains the arithmetic.
    """
    # A node has G^N (cross) or G (align) joint actions. In a tree each of them opens a node of the next turn; a chain has one node per turn
    exponent = (num_agents or 1) if joint_mode.startswith("cross") else 1
    exponents = [exponent * turn if handoff is None else exponent for turn in range(1, num_turns + 1)]
    # Numbers that may have millions of digits are not computed
    is_huge = exponents[-1] * math.log10(num_generations) > 12
    if not is_huge and sum(num_generations**x for x in exponents) <= max_joint_actions:
        return
    terms = [f"{num_generations}^{x}" for x in exponents]
    if len(terms) > 3:
        terms[2:-1] = ["..."]
    agents = f", {num_agents} agents" if exponent > 1 else ""
    total = "" if is_huge else f" = {sum(num_generations**x for x in exponents)}"
    raise ValueError(
        f"the rollout tree of an item is too large: `num_generations` {num_generations}, `num_turns` {num_turns}{agents} and "
        f"`joint_mode` {joint_mode!r} make {' + '.join(terms)}{total} joint actions, but `max_joint_actions` is "
        f"{max_joint_actions}. Lower `num_generations` or `num_turns`, set `handoff`, or raise `max_joint_actions`."
    )
