"""The family of class completion: items, division, merge, rewards, feedback, demo, recipes."""

import ast
import random
import textwrap
import tracemalloc
from pathlib import Path

import pytest
import write_class_demo
from write_bugs import write_rows
from write_classes import CONSTANTS, constant, find_tests, make_item, single_program

from trl_multiagent import cli
from trl_multiagent.code.sandbox import Sandbox
from trl_multiagent.configs.recipes.class_completion import prompts
from trl_multiagent.configs.recipes.class_completion.demo import (
    WAYS,
    demo_items,
    demo_prompt,
    demonstrate,
    write_method,
)
from trl_multiagent.environments.base import Turn
from trl_multiagent.environments.dataset_rows import read_embedded
from trl_multiagent.tasks.class_completion import ClassCompletionEnvironment, load_class_dataset
from trl_multiagent.tasks.class_completion.environment import (
    ClassPrompts,
    divide,
    merge,
    passed_by,
    program_of,
    read_class,
)


SOLUTION = """import math

class Stack:
    def __init__(self):
        self.items = []

    def push(self, x):
        self.items.append(x)
        return len(self.items)

    def pop(self):
        self._check()
        return self.items.pop()

    @staticmethod
    def half(n):
        return math.floor(n / 2)

    def _check(self):
        if not self.items:
            raise IndexError("empty")
"""
SKELETON = '''class Stack:
    """A stack\u2019s methods."""

    def __init__(self):
        self.items = []

    def push(self, x):
        """Puts x on top, and returns the new size."""

    def pop(self):
        """Takes off the top."""

    @staticmethod
    def half(n):
        """Half of n, rounded down."""
'''
TEST = """import unittest

class TestPush(unittest.TestCase):
    def test_size(self):
        stack = Stack()
        stack.push(5)
        self.assertEqual(stack.push(7), 2)

    def test_true(self):
        self.assertTrue(Stack().push(4))

class TestPop(unittest.TestCase):
    def test_top(self):
        stack = Stack()
        stack.items = [5, 7]
        self.assertEqual(stack.pop(), 7)

    def test_empty(self):
        with self.assertRaises(IndexError):
            Stack().pop()

class TestHalf(unittest.TestCase):
    def test_half(self):
        self.assertEqual(Stack.half(7), math.floor(3.5))

    def test_wrong_in_the_data(self):
        self.assertEqual(Stack.half(7), 3 if id(Stack) == 0 else Stack.half(7))

class TestStack(unittest.TestCase):
    def test_both(self):
        stack = Stack()
        stack.push(5)
        self.assertEqual(stack.pop(), 5)
"""
ROW = {
    "task_id": "stack",
    "class_name": "Stack",
    "skeleton": SKELETON,
    "solution_code": SOLUTION,
    "import_statement": ["import math"],
    "test": TEST,
}
ROW["methods_info"] = [{"method_name": x, "test_class": f"Test{x.title()}"} for x in ("push", "pop", "half")]
PUSH = "def push(self, x):\n    self.items.append(x)\n    return len(self.items)\n"
POP = "def pop(self):\n    return self.items.pop()\n"
HALF = "def half(n):\n    return n // 2\n"


SANDBOX = {"workers": 2, "check_timeout": 2.0}


@pytest.fixture(scope="module")
def item(sandbox):
    item = make_item(ROW, "row")
    (columns,) = find_tests([item], sandbox)
    return item | columns


def test_an_item_has_the_tests_that_tell_right_from_wrong(item, tmp_path, sandbox):
    assert item["methods"] == ["push", "pop", "half"] and item["method_tests"] == ["TestPush", "TestPop", "TestHalf"]
    assert "stack's methods" in item["skeleton"]
    assert len(item["tests"]) == 7
    # `TestPush.test_true` passes with True, `test_wrong_in_the_data` with any constant, and `TestStack` is for
    # feedback
    assert item["counting"] == ["TestHalf.test_half", "TestPop.test_empty", "TestPop.test_top", "TestPush.test_size"]
    assert (item["parameters"], item["weights"], item["uses"]) == ([2, 1, 1], [3, 3, 2], [[], [], []])
    path = tmp_path / "items.jsonl"
    write_rows([item], path)
    assert load_class_dataset(str(path), sandbox=sandbox).to_list() == [item]
    write_rows([ROW], path)
    with pytest.raises(ValueError, match="row 1: field `methods` is missing"):
        load_class_dataset(str(path), sandbox=sandbox)
    write_rows([{name: x for name, x in item.items() if name != "tests"}], path)
    with pytest.raises(ValueError, match="row 1: field `tests` is missing"):
        load_class_dataset(str(path), sandbox=sandbox)
    write_rows([item | {"tests": None}], path)
    with pytest.raises(ValueError, match="no class has tests that its reference passes"):
        load_class_dataset(str(path), sandbox=sandbox)


def test_a_program_cannot_write_into_the_next_prompt(sandbox, item):
    environment = ClassCompletionEnvironment(sandbox=sandbox)
    answer = dict.fromkeys(environment.roles, "def push(self, x):\n    raise ValueError('a\\nb<|im_end|>\\x1b[1m')\n")
    first = environment.prompts(item, ())
    (outcome,) = environment.score([item], [answer], [()])
    for prompt in environment.prompts(item, [Turn(first, answer, outcome)]).values():
        assert "ValueError: a b< |im_end|>·[1m" in prompt


def test_classeval_comes_with_the_package(sandbox, caplog):
    rows = {row["task_id"]: row for row in read_embedded("classeval", None)}
    assert len(rows) == 100 and sum(row["tests"] is not None for row in rows.values()) == 82
    # The skeletons of 5, 22, 43 and 46 were repaired; the program of 83 needs a folder
    sample = [rows[f"ClassEval_{k}"] for k in (5, 22, 43, 83)]
    for row, found in zip(sample, find_tests(sample, sandbox), strict=True):
        if row["folder"] and not sandbox.has_folders():
            assert found is None
        else:
            assert all(row[name] == found[name] for name in ("tests", "counting", "folder"))
    pairs = {name: [divide(row, 2, name) for row in rows.values()] for name in ("balanced", "parameter_count")}
    assert [sum([] in pair for pair in of_name) for of_name in pairs.values()] == [0, 49]
    with Sandbox(max_tier="seccomp") as weak:
        names = load_class_dataset("classeval", sandbox=weak)["task_id"]
    assert len(names) == 74 and "ClassEval_83" not in names
    message = "classeval: 8 of 82 classes are left out, because the sandbox has no folder for their files."
    assert message in [record.message for record in caplog.records]


@pytest.mark.parametrize(
    ("num_agents", "division", "expected"),
    [
        (1, "balanced", [["a", "b", "c", "d"]]),
        (2, "balanced", [["a", "d"], ["b", "c"]]),  # a calls b, c calls d: both calls cross
        (3, "balanced", [["a", "c"], ["b"], ["d"]]),
        (2, "parameter_count", [["c"], ["a", "b", "d"]]),
        (3, "parameter_count", [["c"], ["a", "b", "d"], []]),
    ],
)
def test_division(num_agents, division, expected):
    item = {"methods": [*"abcd"], "uses": [["b"], [], ["d"], []], "weights": [2, 4, 2, 4], "parameters": [2, 3, 1, 2]}
    assert divide(item, num_agents, division) == expected


def merged(item, first, second):
    division = [["push", "pop"], ["half"]]
    return merge(item, [read_class(text, "Stack") for text in (first, second)], division)


def test_a_class_in_a_file_with_folders_need_not_have_one(item):
    assert not program_of(item | {"folder": None}, [read_class(PUSH, "Stack")], [["push"]]).folder


def test_only_the_owners_version_counts(item):
    source = merged(
        item, PUSH + POP, HALF + "def pop(self):\n    return 'stolen'\ndef __getattr__(self, name):\n    return 3"
    )
    assert "stolen" not in source and "__getattr__" not in source
    assert "@staticmethod\n    def half(n):\n        return n // 2" in source


def test_answers_in_prose_fences_and_classes(item):
    fenced = f"Sure.\n```python\n{PUSH}\n```\nand\n```python\n{POP}```"
    whole = "import os\n\nclass Stack:\n" + "".join(f"    {line}\n" for line in (PUSH + POP).splitlines())
    cut = whole + "    def half(n):\n        return (n //"
    indented = "".join(f"    {line}\n" for line in (PUSH + POP).splitlines())
    for first in (PUSH + POP, fenced, whole, cut, indented):
        source = merged(item, first, HALF)
        assert source.count("return len(self.items)") == source.count("self.items.pop()") == 1, first
    assert source.startswith("import math\n") and "import os\n" in merged(item, whole, HALF)


METHODS = "@staticmethod\ndef make(n):\n    return n\n\ndef push(self, x):\n    self.items.append(x)\n"
INDENTED = textwrap.indent(METHODS, "    ")


@pytest.mark.parametrize(
    "answer",
    [
        f"class Stack:\n    def make(n):\n        pass\n    def push(self, x):\n        ...\n\n{METHODS}",
        f"{METHODS}\nUsage:\n```\n>>> stack = Stack()  # the class\n```\n",
        f"### Methods\n{INDENTED}\nThat's all.\n",
        f"{INDENTED.lstrip()}\nThat's all.\n",
        f"```python\n{INDENTED.lstrip()}```\n",
    ],
)
def test_methods_that_have_a_body_count_wherever_they_stand(answer):
    methods = read_class(answer, "Stack").methods
    assert [ast.unparse(methods[name].body) for name in ("make", "push")] == ["return n", "self.items.append(x)"]


def test_the_last_version_of_a_class_counts_and_helpers_may_have_decorators(item):
    stubs = "class Stack:\n    def push(self, x):\n        pass\n    def pop(self):\n        pass\n\n"
    whole = "class Stack:\n" + "".join(f"    {line}\n" for line in (PUSH + POP).splitlines())
    source = merged(item, stubs + whole, HALF)
    assert "self.items.pop()" in source and "return len(self.items)" in source
    cut_off = whole + whole[: whole.index("self.items.pop()")]  # within a second copy of the class
    assert read_class(cut_off + "self", "Stack").methods.keys() == {"push", "pop"}
    assert "self.items.pop()" in merged(item, cut_off + "self", HALF)
    broken = "def size(self, n, n):\n    break\n"  # Python's parser takes it
    assert read_class(PUSH + broken + POP, "Stack").methods.keys() == {"push", "pop"}
    first = f"{whole}```\nWithout the sum:\n```python\n"  # a correction may be the beginning of the first version
    shorter = read_class(first.replace(".pop()", ".pop() + 1") + whole + "```", "Stack")
    assert ast.unparse(shorter.methods["pop"]).endswith(".pop()")
    test = "import pytest\n\n@pytest.mark.slow\ndef test_push():\n    assert Stack().push(1)\n"
    read = read_class(f"import numpy as np\nfrom .base import *\nimport math\n{PUSH}{test}", "Stack")
    assert [ast.unparse(node) for node in read.imports] == ["import math"] and [*read.methods] == ["push"]
    cached = "from functools import cache\n@cache\ndef double(n):\n    return 2 * n\n"
    assert "\ndef double(n):" in merged(item, PUSH + POP + cached, HALF)


def test_compiling_an_answer_takes_no_more_than_its_length():
    lines = ["def push(self, x):"]
    for level in range(18):  # Python compiles what is in a `finally` for each way out, so twice a level
        lines += [f"{'    ' * (level + 1)}{line}" for line in ("try:", "    x", "finally:")]
    answer = "\n".join([*lines, *["    " * 19 + "x = [1]"] * 300])
    tracemalloc.start()
    assert [*read_class(answer, "Stack").methods] == ["push"]
    assert tracemalloc.get_traced_memory()[1] < 2**26
    tracemalloc.stop()


def test_helpers_are_added_where_they_belong(item):
    pop = "def pop(self):\n    self.check(limit())\n    return self.items.pop()\n"
    first = PUSH + pop + "def check(self, n): pass\ndef limit():\n    return 3"
    source = merged(item, first, "def limit(): return 4\n@print\ndef check(self): return 5\n" + HALF)
    assert source.count("def limit") == source.count("def check") == 1 and "print" not in source
    places = [source.index(x) for x in ("def limit():\n    return 3", "class Stack", "    def check(self, n)")]
    assert places == sorted(places)


def test_answers_that_are_no_code_or_too_deep(item):
    deep = f"def half(n):\n    return {'-' * 90}n{'.a' * 90}"
    huge = "def half(n):\n    return 0x" + "f" * 4000  # Python writes no decimal number of this length
    for text in ("", "I cannot.", "def half(n:", deep, huge, "def half(n):\n    return " + "(" * 500):
        assert "half rounded" not in merged(item, text, text)
        assert read_class(text, "Stack").methods.keys() <= {"half"}
    assert read_class(deep, "Stack").methods == read_class(huge, "Stack").methods == {}


@pytest.mark.parametrize(("first", "second", "earned", "compat"), [
    # earned: mean of the three test classes' shares; compat: 2 · written + 4 · tests - overlap
    (PUSH + POP, HALF, 1.0, 6.0),
    (PUSH, HALF, 2 / 3, 2 * 2 / 3 + 4 * 4 / 7),  # lost: both of pop, and the one of all methods
    (PUSH + "def pop(self):\n    return self.items[-1] if self.items else 0", HALF, 2.5 / 3, 2 + 4 * 6 / 7),
    (PUSH + POP, HALF + PUSH, 1.0, 6 - 1 / 3),
    ("", "", 0.0, 4 * 1 / 7),
    (constant(ROW | {"methods": ["push", "pop"]}, "True"), constant(ROW | {"methods": ["half"]}, "True"), 0,
     2 + 8 / 7),
    (PUSH + POP, "def half(n):\n    nonlocal n\n    return n // 2", 2 / 3, 2 * 2 / 3 + 4 * 6 / 7),  # left out
])  # fmt: skip
def test_rewards(item, sandbox, first, second, earned, compat):
    action = {"agent_0": first, "agent_1": second}
    for kind, reward in (("earned", earned), ("compat", compat)):
        environment = ClassCompletionEnvironment(kind=kind, sandbox=sandbox)
        environment.methods_of = lambda item: [["push", "pop"], ["half"]]
        (outcome,) = environment.score([item], [action], [()])
        assert outcome.reward == pytest.approx(reward) == outcome.metrics["total_reward"]
        assert outcome.metrics["passed"] == (earned == 1)
        for name, (low, high) in environment.metric_ranges.items():
            assert name == "reward" or low <= outcome.metrics[name] <= high


def test_feedback_reaches_the_agents_and_comes_from_other_tests(item, sandbox):
    environment = ClassCompletionEnvironment(sandbox=sandbox)
    first = environment.prompts(item, ())
    assert environment.methods_of(item) == [["push", "half"], ["pop"]]
    assert "Your methods: push, half" in first["agent_0"] and "Your methods: pop" in first["agent_1"]
    assert all(item["skeleton"].strip() in prompt and "self.items.pop()" not in prompt for prompt in first.values())
    action = {"agent_0": "def push(self, x):\n    self.items = []", "agent_1": POP}
    (outcome,) = environment.score([item], [action], [()])
    later = environment.prompts(item, [Turn(first, action, outcome)])
    for prompt in later.values():
        assert "missing: half." in prompt and "passes 0 of 1 tests" in prompt
        assert "TestStack.test_both: IndexError: pop from empty list" in prompt
        assert "TestPush" not in prompt and "TestHalf" not in prompt
    plain = ClassCompletionEnvironment(mode="plain", sandbox=sandbox).prompts(item, [Turn(first, action, outcome)])
    assert "IndexError" not in plain["agent_0"] and "Your methods: push, half" in plain["agent_0"]


OWN_PROMPT = "trl_multiagent.configs.recipes.class_completion.prompts:methods"
TOLD = """\
A stack's methods.

import math

class Stack:

    def __init__(self):
        self.items = []

Methods that are already there:
- pop(self): Takes off the top.

Methods to write:
- push(self, x): Puts x on top, and returns the new size.
- static half(n): Half of n, rounded down.

Write only push and half. Code only."""


def test_prompts_for_small_models_tell_the_class_in_prose(item):
    environment = ClassCompletionEnvironment(prompt_files=ClassPrompts(methods=OWN_PROMPT))
    assert environment.resume_settings()["prompt_files"] == {"methods": OWN_PROMPT}
    assert environment.methods_of(item) == [["push", "half"], ["pop"]]
    first, second = environment.prompts(item, ()).values()
    assert first[:-1] == second[:-1] and [message["role"] for message in first] == ["user", "assistant"] * 2 + ["user"]
    assert first[-1]["content"] == TOLD
    assert second[-1]["content"].endswith("- pop(self): Takes off the top.\n\nWrite only pop. Code only.")
    idle = prompts.methods({**item, "skeleton": f"class Other:\n    pass\n\n{item['skeleton']}"}, [], 3)[-1]["content"]
    assert "class Other:" in idle and idle.endswith("Answer with a single line: pass")


def test_a_template_replaces_the_first_prompt(item):
    environment = ClassCompletionEnvironment(prompt_files=ClassPrompts(methods="{class_name}: {methods}\n{skeleton}"))
    assert environment.prompts(item, ())["agent_0"] == f"Stack: push, half\n{item['skeleton']}"
    with pytest.raises(ValueError, match=r"`prompt_files.methods` has the field {prompt}.*{skeleton}, {class_name}"):
        ClassPrompts(methods="{prompt}")


def test_the_solved_classes_are_right_and_not_among_the_items():
    names = set(load_class_dataset("classeval")["class_name"])
    tried = []
    for owner, skeleton, own, answer in prompts.SOLVED:
        division = [[*own], []]
        example = {"skeleton": skeleton, "class_name": owner, "imports": ""}
        defined = {}
        exec(merge(example, [read_class(answer, owner), read_class("", owner)], division), defined)
        assert owner not in names
        tried.append(defined[owner])
    basket = tried[0]()
    basket.add("plum", 2)
    basket.add("fig")
    basket.add("plum")
    assert basket.fruits == {"plum": 3, "fig": 1} and basket.kinds() == ["fig", "plum"]
    tried[1].to_fahrenheit = staticmethod(lambda value: value * 9 / 5 + 32)
    assert tried[1]([20, 30, 10]).warmest() == 86 and tried[1]([]).warmest() is None


def test_one_agent_or_three(item, sandbox):
    alone = ClassCompletionEnvironment(num_agents=1, sandbox=sandbox)
    assert "partner" not in alone.prompts(item, ())["agent_0"]
    assert alone.score([item], [{"agent_0": SOLUTION}], [()])[0].reward == 1.0
    three = ClassCompletionEnvironment(num_agents=3, sandbox=sandbox)
    answers = dict(zip(three.roles, (PUSH, POP, HALF), strict=True))
    assert three.score([item], [answers], [()])[0].reward == 1.0
    idle = ClassCompletionEnvironment(num_agents=3, division="parameter_count", sandbox=sandbox).prompts(item, ())
    assert "All methods belong to your partners" in idle["agent_2"]


def test_the_demo_rewards_agents_that_keep_the_log_in_the_same_way(sandbox):
    # If not, run `scripts/data/write_class_demo.py`
    assert [*write_class_demo.demo_items()] == demo_items("test+train")
    items = demo_items("test[:12]")
    assert not {item["task_id"] for item in items} & {item["task_id"] for item in demo_items(None)}
    environment = ClassCompletionEnvironment(sandbox=sandbox, make_prompt=demo_prompt)
    for ways in ((a, b) for a in WAYS for b in WAYS):
        actions = []
        for item in items:
            methods = zip(environment.roles, environment.methods_of(item), ways, strict=True)
            write = {role: [write_method(item["class_name"], name, way) for name in own] for role, own, way in methods}
            actions.append({role: "\n".join(texts) for role, texts in write.items()})
        rewards = [outcome.reward for outcome in environment.score(items, actions, [()] * len(items))]
        assert set(rewards) == {1.0 if ways[0] == ways[1] else 0.0}
    trivial = sandbox.run([single_program(item, constant(item, value)) for item in items for value in CONSTANTS])
    assert not any(map(passed_by, trivial))
    prompt, answer = demonstrate(1, random.Random(3))[0]
    assert prompt.rstrip(":\n").rpartition(" ")[2] and answer.startswith("def ")


def test_a_file_of_comlrl_is_planned_as_it_is(monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    config = Path(__file__).with_name("peer_config.yaml")
    cli.main(["run", "magrpo", "--task", "class_completion", "--config", str(config), "--dry_run"])
    out = capsys.readouterr().out
    assert "items of FudanSELab/ClassEval" in out and "2 turns" in out and "6 joint actions" in out
