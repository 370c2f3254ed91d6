"""The prompts of builders: the target, what an agent may use, and feedback on what was built."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from trl_multiagent.environments.block_building.plan import Palettes, commands_of, house_plan, wall_plan
from trl_multiagent.environments.block_building.world import AIR, ANY, Built, Place, Target, rectangles


UNSEEN = "You cannot see each other's answers."
WALL_RULES = (
    "Build on every # and nowhere else. Any block will do.",
    "Blocks that touch must not look alike. The last word of a block's name says what it looks like.",
    "Use each of your blocks.",
)
HOUSE_RULES = ("Every place must have exactly the right block.",)
FORM = (
    "One command per line: `/setblock x y z block`, or `/fill x1 y1 z1 x2 y2 z2 block` for a box.",
    "The block air empties a place.",
)


def describe_target(target: Target, draw: bool) -> str:
    """Returns a wall as a drawing or as a list of positions, or a house as a list of rectangles."""
    (x1, y1, z1), (x2, y2, _) = target.low, target.high
    if ANY not in target.blocks.values():
        corners = f"{_numbers(*target.low)} to {_numbers(*target.high)}"
        parts = "\n".join(f"{_numbers(*part.low, *part.high)} {part.block}" for part in rectangles(target.blocks))
        return f"The house, as boxes x1 y1 z1 x2 y2 z2 block. All other places from {corners} stay empty.\n{parts}\n"
    if not draw:
        places = sorted(target.blocks, key=lambda place: (-place[1], place[0]))
        return "The wall, as places x y z of a #:\n" + "".join(f"{_numbers(*place)}\n" for place in places)
    rows = [
        f"y={y} " + "".join(ANY if (x, y, z1) in target.blocks else "." for x in range(x1, x2 + 1))
        for y in range(y2, y1 - 1, -1)
    ]
    return f"The wall, with a # for each block. x goes from {x1} to {x2}, and z is {z1}.\n" + "\n".join(rows) + "\n"


def first_prompt(
    role: str, palettes: Palettes, target: Target, draw: bool, rules: str, stock: Mapping[str, int] | None
) -> str:
    """Returns an agent's first prompt. `stock`: how many blocks of each kind the agent has, if that is limited."""
    partners = [name for name in palettes if name != role]
    team = f"You are {role}. You build this with {' and '.join(partners)}. {UNSEEN}\n\n" if partners else ""
    blocks = ", ".join(block if stock is None else f"{block} ({stock.get(block, 0)})" for block in palettes[role])
    return f"{team}{describe_target(target, draw)}\nYour blocks: {blocks}\n{rules}\nYour commands:\n"


def write_rules(is_wall: bool, max_commands: int, spiders: int) -> str:
    """Returns the rules that prompts tell."""
    lines = [*(WALL_RULES if is_wall else HOUSE_RULES), *FORM, f"At most {max_commands} commands count."]
    if spiders:
        lines.append(f"There are {spiders} spiders. One `/kill` of anybody drives them away.")
    return "\n" + "".join(f"- {line}\n" for line in [*lines, "Answer with commands alone."])


@dataclass(frozen=True)
class Last:
    """What feedback is made of: the target, what was built in the last turn, its reward, and how many lines of mistakes to show."""

    target: Target
    palettes: Palettes
    built: Built
    reward: str
    limit: int | None


def score_feedback(last: Last, role: str) -> str:
    return f"Your last build earned {last.reward}.\n"


def position_feedback(last: Last, role: str) -> str:
    share = "Each of you builds a part of it. Of a wall, take places that do not touch.\n"
    return describe_target(last.target, draw=False) + (share if len(last.palettes) > 1 else "")


def perfect_feedback(last: Last, role: str) -> str:
    make = wall_plan if ANY in last.target.blocks.values() else house_plan
    commands = commands_of(make(last.target, last.palettes), role)
    return "This is your part:\n" + "".join(f"{command}\n" for command in commands)


def position_modification(last: Last, role: str) -> str:
    return _list_mistakes(last, "x y z", [((*place,), block) for place, block in mistakes(last).items()])


def rect_modification(last: Last, role: str) -> str:
    parts = [((*part.low, *part.high), part.block) for part in rectangles(mistakes(last))]
    return _list_mistakes(last, "x1 y1 z1 x2 y2 z2", parts)


def _list_mistakes(last: Last, form: str, parts: Sequence[tuple[tuple[int, ...], str]]) -> str:
    if not parts:
        return "All places are right.\n"
    lines = "".join(f"{_numbers(*place)} {block}\n" for place, block in parts[: last.limit])
    return f"These places are wrong. What belongs there, as {form} block (# is any block):\n{lines}"


def mistakes(last: Last) -> dict[Place, str]:
    """Returns what is wrong in the last build: places with the block that belongs there, `#` for any."""
    wrong = {}
    for place in last.target.places():
        wanted, found = last.target.blocks.get(place, AIR), last.built.get(place, (AIR, ""))[0]
        if wanted != found and not (wanted == ANY and found != AIR):
            wrong[place] = wanted
    return wrong


def _numbers(*numbers: int) -> str:
    return " ".join(map(str, numbers))


MODES: dict[str, Callable[[Last, str], str]] = {
    "score_feedback": score_feedback,  # the last reward
    "position_feedback": position_feedback,  # the target as places, and how to share them
    "perfect_feedback": perfect_feedback,  # the agent's part of a plan that is right
    "position_modification": position_modification,  # places that are wrong
    "rect_modification": rect_modification,  # the same as rectangles
}


def later_prompt(mode: str, last: Last, role: str) -> str:
    """Returns an agent's prompt of a later turn, with feedback on the last one. The box is empty again."""
    request = "The box is empty again. Write all of your commands, better ones.\n\nYour commands:\n"
    return f"{MODES[mode](last, role)}\n{request}"
