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
    # A node has G^N (cross) or G (align) joint actions, and in a tree each of them opens a node of the next turn. A chain has one
    # node per turn
    exponent = (num_agents or 1) if joint_mode.startswith("cross") else 1
    if handoff is None:
        exponents = [exponent * turn for turn in range(1, num_turns + 1)]
        terms = [f"{num_generations}^{x}" for x in exponents]
    else:
        exponents = [exponent] * num_turns
        terms = [f"{num_turns} x {num_generations}^{exponent}"]
    digits = exponents[-1] * math.log10(num_generations)  # without computing numbers that may have millions of digits
    total = sum(num_generations**x for x in exponents) if digits <= 12 else None
    if total is not None and total <= max_joint_actions:
        return
    if len(terms) > 3:
        terms[2:-1] = ["..."]
    agents = f", {num_agents} agents" if exponent > 1 else ""
    amount = f" = {total}" if total is not None else f", about 1e{digits:.0f},"
    raise ValueError(
        f"the rollout tree of an item is too large: `num_generations` {num_generations}, `num_turns` {num_turns}{agents} and "
        f"`joint_mode` {joint_mode!r} make {' + '.join(terms)}{amount} joint actions, but `max_joint_actions` is "
        f"{max_joint_actions}. Lower `num_generations` or `num_turns`, set `handoff`, or raise `max_joint_actions`."
    )
