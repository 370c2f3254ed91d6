"""Words and sentences of English texts, and how much of them comes from a source."""

import json
import re
from collections import Counter
from collections.abc import Collection, Iterable, Sequence

from trl_multiagent.environments.embedded import read_data


LISTS = json.loads(read_data("writing_words.json"))
STOP_WORDS = frozenset(LISTS["stop_words"].split())
TRANSITIONS = {category: phrases.split("|") for category, phrases in LISTS["transitions"].items()}
FUNCTION_WORDS = STOP_WORDS.union(LISTS["more_function_words"].split(), *TRANSITIONS.values())
WHOLE_PHRASES = [re.compile(rf"\b(?:{'|'.join(map(re.escape, phrases))})\b") for phrases in TRANSITIONS.values()]
COMPLETE = re.compile(r"[.!?][\"')]*\s*$")
SENTENCE_END = re.compile(r"(?<=[.!?])\s+|\n+")
STEM = 6  # letters of a word that are compared, so that most inflected forms of a word are the same
SHARED = 0.05  # a word that more than this share of the sources have says little about one of them
FEW = 5  # with fewer key words, all content words of a source are key words
RUN = 2  # words in a row that count as copied


def words(text: str) -> list[str]:
    """Returns the words of a text, in lower case."""
    return re.findall(r"\b\w+\b", text.lower())


def content_words(text: str) -> list[str]:
    """Returns the words of a text that are no function words, cut to their first letters."""
    return [word[:STEM] for word in words(text) if word not in FUNCTION_WORDS]


def count_transitions(text: str, whole: bool) -> int:
    """
    Returns how many of the 12 categories of transitions a text has. Unless they must be `whole` words, "as" is found
    in "was", too.
    """
    text = text.lower()
    if whole:
        return sum(pattern.search(text) is not None for pattern in WHOLE_PHRASES)
    return sum(any(phrase in text for phrase in phrases) for phrases in TRANSITIONS.values())


def key_words(sources: Iterable[str]) -> list[list[str]]:
    """
    Returns the words that tell each source from the others: its content words that at most 5 % of the sources have. A
    source with fewer than five of them gets all its content words.
    """
    of_sources = [dict.fromkeys(content_words(source)) for source in sources]
    counts = Counter(word for found in of_sources for word in found)
    limit = max(1.0, SHARED * len(of_sources))
    rare = [[word for word in found if counts[word] <= limit] for found in of_sources]
    return [keys if len(keys) >= FEW else [*found] for keys, found in zip(rare, of_sources, strict=True)]


def copied_share(text: str, others: Sequence[str]) -> float:
    """
    Returns the share, 0 to 1, of the pairs of neighbouring words that another text has, or the text itself further in
    front.
    """
    *known, own = [[tuple(x[k : k + RUN]) for k in range(len(x) - RUN + 1)] for x in map(words, [*others, text])]
    seen = {run for runs in known for run in runs}
    copied = len(own) - len(set(own) - seen)
    return copied / len(own) if own else 0.0


def supported_share(text: str, keys: Collection[str]) -> float:
    """
    Returns the share, 0 to 1, of a text that is in sentences with key words. A sentence of n words counts in full if
    it has n/10 different ones, and at least two; with fewer it counts in part.
    """
    supported, total = 0.0, 0
    for sentence in SENTENCE_END.split(text):
        length, found = len(words(sentence)), len(set(content_words(sentence)).intersection(keys))
        supported += length * min(1.0, found / max(2.0, length / 10))
        total += length
    return supported / total if total else 0.0


def function_share(text: str) -> float:
    """
    Returns the share, 0 to 1, of the words of a text that are function words. In each sentence, every one counts once.
    """
    found = sum(len(FUNCTION_WORDS.intersection(words(sentence))) for sentence in SENTENCE_END.split(text))
    return found / max(1, len(words(text)))
