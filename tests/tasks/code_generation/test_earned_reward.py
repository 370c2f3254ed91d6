"""The reward kind `earned`: what trivial answers pass, who does what, and how long a check may take."""

import logging
import re
from pathlib import Path

import pytest

from trl_multiagent.environments.base import Outcome, ScoringContext, scoring
from trl_multiagent.environments.wrapper import EnvironmentWrapper
from trl_multiagent.rollout.tree import Node, Samples, judge_nodes
from trl_multiagent.tasks.code_generation import CodeGenerationEnvironment, load_code_dataset
from trl_multiagent.tasks.code_generation.item_facts import facts_program, prompt_examples, read_facts

from typical_pairs import ALL_AUX, ALL_MAIN, EVEN, ITEM, SUM_OF_SQUARES, table


DOCS = Path(__file__).parents[3] / "docs"


SANDBOX = {"check_timeout": 5.0}


def score(sandbox, *pairs, item=ITEM, kind="earned"):
    environment = CodeGenerationEnvironment(reward_kind=kind, sandbox=sandbox)
    actions = [{"aux": aux, "main": main} for aux, main in pairs]
    return environment.score([item] * len(pairs), actions, [[]] * len(pairs))


def facts(sandbox, item, tries_trivial=True):
    return read_facts(item, sandbox.run([facts_program(item, tries_trivial)])[0])


def make_item(prompt, test, solution="", entry_point="f"):
    test = "def check(candidate):\n" + "".join(f"    {line}\n" for line in test.split("\n"))
    item = {"task_id": "t/0", "prompt": prompt, "entry_point": entry_point}
    return {**item, "test": test, "canonical_solution": solution}


def test_the_table_of_the_docs_is_what_both_kinds_pay(sandbox):
    assert table(sandbox) in (DOCS / "reward_notes.md").read_text(), (
        "run python scripts/typical_pairs.py and put what it prints into docs/reward_notes.md"
    )


def test_work_is_paid_whatever_binds_the_names(sandbox):
    """A lambda, an alias, a method or a `partial` is counted and changed by the experiments as a `def` is."""
    keep, add = "[x for x in xs if x % 2 == 0]", "sum(x * x for x in aux(xs))"
    aux = [f"aux = lambda xs: {keep}", f"class Solution:\n    def aux(self, xs):\n        return {keep}"]
    aux.append("from functools import partial\naux = partial(filter, lambda x: x % 2 == 0)")
    name = ITEM["entry_point"]
    main = [f"{name} = lambda xs: {add}", f"class Solution:\n    def {name}(self, xs):\n        return {add}"]
    main.append(f"def g(xs):\n    return {add}\n{name} = g")
    outcomes = score(sandbox, *((one, other) for one in aux for other in main))
    assert [outcome.reward for outcome in outcomes] == pytest.approx([4.0] * 9)
    main = f"def {name}(xs):\n    return sum(aux(x, x) for x in xs if x % 2 == 0)"
    (outcome,) = score(sandbox, ("from operator import add, mul as aux", main))
    assert outcome.reward == pytest.approx(4.0)
    alone = f"aux = lambda xs: sum(x * x for x in {keep})"
    passed_on = [
        f"{name} = aux",
        f"{name} = lambda xs: int(aux(xs))",
        f"from functools import partial\n{name} = partial(aux)",
    ]
    outcomes = score(sandbox, *((alone, main) for main in passed_on))
    assert [outcome.reward for outcome in outcomes] == pytest.approx([2.1] * 3)


def test_the_size_share_is_that_of_the_smaller_part(sandbox):
    small, half, unused = (
        outcome.metrics["size_share"]
        for outcome in score(
            sandbox,
            (
                "def aux(n):\n    return n + 1",
                "def f(xs):\n    n = aux(len(xs))\n    return sum(x * x for x in xs[:n] if x % 2 == 0)",
            ),
            (EVEN, SUM_OF_SQUARES),
            (EVEN, ALL_MAIN),
        )
    )
    assert 0 == unused < small < 0.25 < 0.4 < half <= 0.5
    alone = CodeGenerationEnvironment(num_agents=1, sandbox=sandbox)
    assert "size_share" not in alone.score([ITEM], [{"main": ALL_MAIN}], [[]])[0].metrics


def test_everything_about_collaboration_is_scaled_by_the_share_of_the_tests(sandbox):
    # trivial answers pass three of the six tests; this pair passes five: its share is 2/3
    (outcome,) = score(sandbox, (EVEN, "def f(xs):\n    return sum(x * x for x in aux(xs) if x < 8)"))
    assert outcome.metrics["tests_passed"] == 5
    assert outcome.reward == pytest.approx(0.6 + 0.5 + (1.0 + 0.4 + 0.5 + 1.0) * 2 / 3)


def test_no_experiment_is_made_with_a_helper_that_is_called_very_often(sandbox):
    often = SUM_OF_SQUARES.replace("return", "for _ in range(2500):\n        aux(xs)\n    return")
    for main, earned, paper in ((often, 2.1, 4.0), (often.replace("2500", "15"), 4.0, 4.0)):
        environment = CodeGenerationEnvironment(reward_kind="earned", sandbox=sandbox)
        (outcome,) = environment.evaluate([ITEM], [{"aux": EVEN, "main": main}], [[]])
        assert outcome.reward == pytest.approx(earned) and outcome.metrics["paper_reward"] == pytest.approx(paper)


def test_where_rewards_are_compared_equal_pairs_share_experiments(sandbox):
    good, wrapper = (EVEN, SUM_OF_SQUARES), (ALL_AUX, "def f(xs):\n    return aux(xs)")
    long = (f"{ALL_AUX}\nunused = 'it is the same program but for a text that nothing needs'", wrapper[1])
    pairs = [good, good, wrapper, wrapper, wrapper, long, good, wrapper, wrapper, wrapper, good, good]
    trees, actions = [k // 2 for k in range(12)], [{"aux": aux, "main": main} for aux, main in pairs]
    environment = CodeGenerationEnvironment(reward_kind="earned", sandbox=sandbox)
    runs, run = [], environment.runner.run_experiments
    environment.runner.run_experiments = lambda programs: runs.append(programs) or run(programs)
    rewards = {}
    for compared in (False, True):
        runs.clear()
        with scoring(ScoringContext(trees=trees, compared=environment if compared else None)):
            outcomes = environment.score([ITEM] * 12, actions, [[]] * 12)
        rewards[compared] = [outcome.reward for outcome in outcomes]
        tried = [program for programs in runs for program in programs if program.experiments[:1] == ("nothing",)]
        assert len(tried) == (6 if compared else 12)
    # Of the five items whose pairs are equal, the first one and the fifth one make experiments
    assert [k for k, x in enumerate(outcomes) if "experiments" in x.extra] == [2, 3, 4, 5, 8, 9]
    assert rewards[True][2] - rewards[False][2] == pytest.approx(1.9) and rewards[True][10:] == rewards[False][10:]
    for k in range(0, 12, 2):  # the same differences, so the same update
        one, other = (rewards[compared][k + 1] - rewards[compared][k] for compared in (False, True))
        assert one == pytest.approx(other, abs=1e-6) and (one == 0) == (k not in (4, 6)) == (other == 0)


def test_rewards_that_another_environment_uses_are_not_estimated(sandbox):
    class Doubled(CodeGenerationEnvironment):
        """What is estimated would be doubled, too."""

        def score(self, items, joint_actions, histories):
            return [Outcome(2 * outcome.reward) for outcome in super().score(items, joint_actions, histories)]

    pairs = [(EVEN, SUM_OF_SQUARES), (ALL_AUX, "def f(xs):\n    return aux(xs)")]
    nodes = [Node(ITEM, (), {"aux": "", "main": ""}, tree=k) for k in range(2)]
    for node, texts in zip(nodes, pairs, strict=True):
        roles = zip(("aux", "main"), texts, strict=True)
        node.samples = {role: Samples([1], [[1]], [text], [[]]) for role, text in roles}
        node.indices = [(0, 0)]
    own = CodeGenerationEnvironment(reward_kind="earned", sandbox=sandbox)
    for environment, expected in (
        (own, [4.0, 4.0]),
        (EnvironmentWrapper(own), [4.0, 2.1]),
        (Doubled(reward_kind="earned", sandbox=sandbox), [8.0, 4.2]),
    ):
        outcomes = judge_nodes(environment, nodes, compared=environment)
        assert [x.reward for (x,) in outcomes] == pytest.approx(expected)


def test_evaluation_reports_both_kinds(sandbox):
    actions = [{"aux": ALL_AUX, "main": "def f(xs):\n    return aux(xs)"}]
    for kind, settings in (("paper", {}), ("paper", {"collaboration": "static"}), ("earned", {})):
        environment = CodeGenerationEnvironment(reward_kind=kind, sandbox=sandbox, **settings)
        environment.score([ITEM], actions, [[]])
        (outcome,) = environment.evaluate([ITEM], actions, [[]])
        assert (outcome.metrics["paper_reward"], outcome.metrics["earned_reward"]) == pytest.approx((3.0, 2.1))
        assert outcome.reward == outcome.metrics[f"{kind}_reward"]
        (trained,) = environment.score([ITEM], actions, [[]])
        assert trained.reward == outcome.reward and "paper_reward" not in trained.metrics


# Trivial answers


@pytest.mark.parametrize(
    ("prompt", "test", "solution", "expected"),
    [
        # a constant: the most frequent of the expected values, unless there is only one test
        ("def f(x):\n", (
            "assert candidate(1) == 7\nassert candidate(2) == 7\nassert candidate(3) == "
            "8"
        ), "    return 8 if x == 3 else 7\n", 2),
        ("def f(x):\n", "assert candidate(1) == 'a'", "    return 'a'\n", 0),
        # an argument
        ("def f(x, y):\n", (
            "assert candidate(1, [2]) == [2]\nassert candidate(2, [3, 3]) == "
            "[3]"
        ), "    return [y[0]]\n", 1),
        # the examples, looked up, with the best of these for the rest
        ('def f(x):\n    """\n    >>> f(1)\n    5\n    '
        '"""\n', (
            "assert candidate(1) == 5\nassert candidate(2) == 6\nassert candidate(3) == "
            "6"
        ), "    return 5 if x == 1 else 6\n", 3),
        # examples in any form; a number is not a part of another one
        ('def f(x):\n    """For x = 15 the output\n    should be "a". f(-1) ==> "d\'" '
        '"""\n', (
            "assert candidate(1) == 'b'\nassert candidate(5) == 'c'\nassert candidate(7) == 'e'\nassert "
            "candidate(15) == 'a'\nassert candidate(-1) == \"d'\""
        ), "    return {1: 'b', 5: 'c', 7: 'e', 15: 'a', -1: \"d'\"}[x]\n", 4),
        # loops, tolerances and exceptions are run, not read
        ("def f(x):\n", (
            "for k in range(5):\n    assert candidate(k) == k\nassert abs(candidate(2.5) - 2) < "
            "0.1"
        ), "    return int(x)\n", 1),
    ],
)  # fmt: skip
def test_what_trivial_answers_pass(sandbox, prompt, test, solution, expected):
    item = make_item(prompt, test, solution)
    found = facts(sandbox, item)
    assert found.trivial == expected
    assert found.reference == found.total


def test_trivial_answers_count_whatever_the_form_of_the_reference_solution(sandbox):
    prompt, body = 'def f(xs):\n    """Sixes, twice."""\n', "    return xs.count(6) * 2\n"
    test = "\n".join(f"assert candidate({xs}) == {xs.count(6) * 2}" for xs in ([1, 2], [], [3], [6, 1, 9]))
    forms = {prompt: body, prompt.rstrip(): body, f"{prompt}    ": body.lstrip(), "def f(xs):\n    ": body.lstrip()}
    for head, solution in forms.items():
        found = facts(sandbox, make_item(head, test, solution))
        assert (found.trivial, found.reference) == (3, 4)
    for solution in (f"def f(xs):\n{body}", f"```python\n{prompt}{body}```", f"{body}\nSIX = six\n"):
        found = facts(sandbox, make_item("def f(xs):\n", test, solution))
        assert (found.trivial, found.reference, found.reference_seconds) == (3, 0, None)


@pytest.mark.parametrize("name", ["max", "map", "passed", "best"])
def test_an_entry_point_may_have_any_name(sandbox, name):
    item = make_item(
        f"def {name}(x):\n", "assert candidate(1) == 2\nassert candidate(4) == 5", "    return x + 1\n", name
    )
    found = facts(sandbox, item)
    assert (found.trivial, found.reference) == (1, 2)


def test_an_item_that_tells_nothing_is_named(sandbox, caplog):
    worthless = make_item(
        "def f(x):\n", "assert candidate(1) == True\nassert candidate(2) == True", "    return True\n"
    )
    wrong = make_item("def f(x):\n", "assert candidate(1) == 2\nassert candidate(2) == 4", "    return 2\n")
    with caplog.at_level(logging.WARNING, logger="trl_multiagent"):
        (outcome,) = score(sandbox, ("def aux(x):\n    return x", "def f(x):\n    return True"), item=worthless)
        score(sandbox, ("", "def f(x):\n    return 2"), item={**wrong, "task_id": "t/1"})
    assert outcome.metrics["execution_reward"] == 0.0
    assert "t/0: a trivial answer passes all tests" in caplog.text
    assert "t/1: the reference solution passes 1 of 2 tests" in caplog.text
    caplog.clear()
    environment = CodeGenerationEnvironment(sandbox=sandbox, reward_kind="earned", warn_about_items=False)
    environment.score([worthless], [{"aux": "", "main": "def f(x):\n    return True"}], [[]])
    assert not caplog.records


def test_examples_without_a_literal_are_not_read():
    prompt = 'def f(xs):\n    """\n    >>> f([1, 1])\n    {[1]: 2}\n    >>> f([2])\n    3\n    """\n'
    assert dict(prompt_examples(prompt, "f")) == {"([2],)": "3"}


def test_junk_earns_nothing_for_tests_on_a_benchmark(sandbox, shared_data):
    items = load_code_dataset(str(shared_data / "humaneval.jsonl"), split="test[:48]").to_list()[::9]
    for item in items:
        name = item["entry_point"]
        solution = re.sub(rf"\b{name}\b", "solve", item["prompt"] + item["canonical_solution"])
        examples = ", ".join(f"{key!r}: {value}" for key, value in prompt_examples(item["prompt"], name))
        look_up = f"T = {{{examples}}}\ndef {name}(*a):\n    return T.get(repr(a), OTHERWISE)\n"
        junk = [look_up.replace("OTHERWISE", constant) for constant in ("True", "[]", "0", "None", "a[0]")]
        junk += [f"def {name}(*a):\n    return {constant}\n" for constant in ("True", "False", "''", "1", "a[0]")]
        aux = re.sub(r"\bsolve\b", "aux", solution)
        single = [f"{solution}\n\ndef {name}(*a):\n    return solve(*a)\n", f"def {name}(*a):\n    return aux(*a)\n"]
        outcomes = score(sandbox, *((aux, main) for main in junk + single), item=item)
        assert all(outcome.metrics["execution_reward"] == 0 for outcome in outcomes[:-2]), item["task_id"]
        assert all(outcome.reward <= 2.1 + 1e-9 for outcome in outcomes), item["task_id"]


# Deadlines


def test_the_deadline_of_a_check_follows_from_the_reference_solution(sandbox):
    environment = CodeGenerationEnvironment(num_agents=1, sandbox=sandbox)
    ran = []
    run = environment.runner.run
    environment.runner.run = lambda programs: ran.extend(programs) or run(programs)
    slow = "    for _ in range(4_000_000):\n        pass\n    return 2 * x\n"
    fast = make_item("def f(x):\n", "assert candidate(1) == 2\nassert candidate(2) == 4", "    return 2 * x\n")
    items = [
        fast,
        {**fast, "canonical_solution": slow},
        {name: value for name, value in fast.items() if name != "canonical_solution"},
        {**fast, "canonical_solution": "    return 0 * x\n"},
    ]
    environment.score(items, [{"main": "def f(x):\n    return 2 * x\n"}] * 4, [[]] * 4)
    timeouts = [program.check_timeout for program in ran]
    assert timeouts[0] == 1.0 and timeouts[1] > 1.0 and timeouts[2:] == [None, None]
    environment = CodeGenerationEnvironment(num_agents=1, sandbox=sandbox, adaptive_timeout=False)
    (outcome,) = environment.score(items[:1], [{"main": "def f(x):\n    return 2 * x\n"}], [[]])
    assert outcome.info.verdict.passed == 2 and not environment.reward._facts
