"""Watched functions: they stay what they are, and experiments change what passes between a program and its helper."""

import pytest

from trl_multiagent.code.sandbox import Program


EXPERIMENTS = ("nothing", "constant", "alone", "first")
CHECKS = "def check(candidate):\n" + "".join(
    f"    assert candidate({xs}) == {10 * sum(xs)}\n" for xs in ([1, 2], [3], [], [5, 5], [7], [2, 2, 2], [9])
)
SUM = "def aux(xs):\n    return sum(xs)\n"
TEN_TIMES = "def f(xs):\n    return 10 * aux(xs)\n"

# What honest and other teams do with aux, and the experiments that cost them a check
TEAMS = {
    "a helper that is needed": (SUM, TEN_TIMES, EXPERIMENTS),
    "a value that is thrown away": (SUM, "def f(xs):\n    aux(xs)\n    return 10 * sum(xs)\n", ("alone", "first")),
    "a gate on a constant in the module's code": (
        "def aux():\n    return 1\n", "OK = aux() == 1\ndef f(xs):\n    return 10 * sum(xs) if OK else None\n",
        ("alone", "nothing")),
    "both write everything": (
        "def aux(xs):\n    return 10 * sum(xs)\n",
        "def f(xs):\n    value = 10 * sum(xs)\n    return value if aux(xs) == value else None\n",
        ("constant", "nothing")),
    "a gate on an object": (
        "OK = object()\ndef aux(xs):\n    return OK\n",
        "def f(xs):\n    return 10 * sum(xs) if aux(xs) is OK else None\n", EXPERIMENTS),
}  # fmt: skip


SANDBOX = {"check_timeout": 2.0, "retries": 0}


def run(sandbox, source, checks=CHECKS, experiments=(), needed=range(7), watch=("aux",), helper="", **options):
    program = Program(
        source, "f", checks, watch=watch, needed=(*needed,), helper=helper, experiments=experiments, **options
    )
    (verdict,) = sandbox.run([program])
    return verdict


@pytest.mark.parametrize("name", TEAMS)
def test_experiments_show_who_does_what(sandbox, name):
    aux, main, expected = TEAMS[name]
    assert run(sandbox, aux + main).passed == 7
    effective = [one for one in EXPERIMENTS if run(sandbox, main, experiments=(one,), helper=aux).effective]
    assert {*effective} == {*expected}
    several = run(sandbox, main, experiments=EXPERIMENTS, helper=aux).effective
    assert set(several) <= {*expected} and (EXPERIMENTS[0] in several) == (EXPERIMENTS[0] in expected)
    if name != "a gate on an object":
        assert run(sandbox, main, experiments=("control",), helper=aux).effective == ()


def test_what_the_program_gets_in_each_experiment(sandbox):
    helper = "def aux(xs):\n    xs.append(len(xs))\n    return xs[:]\n"
    source = "def f(xs):\n    return [aux(xs), aux(xs), xs]\n"
    for name, expected in (
        ("nothing", [None, None, [3]]),
        ("constant", [[3, 1], [3, 1], [3]]),
        ("alone", [3, 1]),
        ("first", [3, 1]),
        ("control", [[3, 1], [3, 1, 2], [3, 1, 2]]),
    ):
        assert run(sandbox, source, f"assert f([3]) == {expected}\n", (name,), (), helper=helper).passed == 1, name


@pytest.mark.parametrize(
    ("helper", "source", "expected"),
    [
        ("def aux(n):\n    while True:\n        yield n\n", "g = aux(2)\ndef f(x):\n    return next(g)", 2),
        ("def aux(xs):\n    return (x for x in xs)", "def f(x):\n    return sum(aux(iter([1, 2])))", 3),
        ("def aux(n):\n    return aux(n - 1) + 1 if n else 0", "def f(x):\n    return aux(500)", 500),
        ("def aux(x):\n    raise KeyError(x)", (
            "def f(x):\n    try:\n        aux(7)\n    except KeyError as "
            "error:\n        return error.args"
        ), (7,)),
        ("K = 3\ndef aux(x):\n    return K", "K = 2\ndef f(x):\n    return K, aux(x), K", (2, 3, 2)),
        ("def aux(x):\n    return 'aux' in globals(), 'f' in "
        "globals()", "def f(x):\n    return aux(x)", (True, False)),
    ],
    ids=["iterator without an end", "iterators", "recursion", "exception", "names", "apart"],
)  # fmt: skip
def test_a_helper_runs_in_a_process_of_its_own(sandbox, helper, source, expected):
    assert run(sandbox, source, f"assert f(0) == {expected}", ("control",), (), helper=helper).passed == 1


@pytest.mark.parametrize(
    "helper",
    [
        "N = []\ndef aux(x):\n    N.append(1)\n    return len(N)\n",
        "def aux(x, kept=[]):\n    kept.append(x)\n    return kept[0]\n",
        "import random\ndef aux(x):\n    return random.random()\n",
        "N = []\ndef aux(x):\n    N.append(1)\n    if len(N) == 2:\n        raise KeyError\n",
        "K = []\ndef aux(x):\n    K.append(1)\n    return -0.0 if len(K) == 2 else 0.0\n",
    ],
)
def test_the_control_finds_a_helper_that_keeps_a_state(sandbox, helper):
    source = "def f(x):\n    try:\n        aux(x)\n    except KeyError:\n        pass\n    return x\n"
    checks = "".join(f"assert f({x}) == {x}\n" for x in (3, 5, 8))  # no two calls are equal
    assert run(sandbox, source, checks, ("control",), range(3), helper=helper).effective == ("control",)
    memo = "MEMO = {}\ndef aux(x):\n    return MEMO.setdefault(x, x + 1)\n"
    assert run(sandbox, source, checks, ("control",), range(3), helper=memo).effective == ()


COUNTS = "N = []\ndef aux(x):\n    N.append(1)\n    return x, len(N)\n"


@pytest.mark.parametrize("act", ["raise ValueError", "os._exit(0)", "while True: pass", "os.write(3, b'x' * 99)"])
def test_a_helper_that_does_not_answer_again_keeps_a_state(sandbox, act):
    checks = "".join(f"assert f({x}) == {x}\n" for x in (3, 5, 8))
    helper = f"import os\nN = []\ndef aux(x):\n    N.append(1)\n    if len(N) > 3:\n        {act}\n    return x\n"
    source = "def f(x):\n    return aux(x)\n"
    for number, effective in ((3, ("control",)), (9, ())):
        options = {"helper": helper.replace("> 3", f"> {number}"), "check_timeout": 0.3}
        verdict = run(sandbox, source, checks, ("control",), range(3), **options)
        assert verdict.passed == 3 and verdict.effective == effective


@pytest.mark.parametrize("end", ["while True: pass", "import os; os._exit(0)", "raise SystemExit"])
def test_a_state_is_found_also_if_checks_that_are_not_needed_end_the_run(sandbox, end):
    source = f"def f(x):\n    if x == 9:\n        {end}\n    return aux(x)[0]\n"
    checks = "".join(f"assert f({x}) == {x}\n" for x in (3, 5, *[9] * 12))
    for helper, effective in ((COUNTS, ("control",)), ("def aux(x):\n    return x, 0\n", ())):
        verdict = run(sandbox, source, checks, ("control",), range(2), helper=helper, check_timeout=0.3)
        assert verdict.passed == 2 and verdict.effective == effective


def test_each_experiment_begins_in_a_fresh_process_with_the_first_check(sandbox):
    # this program fails the second call of a process, and depends on aux from the fifth on
    source = (
        "N = []\ndef f(xs):\n    N.append(1)\n    if len(N) == 2:\n        return None\n"
        "    return 10 * (aux(xs) if len(N) > 4 else sum(xs))\n"
    )
    for needed, effective in (((0, 2, 3), ()), ((0, 2, 3, 4, 5), ("nothing", "constant"))):
        verdict = run(sandbox, source, experiments=("nothing", "constant", "control"), needed=needed, helper=SUM)
        assert verdict.effective == effective


@pytest.mark.parametrize(
    "waste",
    [
        "while True: pass",
        "x = [x := [x] for _ in iter(int, 1)]",
        "return 'a' * 10**8",
        "import os; os._exit(0)",
    ],
)
def test_a_program_that_wastes_time_or_memory_in_an_experiment_loses_a_check(sandbox, waste):
    source = f"def f(xs):\n    if aux(xs) != sum(xs):\n        {waste}\n    return 10 * sum(xs)\n"
    names = ("nothing", "constant", "control")
    assert run(sandbox, source, experiments=names, check_timeout=0.3, helper=SUM).effective == names[:-1]


@pytest.mark.parametrize(
    "waste",
    ["while True: pass", "return 'a' * 10**8", "import os; os._exit(0)", "import os; os.write(3, b'abcd' * 99)"],
)
def test_a_helper_that_wastes_time_or_memory_costs_a_check(sandbox, waste):
    helper = f"def aux(xs):\n    if len(xs) == 3:\n        {waste}\n    return sum(xs)\n"
    source = (
        "def f(xs):\n    try:\n        return 10 * aux(xs)\n    except BaseException:\n        return 10 * sum(xs)\n"
    )
    verdict = run(sandbox, source, experiments=("control",), check_timeout=0.3, helper=helper)
    statuses = [check.status for check in verdict.checks]
    assert statuses[:5] == ["passed"] * 5 and (statuses[5] != "passed" or "10**8" in waste)
    assert run(sandbox, TEN_TIMES, experiments=("control",), helper=SUM).effective == ()  # the sandbox goes on


@pytest.mark.parametrize(
    ("limit", "depth"), [(None, 900), (1500, 1400), (100_000, 40_000)], ids=["usual", "own limit", "very deep"]
)
def test_recursion_is_as_deep_as_without_watching(sandbox, limit, depth):
    source = f"import sys\nsys.setrecursionlimit({limit})\n" if limit else ""
    source += f"def aux(n):\n    return 0 if n == 0 else 1 + aux(n - 1)\ndef f():\n    return aux({depth})\n"
    assert run(sandbox, source, f"assert f() == {depth}", watch=()).passed == 1
    assert run(sandbox, source, f"assert f() == {depth}").passed == 1


def test_calls_outside_of_asserts_count_for_the_checks_after_them(sandbox):
    source = SUM + "def f(xs):\n    return aux(xs)\n"
    calls = {
        "got = candidate([2])\nassert got == 2": 1,
        "got = candidate([2])\nassert got == 3": 0,
        "a, b = candidate([1]), candidate([2])\nassert a == 0\nassert b == 2": 2,
        "assert candidate([1]) == 1\ngot = candidate([2])\nassert got == 3": 1,
        "for x in range(3):\n    got = candidate([x])\n    assert got == x": 3,
        "try:\n    candidate(5)\nexcept TypeError:\n    caught = True\nassert caught": 1,
    }
    for body, expected in calls.items():
        checks = "def check(candidate):\n" + "".join(f"    {line}\n" for line in body.split("\n"))
        assert run(sandbox, source, checks, needed=()).calls == {"aux": expected}, body


def test_calls_by_the_programs_definitions_count(sandbox):
    source = SUM + "TABLE = {n: aux([n]) for n in range(5)}\ndef f(n):\n    return TABLE[n]\n"
    assert run(sandbox, source, "assert f(3) == 3", needed=()).calls == {"aux": 5}


def test_only_needed_checks_decide(sandbox):
    source = "def f(xs):\n    return 10 * sum(xs) if len(xs) > 1 else 10 * aux(xs)\n"
    for needed, effective in (((0, 3, 5), ()), ((0, 1), ("nothing",))):
        assert run(sandbox, source, experiments=("nothing",), needed=needed, helper=SUM).effective == effective


def test_experiments_that_cannot_be_made_are_refused():
    with pytest.raises(ValueError, match="`experiments` has 'ecko', which is none of nothing, constant"):
        Program(source=SUM, entry_point="aux", checks=CHECKS, experiments=("first", "ecko"))
    for options in ({"experiments": ("first",), "watch": ("aux",)}, {"helper": SUM}):
        with pytest.raises(ValueError, match="Experiments need a `helper` and its one function"):
            Program(source=TEN_TIMES, entry_point="f", checks=CHECKS, **options)
