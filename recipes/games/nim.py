"""
Nim: two players in turn take one, two or three stones. In `nim`, who takes the last one has won. In `together`, both
have won if `player_1` takes it.

    trl-multiagent train magrpo --config nim
    trl-multiagent train magrpo --config together
"""

import random
import re

from trl_multiagent import Task, workflow
from trl_multiagent.models.imitation import ImitationModel


ROLES = ("player_0", "player_1")
MOVES = (1, 2, 3)
MOST, SHORT = 10, 6  # stones at the beginning


def asked(stones, moves=MOVES):
    legal = " ".join(str(move) for move in moves if move <= stones)
    return f"{stones} stones are left. Legal moves: {legal}. Answer with one number:"


def move_of(prompt, answer):
    """Returns the legal move that an answer is, or `None`."""
    numbers = re.findall(r"\d+", answer)
    return int(numbers[0]) if len(numbers) == 1 and numbers[0] in legal_moves(prompt) else None


def legal_moves(prompt):
    return prompt.partition("moves: ")[2].partition(".")[0].split()


async def play(item, agents):
    """Returns the player who takes the last stone, or `None` after an invalid move, for which its player pays 1."""
    stones, moves = item["stones"], 0
    while stones:
        player, prompt = moves % 2, asked(stones, item["moves"])
        ask, moves = agents[player], moves + 1
        move = move_of(prompt, await ask(prompt, memory=False, max_tokens=3))
        agents.log("invalid_moves", (move is None) / moves)
        if move is None:
            agents.reward(-1.0, ROLES[player])
            return None
        stones -= move
    return player


@workflow(roles=ROLES, metric_ranges={"reward": (-0.5, 0.0), **{f"reward/{role}": (-1.0, 1.0) for role in ROLES}})
async def nim(item, agents):
    last = await play(item, agents)
    return 0.0 if last is None else {ROLES[last]: 1.0, ROLES[1 - last]: -1.0}


@workflow(roles=ROLES, metric_ranges={"reward": (-0.5, 1.0), **{f"reward/{role}": (-1.0, 1.0) for role in ROLES}})
async def together(item, agents):
    last = await play(item, agents)
    return dict.fromkeys(ROLES, float(last == 1))


def random_legal(item, prompt, history):
    """A player who draws one of the legal moves."""
    return random.Random(f"{item['item_id']} {len(history)} {prompt}").choice(legal_moves(prompt))


def load_datasets(settings, most=MOST, moves=MOVES):
    from datasets import Dataset

    def items(split, number):
        return [{"item_id": f"{split}/{k}", "stones": 2 + k % (most - 1), "moves": moves} for k in range(number)]

    return Dataset.from_list(items("train", 540)), Dataset.from_list(items("test", 252))


def load_short(settings):
    """Lists the greatest move first: a language model prefers what comes first, and would not try the greatest."""
    return load_datasets(settings, SHORT, MOVES[::-1])


def careless(number, rng):
    """Draws answers to random states: a legal move, or, four times in ten, any word that was seen."""
    prompts = [asked(rng.randint(1, MOST)) for _ in range(number)]
    words = [*"12345678", "stones", "moves"]
    return [(x, rng.choice(words if rng.random() < 0.4 else legal_moves(x))) for x in prompts]


SMALL = {"hidden_size": 64, "intermediate_size": 192}
DEMO = ImitationModel("nim-demo", careless, steps=300, architecture=SMALL)
NIM = Task(lambda settings: nim, load_datasets, models={"demo": DEMO.path}, roles=ROLES)
TOGETHER = Task(lambda settings: together, load_datasets, models={"demo": DEMO.path}, roles=ROLES)
SHORT_NIM = Task(lambda settings: nim, load_short, roles=ROLES)
SHORT_TOGETHER = Task(lambda settings: together, load_short, roles=ROLES)
