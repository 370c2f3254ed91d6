"""The joint reward of two texts. `recipes/writing/README.md` has it as tables."""

import math
from dataclasses import dataclass

from trl_multiagent.tasks.writing import words


REWARD_VERSION = 1
REWARDS = ("grounded", "compat")
LARGEST = 2.98  # 0.5 + 1 + 0.5 + 0.4 * 0.95 + 0.6: with all 12 categories of transitions, the fourth level is below 1
# For each kind, a pair of texts that fits no item, and earns all of `compat`
CONSTANT: dict[str, tuple[str, str]] = {kind: tuple(pair) for kind, pair in words.LISTS["constant"].items()}

Ramp = tuple[float, float, float, float]  # 0 at the first number, 1 from the second to the third, 0 at the fourth


@dataclass(frozen=True)
class Structure:
    """What two texts of a kind should look like."""

    tokens: tuple[int, int]  # fewest and most of each text, separated by white space
    length: Ramp  # characters of the second text for one of the first
    variety: Ramp  # different words of the second text for one of the first
    overlap: float  # Jaccard similarity of their words, without stop words, that earns all
    both: bool  # whether transitions of both texts count, or those of the second
    known: float  # share of the content words that should come from the source


STRUCTURES = {
    "tldr": Structure((8, 256), (1.1, 1.6, 3.2, 5.0), (1.3, 2.0, 1e8, 1e9), 0.03, False, 0.4),
    "arxiv": Structure((128, 256), (0.8, 1.3, 1.6, 2.0), (0.5, 0.7, 1.3, 1.7), 0.23, True, 0.35),
}


def rise(value: float, start: float, end: float) -> float:
    """Returns 0 up to `start`, 1 from `end`, and a line between them."""
    return min(1.0, max(0.0, (value - start) / (end - start)))


def ramp(value: float, points: Ramp) -> float | None:
    """Returns how good a value is, 0 to 1; `None` outside of the points."""
    zero, low, high, end = points
    return min(rise(value, zero, low), 1.0 - rise(value, high, end)) if zero <= value <= end else None


def levels(first: str, second: str, structure: Structure, whole: bool = False) -> list[float]:
    """
    Computes the four levels of CoMLRL's reward for writing (`tldr_combined_reward` and `arxiv_combined_reward` of its
    recipes).

    If a pair is out of the bounds of a level, this level and all that follow are 0. If `whole` is set, transitions
    must be whole words, and repeated white space counts once.
    """
    if whole:
        first, second = " ".join(first.split()), " ".join(second.split())
    own, other = set(words.words(first)), set(words.words(second))
    fewest, most = structure.tokens
    fits = all(fewest <= len(text.split()) <= most for text in (first, second))
    length = ramp(len(second) / len(first), structure.length) if fits else None
    variety = ramp(len(other) / len(own), structure.variety) if own and length is not None else None
    if variety is None:
        return [0.5 * fits, length or 0.0, 0.0, 0.0]
    joint = f"{first} {second}" if whole else first + second
    number = words.count_transitions(joint if structure.both else second, whole)
    transitions = 0.4 + 0.05 * (number - 1) if number else 0.0
    own, other = own - words.STOP_WORDS, other - words.STOP_WORDS
    overlap = len(own & other) / len(own | other) if own | other else 1.0
    style = 0.4 * transitions + 0.6 * min(overlap, structure.overlap) / structure.overlap
    return [0.5, length or 0.0, 0.5 * variety, style]


def grounding(text: str, item: dict, partner: str, structure: Structure) -> dict[str, float]:
    """
    Measures how much of a text comes from the source of an item.

    Returns shares, 0 to 1: `support`, of the text that is in sentences with key words; `precision`, of its content
    words that are in the source; `copied`, of its pairs of neighbouring words that are in the source, in the partner's
    text, or twice in the text; `function_words`, of its words; and `complete`, whether its last sentence ends.
    `grounding` is the product of what follows from them.
    """
    content = set(words.content_words(text))
    known = content.intersection(words.content_words(item["source"]))
    found = {
        "support": words.supported_share(text, item["key_words"]),
        "precision": len(known) / max(1, len(content)),
        "copied": words.copied_share(text, [item["source"], partner]),
        "function_words": words.function_share(text),
        "complete": float(words.COMPLETE.search(text) is not None),
    }
    precision, fluency = rise(found["precision"], 0.2, structure.known), rise(found["function_words"], 0.1, 0.25)
    original = 1.0 - rise(found["copied"], 0.4, 0.65)
    found["grounding"] = found["support"] * precision * original * fluency * found["complete"]
    return found


def pair_metrics(first: str, second: str, item: dict, kind: str, reward: str) -> dict[str, float]:
    """
    Scores a pair of texts about an item. The reward `"compat"` is CoMLRL's, the sum of its levels; `"grounded"` is the
    sum times `source`.

    Returns `total_reward`; `level_1` to `level_4`; `compat`, their sum in CoMLRL's reward; the mean over both texts of
    what [`grounding`] measures; `recall`, the share of the key words that the pair has; and `source`, 0 to 1: the
    square root of the product of both groundings, times the recall, of which 0.2 is enough.
    """
    structure = STRUCTURES[kind]
    compat = levels(first, second, structure)
    earned = compat if reward == "compat" else levels(first, second, structure, whole=True)
    texts = [grounding(first, item, "", structure), grounding(second, item, first, structure)]
    keys = set(item["key_words"])
    recall = len(keys.intersection(words.content_words(f"{first} {second}"))) / max(1, len(keys))
    source = min(1.0, recall / 0.2) * math.sqrt(texts[0]["grounding"] * texts[1]["grounding"])
    return {
        "total_reward": sum(earned) * (1.0 if reward == "compat" else source),
        **{f"level_{k}": level for k, level in enumerate(earned, 1)},
        "compat": sum(compat),
        "source": source,
        "recall": recall,
        **{name: (texts[0][name] + texts[1][name]) / 2 for name in texts[0]},
    }
