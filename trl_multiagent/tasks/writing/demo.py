"""
The demo: generated posts about a thing that somebody bought and that broke, careless answers, and a model that is
trained on these.
"""

import json
import random

from trl_multiagent.environments.embedded import read_data
from trl_multiagent.models.imitation import ImitationModel
from trl_multiagent.tasks.writing.prompts import DETAIL, ROLES, SPLIT, SUMMARY, WRITER, first_prompts


FILE = "writing_posts.json"
POSTS = json.loads(read_data(FILE))
SIZES = {"train": 720, "test": 96}
# How often an answer is written in each way. The ways "short" and "three" go together best
WAYS = {
    SUMMARY: {"short": 4, "long": 3, "vague summary": 3, "copy": 1, "list": 2},
    DETAIL: {"three": 4, "one": 3, "vague detail": 3, "copy": 1, "wrong": 2},
}


def make_posts(split: str) -> list[dict]:
    """
    Makes posts with the columns of `trl-lib/tldr`, `prompt` and `completion`, of the split `"train"` (720 posts) or
    `"test"` (96). Values of a fact are equally frequent.
    """
    rng, rows, decks = random.Random(split), [], {}
    for fact, text in POSTS["facts"].items():
        values = text.split()
        decks[fact] = [value for _ in range(0, SIZES[split], len(values)) for value in rng.sample(values, len(values))]
    for number in range(SIZES[split]):
        facts = {fact: deck[number] for fact, deck in decks.items()}
        post = " ".join(rng.choice(wordings).format(**facts) for wordings in POSTS["sentences"])
        texts = {"prompt": f"{post}\n\nTL;DR:", "completion": POSTS["answers"]["long"].format(**facts)}
        rows.append({"id": f"{split}/{number}", **texts, "facts": facts})
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


demo_model = ImitationModel("demo-writing", make_demonstrations, 800).path
