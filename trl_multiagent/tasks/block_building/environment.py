"""Block building: several agents, each with blocks of its own, build a wall or a house together."""

import hashlib
import json
import random
from collections import Counter
from collections.abc import Mapping
from typing import Any, ClassVar

from trl_multiagent.environments.base import Environment, History, JointAction, Outcome, Prompt, Turn, check_roles
from trl_multiagent.tasks.block_building import reward
from trl_multiagent.tasks.block_building.data import BLOCKS, HOUSES, INVENTORY, WALLS, text_item
from trl_multiagent.tasks.block_building.prompts import MODES, UNSEEN, first_prompt, later_prompt, write_rules
from trl_multiagent.tasks.block_building.world import (
    AIR,
    Palettes,
    Target,
    block_id,
    build,
    read_orders,
    read_target,
)


SOLO = "builder"
HOUSE_BLOCKS = tuple(block for _, block in INVENTORY)
PALETTES: dict[str, Palettes] = {
    WALLS: {"builder_1": ("oak_planks", "stone"), "builder_2": ("white_concrete", "obsidian")},
    HOUSES: {"builder_1": HOUSE_BLOCKS, "builder_2": HOUSE_BLOCKS},
}
FEEDBACK = {WALLS: "position_feedback", HOUSES: "score_feedback"}
MAX_COMMANDS = {WALLS: 300, HOUSES: 600}
SPIDER = {"num": 0, "atk_low": 1, "atk_high": 3, "hp": 5}


class BlockBuildingEnvironment(Environment):
    """
    Agents write commands that set blocks. All commands of a turn are carried out in an empty box, agent after agent.

    Items are rows of [`load_block_dataset`]. The reward is that of [`~reward.wall_metrics`] or
    [`~reward.house_metrics`]. The `info` of an outcome is what was built: for each place that is not empty, its block
    and the role that put it there.

    Args:
        kind (`str`, *optional*, defaults to `"str_build"`): `"str_build"` for walls, `"house_build"` for houses.
        palettes (`dict[str, list[str]]`, *optional*): The blocks of each role, in the order in which their commands
            are carried out. By default those of two agents, `builder_1` and `builder_2`.
        num_agents (`int`, *optional*, defaults to `2`): The number of palettes; or 1, and the role `builder` has the
            blocks of all palettes.
        mode (`str`, *optional*): What later turns show, one of [`~prompts.MODES`]; by default `"position_feedback"`
            for walls and `"score_feedback"` for houses.
        limit (`int`, *optional*): Lines of a list of mistakes, all by default.
        explain (`bool`, *optional*, defaults to `True`): Whether prompts tell the rules.
        max_commands, provide_graph, limited_resource, player, spider, count_air (*optional*): The settings
        `block_building` of YAML files, which
            `recipes/block_building/README.md` describes.

    Raises `ValueError` if the palettes do not fit the number of agents, or the mode is unknown.
    """

    watched_metrics: ClassVar[dict[str, str]] = {"iou": "hardly a block stands where it should"}
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
        given = {role: map(block_id, own) for role, own in (palettes or PALETTES[kind]).items()}
        self.palettes = {role: tuple(block for block in own if block != AIR) for role, own in given.items()}
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
            rewards = reward.EXTRA + reward.ADJACENT + num_agents * reward.MISSING, reward.COVERED
        else:
            shares = ("passed", "iou", "match", "match_of_blocks", "hurt")
            rewards = reward.SPIDERS if self.spiders["num"] else 0.0, 1.0
        self.metric_ranges = {"reward": rewards, "total_reward": rewards, **dict.fromkeys(shares, (0.0, 1.0))}

    def __repr__(self) -> str:
        return (
            f"BlockBuildingEnvironment({self.kind!r}, palettes={self.palettes}, "
            f"reward_version={reward.REWARD_VERSION})"
        )

    def resume_settings(self) -> dict[str, Any]:
        item = text_item("A") if self.kind == WALLS else BLOCKS[HOUSES][0]
        silence = dict.fromkeys(self.roles, "")
        first = self.prompts(item, ())
        later = self.prompts(item, [Turn(first, silence, self.score([item], [silence], [()])[0])])
        return {
            "reward_version": reward.REWARD_VERSION,
            "prompts": hashlib.sha256(json.dumps([first, later]).encode()).hexdigest()[:12],
            "max_commands": self.max_commands,
            "spiders": [*self.spiders.values()],
            "count_air": self.count_air,
        }

    def prompts(self, item: dict, history: History) -> dict[str, Prompt]:
        target, prompts = read_target(item), dict[str, Prompt]()
        for role in self.roles:
            if history:
                outcome, best = history[-1].outcome, self.metric_ranges["total_reward"][1]
                earned = f"{outcome.metrics['total_reward']:.2f} of {best:g}"
                prompts[role] = later_prompt(self.mode, role, self.palettes, target, outcome.info, earned, self.limit)
            else:
                rules = write_rules(self.kind == WALLS, self.num_commands(role), self.spiders["num"])
                stock, shown = self.stock(target), rules if self.explain else ""
                prompts[role] = first_prompt(role, self.palettes, target, self.draw, shown, stock)
        return prompts

    def num_commands(self, role: str) -> int:
        """Returns how many commands of an agent count."""
        share, rest = divmod(self.max_commands, len(self.roles))
        return share + (rest if role == self.roles[0] else 0)

    def stock(self, target: Target) -> Mapping[str, int] | None:
        """Returns how many blocks of each kind an agent has; `None` if that is not limited."""
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
            metrics = reward.wall_metrics(target, built, self.palettes)
        else:
            damage = 0.0 if any(own.kills for own in orders.values()) else self.damage(item)
            metrics = reward.house_metrics(target, built, damage, self.count_air)
        metrics["refused"] = float(sum(own.refused for own in orders.values()))
        owners = Counter(role for _, role in built.values())
        metrics |= {f"blocks_of_{role}": float(owners[role]) for role in self.roles}
        return Outcome(metrics["total_reward"], metrics, built)

    def damage(self, item: dict) -> float:
        """Returns what the spiders do as a share of the player's health, 0 to 1. It depends on the item alone."""
        rng, (number, low, high, health) = random.Random(f"spiders {item['task_id']}"), self.spiders.values()
        return min(1.0, sum(rng.randint(low, max(low, high)) for _ in range(number)) / health)
