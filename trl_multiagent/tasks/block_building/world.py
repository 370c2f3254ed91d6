"""
A box of blocks: what is to be built in it, the commands that agents write, what they build, and how to share the work.
"""

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


Place = tuple[int, int, int]  # x to the right, y up, z to the back
Built = dict[Place, tuple[str, str]]  # the block of each place that is not empty, and the role that put it there
Palettes = Mapping[str, Sequence[str]]  # the blocks of each role
AIR = "air"
ANY = "#"  # in a target, any block
MAX_CELLS = 4096  # places of a box
MAX_CHARS = 100_000  # of an answer; what follows is not read
MAX_LINE = 200  # characters of a line; a longer one is no command

PREFIX = re.compile(r"\s*(?:[-*•]|[0-9]{1,4}[.)])?\s*/?\s*")  # the mark of a list, and the slash
NUMBERS = r"((?:\s+-?[0-9]{1,4}){%d})"
BLOCK = r"\s+(?:minecraft:)?([a-z0-9_]+)\s*"
SETBLOCK, FILL = re.compile(f"setblock{NUMBERS % 3}{BLOCK}"), re.compile(f"fill{NUMBERS % 6}{BLOCK}")
KILL = re.compile(r"kill\b.*")


@dataclass(frozen=True)
class Box:
    """All places between two corners."""

    low: Place  # corner with the smallest coordinates
    high: Place  # opposite corner; both belong to the box

    @property
    def ranges(self) -> list[range]:
        return [range(low, high + 1) for low, high in zip(self.low, self.high, strict=True)]

    @property
    def size(self) -> int:
        return math.prod(map(len, self.ranges))

    def places(self) -> list[Place]:
        """Returns the layers from the ground up, in each the rows from front to back."""
        x_range, y_range, z_range = self.ranges
        return [(x, y, z) for y in y_range for z in z_range for x in x_range]

    def __contains__(self, place: Place) -> bool:
        return all(number in numbers for number, numbers in zip(place, self.ranges, strict=True))


@dataclass(frozen=True)
class Target(Box):
    """What is to be built in a box: the block of each place that must not be empty, [`ANY`] if any block will do."""

    blocks: Mapping[Place, str]


@dataclass(frozen=True)
class Command(Box):
    """Sets all places of a box to a block."""

    block: str

    def __str__(self) -> str:
        name, numbers = ("setblock", self.low) if self.size == 1 else ("fill", (*self.low, *self.high))
        return f"/{name} {' '.join(map(str, numbers))} {self.block}"


@dataclass
class Orders:
    """The commands in an agent's answer."""

    commands: list[Command] = field(default_factory=list)
    kills: bool = False
    refused: int = 0  # lines that look like commands, but are malformed, not allowed, or too many


def read_target(item: Mapping) -> Target:
    """Returns the target of an item: `layers[y][z][x]` is a symbol whose block `inventory` says, or `.` for air."""
    names = {ANY: ANY, ".": AIR, **{symbol: block_id(block) for symbol, block in item["inventory"]}}
    layers, (x1, y1, z1) = item["layers"], item["origin"]
    box = Box((x1, y1, z1), (x1 + len(layers[0][0]) - 1, y1 + len(layers) - 1, z1 + len(layers[0]) - 1))
    symbols = "".join("".join(layer) for layer in layers)
    blocks = {place: names[symbol] for place, symbol in zip(box.places(), symbols, strict=True)}
    return Target(box.low, box.high, {place: block for place, block in blocks.items() if block != AIR})


def read_orders(
    answer: str, target: Target, palette: Sequence[str], max_commands: int, stock: Mapping[str, int] | None = None
) -> Orders:
    """
    Reads the commands in an answer: one per line, `/setblock x y z block`, `/fill x1 y1 z1 x2 y2 z2 block` or `/kill`.
    Other lines are ignored. Coordinates are integers inside the box of the target, blocks those of the palette, or
    air. Only the first `max_commands` count. If the agent has a limited `stock` of each kind of block, a command that
    needs more is refused. The work is bounded, whatever the answer is.
    """
    orders = Orders()
    left = {block: math.inf if stock is None else stock.get(block, 0) for block in palette} | {AIR: math.inf}
    for line in answer[:MAX_CHARS].lower().splitlines():
        text = PREFIX.sub("", line, count=1) if len(line) <= MAX_LINE else ""
        if not text.startswith(("setblock", "fill", "kill")):
            continue
        command = read_command(text)
        if len(orders.commands) + orders.kills >= max_commands:
            orders.refused += 1
        elif KILL.fullmatch(text):
            orders.kills = True
        elif command is None or command.low not in target or command.high not in target:
            orders.refused += 1
        elif command.size > left.get(command.block, 0):
            orders.refused += 1
        else:
            orders.commands.append(command)
            left[command.block] -= command.size
    return orders


def read_command(text: str) -> Command | None:
    """Reads one command without its slash. Returns `None` if it is malformed."""
    match = SETBLOCK.fullmatch(text) or FILL.fullmatch(text)
    if match is None:
        return None
    numbers = [int(number) for number in match[1].split()]
    corners = list(zip(numbers[:3], numbers[-3:], strict=True))
    (x1, y1, z1), (x2, y2, z2) = map(min, corners), map(max, corners)
    return Command((x1, y1, z1), (x2, y2, z2), match[2])


def build(orders: Mapping[str, Orders]) -> Built:
    """Carries out the commands of all agents in the order of the roles. Later ones replace what is there."""
    built: Built = {}
    for role, own in orders.items():
        for command in own.commands:
            built |= dict.fromkeys(command.places(), (command.block, role))
    return {place: (block, role) for place, (block, role) in built.items() if block != AIR}


def block_id(name: str) -> str:
    """
    Returns the id of a block as commands are read: in lower case, without `minecraft:`. Raises `ValueError` if no
    command can have this name.
    """
    block = name.lower().removeprefix("minecraft:")
    if not re.fullmatch("[a-z0-9_]+", block):
        raise ValueError(f"{name!r} cannot be the name of a block, which is one like 'oak_planks'.")
    return block


def texture(block: str) -> str:
    """Returns what a block looks like: the last word of its id. `oak_planks` and `birch_planks` look alike."""
    return block.rpartition("_")[2]


def rectangles(blocks: Mapping[Place, str]) -> list[Command]:
    """Divides blocks into rectangles of one kind, layer by layer. Each grows to the right first, then to the back."""
    left, found = dict(blocks), []
    for x, y, z in sorted(blocks, key=lambda place: (place[1], place[2], place[0])):
        if (x, y, z) not in left:
            continue
        block, x2, z2 = left[x, y, z], x, z
        while left.get((x2 + 1, y, z)) == block:
            x2 += 1
        while all(left.get((k, y, z2 + 1)) == block for k in range(x, x2 + 1)):
            z2 += 1
        found.append(Command((x, y, z), (x2, y, z2), block))
        for place in found[-1].places():
            del left[place]
    return found


def wall_plan(target: Target, palettes: Palettes) -> Built:
    """
    Divides a wall. As far as the work is even, it is a chessboard: of N agents, the one with the number (x + y) mod N
    builds a place. No block looks like the one to its left or below.
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
    """
    Divides the places of each block equally among the agents that have it, from the ground up. Nobody builds what
    nobody has.
    """
    plan = Built()
    for block in set(target.blocks.values()):
        able = [role for role, palette in palettes.items() if block in palette]
        places = [place for place in target.places() if target.blocks.get(place) == block]
        if able:
            plan |= {place: (block, able[k * len(able) // len(places)]) for k, place in enumerate(places)}
    return plan


def commands_of(target: Target, palettes: Palettes, role: str) -> list[Command]:
    """Returns the commands with which an agent builds its part of a wall or a house if all goes well."""
    plan = (wall_plan if ANY in target.blocks.values() else house_plan)(target, palettes)
    return rectangles({place: block for place, (block, owner) in plan.items() if owner == role})
