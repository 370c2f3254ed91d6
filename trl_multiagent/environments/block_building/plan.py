"""Divides a target among the agents: what each of them builds if all goes well."""

from collections import Counter
from collections.abc import Mapping, Sequence

from trl_multiagent.environments.block_building.world import Built, Command, Target, rectangles, texture


Palettes = Mapping[str, Sequence[str]]


def wall_plan(target: Target, palettes: Palettes) -> Built:
    """
    Divides a wall. As far as the work is even, it is a chessboard: of N agents, the one with the number (x + y) mod N builds a place. No block
    looks like the one to its left or below.
    """
    roles = [*palettes]
    choices = [(block, role) for role in roles for block in palettes[role]]
    work, used, plan = Counter[str](), Counter[str](), Built()
    for x, y, z in filter(target.blocks.__contains__, target.places()):
        owner = roles[(x + y) % len(roles)]
        near = {texture(plan[place][0]) for place in ((x - 1, y, z), (x, y - 1, z)) if place in plan}
        free = [choice for choice in choices if texture(choice[0]) not in near] or choices
        least = min(work[role] for role in roles)
        block, role = min(free, key=lambda x: (work[x[1]] > least + 1, x[1] != owner, used[x[0]]))
        work[role] += 1
        used[block] += 1
        plan[x, y, z] = block, role
    return plan


def house_plan(target: Target, palettes: Palettes) -> Built:
    """Divides the places of each block equally among the agents that have it, from the ground up. Nobody builds what nobody has."""
    plan = Built()
    for block in set(target.blocks.values()):
        able = [role for role, palette in palettes.items() if block in palette]
        places = [place for place in target.places() if target.blocks.get(place) == block]
        if able:
            plan |= {place: (block, able[k * len(able) // len(places)]) for k, place in enumerate(places)}
    return plan


def commands_of(plan: Built, role: str) -> list[Command]:
    """Returns the commands with which an agent builds its part of a plan."""
    return rectangles({place: block for place, (block, owner) in plan.items() if owner == role})
