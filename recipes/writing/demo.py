"""
The task of the demo of writing: generated posts and their base model.

A post is about a thing that somebody bought and that broke. The base model has seen careless answers, of which most do
not fit the post, or not the partner's text.
"""

import json
import random
from dataclasses import dataclass
from pathlib import Path

from trl_multiagent.environments.dataset_rows import Dataset, generated_rows, read_data
from trl_multiagent.environments.task import Task, TaskSettings, load_datasets
from trl_multiagent.models.imitation import ImitationModel
from trl_multiagent.tasks.writing import data
from trl_multiagent.tasks.writing.environment import (
    DETAIL,
    ROLES,
    SPLIT,
    SUMMARY,
    WRITER,
    WritingEnvironment,
    first_prompts,
)


DEMO, KIND = "demo", "tldr"  # the name of the posts and of their base model; and their kind
FAMILY = sorted(Path(data.__file__).parent.glob("*.py"))  # whose code determines the base model, too
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
        return f"\n{SPLIT}\n".join(demonstrate(row, of_text, rng) for of_text in ROLES[KIND])
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
        prompts = first_prompts(row["prompt"].partition("\n")[0], KIND, (role,), brief=True)
        pairs.append((prompts[role], demonstrate(row, role, rng)))
    return pairs


# The task


@dataclass
class DemoDataset(data.WritingDataset):
    """The section `dataset`, in which the name `demo` selects the generated posts."""

    generated = (DEMO,)

    def __post_init__(self) -> None:
        if self.name == DEMO:
            self.type = self.type or KIND
        super().__post_init__()

    def load(self, split: str | None) -> Dataset:
        if self.name != DEMO:
            return super().load(split)
        return data.make_items(generated_rows(make_posts, SIZES, split), KIND, DEMO)


def make_environment(settings: TaskSettings) -> WritingEnvironment:
    return data.make_environment(settings, brief=settings.dataset.name == DEMO)


# Writing in which the name `demo` selects the generated posts and their base model
TASK = Task(
    make_environment,
    load_datasets,
    settings={**data.TASK.settings, "dataset": DemoDataset},
    models={DEMO: ImitationModel("demo-writing", make_demonstrations, 800, FAMILY).path},
)
