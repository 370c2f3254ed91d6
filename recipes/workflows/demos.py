"""
The items of the workflows in this folder, and their base models, which have seen careless players. Nothing is
downloaded.
"""

import random
from itertools import product

from trl_multiagent import Task
from trl_multiagent.models.imitation import ImitationModel


WORDS = {
    "noun": ("fox", "girl", "king", "robot", "horse", "baker", "owl", "sailor"),
    "verb": ("sleeps", "sings", "waits", "dances", "reads", "works", "laughs", "hides"),
    "place": ("garden", "tower", "kitchen", "forest", "harbour", "market", "library", "desert"),
}
NUMBERS = range(6)


def datasets_of(items):
    """Returns the function of a task that makes its two datasets from `items()`."""

    def load_datasets(settings):
        from datasets import Dataset

        train, held_out = items()
        return Dataset.from_list(train), Dataset.from_list(held_out)

    return load_datasets


def demo_task(environment, items, demonstrate, steps):
    """
    Makes a task of a workflow, its items to train on and to evaluate on, and a base model, which is trained for some
    steps on demonstrations.
    """

    name = environment.run.__name__.replace("_", "-")
    demo = ImitationModel(f"{name}-demo", lambda number, rng: demonstrate(environment, number, rng), steps)
    return Task(lambda settings: environment, datasets_of(items), models={"demo": demo.path}, roles=environment.roles)


def transcripts(environment, episodes):
    """
    Plays episodes, each an item with the answers of its agents in order. Returns the prompts and answers of each, as
    pairs of texts. A prompt begins with the agent's own past turns.
    """
    from trl_multiagent.rollout.history import whole_prompt
    from trl_multiagent.rollout.tree import Samples, play_episodes

    pairs = [[] for _ in episodes]

    def sample(nodes, num_generations):
        samples = {role: [] for role in environment.roles}
        for node in nodes:
            for role, prompt in node.prompts.items():
                answer = episodes[node.tree][1][len(pairs[node.tree])]
                pairs[node.tree].append((whole_prompt(role, node.history, prompt, as_chat=False), answer))
                samples[role].append(Samples([], [[]], [answer]))
        return samples

    play_episodes([item for item, _ in episodes], environment, sample)
    return pairs


def shuffled(items):
    random.Random(0).shuffle(items)
    return items


def three_words():
    items = shuffled([dict(zip(WORDS, words, strict=True)) for words in product(*WORDS.values())])
    return items[64:], items[:64]


def careless_writing(environment, number, rng):
    """In three of ten places, there is another word of its kind."""

    def careless(words):
        kinds = zip(WORDS, words, strict=True)
        return [rng.choice(WORDS[kind]) if rng.random() < 0.3 else word for kind, word in kinds]

    episodes, shown = [], []
    for _ in range(number):
        words = [rng.choice(of_kind) for of_kind in WORDS.values()]
        draft, sentence = "a {} {} in the {}".format(*careless(words)), ""
        shown.append(int(rng.random() >= 0.5))  # the writer, or the editor of a good draft
        if shown[-1]:
            first, last = rng.choice(("The", "The", "the")), rng.choice((".", ".", ""))
            draft, sentence = "a {} {} in the {}".format(*words), "{} {} {} in the {}{}"
            sentence = sentence.format(first, *careless(words), last)
        episodes.append((dict(zip(WORDS, words, strict=True)), (draft, sentence)))
    return [pairs[k] for k, pairs in zip(shown, transcripts(environment, episodes), strict=True)]


def sums():
    # All sums are for both: the small model learns them as a table, in which a sum that it has not seen is missing
    items = [{"a": a, "b": b} for a in NUMBERS for b in NUMBERS]
    return items, items


def careless_sums(environment, number, rng):
    """Three sums of ten are wrong."""
    episodes = []
    for _ in range(number):
        item = {"a": rng.choice(NUMBERS), "b": rng.choice(NUMBERS)}
        total = item["a"] + item["b"]
        answers = [str(total + (rng.random() < 0.3) * rng.choice((-1, 1))) for _ in range(3)]
        episodes.append((item, answers))
    pairs = [pair for episode in transcripts(environment, episodes) for pair in episode]
    rng.shuffle(pairs)
    return pairs[:number]


def three_dice():
    items = shuffled([{"dice": list(dice)} for dice in product(range(1, 7), repeat=3)])
    return items[36:], items[:36]


def careless_debates(environment, number, rng):
    """Debaters name any die, and judges often guess."""
    episodes, shown = [], []
    for _ in range(number):
        item = {"dice": [rng.randint(1, 6) for _ in range(3)]}
        named = [str(rng.choice(item["dice"])) for _ in ("pro", "con")]
        total = rng.choice((2, 12)) if rng.random() < 0.4 else sum(map(int, named))
        shown.append(rng.choice((0, 1, 2, 2)))
        episodes.append((item, (*named, "pro" if total > 7 else "con")))
    return [pairs[k] for k, pairs in zip(shown, transcripts(environment, episodes), strict=True)]
