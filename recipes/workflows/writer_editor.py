"""
A writer drafts a sentence from three words. The editor sees only the draft and writes the final text, for which both
are rewarded.

    trl-multiagent train magrpo --config writer_editor

The order needs no class: `FunctionEnvironment(order=...)`.
"""

import random
import re
from itertools import product

from trl_multiagent import FunctionEnvironment, Task
from trl_multiagent.models.imitation import ImitationModel


WORDS = {
    "noun": ("fox", "girl", "king", "robot", "horse", "baker", "owl", "sailor"),
    "verb": ("sleeps", "sings", "waits", "dances", "reads", "works", "laughs", "hides"),
    "place": ("garden", "tower", "kitchen", "forest", "harbour", "market", "library", "desert"),
}
PROMPTS = {
    "writer": "Draft a sentence with the words {noun}, {verb}, {place}:\n",
    "editor": (
        "Write this draft as one sentence, with a capital and a full stop, and nothing else.\nDraft: "
        "{writer}\nSentence:\n"
    ),
}
SENTENCE = re.compile(r"The (\w+) (\w+) in the (\w+)\.")


def kept(completions, noun, verb, place, **columns):
    """
    Returns the share of the three words that are in their places of the final sentence; 0 if that has another form.
    """
    rewards = []
    for completion, *words in zip(completions, noun, verb, place, strict=True):
        sentence = SENTENCE.fullmatch(completion["editor"].strip())
        found = sentence.groups() if sentence else ()
        rewards.append(sum(a == b for a, b in zip(found, words, strict=False)) / 3)
    return rewards


def make_environment(settings):
    return FunctionEnvironment(PROMPTS, kept, order=[["writer"], ["editor"]])


def load_datasets(settings):
    from datasets import Dataset

    items = [dict(zip(WORDS, words, strict=True)) for words in product(*WORDS.values())]
    random.Random(0).shuffle(items)
    return Dataset.from_list(items[64:]), Dataset.from_list(items[:64])


# The base model of the run without a download: it has seen careless writers and editors


def careless(words, rng):
    """Replaces some of the words by others of their kind."""
    return [rng.choice(WORDS[kind]) if rng.random() < 0.3 else word for kind, word in zip(WORDS, words, strict=True)]


def demonstrate(number, rng):
    """Draws pairs of a prompt and an answer."""
    pairs = []
    for _ in range(number):
        words = [rng.choice(of_kind) for of_kind in WORDS.values()]
        draft = "a {} {} in the {}".format(*careless(words, rng))
        if rng.random() < 0.5:
            pairs.append((PROMPTS["writer"].format(**dict(zip(WORDS, words, strict=True))), draft))
        else:
            first, last = rng.choice(("The", "The", "the")), rng.choice((".", ".", ""))
            sentence = "{} {} {} in the {}{}".format(first, *careless(words, rng), last)
            prompt = PROMPTS["editor"].format(writer="a {} {} in the {}".format(*words))
            pairs.append((prompt, sentence))
    return pairs


DEMO = ImitationModel("writer-editor-demo", demonstrate, steps=300)
TASK = Task(make_environment, load_datasets, models={"demo": DEMO.path}, roles=("writer", "editor"))
