"""
The data of writing, and its task: posts and abstracts. The demo has generated posts, see recipes/writing/demo.py.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from trl_multiagent.environments.base import ID_COLUMNS
from trl_multiagent.environments.dataset_rows import LOCAL_FILE, Dataset, check_fields, make_dataset
from trl_multiagent.environments.task import Task, TaskSettings, load_datasets, setting
from trl_multiagent.environments.yaml_task import Rows
from trl_multiagent.tasks.writing.environment import REWARDS, WritingEnvironment, key_words


COLUMNS = {"tldr": "prompt", "arxiv": "abstract_text"}  # the column with the source, for each kind of data
KINDS = tuple(COLUMNS)


def infer_kind(name: str) -> str:
    """Returns the kind of data that the name of a dataset says. Raises `ValueError` if it says none."""
    for kind in KINDS:
        if kind in name.lower():
            return kind
    raise ValueError(f"`dataset.name` is {name!r}, which does not say the kind of its texts: set `dataset.type`.")


def load_writing_dataset(
    name: str, split: str | None = None, type: str | None = None, config: str | None = None
) -> Dataset:
    """
    Loads sources to write about.

    Args:
        name (`str`): A Hub id such as `"trl-lib/tldr"`, or the path of a local file.
        split (`str`, *optional*): Split in the syntax of `datasets`, by default `train`.
        type (`str`, *optional*): `"tldr"` for posts in the column `prompt`, `"arxiv"` for abstracts in the column
            `abstract_text`; by default inferred from `name`.
        config (`str`, *optional*): Configuration of the dataset on the Hub.

    Returns:
        `Dataset`: Columns `item_id`, `source`, and `key_words`, see [`key_words`].

    Raises `ValueError` if the dataset is malformed, and `ConnectionError` if the Hub cannot be reached.
    """
    return make_items(Rows(name=name, config=config).load(split), type or infer_kind(name), name)


def make_items(rows: Iterable[dict], kind: str, name: str) -> Dataset:
    """Makes the items of rows of a kind, from the data with this name."""
    items = [make_item(row, number, kind, name) for number, row in enumerate(rows, 1)]
    keys = key_words(item["source"] for item in items)
    return make_dataset([{**item, "key_words": k} for item, k in zip(items, keys, strict=True)], name)


def make_item(row: dict, number: int, kind: str, name: str) -> dict[str, str]:
    """Returns an item of a row, without its key words."""
    text = row.get(COLUMNS[kind])
    if isinstance(text, list):  # an abstract as a list of sentences
        text = " ".join(map(str, text)).replace("<S>", "").replace("</S>", "")
    check_fields({COLUMNS[kind]: text}, {COLUMNS[kind]: str}, f"{name}, row {number}")
    names = [str(row[key]) for key in (*ID_COLUMNS, "article_id") if row.get(key) is not None]
    return {
        "item_id": names[0] if names else str(number - 1),
        "source": str(text).strip().removesuffix("TL;DR:").strip(),  # which ends the prompts of `trl-lib/tldr`
    }


# The task


@dataclass
class WritingDataset(Rows):
    """The section `dataset`."""

    name: str | None = setting(f"Hub id; path of a {LOCAL_FILE}; or 'demo' for generated posts.")
    type: str | None = setting("'tldr' or 'arxiv'; by default inferred from the name.", choices=KINDS)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.type = self.type or infer_kind(str(self.name))

    def load(self, split: str | None) -> Dataset:
        """Loads the sources of a split, with the errors of [`load_writing_dataset`]."""
        return load_writing_dataset(str(self.name), split, self.type, self.config)


@dataclass
class Reward:
    """The section `reward`."""

    kind: str = setting(
        "'grounded' pays for texts that say what their source says; 'compat' is CoMLRL's reward, which does not "
        "read it.",
        REWARDS[0],
        choices=REWARDS,
    )


def make_environment(settings: TaskSettings, brief: bool = False) -> WritingEnvironment:
    """Builds the environment, with `brief` prompts or not."""
    dataset, reward = settings.sections["dataset"], settings.sections["reward"]
    return WritingEnvironment(dataset.type, settings.num_agents, reward.kind, brief)


TASK = Task(make_environment, load_datasets, settings={"dataset": WritingDataset, "reward": Reward})
