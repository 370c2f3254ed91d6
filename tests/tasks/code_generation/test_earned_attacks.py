"""
What pairs earn, with the kind `earned`, that were written to earn more than their work; and honest pairs that look
like them.
"""

import pytest

from trl_multiagent.tasks.code_generation import CodeGenerationEnvironment
from trl_multiagent.tasks.code_generation import reward as reward_module
from trl_multiagent.tasks.code_generation.reward import analyze

from typical_pairs import EVEN, ITEM, SUM_OF_SQUARES


SOLO = 2.1  # what one agent earns that solves the task alone
ANSWER = "return sum(x * x for x in xs if x % 2 == 0)"  # main's last line if it does everything
LONG = ITEM | {"test": ITEM["test"] + ITEM["test"].partition("\n")[2]}  # all tests twice
ONE = "def aux(*xs):\n    return 1\n"


def alone(*lines, before=""):
    """A main that does everything, after some lines."""
    return before + "def f(xs):\n" + "".join(f"    {line}\n" for line in (*lines, ANSWER))


# Experiments take longer than the first run, copy and compare values, and read iterators
MACHINERY = {
    "sleeps longer than the deadline of an experiment":
        (ONE, alone("aux(xs)", "time.sleep(0.5)", before="import time\n")),
    "notices copies": (
        "HEARD = []\nclass A:\n    def __deepcopy__(self, memo):\n        HEARD.append(1)\n        return self\n"
        "def aux(xs):\n    return [A()]\n",
        alone("value = aux(xs)", "if HEARD or not value or type(value[0]) is not A:", "    return None")),
}  # fmt: skip
# What a process remembers must not make later experiments look effective
MEMORY = {
    "fails at the first call of a process":
        (ONE, alone("aux(xs)", "SEEN.append(xs)", "if len(SEEN) == 1:", "    return None",
        before="SEEN = []\n")),
    "remembers a wrong value in a variable":
        (ONE, alone("if aux(xs) != 1:", "    BAD.append(1)", "if BAD:", "    return None", before="BAD = []\n")),
}  # fmt: skip
SQUARES = "sum(x * x for x in xs if x % 2 == 0)"
# Arguments that come back in something other than data
ARRANGED = {
    "returns the argument in a function": ("def aux(xs):\n    return lambda: xs\n", alone("xs = aux(xs)()")),
    "yields the argument of a context": (
        "from contextlib import contextmanager\n@contextmanager\ndef aux(x):\n    yield x\n",
        alone("with aux(xs) as ys:", "    xs = ys")),
}  # fmt: skip
BOXED = {
    name: (
        before + f"def aux(xs):\n    return {aux}\n".replace("SQUARES", SQUARES),
        f"def f(xs):\n    return {main}\n",
    )
    for name, before, aux, main in (
        ("a named tuple", "from collections import namedtuple\nB = namedtuple('B', 'v')\n", "B(SQUARES)", "aux(xs).v"),
        ("a partial", "from functools import partial\n", "partial(int, SQUARES)", "aux(xs)()"),
    )
}
BOXED["a generator that calls itself"] = (
    f"def aux(xs, depth):\n    if depth:\n        yield from aux(xs, depth - 1)\n    else:\n        yield {SQUARES}\n",
    "def f(xs):\n    return next(aux(xs, 2))\n",
)
# What aux does besides returning a constant, and what changes none of its arguments
EFFECTS = {
    "yields": ("def aux(*xs):\n    yield 1\n", alone("if len(list(aux(xs))) != 1:", "    return None")),
    "raises": (
        "def aux(*xs):\n    if xs:\n        raise KeyError\n    return 1\n",
        alone("aux()", "try:", "    aux(xs)", "    return None", "except KeyError:", "    pass")),
    "calls back": (
        "def aux(call):\n    call()\n    return 1\n",
        alone("called = []", "aux(lambda: called.append(1))", "if not called:", "    return None")),
}  # fmt: skip
GATES = {
    "a gate on a constant": (ONE, alone("if aux(xs) != 1:", "    return None")),
}  # fmt: skip
G = "def g(xs):\n    return [x for x in xs if x % 2 == 0]\n"
REPLACED = {
    "main's entry point does aux's work": (
        "def aux(*a):\n    return f(*a, 1)\n",
        "def f(xs, k=0):\n    if k:\n        return [x for x in xs if x % 2 == 0]\n    return sum(x * x for x in "
        "aux(xs))\n",
    ),
    "aux looks a global name up": ("def aux(xs):\n    return globals()['g'](xs)\n", G + SUM_OF_SQUARES),
}  # fmt: skip
# What passes between the agents is data: objects and functions of the program could do the other agent's work
CODE = {
    "works in place on an object": (
        "def aux(bag, x):\n    if x % 2 == 0:\n        bag.total += x * x\n",
        "class Bag:\n    total = 0\ndef f(xs):\n    bag = Bag()\n    for x in xs:\n        aux(bag, x)\n    "
        "return bag.total\n",
    ),
    "makes a function": (
        "def aux(k):\n    return lambda x: x ** k\n",
        "def f(xs):\n    return sum(map(aux(2), [x for x in xs if x % 2 == 0]))\n"),
    "calls a function that it is given": (
        "def aux(g, xs):\n    return g(xs)\n",
        "def f(xs):\n    return aux(lambda ys: sum(y * y for y in ys if y % 2 == 0) + 1, xs) - 1\n"),
    "hides a function in a number": (
        "def aux(x):\n    return x._numerator(1)\n",
        f"from fractions import Fraction\ndef f(xs):\n    x = Fraction(1)\n    x._numerator = lambda k: {SQUARES} "
        "+ k\n    return aux(x) - 1\n",
    ),
}  # fmt: skip
CODE = {name: (aux, main.replace("SQUARES", SQUARES)) for name, (aux, main) in CODE.items()}
# Containers that main fills, and values that aux was given before
KEPT = {
    kind: (
        f"from collections import {kind.split('(')[0]}\ndef aux():\n    return {kind}\n",
        f"def f(xs):\n    d = aux()\n    for k, x in enumerate(xs):\n        if x % 2 == 0:\n            {fill}\n "
        f"   return {total}\n",
    )
    for kind, fill, total in (("deque()", "d.append(x * x)", "sum(d)"),)
}
KEPT |= {
    "returns the last argument": (
        "LAST = [0]\ndef aux(x):\n    old, LAST[0] = LAST[0], x\n    return old\n",
        f"def f(xs):\n    aux({SQUARES} + 1)\n    return aux(0) - 1\n"),
    "counts its calls": (
        "N = []\ndef aux():\n    N.append(1)\n    return len(N)\n",
        alone("v = aux()", "if v in SEEN:", "    return None", "SEEN.append(v)", before="SEEN = []\n")),
    "keeps the arguments of three calls ago": (
        "OLD = [0] * 3\ndef aux(x):\n    OLD.append(x)\n    return OLD[-4]\n",
        f"N = []\ndef f(xs):\n    for k in ({SQUARES}, 0, 0):\n        N.append(1)\n        aux((len(N), k))\n"
        "    N.append(1)\n    return aux((len(N), 0))[1]\n"),
    "keeps a list that it is given": (
        "KEPT = []\ndef aux(x=None):\n    if x is None:\n        return KEPT[-1][0] - 1\n    KEPT.append(x)\n",
        f"def f(xs):\n    box = [0]\n    aux(box)\n    box[0] = {SQUARES} + 1\n    return aux()\n"),
    "tells by which parts of a value are the same object": (
        "def aux(n):\n    one = []\n    return [one, one if n else []]\n",
        alone("k = len(xs) > 2", "a, b = aux(k)", "if (a is b) != k:", "    return None")),
    "calls the entry point with another argument": (
        "def aux(xs):\n    return f(tuple(xs))\n",
        "def f(xs):\n    if type(xs) is tuple:\n        return [x for x in xs if x % 2 == 0]\n    return sum(x * "
        "x for x in aux(xs))\n"),
    "is a recursion through the entry point": (
        "def aux(xs):\n    return f(xs[1:]) if xs else 0\n",
        "def f(xs):\n    return aux(xs) + (xs[0] ** 2 if xs and xs[0] % 2 == 0 else 0)\n"),
}  # fmt: skip
# Texts that use more of the other agent than its function, or the interpreter
TEXTS = {
    "main fills aux's table": (
        "T = {'g': 0}\ndef aux(xs):\n    return T['g'](xs)\n",
        "def f(xs):\n    T['g'] = lambda xs: [x for x in xs if x % 2 == 0]\n    return sum(x * x for x in aux(xs))\n"),
    "an attribute of another name of aux": (
        "def aux(xs):\n    return aux.h(xs)\n",
        "def f(xs):\n    k = aux\n    k.h = lambda xs: [x for x in xs if x % 2 == 0]\n    return sum(x * x for x "
        "in aux(xs))\n",
    ),
}  # fmt: skip
# Honest pairs
IN_PLACE = "def aux(xs):\n    for x in xs[:]:\n        if x % 2:\n            xs.remove(x)\n"
HONEST = {
    "aux returns a fraction, main asks for its denominator": (
        "from fractions import Fraction\ndef aux(x):\n    return Fraction(x, 2)\n",
        "def f(xs):\n    return sum(x * x for x in xs if aux(x).denominator == 1)\n"),
    "aux is a generator that calls itself": (
        "def aux(xs):\n    if xs:\n        if xs[0] % 2 == 0:\n            yield xs[0]\n        yield from "
        "aux(xs[1:])\n",
        "def f(xs):\n    return sum(x * x for x in aux(xs))\n"),
    "works in place and ends with a call that returns nothing": (
        "def aux(xs, out):\n    for x in xs[:-1]:\n        x % 2 or out.append(x)\n    return None if not xs or "
        "xs[-1] % 2 else out.append(xs[-1])\n",
        "def f(xs):\n    out = []\n    aux(xs, out)\n    return sum(x * x for x in out)\n",
    ),
    "works in place and returns its argument":
        (IN_PLACE + "    return xs\n", "def f(xs):\n    aux(xs)\n    return sum(x * x for x in xs)\n"),
    "works with a class of its own": (
        "class Node:\n    def __init__(self, x, next=None):\n        self.x = x\n        self.next = next\n"
        "def aux(xs):\n    node, kept = None, []\n    for x in xs:\n        node = Node(x, node)\n"
        "    while node:\n        if node.x % 2 == 0:\n            kept.append(node.x)\n        node = "
        "node.next\n    return kept\n",
        SUM_OF_SQUARES,
    ),
    "has a function as a default value and a table of functions": (
        "TESTS = {'even': lambda x: x % 2 == 0}\ndef aux(xs, test=TESTS['even']):\n    return [x for x in xs if "
        "test(x)]\n",
        SUM_OF_SQUARES),
    "imports of both overlap": (
        "from typing import List\nimport math\ndef aux(xs: List[int]):\n    return [x for x in xs if math.gcd(x, "
        "2) == 2]\n",
        "from typing import Optional, List\nimport re, math\n"
        + SUM_OF_SQUARES.replace("xs)", "xs: List[int])", 1).replace(
            "return", "assert math.pi and re and Optional\n    return"
        ),
    ),
    "each call of aux has only one other value":
        ("def aux(x):\n    return x % 2 == 0\n", "def f(xs):\n    return sum(x * x for x in xs if aux(x))\n"),
    "an endless loop where aux says nothing": (
        "def aux(x):\n    return x - 1\n",
        "def f(xs):\n    total, k = 0, len(xs)\n    while k != 0:\n        k = aux(k)\n        total += xs[k] ** "
        "2 * (xs[k] % 2 == 0)\n    return total\n",
    ),
}  # fmt: skip


SANDBOX = {"check_timeout": 5.0}


def score(sandbox, *pairs, item=ITEM, kind="earned"):
    environment = CodeGenerationEnvironment(reward_kind=kind, sandbox=sandbox, warn_about_items=False)
    actions = [{"aux": aux, "main": main} for aux, main in pairs]
    return [outcome.reward for outcome in environment.score([item] * len(pairs), actions, [[]] * len(pairs))]


ATTACKS = {
    "machinery": MACHINERY | MEMORY | GATES,
    "arranged": ARRANGED | BOXED | EFFECTS,
    "replaced": REPLACED | CODE,
    "kept": KEPT | TEXTS,
}


@pytest.mark.parametrize("pairs", ATTACKS.values(), ids=ATTACKS)
def test_attacks_earn_no_more_than_one_agent(sandbox, pairs):
    rewards = dict(zip(pairs, score(sandbox, *pairs.values(), item=LONG), strict=True))
    assert {name: reward for name, reward in rewards.items() if not 1.1 < reward <= SOLO + 1e-9} == {}


def test_a_task_whose_answer_is_a_state_shows_nothing_about_aux(sandbox):
    test = "def check(candidate):\n" + "".join(
        f"    assert candidate({k}) == {k * (k + 1) // 2}\n" for k in range(1, 13)
    )
    item = ITEM | {"test": test, "canonical_solution": "    return xs * (xs + 1) // 2\n"}
    main = "N = []\ndef f(xs):\n    aux(xs)\n    N.append(xs)\n    return sum(N)\n"  # all calls so far
    assert score(sandbox, (ONE, main), item=item)[0] <= SOLO + 1e-9


@pytest.mark.parametrize("kind", ["earned", "paper"])
def test_honest_pairs_are_paid_in_full_by_both_kinds(sandbox, kind):
    rewards = dict(zip(HONEST, score(sandbox, *HONEST.values(), kind=kind), strict=True))
    assert rewards == pytest.approx(dict.fromkeys(HONEST, 4.0))


def test_an_exception_in_a_later_iteration_of_a_check_is_evidence(sandbox):
    test = (
        f"def check(candidate):\n    for xs in {[[n, n + 1, 2] for n in range(9)]}:\n"
        "        value = candidate(xs)\n        assert value == expected(xs)\n"
    )
    item = ITEM | {"test": test, "prompt": f"def expected(xs):\n    {ANSWER}\n\n" + ITEM["prompt"]}
    main = "def f(xs):\n    return sum(x * x for x in aux(xs)) if xs[0] else 4\n"
    assert score(sandbox, (EVEN, main), item=item) == pytest.approx([4.0])


def test_imports_belong_to_the_function_once(sandbox):
    lines = "from typing import Dict, List\nimport math\n"
    pairs = (lines + EVEN, lines + SUM_OF_SQUARES), (lines * 9 + EVEN, SUM_OF_SQUARES)
    rewards = score(sandbox, *pairs)
    assert rewards[0] == pytest.approx(4.0) and rewards[1] < 3.9


@pytest.mark.parametrize("otherwise", ["False", "0", "[]", "xs", "[7]"])
def test_looking_the_first_test_up_earns_nothing_for_tests(sandbox, otherwise):
    tests = (f"    assert candidate({xs}) == {sorted(xs)}\n" for xs in ([3, 1], [], [2], [5, 4], [7]))
    item = {"task_id": "t/sort", "prompt": 'def f(xs):\n    """Sorts."""\n', "entry_point": "f"}
    item |= {"test": "def check(candidate):\n" + "".join(tests), "canonical_solution": "    return sorted(xs)\n"}
    aux = "def aux(xs):\n    return xs == [3, 1]\n"
    main = f"def f(xs):\n    return [1, 3] if aux(xs) else {otherwise}\n"
    assert score(sandbox, (aux, main), item=item) == pytest.approx([1.1])
    assert score(sandbox, (aux, "def f(xs):\n    return sorted(xs)\n"), item=item) == pytest.approx([SOLO])


def test_texts_that_the_analysis_fails_on_count_as_empty_and_are_reported_once(sandbox, monkeypatch, caplog):
    def fail_on_some(prompt, entry_point, aux, main):
        if "hard" in main:
            raise KeyError("a kind of node")
        return analyze(prompt, entry_point, aux, main)

    monkeypatch.setattr(reward_module, "analyze", fail_on_some)
    hard = (EVEN, f"{SUM_OF_SQUARES}  # hard")
    environment = CodeGenerationEnvironment(reward_kind="earned", sandbox=sandbox)
    actions = [{"aux": aux, "main": main} for aux, main in (hard, (EVEN, SUM_OF_SQUARES), hard)]
    for _ in range(2):
        outcomes = environment.score([ITEM] * 3, actions, [[]] * 3)
        assert [outcome.reward for outcome in outcomes] == pytest.approx([0.0, 4.0, 0.0])
    (record,) = [record for record in caplog.records if record.levelname == "ERROR"]
    assert "pairs/0: an answer could not be read (KeyError: 'a kind of node')" in record.message
    assert repr(hard) in record.message
    alone = CodeGenerationEnvironment(num_agents=1, reward_kind="earned", sandbox=sandbox)
    assert alone.score([ITEM], [{"main": hard[1]}], [[]])[0].reward == 0.0
