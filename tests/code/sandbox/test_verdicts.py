"""What a verdict says about honest programs, wrong ones, and checks of every shape."""

import textwrap
from dataclasses import replace

import pytest

from trl_multiagent.code.sandbox import Program


SANDBOX = {"check_timeout": 2.0}


def judge(sandbox, source, checks, entry_point="f", **fields):
    body = textwrap.indent(textwrap.dedent(checks), "    ")
    program = Program(textwrap.dedent(source), entry_point, f"def check(candidate):\n{body}", **fields)
    return sandbox.run([program])[0]


def statuses(verdict):
    return [check.status for check in verdict.checks]


def test_each_assert_is_a_check_of_its_own(sandbox):
    checks = (
        "assert candidate(1) == 1\nassert candidate(2) == 2\nassert candidate(0) == 0\nassert True, "
        "'padding'\nassert f(4) == 0.25"
    )
    verdict = judge(sandbox, "def f(x): return 1 / x", checks)
    assert statuses(verdict) == ["passed", "failed", "error", "passed"]
    assert verdict.checks[2].error == "ZeroDivisionError: division by zero"
    assert verdict.checks[0].source == "assert candidate(1) == 1"
    assert (verdict.passed, verdict.total, verdict.definitions.status) == (2, 4, "passed")


def test_checks_run_whole(sandbox):
    verdict = judge(
        sandbox,
        "def f(xs): return sorted(xs)",
        """
        import random
        def same(a, b):
            return abs(a - b) < 1e-6
        for size in range(5):
            xs = [random.random() for _ in range(size)]
            assert len(candidate(xs)) == size
        assert candidate([2,
                          1]) == [
            1,
            2,
        ]
        assert same(candidate([0.5])[0], 0.5)
        result = candidate([3, 1])
        assert result == [1, 3]
        """,
    )
    assert statuses(verdict) == ["passed"] * 4
    assert verdict.checks[1].source == "assert candidate([2, 1]) == [1, 2]"


def test_setup_code_is_the_problems_not_the_programs(sandbox):
    source, setup = "def double(x): return 0\ndef f(x): return x + x", "def double(x): return 2 * x"
    assert statuses(judge(sandbox, source, "assert double(candidate(1)) == 4", setup=setup)) == ["passed"]


def test_a_failure_between_the_asserts_leaves_the_rest_not_run(sandbox):
    verdict = judge(sandbox, "def f(x): raise KeyError", "assert not 0 == 1\ny = candidate(1)\nassert y == 1")
    assert statuses(verdict) == ["passed", "not_run"]
    assert "KeyError" in verdict.checks[1].error


def test_definitions_that_fail(sandbox):
    for source, error in (
        ("def f(x:", "SyntaxError"),
        ("raise ValueError('no')", "ValueError: no"),
        ("def g(x): return x", "NameError: the program does not define 'f'"),
        ("import os; os._exit(0)", "Died"),
        ("x = '\udc00'\ndef f(x): return x", "UnicodeEncodeError"),
    ):
        verdict = judge(sandbox, source, "assert candidate(1) == 1")
        assert verdict.definitions.status == "error"
        assert error in verdict.definitions.error
        assert statuses(verdict) == ["not_run"]


def test_expected_exceptions_and_guards(sandbox):
    checks = """
        try:
            candidate(-1)
            assert False, "should have raised"
        except ValueError as error:
            assert str(error) == "negative"
    """
    careful = "def f(x):\n    if x < 0: raise ValueError('negative')"
    assert statuses(judge(sandbox, careful, checks)) == ["passed", "passed"]
    assert statuses(judge(sandbox, "def f(x): return 0", checks)) == ["failed", "not_run"]


def test_bare_asserts_and_a_function_that_is_called_check(sandbox):
    bare = Program("def f(x): return x", "f", "assert f(1) == 1\nassert f(2) == 3")
    named = Program("def check(x): return x > 0", "check", "def check(candidate):\n    assert check(1) == True")
    verdicts = sandbox.run([bare, named])
    assert [statuses(verdict) for verdict in verdicts] == [["passed", "failed"], ["passed"]]


def test_a_needed_check_that_does_not_pass_is_the_last(sandbox):
    checks = "assert candidate(1) == 1\nassert candidate(2) == 3\nassert candidate(3) == 3"
    program = Program("def f(x): return x", "f", checks)
    assert statuses(sandbox.run([program])[0]) == ["passed", "failed", "passed"]
    assert statuses(sandbox.run([replace(program, needed=(0, 2))])[0]) == ["passed", "failed", "passed"]
    assert statuses(sandbox.run([replace(program, needed=(1,))])[0]) == ["passed", "failed", "not_run"]


def test_a_program_may_have_less_time(sandbox):
    program = Program("import time\ndef f(x): return time.sleep(x)", "f", "assert f(0.5) is None")
    assert sandbox.run([program])[0].passed == 1
    (verdict,) = sandbox.run([replace(program, check_timeout=0.1)])
    assert statuses(verdict) == ["timeout"] and verdict.seconds < 0.5
    (verdict,) = sandbox.run([replace(program, checks="assert f(9) is None", check_timeout=60.0)])
    assert statuses(verdict) == ["timeout"] and verdict.seconds < 9


def test_equal_programs_run_once_and_order_is_kept(sandbox):
    programs = [Program(f"def f(x): return {n % 3}", "f", "assert f(0) == 1") for n in range(30)]
    verdicts = sandbox.run(programs)
    assert [verdict.passed for verdict in verdicts] == [n % 3 == 1 for n in range(30)]
    assert len({id(verdict) for verdict in verdicts}) == 3
    assert sandbox.run([]) == []


def test_checks_that_cannot_be_compiled_are_the_callers_error(sandbox):
    with pytest.raises(ValueError, match="SyntaxError"):
        sandbox.run([Program("def f(x): return x", "f", "def check(candidate:")])
    assert judge(sandbox, "def f(x): return x", "assert candidate(1) == 1").passed == 1


def test_the_same_program_gets_the_same_verdict(sandbox):
    source = "import random\ndef f(x): raise ValueError(x, random.random())"
    program = Program(source, "f", "import random\nassert f(random.random())\nassert f(1)")
    first = sandbox.run([program])[0]
    assert first.checks[0].error.startswith("ValueError: (0.")
    for _ in range(2):
        sandbox.close()
        assert sandbox.run([program])[0].checks == first.checks
