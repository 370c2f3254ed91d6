"""
Block building: several agents, each with blocks of its own, build a wall or a house together.

Agents write commands that set blocks: `/setblock x y z block`, `/fill x1 y1 z1 x2 y2 z2 block`, and `/kill`, which
drives spiders away. All commands of a turn are carried out in an empty box, agent after agent. No agent sees the
commands of the others. In later turns the box is empty again, and the prompt has feedback on what was built last.

All share one reward. That of a wall, at most 2, is the one of CoMLRL's StrBuild:
R = 2 · covered - 1.5 · extra - adjacent - 0.25 · missing

- covered: the share of the target's places that have a block, whatever block.
- extra: the share of the other places that have one.
- adjacent: of all pairs of blocks beside or on top of each other, the share that looks alike, see [`texture`].
- missing: the number of agents that do not have their whole palette in the wall.

That of a house, at most 1, is the one of CoMLRL's HouseBuild: R = match - 0.1 · hurt

- match: the share of places that are right, of the whole box if `count_air`, as published: an empty box earns its
  share of air. Otherwise of the places at which the house or what was built has a block.
- hurt: the damage of the spiders, as a share of the player's health, 0 to 1; none after a `/kill`.

These rewards hardly require that two agents build. With `limited_resource`, nobody has the blocks for the whole
target.
"""

import math
import random
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from trl_multiagent.environments.base import PASSED, Environment, History, JointAction, Outcome, Prompts, check_roles


Place = tuple[int, int, int]  # x to the right, y up, z to the back
Built = dict[Place, tuple[str, str]]  # the block of each place that is not empty, and the role that put it there
Palettes = Mapping[str, Sequence[str]]  # the blocks of each role
WALLS, HOUSES = "str_build", "house_build"
SOLO = "builder"
AIR = "air"
ANY = "#"  # in a target, any block
MAX_CELLS = 4096  # places of a box
MAX_CHARS = 100_000  # of an answer; what follows is not read
MAX_LINE = 200  # characters of a line; a longer one is no command

REWARD_VERSION = 1
COVERED, EXTRA, ADJACENT, MISSING = 2.0, -1.5, -1.0, -0.25
SPIDERS = -0.1

HOUSE_BLOCKS = ("white_concrete", "obsidian", "stone_stairs", "stone_bricks", "planks")
PALETTES: dict[str, Palettes] = {
    WALLS: {"builder_1": ("oak_planks", "stone"), "builder_2": ("white_concrete", "obsidian")},
    HOUSES: {"builder_1": HOUSE_BLOCKS, "builder_2": HOUSE_BLOCKS},
}
FEEDBACK = {WALLS: "position_feedback", HOUSES: "score_feedback"}
MAX_COMMANDS = {WALLS: 300, HOUSES: 600}
SPIDER = {"num": 0, "atk_low": 1, "atk_high": 3, "hp": 5}


# Commands, and what they build


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
        return f"/{name} {spaced(*numbers)} {self.block}"


@dataclass
class Orders:
    """The commands in an agent's answer."""

    commands: list[Command] = field(default_factory=list)
    kills: bool = False
    refused: int = 0  # lines that look like commands, but are malformed, not allowed, or too many


def read_target(item: Mapping) -> Target:
    """Returns the target of an item: `layers[y][z][x]` is `.` for air, or a symbol of a block in `inventory`."""
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
    Other lines are ignored. Coordinates are integers inside the box of the target, blocks are from the palette, or
    air. Only the first `max_commands` count. If the agent has a limited `stock` of each kind of block, a command that
    needs more is refused. The work is bounded, whatever the answer is.
    """
    orders, left = Orders(), Counter(stock or {})
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
        else:
            kind = ANY if ANY in left else command.block
            cost = 0 if stock is None or command.block == AIR else command.size
            if command.block in (AIR, *palette) and cost <= left[kind]:
                orders.commands.append(command)
                left[kind] -= cost
            else:
                orders.refused += 1
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
    Assigns the places of a wall to N agents, in a checkerboard where possible: a place belongs to agent (x + y) mod N
    as long as the work is even. No block looks like the one to its left or below.
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


# Prompts


UNSEEN = "You cannot see each other's answers."
RULES = {
    WALLS: (
        "Build on every # and nowhere else. Any block will do.",
        "Blocks that touch must not look alike. The last word of a block's name says what it looks like.",
        "Use each of your blocks.",
    ),
    HOUSES: ("Every place must have exactly the right block.",),
}
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
        corners = f"{spaced(*target.low)} to {spaced(*target.high)}"
        head = f"The house, as boxes x1 y1 z1 x2 y2 z2 block. All other places from {corners} stay empty."
        lines = list_rectangles(target.blocks)
    elif draw:
        (x_range, y_range, _), z = target.ranges, target.low[2]
        head = f"The wall, with a # for each block. x goes from {x_range[0]} to {x_range[-1]}, and z is {z}."
        lines = [
            f"y={y} " + "".join(ANY if (x, y, z) in target.blocks else "." for x in x_range) for y in reversed(y_range)
        ]
    else:
        head = "The wall, as places x y z of a #:"
        lines = [spaced(*place) for place in sorted(target.blocks, key=lambda place: (-place[1], place[0]))]
    return "\n".join([head, *lines])


def list_mistakes(target: Target, built: Built, as_rectangles: bool, limit: int | None) -> str:
    """
    Returns the places that are wrong in the last build, each with the block that belongs there, and a line that says
    so. `limit`: lines of the list.
    """
    wrong = {}
    for place in target.places():
        wanted, found = target.blocks.get(place, AIR), built.get(place, (AIR, ""))[0]
        if wanted != found and not (wanted == ANY and found != AIR):
            wrong[place] = wanted
    if not wrong:
        return "All places are right."
    if as_rectangles:
        form, lines = "x1 y1 z1 x2 y2 z2", list_rectangles(wrong)
    else:
        form, lines = "x y z", [f"{spaced(*place)} {block}" for place, block in wrong.items()]
    head = f"These places are wrong. What belongs there, as {form} block (# is any block):"
    return "\n".join([head, *lines[:limit]])


def list_rectangles(blocks: Mapping[Place, str]) -> list[str]:
    """Returns blocks as lines of rectangles."""
    return [f"{spaced(*part.low, *part.high)} {part.block}" for part in rectangles(blocks)]


def spaced(*numbers: int) -> str:
    """Returns numbers with spaces between them."""
    return " ".join(map(str, numbers))


# Turns and rewards


class BlockBuildingEnvironment(Environment):
    """
    Agents write commands that set blocks. All commands of a turn are carried out in an empty box, agent after agent.

    The rules and the rewards are described at the top of this module. Items are rows of [`load_block_dataset`]. The
    `info` of an outcome is what was built: for each place that is not empty, its block and the role that put it there.

    Args:
        kind (`str`, *optional*, defaults to `"str_build"`): `"str_build"` for walls, `"house_build"` for houses.
        palettes (`dict[str, list[str]]`, *optional*): The blocks of each role, in the order in which their commands
            are carried out. By default for two agents, `builder_1` and `builder_2`.
        num_agents (`int`, *optional*, defaults to `2`): The number of palettes; or 1, and the role `builder` has the
            blocks of all palettes.
        mode (`str`, *optional*): What later turns show, one of [`MODES`]; by default `"position_feedback"`
            for walls and `"score_feedback"` for houses.
        limit (`int`, *optional*): Lines of a list of mistakes, all by default.
        explain (`bool`, *optional*, defaults to `True`): Whether prompts tell the rules.
        max_commands, provide_graph, limited_resource, player, spider, count_air (*optional*): The settings
            `block_building` of YAML files, which `recipes/block_building/README.md` describes.

    Raises `ValueError` if the palettes do not fit the number of agents, or the mode is unknown.
    """

    watched_metrics = {"iou": "hardly a block stands where it should"}
    unseen = UNSEEN, "The answers of the others are above."

    def __init__(
        self,
        kind: str = WALLS,
        palettes: Palettes | None = None,
        num_agents: int = 2,
        mode: str | None = None,
        limit: int | None = None,
        explain: bool = True,
        max_commands: int | None = None,
        provide_graph: bool = True,
        limited_resource: bool = False,
        player: Mapping[str, int] | None = None,
        spider: Mapping[str, int] | None = None,
        count_air: bool = True,
    ):
        self.palettes = {
            role: tuple(block for block in map(block_id, own) if block != AIR)
            for role, own in (palettes or PALETTES[kind]).items()
        }
        if num_agents == 1:
            self.palettes = {SOLO: tuple(dict.fromkeys(block for own in self.palettes.values() for block in own))}
        if len(self.palettes) != num_agents or not all(self.palettes.values()):
            raise ValueError(f"`palettes` must have blocks for each of the {num_agents} agents, not {self.palettes}.")
        self.roles = check_roles(list(self.palettes))
        self.kind, self.draw, self.explain, self.count_air = kind, provide_graph, explain, count_air
        self.mode, self.limit = mode or FEEDBACK[kind], limit
        if self.mode not in MODES:
            raise ValueError(f"`mode` is {mode!r}; it must be one of {', '.join(MODES)}.")
        self.max_commands, self.limited_resource = max_commands or MAX_COMMANDS[kind], limited_resource
        self.spiders = {**SPIDER, **(spider or {}), **(player or {})}
        if kind == WALLS:
            shares = ("passed", "iou", "covered", "extra", "adjacent")
            rewards = EXTRA + ADJACENT + num_agents * MISSING, COVERED
        else:
            shares = ("passed", "iou", "match", "match_of_blocks", "hurt")
            rewards = SPIDERS if self.spiders["num"] else 0.0, 1.0
        self.metric_ranges = {"reward": rewards, "total_reward": rewards, **dict.fromkeys(shares, (0.0, 1.0))}

    def __repr__(self) -> str:
        return f"BlockBuildingEnvironment({self.kind!r}, palettes={self.palettes}, reward_version={REWARD_VERSION})"

    def resume_settings(self) -> dict[str, Any]:
        return {"reward_version": REWARD_VERSION, **vars(self)}

    def prompts(self, item: dict, history: History) -> Prompts:
        target = read_target(item)
        if history:
            return {role: self.later_prompt(role, target, history[-1].outcome) for role in self.roles}
        return {role: self.first_prompt(role, target) for role in self.roles}

    def first_prompt(self, role: str, target: Target) -> str:
        """Returns an agent's first prompt: the target, the agent's blocks and the rules."""
        partners = [name for name in self.roles if name != role]
        stock, blocks = self.stock(target), self.palettes[role]
        team = f"You are {role}. You build this with {' and '.join(partners)}. {UNSEEN}\n\n" if partners else ""
        if stock is None:
            own = ", ".join(blocks)
        elif ANY in stock:
            own = f"{', '.join(blocks)} ({stock[ANY]} in all)"
        else:
            own = ", ".join(f"{block} ({stock.get(block, 0)})" for block in blocks)
        prompt = f"{team}{describe_target(target, self.draw)}\n\nYour blocks: {own}\n\n"
        if self.explain:
            lines = [*RULES[self.kind], *FORM, f"At most {self.num_commands(role)} commands count."]
            if spiders := self.spiders["num"]:
                lines.append(f"There are {spiders} spiders. One `/kill` of anybody drives them away.")
            prompt += "".join(f"- {line}\n" for line in [*lines, "Answer with commands alone.\n"])
        return f"{prompt}Your commands:\n"

    def later_prompt(self, role: str, target: Target, last: Outcome) -> str:
        """Returns an agent's prompt of a later turn, with what the mode tells of the last one."""
        if self.mode == "score_feedback":
            best = self.metric_ranges["total_reward"][1]
            text = f"Your last build earned {last.metrics['total_reward']:.2f} of {best:g}."
        elif self.mode == "position_feedback":
            text = describe_target(target, draw=False)
            if len(self.roles) > 1:
                text += "\nEach of you builds a part of it. Of a wall, take places that do not touch."
        elif self.mode == "perfect_feedback":
            text = "\n".join(["This is your part:", *map(str, commands_of(target, self.palettes, role))])
        else:
            text = list_mistakes(target, last.info, self.mode == "rect_modification", self.limit)
        return f"{text}\n\nThe box is empty again. Write all of your commands, better ones.\n\nYour commands:\n"

    def num_commands(self, role: str) -> int:
        """Returns how many commands of an agent count."""
        share, rest = divmod(self.max_commands, len(self.roles))
        return share + rest * (role == self.roles[0])

    def stock(self, target: Target) -> Mapping[str, int] | None:
        """
        Returns how many blocks of each kind of the target an agent has; `None` if that is not limited. Those of a
        wall, [`ANY`], may be of any kinds.
        """
        if not self.limited_resource:
            return None
        n, counts = len(self.roles), Counter(target.blocks.values())
        return {block: -(-count // n) + count // (2 * n) for block, count in counts.items()}

    def score(self, items: list[dict], joint_actions: list[JointAction], histories: list[History]) -> list[Outcome]:
        return [self._outcome(item, action) for item, action in zip(items, joint_actions, strict=True)]

    def _outcome(self, item: dict, joint_action: JointAction) -> Outcome:
        target = read_target(item)
        stock = self.stock(target)
        orders = {
            role: read_orders(joint_action[role], target, palette, self.num_commands(role), stock)
            for role, palette in self.palettes.items()
        }
        built = build(orders)
        if self.kind == WALLS:
            metrics = wall_metrics(target, built, self.palettes)
        else:
            damage = 0.0 if any(own.kills for own in orders.values()) else self.damage(item)
            metrics = house_metrics(target, built, damage, self.count_air)
        metrics["refused"] = float(sum(own.refused for own in orders.values()))
        owners = Counter(role for _, role in built.values())
        metrics |= {f"blocks_of_{role}": float(owners[role]) for role in self.roles}
        return Outcome(metrics["total_reward"], metrics, built)

    def damage(self, item: dict) -> float:
        """Returns what the spiders do as a share of the player's health, 0 to 1. It depends on the item alone."""
        rng, (number, low, high, health) = random.Random(f"spiders {item['task_id']}"), self.spiders.values()
        return min(1.0, sum(rng.randint(low, max(low, high)) for _ in range(number)) / health)


def wall_metrics(target: Target, built: Built, palettes: Palettes) -> dict[str, float]:
    """Returns the reward of a wall, and its parts."""
    wanted, blocks = target.blocks.keys(), {place: block for place, (block, _) in built.items()}
    covered, extra = len(wanted & blocks.keys()), len(blocks.keys() - wanted)
    pairs = [
        (block, blocks[near])
        for (x, y, z), block in blocks.items()
        for near in ((x + 1, y, z), (x, y + 1, z))
        if near in blocks
    ]
    same = sum(texture(a) == texture(b) for a, b in pairs)
    metrics = {
        "covered": covered / len(wanted),
        "extra": extra / max(1, target.size - len(wanted)),
        "adjacent": same / max(1, len(pairs)),
        "missing": float(sum(not set(palette) <= set(blocks.values()) for palette in palettes.values())),
    }
    reward = COVERED * metrics["covered"] + EXTRA * metrics["extra"]
    reward += ADJACENT * metrics["adjacent"] + MISSING * metrics["missing"]
    is_right = covered == len(wanted) and not extra and not same and not metrics["missing"]
    return {
        "total_reward": reward,
        PASSED: float(is_right),
        "iou": covered / (len(wanted) + extra),
        "adjacent_pairs": float(same),
        **metrics,
    }


def house_metrics(target: Target, built: Built, damage: float, count_air: bool) -> dict[str, float]:
    """Returns the reward of a house, and its parts."""
    wanted = target.blocks.keys()
    union = len(wanted | built.keys())
    right = sum(place in built and built[place][0] == block for place, block in target.blocks.items())
    match = (right + target.size - union) / target.size if count_air else right / union
    return {
        "total_reward": match + SPIDERS * damage,
        PASSED: float(right == union),
        "iou": len(wanted & built.keys()) / union,
        "match": match,
        "match_of_blocks": right / union,
        "hurt": damage,
    }
