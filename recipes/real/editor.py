"""
Editor: a writer gets three words and drafts a sentence; an editor, who sees the draft alone, shortens it. Both are
paid for the words in the final text, if that is one short sentence that says no word twice. A list of the words is no
sentence: other words stand between them, and two are little ones such as `the`.

    trl-multiagent train magrpo --config editor

`ALONE` is the same for one agent, which gets the words and writes the final text.
"""

import itertools
import random
import re

from trl_multiagent import Task, workflow
from trl_multiagent.configs.recipes.real.words import HELD_OUT, TRAINING


LITTLE = {*"a an the and or of in on at to by for with from into is are was were it its as".split()}
RANGES = {"reward": (0.0, 1.0), "solved": (0.0, 1.0)}


@workflow(roles=("writer", "editor"), metric_ranges=RANGES)
async def editor(item, agents):
    draft = await agents.writer(f"Write one short sentence with the words {item['words']}.")
    text = await agents.editor(f"Write this as one sentence of at most twelve words:\n{draft}")
    return pay(text, item["words"], agents)


@workflow(roles=("writer",), metric_ranges=RANGES)
async def alone(item, agents):
    text = await agents.writer(f"Write one sentence of at most twelve words with the words {item['words']}.")
    return pay(text, item["words"], agents)


def pay(text, words, agents):
    """Returns the share of the words that a text has, times what is lost for its form."""
    said = re.findall(r"[a-z']+", text.lower())
    wanted, content = {*words.split(", ")}, [word for word in said if word not in LITTLE]
    share = len(wanted & {*said}) / len(wanted)
    distinct = len({*content}) / max(1, len(content))
    length = min(1.0, 12 / max(1, len(said)), len(said) / 5)
    is_list = len(said) - len(content) < 2 or any({*pair} <= wanted for pair in itertools.pairwise(said))
    sentence = not is_list and re.fullmatch(r"[A-Z][^.!?\n]*[.!?]", text.strip()) is not None
    agents.log("solved", share == distinct == length == sentence == 1)
    agents.log("words", share)
    return share * distinct**2 * length**2 * (1.0 if sentence else 0.5)


def draw(known, number, seed):
    rng = random.Random(seed)
    return [{"id": place, "words": ", ".join(rng.sample(known, 3))} for place in range(number)]


def load_datasets(settings):
    from datasets import Dataset

    return Dataset.from_list(draw(TRAINING, 512, 0)), Dataset.from_list(draw(HELD_OUT, 64, 1))


TASK = Task(lambda settings: editor, load_datasets, roles=editor.roles)
ALONE = Task(lambda settings: alone, load_datasets, roles=alone.roles)
