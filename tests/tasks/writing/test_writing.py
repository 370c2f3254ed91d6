"""The family of writing: CoMLRL's reward, the grounded one, data, prompts, recipes."""

import json
import random
from pathlib import Path

import numpy as np
import pytest

from trl_multiagent.configs.recipes.writing.demo import POSTS, DemoDataset, make_demonstrations, make_posts
from trl_multiagent.environments.base import Turn
from trl_multiagent.tasks.writing import WritingEnvironment, load_writing_dataset
from trl_multiagent.tasks.writing.environment import (
    CONSTANT,
    LARGEST,
    LISTS,
    STRUCTURES,
    count_transitions,
    key_words,
    levels,
    pair_metrics,
)


HERE = Path(__file__).parent
TEXTS = json.loads((HERE / "texts.json").read_text())
TINY = 0.1 * LARGEST

POST, *OTHERS = [
    {"item_id": str(k), "source": source, "key_words": keys}
    for k, (source, keys) in enumerate(zip(TEXTS["posts"], key_words(TEXTS["posts"]), strict=True))
]
ABSTRACT = {"source": TEXTS["abstract"], "key_words": key_words([TEXTS["abstract"], *TEXTS["posts"]])[0]}
ITEMS = {"tldr": POST, "arxiv": ABSTRACT}
GOOD = {"tldr": (TEXTS["summary"], TEXTS["detail"]), "arxiv": (TEXTS["background"], TEXTS["method"])}


def reference_reward(first, second, kind):
    """CoMLRL's reward from the table of its levels, by interpolation over the points of each curve."""
    fewest = {"tldr": 8, "arxiv": 128}[kind]
    if min(len(first.split()), len(second.split())) < fewest or max(len(first.split()), len(second.split())) > 256:
        return 0.0
    points = {"tldr": ([1.1, 1.6, 3.2, 5.0], [0, 1, 1, 0]), "arxiv": ([0.8, 1.3, 1.6, 2.0], [0, 1, 1, 0])}[kind]
    ratio = len(second) / len(first)
    if ratio < points[0][0] or ratio > points[0][-1]:
        return 0.5
    total = 0.5 + np.interp(ratio, *points)
    vocabularies = [set(separate(text)) for text in (first, second)]
    if not vocabularies[0]:
        return total
    points = {"tldr": ([1.3, 2.0, 1e9], [0, 0.5, 0.5]), "arxiv": ([0.5, 0.7, 1.3, 1.7], [0, 0.5, 0.5, 0])}[kind]
    ratio = len(vocabularies[1]) / len(vocabularies[0])
    if ratio < points[0][0] or ratio > points[0][-1]:
        return total
    total += np.interp(ratio, *points)
    searched = (second if kind == "tldr" else first + second).lower()
    hits = {name for name, text in LISTS["transitions"].items() for phrase in text.split("|") if phrase in searched}
    total += 0.4 * (0 if not hits else min(1.0, 0.35 + 0.05 * len(hits)))
    counts = [word for v in vocabularies for word in v if word not in LISTS["stop_words"].split()]
    similarity = (len(counts) - len(set(counts))) / len(set(counts)) if counts else 1.0
    return total + 0.6 * np.interp(similarity, [0, {"tldr": 0.03, "arxiv": 0.23}[kind]], [0, 1])


def separate(text):
    """The words of a text: letters, digits and underscores in a row, in lower case."""
    return "".join(c if c.isalnum() or c == "_" else " " for c in text.lower()).split()


def random_pairs(kind, number, seed):
    """Pairs of random texts. About half of them reach the second level, some the last."""
    rng = random.Random(seed)
    phrases = [phrase for text in LISTS["transitions"].values() for phrase in text.split("|")]
    vocabulary = [*phrases, *LISTS["stop_words"].split(), *(f"w{k}" for k in range(60))]
    vocabulary += ["über", "x_y", "don't", "—", "..."]
    shortest, longest = {"tldr": (6, 80), "arxiv": (100, 150)}[kind]

    def text(length):
        return rng.choice([" ", " ", "\n", "  "]).join(rng.choices(some, k=length))

    for _ in range(number):
        some = rng.sample(vocabulary, rng.randint(12, len(vocabulary)))
        first = text(rng.randint(shortest, longest))
        some = some[: rng.choice([3, len(some)])]
        copied = first[: rng.choice([0, rng.randint(0, len(first))])]
        yield first, copied + " " + text(int(len(first.split()) * rng.uniform(0.3, 3.0)))


@pytest.mark.parametrize("kind", ["tldr", "arxiv"])
def test_compat_equals_the_table_on_random_texts(kind):
    environment = WritingEnvironment(kind, reward="compat")
    reached = set()
    for first, second in random_pairs(kind, 300, seed=3):
        (outcome,) = environment.score(
            [ITEMS[kind]], [dict(zip(environment.roles, (first, second), strict=True))], [()]
        )
        assert outcome.reward == pytest.approx(reference_reward(first, second, kind), abs=1e-9)
        reached.add(sum(outcome.metrics[f"level_{k}"] > 0 for k in range(1, 5)))
    assert reached >= {0, 1, 2, 4}


@pytest.mark.parametrize(
    ("kind", "first", "second", "expected"),
    [
        ("tldr", "a b c d e f g", "a b c d e f g h", [0, 0, 0, 0]),  # 7 tokens
        ("tldr", "word " * 8, "word " * 60, [0.5, 0, 0, 0]),  # 7.5 times as long
        ("tldr", "word " * 8, "word " * 16, [0.5, 1, 0, 0]),  # no more different words
        # 33 / 24 = 1.375; no transitions, 1 of 3 words shared
        ("tldr", "xx " * 8, "xx yy zz " * 3 + "xx " * 2, [0.5, 0.55, 0.5, 0.6]),
        ("tldr", "xx " * 8, "yy but zz " * 4, [0.5, 1, 0.5, 0.16]),  # one category
        ("arxiv", "xx " * 128, "xx " * 128, [0.5, 0.4, 0.5, 0.6]),
        ("arxiv", "xx " * 128, "xx yy " * 100, [0.5, 1 - (600 / 384 - 1.6) / 0.4 if 600 / 384 > 1.6 else 1, 0, 0]),
    ],
)  # fmt: skip
def test_levels_by_hand(kind, first, second, expected):
    assert levels(first, second, STRUCTURES[kind]) == pytest.approx(expected)


@pytest.mark.parametrize("kind", ["tldr", "arxiv"])
def test_constant_texts_earn_all_of_compat_and_nothing_when_grounded(kind):
    item = ITEMS[kind]
    assert pair_metrics(*CONSTANT[kind], item, kind, "compat")["total_reward"] == pytest.approx(LARGEST)
    assert pair_metrics(*CONSTANT[kind], item, kind, "grounded")["total_reward"] == 0
    for reward, expected in (("compat", LARGEST), ("grounded", 0.0)):
        environment = WritingEnvironment(kind, reward=reward)
        (outcome,) = environment.score([item], [dict(zip(environment.roles, GOOD[kind], strict=True))], [()])
        assert outcome.metrics["constant_text"] == pytest.approx(expected)
        assert outcome.metrics["compat"] == pytest.approx(sum(levels(*GOOD[kind], STRUCTURES[kind])))
        ranges = environment.metric_ranges
        assert all(ranges[name][0] <= value <= ranges[name][1] for name, value in outcome.metrics.items())


@pytest.mark.parametrize("kind", ["tldr", "arxiv"])
def test_good_pairs_earn_nearly_all(kind):
    metrics = pair_metrics(*GOOD[kind], ITEMS[kind], kind, "grounded")
    assert metrics["total_reward"] > 0.85 * LARGEST and metrics["source"] > 0.95


def sentences(first, last):
    return ". ".join(POST["source"].split(". ")[first:last]) + "."


KEYS = POST["key_words"]
POOR = {
    "the source": (sentences(0, 1), sentences(1, 4)),
    "key words": (" ".join(KEYS[:12]) + ".", " ".join(KEYS[12:36]) + "."),
    "key words in a frame": (
        "The " + " and the ".join(KEYS[:6]) + ".",
        "However the " + " and the ".join(KEYS[6:22]) + ".",
    ),
    "half of a sentence": (GOOD["tldr"][0][:-12], GOOD["tldr"][1][:-12]),
    "the partner's text": (GOOD["tldr"][0], GOOD["tldr"][0] + " " + GOOD["tldr"][0]),
    "a constant summary": (CONSTANT["tldr"][0], GOOD["tldr"][1]),
    "a constant detail": (GOOD["tldr"][0], CONSTANT["tldr"][1]),
    "one fact and filling": (f"A post about a {KEYS[2]} and a {KEYS[0]} was "
    "written.", CONSTANT["tldr"][1] + f" A {KEYS[2]}."),
    "nothing": ("", ""),
    "function words": ("the of and to in it is so " * 2, "however the of and to in it is so but we they " * 3),
}  # fmt: skip


@pytest.mark.parametrize("name", POOR)
def test_texts_without_the_task_earn_little(name):
    assert pair_metrics(*POOR[name], POST, "tldr", "grounded")["total_reward"] <= TINY


def test_white_space_makes_a_text_longer_only_under_compat():
    first = "The sister borrowed the car and scratched a door."
    second = "The sister borrowed it, and scratched the car's left door."
    wide = second.replace(" ", "      ")
    narrow, stretched = (levels(first, text, STRUCTURES["tldr"]) for text in (second, wide))
    assert stretched[1] == 1.0 > narrow[1] == levels(first, wide, STRUCTURES["tldr"], whole=True)[1]


def test_a_good_pair_of_another_item_earns_little():
    assert all(pair_metrics(*GOOD["tldr"], other, "tldr", "grounded")["total_reward"] < TINY for other in OTHERS)
    items = DemoDataset(name="demo").load("test").to_list()
    answers = [POSTS["answers"][way] for way in ("short", "three")]
    of_items = [[answer.format(**row["facts"]) for answer in answers] for row in make_posts("test")]

    def earns(pair, item):
        return pair_metrics(*pair, item, "tldr", "grounded")["total_reward"]

    assert np.mean([earns(pair, item) for pair, item in zip(of_items, items, strict=True)]) > 0.75 * LARGEST
    for pair in of_items[:8]:  # each as a constant pair
        earned = [earns(pair, item) for item in items]
        assert sum(earned) - max(earned) <= TINY * len(items)


def test_words():
    sources = ["the cat met a dog named Rex in Rome", "the cat met a dog named Ann in Bonn", "a parrot"]
    assert key_words(sources) == [
        ["cat", "met", "dog", "named", "rex", "rome"], ["cat", "met", "dog", "named", "ann", "bonn"], ["parrot"]
    ]  # fmt: skip
    many = [f"tree house river cloud n{k} m{k} o{k} p{k} q{k}" for k in range(30)]
    assert key_words(many)[4] == ["n4", "m4", "o4", "p4", "q4"]  # the others are in more than 5 % of the sources
    assert count_transitions("She was here.", whole=False) == 1 and count_transitions("She was here.", whole=True) == 0
    assert count_transitions("However, as it rained ...", whole=True) == 3  # contrast, concession, time


def test_data_of_the_hub_and_of_files(tmp_path):
    tldr = tmp_path / "some_tldr.jsonl"
    tldr.write_text(json.dumps({"prompt": "SUBREDDIT: r/a\n\nPOST: A cat.\n\nTL;DR:", "completion": " A cat."}) + "\n")
    (row,) = load_writing_dataset(str(tldr))
    assert (row["source"], row["key_words"]) == ("SUBREDDIT: r/a\n\nPOST: A cat.", ["subred", "r", "post", "cat"])
    arxiv = tmp_path / "abstracts.jsonl"
    arxiv.write_text(json.dumps({"article_id": "9", "abstract_text": ["<S> We prove it . </S>", "<S> So . </S>"]}))
    (row,) = load_writing_dataset(str(arxiv), type="arxiv")
    assert " ".join(row["source"].split()) == "We prove it . So ." and row["item_id"] == "9"
    with pytest.raises(ValueError, match="does not say the kind of its texts"):
        load_writing_dataset(str(arxiv))
    with pytest.raises(ValueError, match="row 1: field `prompt` is missing"):
        load_writing_dataset(str(arxiv), type="tldr")
    with pytest.raises(ValueError, match="one of \\['train', 'test'\\]"):
        DemoDataset(name="demo").load("validation")


def test_generated_posts_are_reproducible_and_have_rare_facts():
    train, test = (DemoDataset(name="demo").load(split).to_list() for split in ("train", "test"))
    assert (len(train), len(test)) == (720, 96) and not {x["source"] for x in train} & {x["source"] for x in test}
    assert DemoDataset(name="demo").load("[:3]")["source"] == [item["source"] for item in train[:3]]
    facts = make_posts("train")[0]["facts"]
    assert set(train[0]["key_words"]) == {value.lower()[:6] for value in facts.values()}
    assert make_demonstrations(5, random.Random(1)) == make_demonstrations(5, random.Random(1))


def test_prompts_and_one_agent():
    team, alone = WritingEnvironment(), WritingEnvironment(num_agents=1)
    prompts = team.prompts(POST, ())
    assert list(prompts) == ["summary", "detail"] and all(POST["source"] in text for text in prompts.values())
    assert "Your partner's text is above." in team.show_answers("detail", prompts["detail"], {"summary": "x"})
    assert "[PARAGRAPH_SPLIT]" in alone.prompts(POST, ())["writer"]
    answer = "\n[PARAGRAPH_SPLIT]\n".join(GOOD["tldr"])
    (together,) = team.score([POST], [dict(zip(team.roles, GOOD["tldr"], strict=True))], [()])
    one, without = alone.score([POST] * 2, [{"writer": answer}, {"writer": answer.replace("[", "")}], [()] * 2)
    assert one.metrics == together.metrics and without.reward == 0
    assert WritingEnvironment("arxiv").roles == ("background", "method")
    assert "reward='compat'" in repr(WritingEnvironment(reward="compat"))
    assert team.resume_settings() != WritingEnvironment(reward="compat").resume_settings()
    with pytest.raises(ValueError, match="one turn"):
        team.check_turns(2)
    assert team.prompts(POST, [Turn(prompts, {}, together)]) == prompts
