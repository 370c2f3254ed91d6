"""Block building as a task: its sections, its environment and its datasets."""

from dataclasses import dataclass

from trl_multiagent.environments.dataset_rows import LOCAL_FILE, Dataset, Datasets
from trl_multiagent.environments.task import DatasetSource, Task, TaskSettings, setting
from trl_multiagent.tasks.block_building.data import DEMO, HOUSES, WALLS, load_block_dataset
from trl_multiagent.tasks.block_building.demo import PALETTES, demo_model
from trl_multiagent.tasks.block_building.environment import BlockBuildingEnvironment
from trl_multiagent.tasks.block_building.prompts import MODES


@dataclass
class BlockDataset(DatasetSource):
    """The section `dataset`."""

    generated = (WALLS, HOUSES, DEMO)
    name: str | None = setting(f"'{WALLS}', '{HOUSES}' or '{DEMO}', or the path of a {LOCAL_FILE}.", WALLS)
    type: str | None = setting("What a file holds: walls or houses.", choices=(WALLS, HOUSES))
    spacing: int = setting("Columns between the letters of a wall.", 2, ge=0, le=20)
    local_z: int = setting("The z of a wall.", 0, ge=-9999, le=9999)

    def __post_init__(self) -> None:
        kind = {WALLS: WALLS, HOUSES: HOUSES, DEMO: WALLS}.get(self.name or WALLS)
        if self.type is not None and kind not in (None, self.type):
            raise ValueError(f"`dataset.type` is {self.type!r}, but `dataset.name` {self.name!r}, which is {kind!r}.")

    @property
    def kind(self) -> str:
        return HOUSES if HOUSES in (self.name, self.type) else WALLS


@dataclass
class Feedback:
    """The section `external`: what later turns show."""

    mode: str | None = setting("Feedback between turns; by default that of CoMLRL's file.", choices=(*MODES,))
    lim: int | None = setting("Lines of a list of mistakes, all by default.", ge=1)


@dataclass
class BlockSettings:
    """The section `block_building`."""

    palettes: dict[str, list[str]] | None = setting("The blocks of each role, such as {builder_1: [stone, glass]}.")
    max_commands: int | None = setting("Commands of all agents; 300 by default, 600 for houses.", ge=1, le=10000)
    provide_graph: bool = setting("Whether a wall is shown as a drawing, instead of as a list of places.", True)
    limited_resource: bool = setting("Whether agents have a limited number of each kind of block.", False)
    player: dict[str, int] | None = setting("`hp`, the health of the player; 5 by default.", keys=("hp",), ge=1)
    spider: dict[str, int] | None = setting(
        "Spiders of a house: `num`, `atk_low`, `atk_high`; 0, 1 and 3.", keys=("num", "atk_low", "atk_high"), ge=0
    )
    count_air: bool = setting("Whether empty places that are right count in the reward of a house.", True)


def make_environment(settings: TaskSettings) -> BlockBuildingEnvironment:
    """Makes the environment. Raises `ValueError` if the palettes do not fit the number of agents."""
    dataset: BlockDataset = settings.sections["dataset"]
    own: BlockSettings = settings.sections["block_building"]
    feedback: Feedback = settings.sections["external"]
    more = {"mode": feedback.mode, "limit": feedback.lim, "explain": dataset.name != DEMO, **vars(own)}
    if dataset.name == DEMO:
        more["palettes"] = own.palettes or PALETTES
    return BlockBuildingEnvironment(dataset.kind, num_agents=settings.num_agents, **more)


def load_datasets(settings: TaskSettings) -> Datasets:
    """
    Loads the training set and, if there is an `eval_split`, the evaluation set. Raises `ValueError` if a row or a
    split is malformed.
    """
    dataset: BlockDataset = settings.sections["dataset"]

    def load(split: str | None) -> Dataset:
        return load_block_dataset(dataset.name or WALLS, split, dataset.kind, dataset.spacing, dataset.local_z)

    return load(dataset.train_split), None if dataset.eval_split is None else load(dataset.eval_split)


TASK = Task(
    make_environment,
    load_datasets,
    settings={"dataset": BlockDataset, "external": Feedback, "block_building": BlockSettings},
    models={DEMO: demo_model},
)
