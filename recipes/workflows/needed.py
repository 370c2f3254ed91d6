"""
Needed: speakers tell a decider what it does not know. A team above the bound of its items has used its messages.

Every agent has facts of its own. The speakers write in the first turn, at most `width` words each; the decider reads
the messages in the second turn, with its own part of the item, and answers. Only words of the channel, the game's
`words`, reach it. The reward is 1 for a right answer and 0 for any other, and 0 if a message is empty, is longer than
`width`, or has another word.

There are two games, [`Rule`] and [`Walk`]. For every item, the best expected reward of a decider that gets no message,
the bound, is computed exactly.

The base model has a speaker that ignores its facts, and a decider that uses the messages in a share of its answers,
the literacy. The words have a meaning for the decider, as in a pretrained language model, but no speaker uses this
meaning. So the demonstrated team cannot be above the bound, whatever its decider does.
"""

import itertools
import random
import zlib
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

from trl_multiagent.environments.base import Environment, History, JointAction, Outcome, Prompts
from trl_multiagent.environments.dataset_rows import Dataset, Datasets, generated_rows, make_dataset
from trl_multiagent.environments.task import DatasetSource, ModelBuilder, Task, TaskSettings, setting
from trl_multiagent.models.imitation import ImitationModel


PRIVATE, SHARED, ISOLATED = FACTS = ("private", "shared", "isolated")
SOLO = "solo"
Item = dict[str, Any]
DECIDER = "decider"
OPERATIONS: dict[str, Callable[[Sequence[int]], int]] = {
    "first": lambda digits: digits[0],
    "last": lambda digits: digits[-1],
    "largest": max,
    "smallest": min,
    "second": lambda digits: digits[1],
    "third": lambda digits: digits[2],
}
MOVES = {"left": (-1, 0), "right": (1, 0), "up": (0, 1), "down": (0, -1)}


class Bounded:
    """
    Base class of games. `bound` is the best expected reward of a decider that has its own view alone, the same for all
    items.

    The expected reward of a decider without a message is linear in the probabilities of its answers. So no agreement
    and no randomness beats the best single answer, and no answer is right in two of the worlds that the decider cannot
    tell apart.
    """

    bound: float
    speakers: tuple[str, ...] = ("speaker",)

    def in_split(self, item: Item, split: str) -> bool:
        """Returns whether an item belongs to the split `"train"` or `"test"`."""
        return True

    def __repr__(self) -> str:
        knobs = {name: value for name, value in vars(self).items() if isinstance(value, int)}
        knobs["speakers"] = len(self.speakers)
        return f"{type(self).__name__}({', '.join(f'{name}={value}' for name, value in knobs.items())})"


class Rule(Bounded):
    """
    The speaker has an operation, such as `largest`, and the decider a list of digits. The answer is the digit that the
    operation takes.

    All operations give different digits, so the bound is 1 / operations. Every fifth list of digits is in the split
    `test` alone. The split depends on the decider's view alone, so the bound holds in both splits.

    Args:
        operations (`int`, *optional*, defaults to `4`): The number of operations, 2 to 6.
        digits (`int`, *optional*, defaults to `4`): The length of a list; at least the number of operations.
        width (`int`, *optional*, defaults to `1`): The largest number of words of a message.
    """

    def __init__(self, operations: int = 4, digits: int = 4, width: int = 1):
        if not 2 <= operations <= len(OPERATIONS) or not operations <= digits <= 10:
            raise ValueError(
                f"A rule has 2 to 6 operations and as many digits or more, not {operations} and {digits}."
            )
        self.operations, self.digits, self.width = operations, digits, width
        self.bound = 1 / operations
        self.names = [*OPERATIONS][:operations]
        self.words = [f"take_{name}" for name in self.names]
        self.vocabulary = [*self.names, *self.words, *map(str, range(10)), "rule", "digits"]

    def item(self, rng: random.Random) -> Item:
        while True:
            digits = [rng.randrange(10) for _ in range(self.digits)]
            if len({OPERATIONS[name](digits) for name in self.names}) == self.operations:
                return {"digits": digits, "operation": rng.choice(self.names)}

    def fact(self, role: str, item: Item) -> str:
        """Returns the fact that only this speaker sees, as text."""
        return f"rule {item['operation']}"

    def view(self, item: Item) -> str:
        """Returns the decider's part of the item, as text."""
        return f"digits {' '.join(map(str, item['digits']))}"

    def reward(self, item: Item, answer: str) -> float:
        return float(answer.strip() == str(OPERATIONS[item["operation"]](item["digits"])))

    def truth(self, item: Item) -> list[str]:
        """Returns the words that state all facts of the speakers."""
        return [f"take_{item['operation']}"]

    def speak(self, role: str, rng: random.Random) -> list[str]:
        """Draws a message that does not depend on the facts."""
        return rng.choices(self.words, k=self.width)

    def read(self, item: Item, words: Collection[str], rng: random.Random) -> str:
        """Returns the right answer if these words are true. Facts that they do not state are drawn."""
        name = rng.choice([*words] or self.words).removeprefix("take_")
        return str(OPERATIONS[name](item["digits"]))

    def in_split(self, item: Item, split: str) -> bool:
        return (zlib.crc32(self.view(item).encode()) % 5 == 0) == (split == "test")


class Walk(Bounded):
    """
    The speaker sees a goal on a square board, and the decider its own position. The decider writes its moves. With two
    speakers, one sees the column of the goal and the other the row.

    The goal is any cell but the decider's, so the bound is 1 / (cells - 1). No cell is held out: the game shows
    communication, not generalisation.

    Args:
        board (`int`, *optional*, defaults to `3`): The length of a side, 2 to 6.
        speakers (`int`, *optional*, defaults to `1`): The number of speakers, 1 or 2.
        width (`int`, *optional*): The largest number of words of a message; by default the number that a speaker
            needs, 2 or 1.
    """

    def __init__(self, board: int = 3, speakers: int = 1, width: int | None = None):
        self.board, self.width = board, width or 3 - speakers
        if speakers == 2:
            self.speakers = ("speaker_1", "speaker_2")
        self.names = [list("abcdef"[:board]), [str(y + 1) for y in range(board)]]  # of columns and rows
        self.signs = [[f"column_{x}" for x in self.names[0]], [f"row_{y}" for y in self.names[1]]]
        self.words = [*self.signs[0], *self.signs[1]]
        self.vocabulary = [*self.names[0], *self.names[1], *self.words, *MOVES, "stay", "goal", "here"]
        self.cells = [[x, y] for x in range(board) for y in range(board)]
        self.bound = 1 / (len(self.cells) - 1)

    def axes(self, role: str) -> list[int]:
        """Returns the coordinates of the goal that a speaker sees: the column (0), the row (1), or both."""
        return [0, 1] if len(self.speakers) == 1 else [self.speakers.index(role)]

    def item(self, rng: random.Random) -> Item:
        goal, here = rng.sample(self.cells, 2)
        return {"goal": goal, "here": here}

    def fact(self, role: str, item: Item) -> str:
        return f"goal {' '.join(self.names[axis][item['goal'][axis]] for axis in self.axes(role))}"

    def view(self, item: Item) -> str:
        return f"here {' '.join(names[place] for names, place in zip(self.names, item['here'], strict=True))}"

    def reward(self, item: Item, answer: str) -> float:
        x, y = item["here"]
        for move in answer.split()[: 2 * self.board - 2]:
            dx, dy = MOVES.get(move, (0, 0))
            x, y = (min(max(place, 0), self.board - 1) for place in (x + dx, y + dy))
        return float([x, y] == item["goal"])

    def truth(self, item: Item) -> list[str]:
        return [signs[place] for signs, place in zip(self.signs, item["goal"], strict=True)]

    def speak(self, role: str, rng: random.Random) -> list[str]:
        axes = itertools.islice(itertools.cycle(self.axes(role)), self.width)
        return [rng.choice(self.signs[axis]) for axis in axes]

    def read(self, item: Item, words: Collection[str], rng: random.Random) -> str:
        said = [[sign for sign in words if sign in signs] or signs for signs in self.signs]
        goal = [signs.index(rng.choice(options)) for signs, options in zip(self.signs, said, strict=True)]
        return self.path(item["here"], goal)

    def path(self, here: Sequence[int], goal: Sequence[int]) -> str:
        """Returns the moves from one cell to another, along the row first."""
        x, y = goal[0] - here[0], goal[1] - here[1]
        moves = ["right"] * x + ["left"] * -x + ["up"] * y + ["down"] * -y
        return " ".join(moves) or "stay"


Game = Rule | Walk


class NeededEnvironment(Environment):
    """
    A game. Its rules are described at the top of this module.

    Metrics: `passed`; `bound`, the item's best expected reward without a message; in the first turn `well_formed`, the
    share of the messages that the channel allows.

    Args:
        game ([`Rule`] or [`Walk`]): The game.
        facts (`str`, *optional*, defaults to `"private"`): `"private"`: every agent has facts of its own. `"shared"`:
            the single agent `solo` has all facts. `"isolated"`: the single agent `solo` has the decider's facts.
        noise (`float`, *optional*, defaults to `0.0`): The probability that a word of a message is replaced by a
            random word of the channel. The draw depends on the item, the speaker and the message alone.
    """

    watched_metrics = {"well_formed": "hardly a message consists of the channel's words"}

    def __init__(self, game: Game, facts: str = PRIVATE, noise: float = 0.0):
        self.game, self.facts, self.noise = game, facts, noise
        self.metric_ranges = dict.fromkeys(("reward", "bound", "well_formed"), (0.0, 1.0))
        self.order = (game.speakers, (DECIDER,)) if facts == PRIVATE else ((SOLO,),)
        self.roles = tuple(role for turn in self.order for role in turn)

    def __repr__(self) -> str:
        return f"NeededEnvironment({self.game!r}, facts={self.facts!r}, noise={self.noise})"

    def resume_settings(self) -> dict[str, Any]:
        return {"game": repr(self.game), "facts": self.facts, "noise": self.noise}

    def prompts(self, item: Item, history: History) -> Prompts:
        """Returns the prompts of the roles that act. After the decider's answer there is none."""
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


# Items


GAMES: dict[str, type[Rule] | type[Walk]] = {"rule": Rule, "walk": Walk}
# For each setting, the games that have it
KNOBS = {"width": ("rule", "walk"), "operations": ("rule",), "digits": ("rule",), "board": ("walk",)}
SIZES = {"train": 4096, "test": 512}


def draw_items(game: Game, split: str | None, seed: int = 1) -> Dataset:
    """
    Draws the items of a game.

    Args:
        game ([`Rule`] or [`Walk`]): The game.
        split (`str`): `"train"`, 4096 items, or `"test"`, 512 items; or rows of one, such as `"test[:8]"`.
        seed (`int`, *optional*, defaults to `1`): Seed of the draw.

    Returns:
        `Dataset`: Columns `item_id`, the game's own, and `bound`, the best expected reward without a message.
    """

    def make(name: str) -> list[dict]:
        rng = random.Random(f"{name} {seed}")
        rows: list[dict] = []
        while len(rows) < SIZES[name]:
            item = game.item(rng)
            if game.in_split(item, name):
                rows.append({"item_id": f"{name}/{len(rows)}", **item, "bound": game.bound})
        return rows

    return make_dataset(generated_rows(make, SIZES, split), "the generated items")


# The base model


STEPS = 1000
SPEAKING, SILENT = 0.2, 0.05  # shares of a speaker's demonstrations, and of a decider's in which it hears nothing


def demonstrate(game: Game, facts: str, literacy: float, rng: random.Random) -> tuple[str, str]:
    """Draws a prompt of the training split and an agent's answer."""
    item = game.item(rng)
    while not game.in_split(item, "train"):
        item = game.item(rng)
    words = []
    if facts != PRIVATE:
        prompt = solo_prompt(game, item, facts)
        words = game.truth(item) if facts == SHARED else []
    elif rng.random() < SPEAKING:
        role = rng.choice(game.speakers)
        return speaker_prompt(game, item, role), " ".join(game.speak(role, rng))
    else:
        if rng.random() >= SILENT:
            words = [word for role in game.speakers for word in game.speak(role, rng)]
        prompt = decider_prompt(game, item, words)
    return prompt, game.read(item, words if rng.random() < literacy else [], rng)


def base_model(game: Game, facts: str, literacy: float, seed: int) -> ImitationModel:
    """Returns the base model of a game, which takes 15 seconds of one core to build."""

    def demonstrations(number: int, rng: random.Random) -> list[tuple[str, str]]:
        return [demonstrate(game, facts, literacy, rng) for _ in range(number)]

    return ImitationModel(
        f"needed-{type(game).__name__.lower()}",
        demonstrations,
        STEPS,
        vocabulary=[*game.vocabulary, "said", ":", "?"],
        architecture={"hidden_size": 64, "intermediate_size": 128},  # 84,000 parameters
        batch_size=32,
        seed=seed,
        variant=f"{game!r} {facts} {literacy}",
    )


# The task


@dataclass
class NeededDataset(DatasetSource):
    """The section `dataset`."""

    generated = (*GAMES,)
    name: str | None = setting("The game, 'rule' or 'walk'.", "rule", choices=(*GAMES,))
    seed: int = setting("Seed of the items and of the base model.", 1, ge=0)


@dataclass
class NeededSettings:
    """The section `needed`."""

    facts: str | None = setting(
        "'private': every agent has its own facts. 'shared': one agent has all facts. 'isolated': one agent has "
        "the decider's.",
        choices=FACTS,
    )
    literacy: float = setting("Share of the base model's answers that use the message.", 0.5, ge=0, le=1)
    noise: float = setting("Probability that a word of a message is replaced by a random one.", 0.0, ge=0, le=1)
    width: int | None = setting("Maximum words of a message; by default as many as a fact needs.", ge=1, le=8)
    operations: int | None = setting("Operations of the rule, 4 by default.", ge=2, le=6)
    digits: int | None = setting("Digits of the rule, 4 by default.", ge=2, le=10)
    board: int | None = setting("Side of the walk's board, 3 by default.", ge=2, le=6)


def make_game(settings: TaskSettings) -> Game:
    """Builds the game. Raises `ValueError` if a setting belongs to the other game, or has an impossible value."""
    name = str(settings.dataset.name)
    given = {key: getattr(settings.sections["needed"], key) for key in KNOBS}
    knobs = {key: value for key, value in given.items() if value is not None}
    for key in knobs:
        if name not in KNOBS[key]:
            other = KNOBS[key][0]
            raise ValueError(f"`needed.{key}` is a setting of {other}, but `dataset.name` is {name!r}: leave it out.")
    if settings.num_agents == 3 and name == "walk":
        knobs["speakers"] = 2
    return GAMES[name](**knobs)


def facts_of(settings: TaskSettings) -> str:
    """Returns the setting `facts` or its default. Raises `ValueError` if it does not fit the number of agents."""
    number, name = settings.num_agents, settings.dataset.name
    facts = settings.sections["needed"].facts or (SHARED if number == 1 else PRIVATE)
    allowed = [1] if facts != PRIVATE else [2, 3] if name == "walk" else [2]
    if number not in allowed:
        needed = " or ".join(map(str, allowed))
        raise ValueError(f"`num_agents` is {number}, but {name} with {facts} facts needs {needed}.")
    return facts


def make_environment(settings: TaskSettings) -> NeededEnvironment:
    return NeededEnvironment(make_game(settings), facts_of(settings), settings.sections["needed"].noise)


def load_datasets(settings: TaskSettings) -> Datasets:
    """
    Draws the training set and, if there is an `eval_split`, the evaluation set. Raises `ValueError` if a split does
    not exist.
    """
    dataset, game = settings.sections["dataset"], make_game(settings)
    return dataset.load_splits(lambda split: draw_items(game, split, dataset.seed))


def build_model(settings: TaskSettings) -> str:
    """Builds the base model of a run's game."""
    literacy = settings.sections["needed"].literacy
    return base_model(make_game(settings), facts_of(settings), literacy, settings.sections["dataset"].seed).path()


TASK = Task(
    make_environment,
    load_datasets,
    settings={"dataset": NeededDataset, "needed": NeededSettings},
    models={"demo": ModelBuilder(build_model)},
)
