"""
Random players of games of TextArena that mostly follow the rules. As a program, it plays each game through the task
and prints a table: `python scripts/random_games.py`.
"""

import random
import re
import statistics
from collections.abc import Callable, Iterable
from typing import Any

from trl_multiagent.environments.base import Environment, Outcome, Turn
from trl_multiagent.rollout.tree import Node, Samples, judge_nodes, play_episodes, turns_of_episodes
from trl_multiagent.tasks.textarena import Game, make_environment


Move = Callable[[random.Random, str], str]  # from what was shown so far to an answer
LISTED = re.compile(r"available|valid|viable|possible|options|remaining (hand|money)", re.IGNORECASE)
HANABI = "textarena.envs.Hanabi.env:HanabiEnv"


def listed(rng: random.Random, text: str) -> str:
    """Draws from the moves that the game listed last."""
    text = text.replace("[GAME]", "")
    lines = [line for line in text.splitlines() if LISTED.search(line) and "[" in line]
    move = rng.choice(re.findall(r"\[[^\]]+\]", lines[-1] if lines else "[1] [2] [3] [4] [5]"))
    return re.sub(r"\b[XN]\]", f"{rng.randint(1, 4)}]", move)


def one_of(*moves: str) -> Move:
    return lambda rng, text: rng.choice(moves)


def numbers(form: str, *ranges: tuple[int, int]) -> Move:
    return lambda rng, text: form.format(*(rng.randint(*span) for span in ranges))


def nim(rng: random.Random, text: str) -> str:
    piles = [(k, n) for k, n in re.findall(r"pile (\d): (\d+)", text)[-3:] if int(n)]
    pile, left = rng.choice(piles)
    return f"[{pile} {rng.randint(1, int(left))}]"


def blotto(rng: random.Random, text: str) -> str:
    a, b = sorted(rng.randint(0, 20) for _ in range(2))
    return f"[A{a} B{b - a} C{20 - b}]"


def ultimatum(rng: random.Random, text: str) -> str:
    is_answer = text.rfind("[Accept]") < text.rfind("offer") and "Player 0 is the proposer" not in text[-300:]
    return rng.choice(["[Accept]", "[Reject]"]) if is_answer else f"[Offer: ${rng.randint(1, 40)}]"


def dice(rng: random.Random, text: str) -> str:
    bids = re.findall(r"\[Bid: (\d+), (\d+)\]|New round", text)
    number, face = bids[-1] if bids and bids[-1][0] and "i.e. '[Bid" not in text[-400:] else ("0", "1")
    return "[Call]" if int(number) > 2 else f"[Bid: {int(number) + 1}, {face}]"


def negotiate(rng: random.Random, text: str) -> str:
    return rng.choice(["[Propose] " + "".join(rng.choices("ABCDE", k=8)), "[Propose] ABCDEABC", "[Accept]"])


# For each game, the number of players and a random player
PLAYERS: dict[str, tuple[int, Move]] = {
    "KuhnPoker-v0": (2, listed),
    "TicTacToe-v0": (2, listed),
    "WildTicTacToe-v0": (2, listed),
    "QuantumTicTacToe-v0": (2, numbers("[{},{}]", (0, 8), (0, 8))),
    "UltimateTicTacToe-v0": (2, numbers("[{} {}]", (0, 8), (0, 8))),
    "ConnectFour-v0": (2, numbers("[col {}]", (0, 6))),
    "Nim-v0": (2, nim),
    "Chopsticks-v0": (2, numbers("[attack {} {}]", (0, 1), (0, 1))),
    "PigDice-v0-short": (2, one_of("[roll]", "[hold]")),
    "Othello-v0-tiny": (2, listed),
    "SimpleTak-v0": (2, listed),
    "Crusade-v0": (2, listed),
    "MemoryGame-v0": (2, numbers("[{} {} {} {}]", (0, 3), (0, 3), (0, 3), (0, 3))),
    "IteratedRockPaperScissors-v0": (2, one_of("[rock]", "[paper]", "[scissors]")),
    "IteratedMatchingPennies-v0": (2, one_of("[heads]", "[tails]")),
    "IteratedTwoThirdsAverage-v0": (2, numbers("[{}]", (0, 100))),
    "IndianPoker-v0-short": (2, listed),
    "GameOfPureStrategy-v0": (2, listed),
    "HighSociety-v0": (2, listed),
    "Briscola-v0": (2, numbers("[play {}]", (1, 3))),
    "GermanWhist-v0": (2, numbers("[play {}]", (1, 13))),
    "Golf-v0": (2, listed),
    "ColonelBlotto-v0-small": (2, blotto),
    "Snake-v0": (2, one_of("[up]", "[down]", "[left]", "[right]")),
    "SimpleBlindAuction-v0-quick": (2, numbers("[Bid on Item 0: {}] [Bid on Item 1: {}]", (1, 300), (1, 300))),
    "TruthAndDeception-v0": (2, one_of("It is [Fact 1]", "It is [Fact 2]")),
    "IteratedPrisonersDilemma-v0": (2, one_of("[Cooperate]", "[Defect]")),
    "IteratedUltimatumGame-v0": (2, ultimatum),
    "SimpleNegotiation-v0-short": (2, one_of("[Deny]", "[Accept]", "[Offer: 1 Wheat -> 1 Wood]")),
    "NewRecruit-v0": (2, negotiate),
    HANABI: (2, one_of(*(f"[{do}] {k}" for do in ("Play", "Discard") for k in range(5)))),
    "Taboo-v0": (4, one_of("a thing", "[water]", "[house]")),
    "SecretMafia-v0": (6, listed),
    "ThreePlayerIPD-v0": (3, numbers("[0 cooperate] [1 defect] [2 cooperate]")),
    "ThreePlayerGOPS-v0": (3, listed),
    "ThreePlayerTicTacToe-v0": (3, listed),
    "LiarsDice-v0-small": (3, dice),
    "Poker-v0-small": (3, one_of("[Call]", "[Check]", "[Fold]")),
    "PublicGoodsGame-v0": (4, numbers("{{hello}} [{}]", (0, 20))),
    "MarketEntryGame-v0": (4, one_of("{hello} [E]", "{hello} [S]")),
    "Blackjack-v0": (1, one_of("[Hit]", "[Stand]")),
    "Sokoban-v0": (1, one_of("[up]", "[down]", "[left]", "[right]")),
}


def environment_of(name: str, **options: Any) -> Environment:
    class Settings:
        sections = {"textarena": Game(name, PLAYERS[name][0], options or None)}

    return make_environment(Settings)


def play_by(
    environment: Environment,
    seeds: Iterable[Any],
    answer: Callable[[Node, str], str],
    num_turns: int = 400,
    num_episodes: int = 1,
    **scoring: Any,
) -> list[list[Turn]]:
    """
    Plays an episode for each seed or item. `answer(node, role)` is what a role says. Returns the turns of each
    episode.
    """

    def sample(nodes: list[Node], number: int) -> dict[str, list[Samples]]:
        samples: dict[str, list[Samples]] = {}
        for node in nodes:
            for role in node.prompts:
                samples.setdefault(role, []).append(Samples([1], [[1]], [answer(node, role)]))
        return samples

    def score(nodes: list[Node]) -> list[list[Outcome]]:
        return judge_nodes(environment, nodes, evaluation=True, **scoring)

    items = [{"seed": x} if isinstance(x, int) else x for x in seeds]
    turns = play_episodes(items, environment, sample, score, num_turns=num_turns, num_episodes=num_episodes)
    return turns_of_episodes(turns)


def play(name: str, seeds: Iterable[int], move: Move | None = None, **settings: Any) -> list[list[Turn]]:
    """Plays a game for each seed with a random player."""
    chosen = move or PLAYERS[name][1]

    def answer(node: Node, role: str) -> str:
        past = [turn.prompts[role] for turn in node.history if role in turn.prompts]
        rng = random.Random(f"{node.item['seed']} {node.episode} {len(node.history)}")
        return chosen(rng, "\n".join([*past, node.prompts[role]]))

    return play_by(environment_of(name), seeds, answer, **settings)


def main() -> None:
    for name in PLAYERS:
        try:
            episodes = play(name, range(20))
        except Exception as error:
            print(f"| {name} | {type(error).__name__}: {error} |")
            continue
        last = [turns[-1].outcome for turns in episodes]
        rewards = [reward for outcome in last for reward in outcome.role_rewards.values()]
        sums = [round(sum(outcome.role_rewards.values()), 6) for outcome in last]
        invalid = statistics.mean(outcome.metrics["invalid_moves"] for outcome in last)
        unfinished = sum(outcome.metrics["out_of_turns"] for outcome in last)
        lengths = [len(turns) for turns in episodes]
        print(
            f"| {name} | {PLAYERS[name][0]} | {min(lengths)} to {max(lengths)} | {100 * invalid:.0f} % | "
            f"{min(rewards):g} to {max(rewards):g} | {min(sums):g} to {max(sums):g} | {unfinished:g} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
