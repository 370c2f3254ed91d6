"""
The family of needed messages: bounds against brute force, rewards by hand, splits, the base model's demonstrations,
ablated messages.
"""

import itertools
import json
import random
from collections import Counter, defaultdict
from pathlib import Path
from statistics import fmean

import pytest

from trl_multiagent.configs.recipes.workflows.needed import (
    OPERATIONS,
    TASK,
    NeededDataset,
    NeededEnvironment,
    NeededSettings,
    Rule,
    Walk,
    demonstrate,
    draw_items,
)
from trl_multiagent.environments import FunctionEnvironment, TaskError, Turn
from trl_multiagent.environments.base import Outcome
from trl_multiagent.environments.task import TaskSettings
from trl_multiagent.evaluation.players import MessageAblation, partners_of
from trl_multiagent.runs.evaluation import run_evaluation
from trl_multiagent.runs.run import run_recipe


CONFIGS = Path(__file__).resolve().parents[2] / "recipes" / "workflows" / "configs"
ALONE = ["--override", "magrpo.num_agents=1"]
SORTED = {"item_id": "x", "digits": [1, 4, 9, 6], "operation": "largest", "bound": 0.25}
CORNER = {"item_id": "y", "goal": [2, 2], "here": [0, 1], "bound": 0.125}


def all_worlds(game):
    """All items of a game, which are equally likely, from its definition."""
    if isinstance(game, Walk):
        cells = [list(cell) for cell in itertools.product(range(game.board), repeat=2)]
        return [{"goal": goal, "here": here} for goal in cells for here in cells if goal != here]
    lists = map(list, itertools.product(range(10), repeat=game.digits))
    used = list(OPERATIONS)[: game.operations]
    distinct = [digits for digits in lists if len({OPERATIONS[x](digits) for x in used}) == game.operations]
    return [{"digits": digits, "operation": name} for digits in distinct for name in used]


MOVES = [" ".join(moves) for n in range(5) for moves in itertools.product(("left", "right", "up", "down"), repeat=n)]
DIGITS = [str(digit) for digit in range(10)]


@pytest.mark.parametrize(
    ("game", "texts", "value", "number"),
    [
        (Rule(), DIGITS, 0.25, 3360),
        (Rule(operations=3, digits=3), DIGITS, 1 / 3, 720),
        (Walk(), MOVES, 1 / 8, 72),
        (Walk(speakers=2), MOVES, 1 / 8, 72),
    ],
)
def test_bounds_are_those_of_brute_force(game, texts, value, number):
    """The value of the best of all functions from what the decider sees to an answer, over all worlds."""
    groups, total = defaultdict(list), 0.0
    for world in all_worlds(game):
        groups[game.view(world)].append(world)
    for worlds in groups.values():
        best = max(fmean(game.reward(world, text) for world in worlds) for text in texts)
        assert game.bound == pytest.approx(best)
        total += best * len(worlds)
    assert sum(map(len, groups.values())) == number and total / number == pytest.approx(value)


def play(environment, item, messages, answer):
    """The prompts of both turns, and their outcomes."""
    first = environment.prompts(item, ())
    before = environment.score([item], [messages], [()])[0]
    history = [Turn(first, messages, before)]
    second = environment.prompts(item, history)
    after = environment.score([item], [{"decider": answer}], [history])[0]
    assert environment.prompts(item, [*history, Turn(second, {"decider": answer}, after)]) == {}
    return first, before, second, after


@pytest.mark.parametrize(
    ("message", "answer", "read", "well_formed", "reward"),
    [
        ("take_largest", "9", "take_largest", 1.0, 1.0),
        ("take_first", " 9 ", "take_first", 1.0, 1.0),  # the answer counts, whatever the message says
        ("take_largest", "6", "take_largest", 1.0, 0.0),
        ("take_largest", "9 9", "take_largest", 1.0, 0.0),
        ("", "9", "", 0.0, 0.0),
        ("the answer is 9", "9", "", 0.0, 0.0),  # what is no word of the channel is not read
        ("take_largest take_last", "9", "take_largest", 0.0, 0.0),
    ],
)
def test_rule_by_hand(message, answer, read, well_formed, reward):
    first, before, second, after = play(NeededEnvironment(Rule()), SORTED, {"speaker": message}, answer)
    assert first == {"speaker": "rule largest :"}
    assert second == {"decider": " ".join(f"digits 1 4 9 6 said {read} ?".split())}
    assert (before.reward, before.metrics) == (0.0, {"well_formed": well_formed})
    assert (after.reward, after.metrics) == (reward, {"passed": reward, "bound": 0.25})


def test_walk_by_hand():
    team = NeededEnvironment(Walk(speakers=2))
    first, before, second, after = play(
        team, CORNER, {"speaker_1": "column_c", "speaker_2": "up"}, "right up right right"
    )
    assert first == {"speaker_1": "goal c :", "speaker_2": "goal 3 :"} and before.metrics["well_formed"] == 0.5
    assert second == {"decider": "here a 2 said column_c ?"} and after.reward == 0.0
    messages = {"speaker_1": "column_c", "speaker_2": "row_3"}
    assert play(team, CORNER, messages, "right up right right")[3].reward == 1.0  # a wall stops the walk
    assert play(team, CORNER, messages, "left down up up right right")[3].reward == 0.0  # four moves count
    assert play(NeededEnvironment(Walk()), CORNER, {"speaker": "row_1 row_1"}, "up right right")[3].reward == 1.0


def test_one_agent():
    for facts, prompt in (("shared", "rule largest digits 1 4 9 6 ?"), ("isolated", "digits 1 4 9 6 ?")):
        environment = NeededEnvironment(Rule(), facts)
        assert environment.prompts(SORTED, ()) == {"solo": prompt} and environment.roles == ("solo",)
        outcomes = environment.score([SORTED] * 2, [{"solo": "9"}, {"solo": "1"}], [(), ()])
        assert [outcome.reward for outcome in outcomes] == [1.0, 0.0]


def test_noise_replaces_words_at_its_rate():
    environment = NeededEnvironment(Rule(), noise=0.4)
    items = [{**SORTED, "item_id": str(k)} for k in range(2000)]
    heard = [environment.hear(item, "speaker", "take_last") for item in items]
    counts = Counter(word for (word,) in heard)
    assert counts["take_last"] / 2000 == pytest.approx(0.6 + 0.4 / 4, abs=0.04)
    assert all(counts[word] / 2000 == pytest.approx(0.1, abs=0.03) for word in environment.game.words[2:])
    assert heard == [environment.hear(item, "speaker", "take_last") for item in items]


def test_no_list_of_the_test_is_in_the_training_or_in_a_demonstration():
    train, test = (draw_items(Rule(), split) for split in ("train", "test[:300]"))
    assert len(train) == 4096 and len(test) == 300 and len({*train["item_id"]}) == 4096
    held_out = {str(digits) for digits in test["digits"]}
    assert not held_out & {str(digits) for digits in train["digits"]}
    assert {*train["bound"], *test["bound"]} == {0.25} and {*draw_items(Walk(), "test")["bound"]} == {0.125}
    rng = random.Random(1)
    shown = {demonstrate(Rule(), "private", 0.5, rng)[0].partition(" said")[0] for _ in range(3000)}
    assert not shown & {Rule().view(item) for item in test}
    assert draw_items(Rule(), "test", seed=2)["digits"][:300] != test["digits"]
    with pytest.raises(ValueError, match="one of \\['train', 'test'\\]"):
        draw_items(Rule(), "validation")


@pytest.mark.parametrize(("game", "words"), [(Rule(), 1), (Rule(width=3), 3), (Walk(), 2), (Walk(speakers=2), 1)])
def test_demonstrations_show_a_blind_speaker_and_a_literate_decider(game, words):
    """A speaker says every word about every fact. Who believes the truth is right, and who hears nothing guesses."""
    environment, rng = NeededEnvironment(game), random.Random(3)
    pairs = [demonstrate(game, "private", 1.0, rng) for _ in range(4000)]
    messages = defaultdict(set)
    for prompt, answer in pairs:
        assert {*prompt.split(), *answer.split()} <= {*game.vocabulary, "said", ":", "?"}
        if prompt.endswith(":"):
            assert environment.is_well_formed(answer) and len(answer.split()) == words
            messages[prompt] |= {*answer.split()}
    # Whatever the fact, a role says the same words
    assert len({*map(frozenset, messages.values())}) == len(game.speakers)
    item = game.item(rng)
    assert game.reward(item, game.read(item, game.truth(item), rng)) == 1.0
    guesses = fmean(game.reward(item, game.read(item, [], rng)) for item in (game.item(rng) for _ in range(2000)))
    assert guesses == pytest.approx(0.25 if isinstance(game, Rule) else 1 / 9, abs=0.04)


def settings_of(name, num_agents, **needed):
    sections = {"dataset": NeededDataset(name=name, train_split="train[:8]"), "needed": NeededSettings(**needed)}
    return TaskSettings(sections, num_agents, Path())


def test_settings_make_the_game():
    make = TASK.make_environment
    rule = make(settings_of("rule", 2, operations=3, digits=5)).game
    assert rule.words == ["take_first", "take_last", "take_largest"]
    assert make(settings_of("walk", 3, board=4)).roles == ("speaker_1", "speaker_2", "decider")
    assert make(settings_of("rule", 1)).facts == "shared"  # so that `--control single_agent` has all facts
    assert make(settings_of("rule", 1, facts="isolated")).roles == ("solo",)
    assert repr(Walk(width=1)) != repr(Walk(speakers=2)), "they have different base models"
    with pytest.raises(ValueError, match="an episode has 2"):
        make(settings_of("rule", 2)).check_turns(1)


@pytest.mark.parametrize(
    ("name", "num_agents", "needed", "message"),
    [
        ("rule", 3, {}, r"`num_agents` is 3, but rule with private facts needs 2\."),
        ("walk", 4, {}, r"walk with private facts needs 2 or 3\."),
        ("walk", 2, {"facts": "shared"}, r"walk with shared facts needs 1\."),
        ("rule", 1, {"facts": "private"}, r"rule with private facts needs 2\."),
        ("rule", 2, {"board": 4}, r"`needed\.board` is a setting of walk, but `dataset.name` is 'rule'"),
        ("rule", 2, {"operations": 6}, "2 to 6 operations and as many digits or more, not 6 and 4"),
    ],
)
def test_settings_that_do_not_fit_are_refused(name, num_agents, needed, message):
    with pytest.raises(ValueError, match=message):
        TASK.make_environment(settings_of(name, num_agents, **needed))


# Ablated messages


class Talk(FunctionEnvironment):
    """The prompt of the second turn is what its task sees of the first."""

    def __init__(self):
        super().__init__({"a": "{x}", "b": "{x}"}, lambda completions, **columns: [0.0] * len(completions))

    def prompts(self, item, history):
        if not history:
            return {"a": item["x"], "b": item["x"]}
        text = "; ".join(" ".join(f"{role}={text}" for role, text in turn.joint_action.items()) for turn in history)
        return {"a": text} if item["x"] == "only a" else {"a": text, "b": text}


def histories_of(items, turns=1):
    """Histories in which the answer of a role tells the item, the turn and the role."""
    return [
        [Turn({}, {role: f"{item['x']}{t}{role}" for role in "ab"}, Outcome(0.0)) for t in range(turns)]
        for item in items
    ]


def test_cut_messages():
    items = [{"x": "p"}, {"x": "only a"}]
    environment = MessageAblation(Talk(), "cut")
    assert environment.next_prompts(items, [(), ()]) == Talk().next_prompts(items, [(), ()])
    prompts = environment.next_prompts(items, histories_of(items, turns=2))
    assert prompts == [{"a": "a=p0a b=; a=p1a b=", "b": "a= b=p0b; a= b=p1b"}, {"a": "a=only a0a b=; a=only a1a b="}]
    assert environment.resume_settings() != MessageAblation(Talk(), "shuffled").resume_settings()


def test_shuffled_messages_are_those_of_one_other_item():
    items = [{"x": name} for name in "ppqqrr"]  # two branches of each item
    environment = MessageAblation(Talk(), "shuffled")
    prompts = environment.next_prompts(items, histories_of(items))
    partners = [prompt["a"][-3] for prompt in prompts]
    for item, prompt, partner in zip(items, prompts, partners, strict=True):
        own = item["x"]
        assert partner != own and partner == partners["pqr".index(own) * 2]
        assert prompt == {"a": f"a={own}0a b={partner}0b", "b": f"a={partner}0a b={own}0b"}
    assert {*partners} == {*"pqr"}
    backwards = environment.next_prompts(items[::-1], histories_of(items[::-1]))
    assert backwards[::-1] == prompts  # the items decide, not their order
    branches = [dict(item) for item in items]
    assert sorted(partners_of(branches)) == list(range(6))  # every branch is read once
    with pytest.raises(TaskError, match="at least two of them at a time"):
        MessageAblation(Talk(), "shuffled").next_prompts(items[:2], histories_of(items[:2]))


def test_shuffled_messages_stay_those_of_an_item_whose_episode_has_ended():
    items = [{"x": name} for name in "pqr"]
    environment = MessageAblation(Talk(), "shuffled")
    environment.next_prompts(items, [()] * 3)
    histories = histories_of(items)
    before = environment.next_prompts(items, histories)[2]["a"]
    _, later = environment.next_prompts(items[1:], histories_of(items[1:], turns=2))
    # Of the turn that the item did not play, the messages are those of the next one in the order
    assert later["a"].startswith(before) and later["a"].endswith("a=r1a b=q1b")


# Runs


@pytest.fixture
def small_base(tmp_path, monkeypatch):
    """Makes the base models quick to build."""
    monkeypatch.setenv("TRL_MULTIAGENT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("trl_multiagent.configs.recipes.workflows.needed.STEPS", 40)


def run_needed(folder, config, *changes):
    """Trains two steps. Returns what they cost."""
    small = ["magrpo.max_steps=2", "magrpo.items_per_device=4", f"magrpo.output_dir={folder}", "dataset.eval_size=6"]
    run_recipe("magrpo", TASK, ["--config", str(CONFIGS / config), "--override", *small, *changes], "train")
    return json.loads((folder / "training_cost.json").read_text())


def test_a_team_trains_and_plays_without_its_messages(small_base, tmp_path, capsys):
    cost = run_needed(tmp_path / "run", "needed_rule.yaml")
    # Per item 6 messages, and 6 answers to each. A message is at most two tokens, and so is an answer
    assert cost["env_steps"] == 2 * 4 * (6 + 36) and cost["generated_tokens"] <= 2 * cost["env_steps"]
    flags = ["--ablate", "messages", "--control", "single_agent", "--num_episodes", "2", "--disable_tqdm"]
    run_evaluation(TASK, [str(tmp_path / "run"), *flags, "--output_dir", str(tmp_path / "evaluation")], "evaluate")
    report = json.loads((tmp_path / "evaluation" / "evaluation.json").read_text())
    assert [*report["policies"]] == ["run", "run_control", "run_messages_cut", "run_messages_shuffled"]
    for name, policy in report["policies"].items():
        assert policy["results"]["final"]["bound"]["mean"] == 0.25
        assert policy["cost_per_episode"]["calls"] == (1.0 if name == "run_control" else 2.0)
    assert [*report["contributions"]] == ["messages cut", "messages shuffled"]
    table = capsys.readouterr().out
    assert "messages cut" in table and "Replaced by nothing" not in table
    transcripts = {
        name: [json.loads(line)["turns"] for line in (path / "transcripts.jsonl").read_text().splitlines()]
        for name, path in ((x.name, x) for x in (tmp_path / "evaluation" / "transcripts").iterdir())
    }
    for true, cut in zip(transcripts["run"], transcripts["run_messages_cut"], strict=True):
        assert true[0] == cut[0]  # the speaker draws the same message
        assert cut[1]["prompts"]["decider"].endswith(" said ?") and [*cut[1]["tokens"]] == ["decider"]
    with pytest.raises(SystemExit):
        run_evaluation(TASK, [str(tmp_path / "run"), *flags[:2], "--items_per_batch", "5"], "evaluate")
    assert "one batch has a single item" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        run_evaluation(TASK, ["demo", "--config", str(CONFIGS / "needed_rule.yaml"), *flags[:2], *ALONE], "evaluate")
    assert "`evaluation.ablate: messages` is for several agents and turns" in capsys.readouterr().err


def test_three_agents_and_one_train(small_base, tmp_path):
    cost = run_needed(tmp_path / "three", "needed_walk.yaml", "magrpo.num_agents=3", "needed.board=2")
    assert cost["env_steps"] == 2 * 4 * (4 + 16)
    cost = run_needed(tmp_path / "one", "needed_rule.yaml", "magrpo.num_agents=1", "needed.facts=isolated")
    assert cost["env_steps"] == 2 * 4 * 6  # the second turn has no prompt, so episodes end after the first
