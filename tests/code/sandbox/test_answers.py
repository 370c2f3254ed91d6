"""What a program's answers may do to the checks: nothing that the checks did not ask for."""

import textwrap

import pytest

from trl_multiagent.code.sandbox import Program, Sandbox
from trl_multiagent.code.sandbox.helpers import wire


SANDBOX = {"workers": 2, "check_timeout": 1.0, "max_timeouts": 2, "retries": 0}


def judge(sandbox, source, checks, setup="", **fields):
    program = Program(textwrap.dedent(source), "f", textwrap.dedent(checks), textwrap.dedent(setup), **fields)
    return sandbox.run([program])[0]


def statuses(verdict):
    return [check.status for check in verdict.checks]


# Checks that break off

LOOP = """
def check(candidate):
    assert candidate(0) == 0
    for n in range(3):
        got = candidate(n)
        assert got == n
    assert candidate(9) == 9
"""
HELPER = """
def same(got, n):
    assert got == n
def check(candidate):
    same(candidate(0), 0)
    assert candidate(0) == 0
    same(candidate(1), 1)
"""


@pytest.mark.parametrize(
    ("end", "status"),
    [("raise ValueError('no')", "error"), ("os._exit(0)", "error"), ("while True: pass", "timeout")],
)
def test_a_loop_or_a_helper_that_is_left_early_does_not_count_as_passed(sandbox, end, status):
    source = f"import os\ndef f(x):\n    if x:\n        {end}\n    return x"
    assert statuses(judge(sandbox, source, LOOP)) == ["passed", status, "not_run"]
    assert statuses(judge(sandbox, source, HELPER)) == [status, "passed"]


def test_finished_loops_keep_their_credit(sandbox):
    checks = LOOP.replace("assert candidate(9) == 9", "candidate(9)\n    assert True is not candidate")
    source = "def f(x):\n    if x == 9: raise ValueError\n    return x"
    assert statuses(judge(sandbox, source, checks)) == ["passed", "passed", "not_run"]


def test_asserts_that_no_right_answer_reaches(sandbox):
    checks = """
    def check(candidate):
        got = candidate(1)
        if got is None:
            assert got == 0
        elif got == 1:
            assert type(got) is int
        else:
            assert got == 2
    """
    assert statuses(judge(sandbox, "def f(x): return x", checks)) == ["passed"] * 3
    assert statuses(judge(sandbox, "def f(x): return 3", checks)) == ["not_run", "not_run", "failed"]
    nothing = "for item in f(3):\n    assert item == 1"
    assert statuses(judge(sandbox, "def f(x): return []", nothing)) == ["not_run"]


def test_stop_iteration_does_not_end_loops_of_the_checks(sandbox):
    source = "def f(x): raise StopIteration"
    assert statuses(judge(sandbox, source, "assert all(g == 1 for g in map(f, [1, 2]))")) == ["error"]
    expected = "try:\n    f(1)\n    assert False\nexcept StopIteration:\n    assert f"
    assert statuses(judge(sandbox, source, expected)) == ["passed", "passed"]


def test_a_bare_except_does_not_hide_a_timeout(sandbox):
    checks = "try:\n    f(1)\n    assert False\nexcept:\n    pass\nassert f(0) == 0"
    endless = judge(sandbox, "def f(x):\n    while x: pass\n    return x", checks)
    assert statuses(endless) == ["not_run", "not_run"] and "Timeout" in endless.checks[0].error
    assert statuses(judge(sandbox, "def f(x): return 0 * (1 // (1 - x))", checks)) == ["passed", "passed"]


# Answers that would break the verifier


def test_a_number_of_too_many_digits_in_an_error(sandbox):
    verdict = judge(sandbox, "def f(x): return 1 << 20000", "y = {1: 2}[f(3)]\nassert y == 2")
    assert statuses(verdict) == ["not_run"] and verdict.checks[0].error == "KeyError"


def test_what_ends_processes_cannot_be_raised_through_the_checks(sandbox):
    checks = """
    def fail(kind):
        raise kind("x")
    assert f(fail) == 1
    """
    for kind in ("SystemExit", "KeyboardInterrupt", "GeneratorExit", "BaseException"):
        assert "passed" not in statuses(judge(sandbox, f"def f(fail): return fail({kind})", checks))
    assert statuses(judge(sandbox, "def f(x): return 1", "import sys\nsys.exit(3)\nassert f(1) == 1")) == ["not_run"]


def test_answers_that_are_too_much_for_the_checks_cost_the_program(sandbox):
    source = "def f(x): return '0' * (3 << 20)"
    checks = """
    kept = []
    for n in range(2000):
        kept.append(f(n) + "1")
    assert len(kept) == 2000
    """
    assert "passed" not in statuses(judge(sandbox, source, checks))
    assert statuses(judge(sandbox, "def f(x): return x", "assert f(1) == 1")) == ["passed"]


def test_a_very_large_source_is_an_error_of_the_program(sandbox):
    verdict = judge(sandbox, "def f(x): return 1\n#" + "\N{GRINNING FACE}" * 6_000_000, "assert f(1) == 1")
    assert verdict.definitions.status == "error" and "more than" in verdict.definitions.error


HUGE = {"int": [hex(1 << 4_000_000)]}
SAME_HASH = [(2**61 - 1) * n for n in range(50_000)]
REFUSED = {
    "a text for a fraction": {"Fraction": ["1e99999999"]},
    "a decimal with a huge exponent": {"Decimal": ["1e99999999"]},
    "a decimal of too many digits": {"Decimal": ["9" * 1_000_000]},
    "an integer of too many digits": {"int": ["f" * 3_000_000]},
    "days of huge integers": {"timedelta": [HUGE, HUGE, HUGE]},
    "a moment with a zone that is none": {"datetime": ["2024-01-02T03:04:05.000006", "UTC", 0]},
    "bytes of a number": {"bytes": [10**9]},
    "a set of keys with one hash": {"set": SAME_HASH},
    "a dictionary of keys with one hash": {"dict": [part for key in SAME_HASH for part in (key, 0)]},
    "a type of no known name": {"type": ["Popen"]},
    "two types at once": {"list": [], "set": []},
    "parts that are no list": {"list": {"list": []}},
}


LEVELS = ["7" * 1_000_000, "[" + "-" + "7" * 100 + "]", "[" * 300 + "]" * 300]


def test_parts_are_checked_before_a_value_is_made_of_them():
    packed = [wire.pack(value) for value in REFUSED.values()]
    for message in (*packed, *(len(text).to_bytes(4, "little") + text.encode() for text in LEVELS)):
        inbox = wire.Inbox(1 << 30)
        inbox.data += message
        with pytest.raises(wire.WireError):
            wire.decode(inbox.next(), wire.References(lambda *_: None, objects=True))


def test_a_subclass_is_read_from_the_fields_of_its_type(sandbox):
    source = """
    from collections import Counter, OrderedDict, defaultdict, deque
    from datetime import date, datetime, time, timedelta
    from decimal import Decimal
    from fractions import Fraction
    def lying(base):
        def wrong(*args): raise TypeError("not this one")
        names = "__reduce__ __reduce_ex__ __iter__ __getnewargs__ __str__ __float__ __index__ "
        names += "__len__ items keys as_tuple isoformat"
        return type("Lying", (base,), {name: wrong for name in names.split()} | {"numerator": 1, "year": 1, "days": 1})
    SAMPLES = [
        (Fraction, 1, 3), (Decimal, "2.5"), (date, 2024, 1, 2), (datetime, 2024, 1, 2), (time, 1, 2),
        (timedelta, 3), (int, 10**90),
        (float, 0.5), (complex, 1, 2), (str, "a"), (bytes, b"a"), (bytearray, b"a"), (list, [1]),
        (tuple, (1, 2)), (set, {1}),
        (frozenset, [1]), (deque, [1]), (dict, {1: 2}), (OrderedDict, {1: 2}), (Counter, "a"),
        (defaultdict, None, {1: 2}),
    ]
    def f(): return [(lying(base)(*args), base(*args)) for base, *args in SAMPLES]
    """
    checks = """
    pairs = f()
    assert len(pairs) == 21
    assert [type(lying) for lying, plain in pairs if type(lying) is not type(plain) or lying != plain] == []
    """
    assert statuses(judge(sandbox, source, checks)) == ["passed", "passed"]


def test_numbers_of_calls_that_are_no_integers_break_the_protocol(sandbox):
    source = """
    import sys
    def f(x):
        names = sys._getframe(2).f_globals
        pack = names["pack"]
        names["pack"] = lambda answer: pack(answer | x)
        return 1
    """
    for lie in ({"calls": [0.5]}, {"calls": [[1]]}, {"changed": [[[0], 1]]}, {"changed": [[-1, 1]]}, {"changed": 1}):
        verdict = judge(sandbox, source, f"assert f({lie}) == 1", watch=("f",))
        assert statuses(verdict) == ["error"] and "broke the protocol" in verdict.suspicious


# What honest programs need


def test_exceptions_keep_their_arguments_and_their_class(sandbox):
    setup = """
    class Short(ValueError):
        def __init__(self, missing):
            super().__init__(f"{missing} is missing")
            self.missing = missing
    """
    source = """
    def f(x):
        if x == 1: raise Short(7)
        if x == 2: raise KeyError(7)
        if x == 3: raise OSError(2, "gone")
        raise RuntimeError("long" * 200)
    """
    checks = """
    def raised(x, kind):
        try:
            f(x)
        except kind as error:
            return error
    assert str(raised(1, Short)) == "7 is missing"
    assert raised(2, KeyError).args == (7,)
    assert raised(3, OSError).args == (2, "gone")
    assert str(raised(4, RuntimeError)) == "long" * 200
    """
    assert statuses(judge(sandbox, setup + source, checks, setup=setup)) == ["passed"] * 4


def test_a_name_of_the_checks_is_no_way_to_another_exception(sandbox):
    source = "class Right(ValueError): pass\ndef f(x): raise Right('x')"
    checks = "class Right(KeyError): pass\ntry:\n    f(1)\n    assert False\nexcept Right:\n    pass\nassert f"
    assert statuses(judge(sandbox, source, checks)) == ["not_run", "not_run"]


def test_exceptions_of_the_standard_library_arrive_as_such(sandbox):
    source = """
    import json
    class Odd(json.JSONDecodeError): __module__ = 5
    def f(x):
        if x: raise Odd("odd", "", 0)
        return json.loads("{")
    """
    checks = """
    import json
    def named(error, call):
        try: call()
        except error as raised: return type(raised) is error and raised.args[0]
    assert named(json.JSONDecodeError, lambda: f(0)).startswith("Expecting property name")
    try: f(1)
    except ValueError as error: assert type(error).__name__ == "Odd" and not isinstance(error, json.JSONDecodeError)
    """
    assert statuses(judge(sandbox, source, checks)) == ["passed", "passed"]


@pytest.mark.parametrize("error", ["unittest.case._ShouldStop()", "unittest.SkipTest('no')"])
def test_a_program_cannot_end_a_test_of_the_checks_by_an_exception(sandbox, error):
    source = f"import unittest\ndef f(x): raise {error}"
    checks = """
    import unittest
    class Test(unittest.TestCase):
        def test(self): self.assertEqual(f(1), 2)
    result = unittest.TestResult()
    Test("test").run(result)
    assert f and result.wasSuccessful() and not result.skipped
    """
    assert statuses(judge(sandbox, source, checks))[0] == "failed"


def test_large_and_deep_values():
    source = """
    def f(n):
        value = list(range(n))
        for _ in range(150):
            value = [value]
        return value
    """
    checks = """
    value = f(210_000)
    for _ in range(150):
        value = value[0]
    assert value == list(range(210_000))
    """
    taken = Program("def f(xs): return sum(xs)", "f", "assert f([1] * 210_000) == 210_000")
    with Sandbox(workers=1, check_timeout=60.0) as sandbox:
        assert statuses(judge(sandbox, source, checks)) == ["passed"]
        assert statuses(sandbox.run([taken])[0]) == ["passed"]
