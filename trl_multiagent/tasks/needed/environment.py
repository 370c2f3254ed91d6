"""Needed: speakers tell a decider what it does not know. A team above the bound of its items has used its messages."""

import random
from collections.abc import Sequence
from typing import Any, ClassVar

from trl_multiagent.environments.base import Environment, History, JointAction, Outcome, Prompt
from trl_multiagent.tasks.needed.games import DECIDER, Game, Item


PRIVATE, SHARED, ISOLATED = FACTS = ("private", "shared", "isolated")
SOLO = "solo"


class NeededEnvironment(Environment):
    """
    The speakers write their messages in the first turn, and the decider reads them and answers in the second.

    Only words of the channel reach the decider, at most `game.width` of them. A message that is empty, is longer, or
    has another word makes the reward 0. Metrics: `passed`; `bound`, the item's best expected reward without a message;
    in the first turn `well_formed`, the share of the messages that the channel allows.

    Args:
        game ([`~games.Game`]): The game.
        facts (`str`, *optional*, defaults to `"private"`): `"private"`: every agent has facts of its own. `"shared"`:
            the single agent `solo` has all facts. `"isolated"`: the single agent `solo` has the decider's facts.
        noise (`float`, *optional*, defaults to `0.0`): The probability that a word of a message is replaced by a
            random word of the channel. The draw depends on the item, the speaker and the message alone.
    """

    watched_metrics: ClassVar[dict[str, str]] = {"well_formed": "hardly a message consists of the channel's words"}

    def __init__(self, game: Game, facts: str = PRIVATE, noise: float = 0.0):
        self.game, self.facts, self.noise = game, facts, noise
        self.metric_ranges = dict.fromkeys(("reward", "bound", "well_formed"), (0.0, 1.0))
        self.order = (game.speakers, (DECIDER,)) if facts == PRIVATE else ((SOLO,),)
        self.roles = tuple(role for turn in self.order for role in turn)

    def __repr__(self) -> str:
        return f"NeededEnvironment({self.game!r}, facts={self.facts!r}, noise={self.noise})"

    def resume_settings(self) -> dict[str, Any]:
        return {"game": repr(self.game), "facts": self.facts, "noise": self.noise}

    def prompts(self, item: Item, history: History) -> dict[str, Prompt]:
        """Makes the prompts of the roles that act. After the decider's answer there is none."""
        game, turn = self.game, len(history)
        if self.facts != PRIVATE:
            return {} if turn else {SOLO: solo_prompt(game, item, self.facts)}
        if turn == 0:
            return {role: speaker_prompt(game, item, role) for role in game.speakers}
        if turn == 1:
            said = history[0].joint_action
            heard = [word for role in game.speakers for word in self.hear(item, role, said[role])]
            return {DECIDER: decider_prompt(game, item, heard)}
        return {}

    def hear(self, item: Item, role: str, message: str) -> list[str]:
        """Returns the words of a message that reach the decider."""
        words = [word for word in message.split() if word in self.game.words][: self.game.width]
        rng = random.Random(f"{item['item_id']} {role} {message}")
        return [rng.choice(self.game.words) if rng.random() < self.noise else word for word in words]

    def is_well_formed(self, message: str) -> bool:
        words = message.split()
        return 0 < len(words) <= self.game.width and set(words) <= {*self.game.words}

    def score(self, items: list[dict], joint_actions: list[JointAction], histories: list[History]) -> list[Outcome]:
        return [self._judge(*episode) for episode in zip(items, joint_actions, histories, strict=True)]

    def _judge(self, item: Item, action: JointAction, history: History) -> Outcome:
        if self.facts != PRIVATE:
            reward = self.game.reward(item, action[SOLO])
        else:
            messages = history[0].joint_action if history else action
            allowed = [self.is_well_formed(messages[role]) for role in self.game.speakers]
            if not history:
                return Outcome(0.0, {"well_formed": sum(allowed) / len(allowed)})
            reward = self.game.reward(item, action[DECIDER]) if all(allowed) else 0.0
        return Outcome(reward, {"passed": reward, "bound": item["bound"]})


def speaker_prompt(game: Game, item: Item, role: str) -> str:
    return f"{game.fact(role, item)} :"


def decider_prompt(game: Game, item: Item, words: Sequence[str]) -> str:
    return " ".join([game.view(item), "said", *words, "?"])


def solo_prompt(game: Game, item: Item, facts: str) -> str:
    known = [game.fact(role, item) for role in game.speakers] if facts == SHARED else []
    return " ".join([*known, game.view(item), "?"])
