"""
Writing: two agents write two texts about one source, which should go together.

For a post (TLDR), `summary` writes a short summary and `detail` a longer one. For the abstract of a paper (arXiv),
`background` and `method` write the two paragraphs of an introduction. Neither sees what the other writes. A single
agent, the `writer`, writes both texts, with a line between them. An episode has one turn.

The reward of a pair, at most 2.98, is the sum of the four levels of CoMLRL's reward: size, length, variety and style,
see [`levels`]. It does not read the source, and is the kind `compat`. The kind `grounded` is the sum times `source`,
which measures what share of both texts comes from the source, see [`grounding`]. It counts words: key words in any
order earn up to 87 %, and it pays nothing for truth.
"""

import json
import math
import re
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from trl_multiagent.environments.base import Environment, History, JointAction, Outcome, Prompts
from trl_multiagent.environments.dataset_rows import read_data


REWARD_VERSION = 2
REWARDS = ("grounded", "compat")
LARGEST = 2.98  # 0.5 + 1 + 0.5 + 0.4 * 0.95 + 0.6: with all 12 categories of transitions, the fourth level is below 1
LISTS = json.loads(read_data("writing_words.json"))
# For each kind, a pair of texts that fits no item, and earns all of `compat`
CONSTANT: dict[str, tuple[str, str]] = {kind: tuple(pair) for kind, pair in LISTS["constant"].items()}
SHARES = "level_2 level_4 source recall support precision copied function_words complete grounding"


# Prompts


SUMMARY, DETAIL, BACKGROUND, METHOD, WRITER = "summary", "detail", "background", "method", "writer"
ROLES = {"tldr": (SUMMARY, DETAIL), "arxiv": (BACKGROUND, METHOD)}
SPLIT = "[PARAGRAPH_SPLIT]"  # between the two texts of a single agent. Without it, the second is empty
UNSEEN = "You cannot see each other's texts."
LINKED = "link the sentences with words such as however, therefore, first, although, for example"
TASKS = {
    SUMMARY: "a short summary of this post, in one or two sentences. Name the facts that matter most",
    DETAIL: "a longer summary of this post, two to three times as long as a short one of one or two sentences. Add "
    f"details of the post that a short one leaves out, use many different words, and {LINKED}",
    BACKGROUND: f"the background of the work in this abstract and the reasons for it, in 130 to 140 words; {LINKED}",
    METHOD: f"the method of the work in this abstract and what follows from its results, in 170 to 190 words; "
    f"{LINKED}",
}
RULES = {
    "tldr": "Use your own words, and write nothing that the post does not say. Answer with the summary alone.",
    "arxiv": "Use your own words, and stay with the subject of the abstract. Answer with the text alone.",
}


def first_prompts(source: str, kind: str, roles: Sequence[str], brief: bool) -> dict[str, str]:
    """Returns the prompts of all agents. The `brief` ones of the demo leave to its model what a role writes."""
    if brief:
        return {role: f"{source}\n\n{role}:\n" for role in roles}
    first, second = (TASKS[role] for role in ROLES[kind])
    works = {
        role: f"Write {TASKS[role]}. Your partner writes the part `{other}`. {UNSEEN}"
        for role, other in (ROLES[kind], ROLES[kind][::-1])
    }
    works[WRITER] = f"Write two texts, with a line {SPLIT} between them. One is {first}. The other is {second}."
    return {role: f"{works[role]} {RULES[kind]}\n\n{source}\n\nYour answer:\n" for role in roles}


# Turns and rewards


class WritingEnvironment(Environment):
    """
    Two agents write two texts about one source, which should go together: `summary` and `detail` of a post, or
    `background` and `method` of an abstract. A single agent, the `writer`, writes both, with a line between them.
    Episodes have one turn.

    Items are rows of [`load_writing_dataset`]. The reward, at most 2.98, is described in [`pair_metrics`]. The metric
    `constant_text` is what a fixed pair of texts earns for the same item.

    Args:
        kind (`str`, *optional*, defaults to `"tldr"`): `"tldr"` or `"arxiv"`.
        num_agents (`int`, *optional*, defaults to `2`): 2 or 1.
        reward (`str`, *optional*, defaults to `"grounded"`): `"grounded"` or `"compat"`.
        brief (`bool`, *optional*, defaults to `False`): Whether prompts are the source and the role alone, as the
            demo's model knows them.

    Raises `ValueError` if an argument has another value.
    """

    watched_metrics = {"source": "no pair says what its source says"}
    unseen = UNSEEN, "Your partner's text is above."

    def __init__(
        self,
        kind: str = "tldr",
        num_agents: int = 2,
        reward: str = REWARDS[0],
        brief: bool = False,
    ):
        if kind not in ROLES or reward not in REWARDS or num_agents not in (1, 2):
            choices = f"`kind` is one of {(*ROLES,)}, `reward` one of {REWARDS}, and `num_agents` 1 or 2"
            raise ValueError(f"{choices}, not {kind!r}, {reward!r} and {num_agents}.")
        self.kind, self.reward, self.brief = kind, reward, brief
        self.roles = ROLES[kind] if num_agents == 2 else (WRITER,)
        rewards, levels = ("reward", "total_reward", "compat", "constant_text"), ("level_1", "level_3")
        self.metric_ranges = dict.fromkeys(rewards, (0.0, LARGEST)) | dict.fromkeys(levels, (0.0, 0.5))
        self.metric_ranges |= dict.fromkeys(SHARES.split(), (0.0, 1.0))

    def __repr__(self) -> str:
        settings = f"kind={self.kind!r}, reward={self.reward!r}, reward_version={REWARD_VERSION}"
        return f"WritingEnvironment(roles={self.roles}, {settings})"

    def resume_settings(self) -> dict[str, Any]:
        return {"kind": self.kind, "reward": self.reward, "brief": self.brief, "reward_version": REWARD_VERSION}

    def check_turns(self, num_turns: int | None, are_episodes: bool = True) -> int:
        if (num_turns or 1) > 1:
            raise ValueError(f"`num_turns` is {num_turns}, but episodes of writing have one turn.")
        return 1

    def prompts(self, item: dict, history: History) -> Prompts:
        return {**first_prompts(item["source"], self.kind, self.roles, self.brief)}

    def score(self, items: list[dict], joint_actions: list[JointAction], histories: list[History]) -> list[Outcome]:
        return [self._judge(item, action) for item, action in zip(items, joint_actions, strict=True)]

    def _judge(self, item: dict, action: JointAction) -> Outcome:
        if WRITER in self.roles:
            first, second = (text.strip() for text in action[WRITER].partition(SPLIT)[::2])
        else:
            first, second = (action[role] for role in self.roles)
        metrics = pair_metrics(first, second, item, self.kind, self.reward)
        metrics["constant_text"] = pair_metrics(*CONSTANT[self.kind], item, self.kind, self.reward)["total_reward"]
        return Outcome(metrics["total_reward"], metrics)


Ramp = tuple[float, float, float, float]  # 0 at the first number, 1 from the second to the third, 0 at the fourth


@dataclass(frozen=True)
class Structure:
    """What two texts of a kind should look like."""

    tokens: tuple[int, int]  # fewest and most of each text, separated by white space
    length: Ramp  # characters of the second text for one of the first
    variety: Ramp  # different words of the second text for one of the first
    overlap: float  # Jaccard similarity of their words, without stop words, that earns all
    both: bool  # whether transitions of both texts count, or only of the second
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
    own, other = set(words(first)), set(words(second))
    fewest, most = structure.tokens
    fits = all(fewest <= len(text.split()) <= most for text in (first, second))
    length = ramp(len(second) / len(first), structure.length) if fits else None
    variety = ramp(len(other) / len(own), structure.variety) if own and length is not None else None
    if variety is None:
        return [0.5 * fits, length or 0.0, 0.0, 0.0]
    joint = f"{first} {second}" if whole else first + second
    number = count_transitions(joint if structure.both else second, whole)
    transitions = 0.4 + 0.05 * (number - 1) if number else 0.0
    own, other = own - STOP_WORDS, other - STOP_WORDS
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
    content = set(content_words(text))
    known = content.intersection(content_words(item["source"]))
    found = {
        "support": supported_share(text, item["key_words"]),
        "precision": len(known) / max(1, len(content)),
        "copied": copied_share(text, [item["source"], partner]),
        "function_words": function_share(text),
        "complete": float(COMPLETE.search(text) is not None),
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
    one, other = grounding(first, item, "", structure), grounding(second, item, first, structure)
    keys = set(item["key_words"])
    recall = len(keys.intersection(content_words(f"{first} {second}"))) / max(1, len(keys))
    source = min(1.0, recall / 0.2) * math.sqrt(one["grounding"] * other["grounding"])
    return {
        "total_reward": sum(earned) * (1.0 if reward == "compat" else source),
        **{f"level_{k}": level for k, level in enumerate(earned, 1)},
        "compat": sum(compat),
        "source": source,
        "recall": recall,
        **{name: (value + other[name]) / 2 for name, value in one.items()},
    }


# Words and sentences of English texts


STOP_WORDS = frozenset(LISTS["stop_words"].split())
TRANSITIONS = {category: phrases.split("|") for category, phrases in LISTS["transitions"].items()}
FUNCTION_WORDS = STOP_WORDS.union(LISTS["more_function_words"].split(), *TRANSITIONS.values())
WHOLE_PHRASES = [re.compile(rf"\b(?:{'|'.join(map(re.escape, phrases))})\b") for phrases in TRANSITIONS.values()]
COMPLETE = re.compile(r"[.!?][\"')”’»]*\s*$")
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
