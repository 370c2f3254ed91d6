"""The prompts of builders: the target, what an agent may use, and feedback on what was built."""

from collections.abc import Mapping

from trl_multiagent.tasks.block_building.world import AIR, ANY, Built, Palettes, Target, commands_of, rectangles


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
MODES = (
    "score_feedback",  # the last reward
    "position_feedback",  # the target as places, and how to share them
    "perfect_feedback",  # the agent's part of a plan that is right
    "position_modification",  # places that are wrong
    "rect_modification",  # the same as rectangles
)


def describe_target(target: Target, draw: bool) -> str:
    """Returns a wall as a drawing or as a list of positions, or a house as a list of rectangles."""
    if ANY not in target.blocks.values():
        corners = f"{_numbers(*target.low)} to {_numbers(*target.high)}"
        head = f"The house, as boxes x1 y1 z1 x2 y2 z2 block. All other places from {corners} stay empty."
        lines = _list_rectangles(target.blocks)
    elif draw:
        (x_range, y_range, _), z = target.ranges, target.low[2]
        head = f"The wall, with a # for each block. x goes from {x_range[0]} to {x_range[-1]}, and z is {z}."
        rows = {y: [ANY if (x, y, z) in target.blocks else "." for x in x_range] for y in reversed(y_range)}
        lines = [f"y={y} {''.join(row)}" for y, row in rows.items()]
    else:
        head = "The wall, as places x y z of a #:"
        lines = [_numbers(*place) for place in sorted(target.blocks, key=lambda place: (-place[1], place[0]))]
    return "\n".join([head, *lines])


def first_prompt(
    role: str, palettes: Palettes, target: Target, draw: bool, rules: str, stock: Mapping[str, int] | None
) -> str:
    """Returns an agent's first prompt. `stock`: how many blocks of each kind the agent has, if that is limited."""
    partners = [name for name in palettes if name != role]
    team = f"You are {role}. You build this with {' and '.join(partners)}. {UNSEEN}\n\n" if partners else ""
    blocks = ", ".join(block if stock is None else f"{block} ({stock.get(block, 0)})" for block in palettes[role])
    return f"{team}{describe_target(target, draw)}\n\nYour blocks: {blocks}\n{rules}\nYour commands:\n"


def write_rules(is_wall: bool, max_commands: int, spiders: int) -> str:
    """Returns the rules that prompts tell."""
    lines = [*(WALL_RULES if is_wall else HOUSE_RULES), *FORM, f"At most {max_commands} commands count."]
    if spiders:
        lines.append(f"There are {spiders} spiders. One `/kill` of anybody drives them away.")
    return "\n" + "".join(f"- {line}\n" for line in [*lines, "Answer with commands alone."])


def later_prompt(
    mode: str, role: str, palettes: Palettes, target: Target, built: Built, reward: str, limit: int | None
) -> str:
    """
    Returns an agent's prompt of a later turn, with what a mode tells of the last one. `limit`: lines of a list of
    mistakes.
    """
    if mode == "score_feedback":
        text = f"Your last build earned {reward}."
    elif mode == "position_feedback":
        text = describe_target(target, draw=False)
        if len(palettes) > 1:
            text += "\nEach of you builds a part of it. Of a wall, take places that do not touch."
    elif mode == "perfect_feedback":
        text = "\n".join(["This is your part:", *map(str, commands_of(target, palettes, role))])
    else:
        text = list_mistakes(target, built, mode == "rect_modification", limit)
    return f"{text}\n\nThe box is empty again. Write all of your commands, better ones.\n\nYour commands:\n"


def list_mistakes(target: Target, built: Built, as_rectangles: bool, limit: int | None) -> str:
    """
    Returns the places that are wrong in the last build, each with the block that belongs there, and a line that says
    so.
    """
    wrong = {}
    for place in target.places():
        wanted, found = target.blocks.get(place, AIR), built.get(place, (AIR, ""))[0]
        if wanted != found and not (wanted == ANY and found != AIR):
            wrong[place] = wanted
    if not wrong:
        return "All places are right."
    if as_rectangles:
        form, lines = "x1 y1 z1 x2 y2 z2", _list_rectangles(wrong)
    else:
        form, lines = "x y z", [f"{_numbers(*place)} {block}" for place, block in wrong.items()]
    head = f"These places are wrong. What belongs there, as {form} block (# is any block):"
    return "\n".join([head, *lines[:limit]])


def _list_rectangles(blocks: Mapping[tuple[int, int, int], str]) -> list[str]:
    return [f"{_numbers(*part.low, *part.high)} {part.block}" for part in rectangles(blocks)]


def _numbers(*numbers: int) -> str:
    return " ".join(map(str, numbers))
