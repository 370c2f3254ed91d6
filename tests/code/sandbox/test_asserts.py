import pytest

from trl_multiagent.code.sandbox.program import read_asserts


def run(test, **names):
    """Runs an instrumented test; what it reported, in order."""
    reports = []
    namespace = {
        "__begin__": lambda index: reports.append("begin"),
        "__end__": lambda index, value, error=None: reports.append((index, type(error) if error else bool(value))),
        "__settle__": lambda indices: reports.append(("settled", indices)),
        "__caught__": Exception,
        **names,
    }
    exec(read_asserts(test).code, namespace)
    return [report for report in reports if report != "begin"], namespace


def test_every_assert_reports_and_the_next_statement_runs():
    test = "assert x == 1, 'why'\nassert x == 2\nassert 1 / 0\nassert x"
    assert run(test, x=1)[0] == [
        (0, True), ("settled", [0]), (1, False), ("settled", [1]),
        (2, ZeroDivisionError), ("settled", [2]), (3, True), ("settled", [3]),
    ]  # fmt: skip
    assert read_asserts(test).sources == ("assert x == 1, 'why'", "assert x == 2", "assert 1 / 0", "assert x")


def test_asserts_are_settled_with_their_statement_but_not_in_functions():
    test = """
def same(a, b):
    assert a == b
def check(candidate):
    for n in range(2):
        assert candidate(n) == n
        def inner():
            assert False
    same(candidate(3), 3)
    assert candidate(4) == 4
"""
    asserts = read_asserts(test)
    assert asserts.has_check and asserts.guards == (2,) and len(asserts.sources) == 4
    reports, namespace = run(test)
    assert reports == []
    namespace["check"](lambda n: n)
    _, namespace = run(test, reports=reports)
    reported = []
    namespace["__end__"] = lambda index, value, error=None: reported.append(index)
    namespace["__settle__"] = reported.append
    namespace["check"](lambda n: n)
    assert reported == [1, 1, [1], 0, 3, [3]]


def test_what_cannot_fail_is_no_assert():
    asserts = read_asserts("assert True\nassert 1, 'padding'\nassert x")
    assert asserts.sources == ("assert x",) and not asserts.guards and not asserts.has_check


@pytest.mark.parametrize("handler", ["except:", "except BaseException:", "except BaseException as error:"])
def test_a_test_does_not_catch_what_ends_it(handler):
    code = f"try:\n    candidate()\n{handler}\n    pass"

    def interrupted():
        raise KeyboardInterrupt

    def wrong():
        raise ValueError

    run(code, candidate=wrong)
    with pytest.raises(KeyboardInterrupt):
        run(code, candidate=interrupted)


@pytest.mark.parametrize("test", ["def check(:", "return 1", "assert x\x00"])
def test_what_is_not_python_is_refused(test):
    with pytest.raises((SyntaxError, ValueError)):
        read_asserts(test)
