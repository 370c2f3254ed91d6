"""Modules of `unittest` on objects of a program."""

import textwrap

import pytest

from trl_multiagent.code.sandbox import Program


SANDBOX = {"workers": 1, "check_timeout": 0.5, "max_timeouts": 2, "retries": 0}


def run(sandbox, source, tests, setup="", **fields):
    """The verdict on a class `Box`; `tests` are the bodies of test methods by name."""
    methods = "".join(
        f"    def test_{name}(self):\n{textwrap.indent(body, ' ' * 8)}\n" for name, body in tests.items()
    )
    module = f"import unittest\nclass TestBox(unittest.TestCase):\n{methods}"
    program = Program(textwrap.dedent(source), "Box", module, setup=setup, unittest=True, **fields)
    return sandbox.run([program])[0]


def statuses(verdict):
    return {check.source.removeprefix("TestBox.test_"): check.status for check in verdict.checks}


BOX = """
import collections, enum

class Color(enum.Enum):
    RED = 1

class Part:
    def __init__(self, size):
        self.size = size

class Box:
    color = Color.RED
    count = 0

    def __init__(self, *sizes, name=None):
        self.parts = [Part(size) for size in sizes]
        self.name = name
        self.by_name = {"all": {*sizes}}
        Box.count += 1

    @property
    def total(self):
        return sum(part.size for part in self.parts)

    @staticmethod
    def sorted(values, key):
        values.sort(key=key)
        return values[0]

    @classmethod
    def of(cls, box):
        return cls(*[part.size for part in box.parts])

    def largest(self):
        if not self.parts:
            raise LookupError("empty", 3)
        return max(self.parts, key=lambda part: part.size)

    def __len__(self):
        return len(self.parts)

    def __getitem__(self, k):
        return [part.size for part in self.parts][k]

    def __iter__(self):
        return (part.size for part in self.parts)

    def __str__(self):
        return f"box of {len(self)}"

    def __enter__(self):
        return self

    def __exit__(self, *raised):
        self.parts = []
"""
USES = {
    "state": "box = Box(3, 1)\nbox.parts[0].size = 9\nself.assertEqual((box.total, box.largest().size), (10, 9))",
    "class": (
        "before = Box.count\nBox()\nself.assertEqual(Box.count, before + 1)\nself.assertEqual(Box.__name__, 'Box')"
    ),
    "static": "values = [3, -4]\nself.assertEqual(Box.sorted(values, abs), 3)\nself.assertEqual(values, [3, -4])",
    "changed": "values = [3, -4]\nBox.sorted(values, key=lambda v: v)\nself.assertEqual(values, [-4, 3])",
    "back": "box = Box(5)\nself.assertEqual(Box.of(box).total, 5)\nself.assertIs(box.largest(), box.parts[0])",
    "error": (
        "with self.assertRaises(LookupError) as got:\n    "
        "Box().largest()\nself.assertEqual(got.exception.args, ('empty', 3))"
    ),
    "slice": "self.assertEqual(Box(3, 1, 2)[:2], [3, 1])",
    "items": (
        "box = Box(2, 7)\nself.assertEqual([len(box), box[1], *box], [2, 7, 2, 7])\nself.assertIn(7, "
        "box)\nself.assertNotIn(8, box)"
    ),
    "text": "self.assertEqual(f'{Box(1)}', 'box of 1')",
    "with": "with Box(1) as box:\n    self.assertEqual(len(box), 1)\nself.assertEqual(box.parts, [])",
    "plain": "self.assertEqual(Box(1, 2).by_name, {'all': {1, 2}})",
    "enum": "self.assertEqual(Box.color, Box().color)\nself.assertEqual(Box.color.value, 1)",
    "attributes": (
        "box = Box(name='a')\nbox.name = 'b'\nself.assertEqual(box.name, 'b')\ndel "
        "box.name\nself.assertFalse(hasattr(box, 'name'))"
    ),
}


def test_objects_are_used_as_in_one_process(sandbox):
    verdict = run(sandbox, BOX, USES)
    assert statuses(verdict) == dict.fromkeys(USES, "passed"), [check.error for check in verdict.checks]
    assert verdict.suspicious == ()


def test_results_of_test_methods(sandbox):
    tests = {
        "right": "self.assertEqual(Box().f(2), 2)",
        "wrong": "self.assertEqual(Box().f(2), 3)",
        "raising": "Box().f()",
        "skipped": "Box().f(1)\nself.skipTest('no')",
        "idle": "self.assertEqual(1, 1)",
        "parts": "for k in (1, 2):\n    with self.subTest(k):\n        self.assertEqual(Box().f(k), 1)",
        "again": "self.assertEqual(Box().f(5), 5)",
    }
    verdict = run(sandbox, "class Box:\n    def f(self, x): return x", tests)
    found = statuses(verdict)
    assert found == {
        **dict.fromkeys(("right", "again"), "passed"),
        **dict.fromkeys(("wrong", "skipped", "idle"), "failed"),
        **dict.fromkeys(("raising", "parts"), "error"),
    }
    assert verdict.checks[1].error == "AssertionError: 2 != 3" and "missing" in verdict.checks[2].error
    assert verdict.definitions.status == "passed"


@pytest.mark.parametrize(
    ("end", "status"), [("while True: pass", "timeout"), ("os._exit(0)", "error"), ("os.write(3, b'x' * 99)", "error")]
)
def test_a_lost_process_costs_one_test_method_even_if_the_test_catches_that(sandbox, end, status):
    source = f"import os\nclass Box:\n    def f(self, x):\n        if x:\n            {end}\n        return x"
    tests = {
        "caught": "box = Box()\ntry:\n    box.f(1)\nexcept:\n    pass\ntry:\n    box.f(0)\nexcept:\n    pass",
        "next": "self.assertEqual(Box().f(0), 0)",
    }
    assert statuses(run(sandbox, source, tests)) == {"caught": status, "next": "passed"}


def test_objects_of_a_lost_process_cannot_be_used(sandbox):
    module = """
    import unittest
    kept = []
    class TestBox(unittest.TestCase):
        def test_a(self):
            kept.append(Box())
            kept[0].f(1)
        def test_b(self):
            self.assertEqual(kept[0].f(0), 0)
        def test_c(self):
            self.assertEqual(Box().f(0), 0)
    """
    source = "class Box:\n    def f(self, x):\n        while x: pass\n        return x"
    (verdict,) = sandbox.run([Program(source, "Box", textwrap.dedent(module), unittest=True)])
    assert [check.status for check in verdict.checks] == ["timeout", "error", "passed"]


def test_mocks_of_the_tests_are_not_answered_for(sandbox):
    source = """
    class Box:
        def __init__(self):
            self.done = []
        def __setattr__(self, name, value):
            super().__setattr__(name, value)
        def call(self, x):
            self.hook(x)
        def __getattr__(self, name):
            return lambda *args: None
    """
    tests = {
        "called": "box = Box()\nbox.hook = mock.Mock()\nbox.call(3)\nbox.hook.assert_called_once_with(3)",
        "other": "box = Box()\nbox.hook = mock.Mock()\nbox.call(3)\nbox.hook.assert_called_once_with(4)",
        "own": "Box().assert_called_once_with(3)",
    }
    found = statuses(run(sandbox, source, tests, setup="from unittest import mock"))
    assert found == {"called": "passed", "other": "failed", "own": "error"}


def test_programs_without_the_class(sandbox):
    tests = {"new": "Box()"}
    for source, error in (("Other = 3", "NameError"), ("class Box(", "SyntaxError"), ("1 / 0", "ZeroDivisionError")):
        verdict = run(sandbox, source, tests)
        assert error in verdict.definitions.error and statuses(verdict) == {"new": "not_run"}


def test_objects_do_not_cross_where_checks_are_asserts(sandbox):
    program = Program("class Box:\n    x = 3\ndef f(): return Box()", "f", "assert f().x == 3")
    assert sandbox.run([program])[0].passed == 0
