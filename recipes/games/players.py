"""Random legal players of the games, and the demonstrations that the base models learn the form of a move from."""

import random
import re

from trl_multiagent.rollout.tree import Samples, play_episodes
from trl_multiagent.tasks.textarena import Game, make_environment


def nim(item, prompt, history):
    """Takes any number from a pile that is not empty."""
    rng = random.Random(f"{item['seed']} {len(history)} {prompt}")
    piles = [(pile, int(size)) for pile, size in re.findall(r"pile (\d): (\d+)", prompt)[-3:] if int(size)]
    pile, size = rng.choice(piles)
    return f"[{pile} {rng.randint(1, size)}]"


def hanabi(item, prompt, history):
    """Plays a card, discards one, or says the rank of one of the other player's."""
    rng = random.Random(f"{item['seed']} {len(history)} {prompt}")
    card, state = rng.randrange(2), prompt[prompt.rindex("Built:") :]
    hints = re.findall(r"card (\d) \w+ (\d)", state) if "left: 0" not in state else []
    other = re.search(r"Player (\d) has", state)[1]
    moves = [f"[Play] {card}", f"[Discard] {card}"]
    if hints:
        moves.append("[Reveal] player {} card {} rank {}".format(other, *rng.choice(hints)))
    return rng.choice(moves)


def demonstrations(game, player, careless):
    """
    Returns a function that draws pairs of a prompt and a move: those of random games, in which three moves of ten are
    made without looking at the state.
    """

    def demonstrate(number, rng):
        class Settings:
            sections = {"textarena": Game(**game)}

        pairs = []

        def sample(nodes, count):
            samples = {}
            for node in nodes:
                for role, prompt in node.prompts.items():
                    text = player(node.item, prompt, node.history)
                    pairs.append((prompt, careless(rng) if rng.random() < 0.3 else text))
                    samples.setdefault(role, []).append(Samples([1], [[1]], [text], truncated=[False]))
            return samples

        while len(pairs) < number:
            items = [{"seed": rng.getrandbits(31)} for _ in range(32)]
            play_episodes(items, make_environment(Settings), sample, num_turns=40)
        return pairs[:number]

    return demonstrate


def any_pile(rng):
    return f"[{rng.randrange(3)} {rng.randint(1, 5)}]"


def any_move(rng):
    hint = f"[Reveal] player {rng.randrange(2)} card {rng.randrange(2)} rank {rng.randint(1, 3)}"
    return rng.choice([f"[Play] {rng.randrange(3)}", f"[Discard] {rng.randrange(3)}", hint])
