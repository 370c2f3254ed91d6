"""
The items of needed, its base model, and its task.

The base model has a speaker that ignores its facts, and a decider that uses the messages in a share of its answers,
the literacy. The words have a meaning for the decider, as in a pretrained language model, but no speaker uses this
meaning. So the demonstrated team cannot be above the bound, whatever its decider does.
"""

import random
from dataclasses import asdict, dataclass

from trl_multiagent.environments.dataset_rows import Dataset, Datasets, make_dataset
from trl_multiagent.environments.embedded import generated_rows
from trl_multiagent.environments.task import DatasetSource, ModelBuilder, Task, TaskSettings, setting
from trl_multiagent.models.imitation import ImitationModel
from trl_multiagent.tasks.needed.environment import (
    FACTS,
    PRIVATE,
    SHARED,
    Game,
    NeededEnvironment,
    Rule,
    Walk,
    decider_prompt,
    solo_prompt,
    speaker_prompt,
)


GAMES: dict[str, type[Rule] | type[Walk]] = {"rule": Rule, "walk": Walk}
KNOBS = {"rule": ("operations", "digits"), "walk": ("board",)}
SIZES = {"train": 4096, "test": 512}


def draw_items(game: Game, split: str | None, seed: int = 1) -> Dataset:
    """
    Draws the items of a game.

    Args:
        game ([`Rule`] or [`Walk`]): The game.
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


# The base model


STEPS = 1000
SPEAKING, SILENT = 0.2, 0.05  # shares of a speaker's demonstrations, and of a decider's in which it hears nothing


def demonstrate(game: Game, facts: str, literacy: float, rng: random.Random) -> tuple[str, str]:
    """Draws a prompt of the training split and an agent's answer."""
    item = game.item(rng)
    while not game.in_split(item, "train"):
        item = game.item(rng)
    words: list[str] = []
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
