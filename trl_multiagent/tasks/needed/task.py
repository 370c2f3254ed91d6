"""Needed as a task: its sections, its environment, its generated items, and its base model."""

import random
from dataclasses import asdict, dataclass

from trl_multiagent.environments.dataset_rows import Dataset, Datasets, make_dataset
from trl_multiagent.environments.embedded import generated_rows
from trl_multiagent.environments.task import DatasetSource, ModelBuilder, Task, TaskSettings, setting
from trl_multiagent.tasks.needed.environment import FACTS, PRIVATE, SHARED, NeededEnvironment
from trl_multiagent.tasks.needed.games import Game, Rule, Walk


GAMES: dict[str, type[Rule] | type[Walk]] = {"rule": Rule, "walk": Walk}
KNOBS = {"rule": ("operations", "digits"), "walk": ("board",)}
SIZES = {"train": 4096, "test": 512}


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
    """Makes the game. Raises `ValueError` if a setting belongs to the other game, or has an impossible value."""
    name = str(settings.dataset.name)
    given = {key: value for key, value in asdict(settings.sections["needed"]).items() if value is not None}
    for other in {*GAMES} - {name}:
        for key in given.keys() & {*KNOBS[other]}:
            raise ValueError(f"`needed.{key}` is a setting of {other}, but `dataset.name` is {name!r}: leave it out.")
    knobs = {key: given[key] for key in ("width", *KNOBS[name]) if key in given}
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
    dataset: NeededDataset = settings.sections["dataset"]
    game = make_game(settings)
    train = draw_items(game, dataset.train_split, dataset.seed)
    return train, None if dataset.eval_split is None else draw_items(game, dataset.eval_split, dataset.seed)


def draw_items(game: Game, split: str | None, seed: int = 1) -> Dataset:
    """
    Draws the items of a game.

    Args:
        game ([`~games.Game`]): The game.
        split (`str`): `"train"`, 4096 items, or `"test"`, 512 items; or rows of one, such as `"test[:8]"`.
        seed (`int`, *optional*, defaults to `1`): Seed of the draw.

    Returns:
        `Dataset`: Columns `item_id`, those of the game, and `bound`, the best expected reward without a message.
    """

    def make(name: str) -> list[dict]:
        rng = random.Random(f"{name} {seed}")
        rows: list[dict] = []
        while len(rows) < SIZES[name]:
            item = game.item(rng)
            if game.in_split(item, name):
                rows.append({"item_id": f"{name}/{len(rows)}", **item, "bound": game.bound(item)})
        return rows

    return make_dataset(generated_rows(make, SIZES, split), "the generated items")


def build_model(settings: TaskSettings) -> str:
    from trl_multiagent.tasks.needed.demo import base_model

    literacy = settings.sections["needed"].literacy
    return base_model(make_game(settings), facts_of(settings), literacy, settings.sections["dataset"].seed).path()


TASK = Task(
    make_environment,
    load_datasets,
    settings={"dataset": NeededDataset, "needed": NeededSettings},
    models={"demo": ModelBuilder(build_model)},
)
