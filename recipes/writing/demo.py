"""
The base model of the demo of writing. It has seen careless answers, of which most do not fit the post, or not the
partner's text.
"""

import random
from pathlib import Path

from trl_multiagent.models.imitation import ImitationModel
from trl_multiagent.tasks.writing import data, environment
from trl_multiagent.tasks.writing.data import POSTS, make_posts
from trl_multiagent.tasks.writing.environment import DETAIL, ROLES, SPLIT, SUMMARY, WRITER, first_prompts


# How often an answer is written in each way. The ways "short" and "three" go together best
WAYS = {
    SUMMARY: {"short": 4, "long": 3, "vague summary": 3, "copy": 1, "list": 2},
    DETAIL: {"three": 4, "one": 3, "vague detail": 3, "copy": 1, "wrong": 2},
}


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


MODEL = ImitationModel(
    "demo-writing", make_demonstrations, 800, sources=[Path(data.__file__), Path(environment.__file__)]
)
