"""
The data of writing, and its task: posts and abstracts, and the generated posts of the demo.

A post of the demo is about a thing that somebody bought and that broke. The demo's base model has seen careless
answers, of which most do not fit the post, or not the partner's text.
"""

import json
import random
from dataclasses import dataclass

from trl_multiagent.environments.base import ID_COLUMNS
from trl_multiagent.environments.dataset_rows import LOCAL_FILE, Dataset, check_fields, make_dataset
from trl_multiagent.environments.embedded import generated_rows, read_data
from trl_multiagent.environments.task import Task, TaskSettings, load_datasets, setting
from trl_multiagent.environments.yaml_task import Rows
from trl_multiagent.models.imitation import ImitationModel
from trl_multiagent.tasks.writing.environment import (
    DETAIL,
    REWARDS,
    ROLES,
    SPLIT,
    SUMMARY,
    WRITER,
    WritingEnvironment,
    first_prompts,
    key_words,
)


COLUMNS = {"tldr": "prompt", "arxiv": "abstract_text"}  # the column with the source, for each kind of data
KINDS = tuple(COLUMNS)
DEMO = "demo"  # generated posts


def infer_kind(name: str) -> str:
    """Returns the kind of data that the name of a dataset says. Raises `ValueError` if it says none."""
    for kind in KINDS:
        if kind in ("tldr" if name == DEMO else name.lower()):
            return kind
    raise ValueError(f"`dataset.name` is {name!r}, which does not say the kind of its texts: set `dataset.type`.")


def load_writing_dataset(
    name: str, split: str | None = None, type: str | None = None, config: str | None = None
) -> Dataset:
    """
    Loads sources to write about.

    Args:
        name (`str`): `"demo"` for generated posts, a Hub id such as `"trl-lib/tldr"`, or the path of a local file.
        split (`str`, *optional*): Split in the syntax of `datasets`, by default `train`.
        type (`str`, *optional*): `"tldr"` for posts in the column `prompt`, `"arxiv"` for abstracts in the column
            `abstract_text`; by default inferred from `name`.
        config (`str`, *optional*): Configuration of the dataset on the Hub.

    Returns:
        `Dataset`: Columns `item_id`, `source`, and `key_words`, see [`key_words`].

    Raises `ValueError` if the dataset is malformed, and `ConnectionError` if the Hub cannot be reached.
    """
    kind = type or infer_kind(name)
    rows = generated_rows(make_posts, SIZES, split) if name == DEMO else Rows(name=name, config=config).load(split)
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


# The demo


POSTS = json.loads(read_data("writing_posts.json"))
SIZES = {"train": 720, "test": 96}
# How often an answer is written in each way. The ways "short" and "three" go together best
WAYS = {
    SUMMARY: {"short": 4, "long": 3, "vague summary": 3, "copy": 1, "list": 2},
    DETAIL: {"three": 4, "one": 3, "vague detail": 3, "copy": 1, "wrong": 2},
}


def make_posts(split: str) -> list[dict]:
    """
    Generates posts of the split `"train"` (720 posts) or `"test"` (96), with the column `prompt` as in `trl-lib/tldr`.
    Values of a fact are equally frequent.
    """
    rng, rows, decks = random.Random(split), [], {}
    for fact, text in POSTS["facts"].items():
        values = text.split()
        decks[fact] = [value for _ in range(0, SIZES[split], len(values)) for value in rng.sample(values, len(values))]
    for number in range(SIZES[split]):
        facts = {fact: deck[number] for fact, deck in decks.items()}
        post = " ".join(rng.choice(wordings).format(**facts) for wordings in POSTS["sentences"])
        rows.append({"id": f"{split}/{number}", "prompt": f"{post}\n\nTL;DR:", "facts": facts})
    return rows


def demonstrate(row: dict, role: str, rng: random.Random) -> str:
    """
    Draws an agent's answer to a row of [`make_posts`]. Most of them do not fit the post, or not the partner's text.
    """
    if role == WRITER:
        return f"\n{SPLIT}\n".join(demonstrate(row, of_text, rng) for of_text in ROLES["tldr"])
    (way,) = rng.choices([*WAYS[role]], [*WAYS[role].values()])
    if way == "copy":
        sentences = row["prompt"].partition("\n")[0].split(". ")
        return ". ".join(sentences[:2]) + "." if role == SUMMARY else ". ".join(sentences)
    facts = row["facts"]
    if way == "wrong":
        way, facts = "three", {fact: rng.choice(text.split()) for fact, text in POSTS["facts"].items()}
    return POSTS["answers"][way].format(**facts)


def make_demonstrations(number: int, rng: random.Random) -> list[tuple[str, str]]:
    """Draws pairs of a prompt and an answer, of both agents of the team and of the single agent."""
    rows, pairs = make_posts("train"), []
    for _ in range(number):
        row, role = rng.choice(rows), rng.choice((SUMMARY, DETAIL, WRITER))
        prompts = first_prompts(row["prompt"].partition("\n")[0], "tldr", (role,), brief=True)
        pairs.append((prompts[role], demonstrate(row, role, rng)))
    return pairs


# The task


@dataclass
class WritingDataset(Rows):
    """The section `dataset`."""

    generated = (DEMO,)
    name: str | None = setting(f"Hub id; path of a {LOCAL_FILE}; or '{DEMO}' for generated posts.")
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


def make_environment(settings: TaskSettings) -> WritingEnvironment:
    dataset, reward = settings.sections["dataset"], settings.sections["reward"]
    return WritingEnvironment(dataset.type, settings.num_agents, reward.kind, brief=dataset.name == DEMO)


TASK = Task(
    make_environment,
    load_datasets,
    settings={"dataset": WritingDataset, "reward": Reward},
    models={DEMO: ImitationModel("demo-writing", make_demonstrations, 800).path},
)
