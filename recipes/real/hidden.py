"""
Hidden: one thing of four is in a box. The speaker knows which; the decider knows the four and what the speaker writes,
and names one. Without the message, a decider is expected to be right one time in four at most, over the draw of the
items.

    trl-multiagent train magrpo --config hidden
"""

import random
import re

from trl_multiagent import Task, workflow
from trl_multiagent.configs.recipes.real.words import HELD_OUT, TRAINING


@workflow(roles=("speaker", "decider"), metric_ranges={"reward": (0.0, 1.0)})
async def hidden(item, agents):
    word, options = item["word"], item["options"]
    message = await agents.speaker(
        f"A {word} is hidden in a box. Write a short message that tells your friend what is in the box."
    )
    answer = await agents.decider(f"Your friend says: {message}\nWhat is in the box: {options}? Answer with one word.")
    agents.log("told", named(message, options) == {word})
    return float(named(answer, options) == {word})


def named(text, options):
    """Returns which of the options a text names."""
    return set(options.split(", ")) & set(re.findall(r"[a-z]+", text.lower()))


def draw(known, number, seed):
    rng, items = random.Random(seed), []
    for place in range(number):
        options = rng.sample(known, 4)
        items.append({"id": place, "word": rng.choice(options), "options": ", ".join(options)})
    return items


def even(items):
    """Moves the hidden things in turn to each of the four places, so that no place is right more often than others."""
    for k, item in enumerate(items):
        options = item["options"].split(", ")
        options.remove(item["word"])
        options.insert(k % 4, item["word"])
        item["options"] = ", ".join(options)
    return items


def load_datasets(settings=None):
    from datasets import Dataset

    return Dataset.from_list(draw(TRAINING, 512, 0)), Dataset.from_list(even(draw(HELD_OUT, 64, 1)))


TASK = Task(lambda settings: hidden, load_datasets, roles=hidden.roles)
