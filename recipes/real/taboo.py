"""
Taboo: the describer says what a word means, without the word itself; the guesser reads that and names one of four
words. If the describer writes the word, the game is lost. Without the description, a guesser is expected to be right
one time in four at most, over the draw of the items.

    trl-multiagent train magrpo --config taboo
"""

import random
import re
import unicodedata

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
# Digits and signs, and below them the letters that they look like
ALIKE = "01345789!|@$"
LATIN = "oieastbgilas"
USUAL = "Mn Me Cf Zs Pd Pi Pf".split()  # kinds of characters: accents, characters without a width, spaces, punctuation
# They have one of the words in them
ORDINARY = """train trained training trainer brain grain drain strain terrain constraint chair price prices driver
drivers environment address beforehand textbook textbooks cookbook vegetable vegetables comfortable portable stable
suitable eatable notable flake flakes clamp unwind scavenger cupcake cupcakes attractor workhorse matrices"""


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
    Returns whether a text has the word, also in disguise: within other letters, in parts, or in signs that look like
    its letters. A word that begins with its first four letters counts, too. Of a word of three letters, which many
    others have in them, only the word itself and its plural count. Letters, digits, signs and pictures beyond ASCII
    always count, except accents, dashes and quotation marks, because many look like a word or mean it.
    """
    (word,), said = letters(word), letters(text)
    if any(x > "~" and unicodedata.category(x) not in USUAL for x in unicodedata.normalize("NFKD", text)):
        return True
    in_one = (x.startswith(word[:4]) or (word in x and x not in letters(ORDINARY)) for x in said if len(word) > 3)
    parts = ("".join(said[k:n]) for k in range(len(said)) for n in range(k + 1, k + len(word) + 2))
    return any(in_one) or any(x in (word, word + "s") for x in parts)


def letters(text):
    """Returns the words of a text in plain letters. `l` is written as `i`, because `I` looks like both."""
    text = unicodedata.normalize("NFKD", text).translate(str.maketrans(ALIKE, LATIN)).casefold().replace("l", "i")
    return re.findall("[a-z]+", "".join(x for x in text if unicodedata.category(x) not in ("Mn", "Me", "Cf")))


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
