"""
Taboo: the describer says what a word means, without the word itself; the guesser reads that and names one of four
words. If the describer writes the word, the game is lost. Without the description, no guesser is right more often than
one time in four.

    trl-multiagent train magrpo --config taboo
"""

import random
import re

from trl_multiagent import Task, workflow
from trl_multiagent.configs.recipes.real.hidden import named
from trl_multiagent.configs.recipes.real.words import CATEGORIES, HELD_OUT, TRAINING


DESCRIBE = "Say what a word means, without the word itself.\nmilk: a white drink from cows\n{word}:"
GUESS = """Words: chair, milk, snow, dog
Hint: a white drink from cows
Answer: milk

Words: {options}
Hint: {hint}
Answer:"""


@workflow(roles=("describer", "guesser"), metric_ranges={"reward": (0.0, 1.0), "said_the_word": (0.0, 1.0)})
async def taboo(item, agents):
    word, options = item["word"], item["options"]
    hint = await agents.describer(DESCRIBE.format(word=word), stop="\n", max_tokens=12)
    said, guess = says(word, hint), ""
    if not said:
        question = GUESS.format(options=options, hint=hint.strip())
        guess = await agents.guesser(question, stop="\n", max_tokens=4)
    agents.log("said_the_word", said)
    return float(named(guess, options) == {word})


def says(word, text):
    """
    Returns whether a text has the word. A word that begins with its first four letters counts, too; of a word of three
    letters, the plural.
    """
    pattern = rf"\b{word[:4]}{'[a-z]*' if len(word) > 3 else 's?'}\b"
    return re.search(pattern, text, flags=re.IGNORECASE) is not None


def draw(known, number, seed):
    """Returns items with four words of four categories."""
    kind = {word: name for name, words in CATEGORIES.items() for word in words.split()}
    rng, items = random.Random(seed), []
    while len(items) < number:
        options = rng.sample(known, 4)
        if len({kind[word] for word in options}) == 4:
            items.append({"id": len(items), "word": rng.choice(options), "options": ", ".join(options)})
    return items


def load_datasets(settings):
    from datasets import Dataset

    return Dataset.from_list(draw(TRAINING, 512, 0)), Dataset.from_list(draw(HELD_OUT, 64, 1))


TASK = Task(lambda settings: taboo, load_datasets, roles=taboo.roles)
