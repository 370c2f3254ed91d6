"""
Hanabi of TextArena, in a short form, with a base model that is made on the spot: it has seen moves of random players.

    trl-multiagent train magrpo --config hanabi
"""

import dataclasses
import random
import re

from trl_multiagent.configs.recipes.games.nim import SMALL
from trl_multiagent.models.imitation import ImitationModel
from trl_multiagent.rollout.tree import Samples, play_episodes
from trl_multiagent.tasks import textarena


def random_legal(item, prompt, history):
    """Plays a card, discards one, or says the rank of one of the other player's."""
    rng = random.Random(f"{item['seed']} {len(history)} {prompt}")
    card, state = rng.randrange(2), prompt[prompt.rindex("Built:") :]
    hints = re.findall(r"card (\d) \w+ (\d)", state) if "left: 0" not in state else []
    other = re.search(r"Player (\d) has", state)[1]
    moves = [f"[Play] {card}", f"[Discard] {card}"]
    if hints:
        moves.append("[Reveal] player {} card {} rank {}".format(other, *rng.choice(hints)))
    return rng.choice(moves)


def make_environment(memory=False):
    class Settings:
        sections = {"textarena": textarena.Game(f"{__package__}.short_hanabi:ShortHanabi", memory=memory)}

    return textarena.make_environment(Settings)


def careless(number, rng):
    """Draws moves of random games. Three of ten are made without looking at the state."""
    pairs = []

    def sample(nodes, count):
        samples = {}
        for node in nodes:
            for role, prompt in node.prompts.items():
                text = random_legal(node.item, prompt, node.history)
                pairs.append((prompt, any_move(rng) if rng.random() < 0.3 else text))
                samples.setdefault(role, []).append(Samples([1], [[1]], [text]))
        return samples

    while len(pairs) < number:
        items = [{"seed": rng.getrandbits(31)} for _ in range(32)]
        play_episodes(items, make_environment(memory=True), sample, num_turns=40)
    return pairs[:number]


def any_move(rng):
    hint = f"[Reveal] player {rng.randrange(2)} card {rng.randrange(2)} rank {rng.randint(1, 3)}"
    return rng.choice([f"[Play] {rng.randrange(3)}", f"[Discard] {rng.randrange(3)}", hint])


DEMO = ImitationModel("hanabi-demo", careless, steps=300, architecture=SMALL)
TASK = dataclasses.replace(textarena.TASK, models={"demo": DEMO.path})
