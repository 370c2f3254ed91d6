"""
Taboo: the describer says what a word means without writing it; the guesser reads the description and names one of
four words. The word itself is struck out before the guesser reads, and costs half of the reward. Without the
description, no guesser is right more often than one time in four.

    trl-multiagent train magrpo --config taboo
"""

import random
import re

from trl_multiagent import Task, workflow
from trl_multiagent.configs.recipes.real.hidden import named
from trl_multiagent.configs.recipes.real.words import CATEGORIES, HELD_OUT, TRAINING


RANGES = {"reward": (0.0, 1.0), "right": (0.0, 1.0), "said_the_word": (0.0, 1.0)}


@workflow(roles=("describer", "guesser"), metric_ranges=RANGES)
async def taboo(item, agents):
    word, options = item["word"], item["options"]
    hint = await agents.describer(f"What is a {word}? Do not write the word {word}.", max_tokens=14)
    hint, struck = strike(word, hint)
    question = f"Your friend says: {hint}\nWhat is it: {options}? Answer with one word."
    guess = await agents.guesser(question, max_tokens=8)
    right = named(guess, options) == {word}
    agents.log("right", right)
    agents.log("said_the_word", struck > 0)
    return right * (0.5 if struck else 1.0)


def strike(word, text):
    """
    Returns the text without the word, and how often it was there. A word that begins with its first four letters
    counts, too; of a word of three letters, the plural.
    """
    return re.subn(rf"\b{word[:4]}{'[a-z]*' if len(word) > 3 else 's?'}\b", "___", text, flags=re.IGNORECASE)


def draw(known, number, seed):
    """Returns items with four words of four categories."""
    kind = {word: name for name, words in CATEGORIES.items() for word in words.split()}
    rng, items = random.Random(seed), []
    while len(items) < number:
        options = rng.sample(known, 4)
        if len({kind[word] for word in options}) == 4:
            items.append({"word": rng.choice(options), "options": ", ".join(options)})
    return items


def load_datasets(settings):
    from datasets import Dataset

    return Dataset.from_list(draw(TRAINING, 512, 0)), Dataset.from_list(draw(HELD_OUT, 64, 1))


TASK = Task(lambda settings: taboo, load_datasets, roles=taboo.roles)
