import ast
import textwrap
import time
import warnings

import pytest

from trl_multiagent.environments.code_generation.extraction import MAX_CHARS, analyze, extract_code


PROMPT = 'def f(xs):\n    """Do something with the list."""\n'
AUX = "def aux(x):\n    return x\n"


def code(text):
    return textwrap.dedent(text).strip("\n") + "\n"


def facts(main, aux=AUX, prompt=PROMPT):
    return analyze(prompt, "f", code(aux), code(main))


def run(source):
    """Runs a program that this file wrote itself."""
    namespace = {}
    exec(compile(source, "<test>", "exec"), namespace)
    return namespace


# From completions to code


WRAPPINGS = {
    "bare": "{code}",
    "fence": "```python\n{code}```\n",
    "fence without language": "```\n{code}```",
    "prose around a fence": "Sure! Here is `f`:\n\n```py\n{code}```\n\nIt's def f(x): return 0 with care.\n",
    "unclosed fence": "Here it is:\n```python\n{code}",
    "only the closing fence": "{code}```\nThis function (f) isn't slow.\n",
    "prose": "Here is the answer:\n\n{code}\nI hope that it's useful (really.\n",
    "indented fence": "1. Do this\n\n   ```python\n   {indented}   ```\n",
    "windows line ends": "```python\r\n{crlf}```\r\n",
    "answer as code, prompt as prose": "Let's see: x = y?\n{code}\nDone: 1) yes",
}


@pytest.mark.parametrize("wrapping", WRAPPINGS.values(), ids=WRAPPINGS)
def test_code_survives_what_surrounds_it(wrapping):
    answer = code('''
        import math
        from collections import (
            Counter,
        )
        LIMIT = 10
        TABLE = {}
        for n in range(3):
            TABLE[n] = n * n
        if LIMIT > 100:
            NOTHING = 1
        else:
            NOTHING = 0

        class Box:
            """def f(xs): return "fooled"

        text at the margin
            """
            def __init__(self, value):
                self.value = value

        def twice(function):
            def wrapped(*args):
                return 2 * function(*args)
            return wrapped

        @twice
        def helper(x):
            return Box(x).value

        def f(xs):
            """A docstring with

        a line at the margin
            """
            def inner(x):
                return helper(x) + TABLE[2]
            total = sum(map(inner, xs))
            return min(total, LIMIT) + math.floor(0.5) + NOTHING + Counter("a")["a"]
    ''')
    text = wrapping.format(code=answer, indented=answer.replace("\n", "\n   "), crlf=answer.replace("\n", "\r\n"))
    assert run(extract_code(text, "f"))["f"]([1]) == 7  # 2 * 1 + 4 + 0 + 1


def test_two_fenced_blocks_are_one_program():
    text = "First a helper:\n```python\ndef h(x):\n    return x + 1\n```\nthen\n```python\ndef f(x):\n    return h(x)\n```"
    assert run(extract_code(text, "f"))["f"](1) == 2


def test_future_imports_of_a_later_block_come_first():
    text = "```python\ndef h(x):\n    return x\n```\nthen\n```python\nfrom __future__ import annotations\ndef f(x: Unknown):\n    return x\n```"
    assert run(facts(text, aux="").source)["f"](1) == 1


def test_the_last_definition_counts():
    text = "```python\ndef f(x):\n    return 1\n```\nBetter:\n```python\ndef f(x):\n    return 2\n```"
    assert run(extract_code(text, "f"))["f"](0) == 2


def test_a_scripts_own_part_is_left_out():
    source = extract_code(
        code("""
            import sys
            sys.setrecursionlimit(5000)
            STEP: int = 1
            STEP += 1
            example = undefined_name
            f: whatever
            def f(x):
                return x + STEP
            f = staticmethod(f)
            assert f(1) == 100
            print(f(undefined_name))
            for case in [1, 2]:
                print(case)
            main()
            if __name__ == "__main__":
                raise SystemExit
            raise SystemExit
        """),
        "f",
    )
    kept = [ast.unparse(node).split("\n")[0] for node in ast.parse(source).body]
    assert kept == [
        "import sys",
        "sys.setrecursionlimit(5000)",
        "STEP: int = 1",
        "STEP += 1",
        "def f(x):",
        "f = staticmethod(f)",
    ]


def test_a_cut_off_tail_is_dropped_but_not_the_function_itself():
    good = extract_code("def f(x):\n    return x\n\ndef test_f():\n    assert f(1", "f")
    assert good.strip() == "def f(x):\n    return x"
    cut = extract_code("import math\ndef f(x):\n    return math.floor(x", "f")
    assert "def f(x)" in cut and "import math" in cut
    again = extract_code("def f(x):\n    return x\n\ndef f(x):\n    return (x", "f")
    assert run(again)["f"](3) == 3


def test_statements_on_one_line_and_bytes_columns():
    source = extract_code("É = 'é'; y = 2; print(y); z = y + 1\ndef f(x): return x + z + len(É)", "f")
    assert run(source)["f"](0) == 4 and "print" not in source


def test_future_imports_come_first_in_the_program():
    answer = "from __future__ import annotations\n\ndef {}(x: Unknown):\n    return x\n"
    result = analyze("import math\n" + PROMPT, "f", answer.format("aux"), answer.format("f"))
    assert run(result.source)["f"](5) == 5
    assert "import math" in result.source and result.setup == "import math"


def test_the_program_is_prefix_aux_main_and_the_setup_is_the_prefix_alone():
    prompt = "import math\n\ndef poly(x):\n    return x * 2\n\n" + PROMPT
    result = facts("def f(xs):\n    return poly(aux(xs))", prompt=prompt)
    assert run(result.source)["f"](4) == 8
    assert run(result.setup)["poly"](4) == 8
    hijack = facts("def poly(x):\n    return 0\ndef f(xs):\n    return 0", prompt=prompt)
    assert run(hijack.setup)["poly"](4) == 8


# Definitions and syntax


@pytest.mark.parametrize(
    ("aux", "problem"),
    [
        ("def aux(x):\n    return x", ""),
        ("def aux(x):\n    if x:\n        return 1", ""),
        ("async def aux(x):\n    return x", ""),
        ("def aux(x):\n    return None", ""),
        ("def aux(x):\n    print(x)", "does not return a value"),
        ("def aux(x):\n    return", "does not return a value"),
        ("def aux(x):\n    # return x\n    '''return x'''\n    y = 'return x'", "does not return a value"),
        ("def aux(x):\n    def g():\n        return 1\n    g()", "does not return a value"),
        ("def aux(x):\n    class A:\n        def g(self):\n            return 1", "does not return a value"),
        ("def aux(x):\n    return 1\ndef aux(x):\n    pass", "does not return a value"),
        ("def aux(x):\n    pass\ndef aux(x):\n    return 1", ""),
        ("def helper(x):\n    return x", "no function `aux`"),
        ("def aux_2(x):\n    return x", "no function `aux`"),
        ("def g():\n    def aux(x):\n        return x\n    return 1", "no function `aux`"),
        ("class A:\n    def aux(self):\n        return 1", "no function `aux`"),
        ("# def aux(x): return x", "no function `aux`"),
        ("'''\ndef aux(x):\n    return x\n'''", "no function `aux`"),
        ("", "no function `aux`"),
        ("I cannot help with that.", "no function `aux`"),
    ],
)
def test_definitions_are_read_from_the_tree(aux, problem):
    found = analyze(PROMPT, "f", aux, "def f(xs):\n    return 1").aux_problem
    assert problem in found and bool(problem) == bool(found)


@pytest.mark.parametrize(
    ("main", "defined"),
    [
        ("def f(xs):\n    return [x for x xs]", True),
        ("def f(xs):\n    ys ys = 1\n    return ys", True),
        ("def f(xs):\n    if xs\n        return 1\n    return 2", True),
        ("def f(xs):\n    ys ys = 1\n    # return ys", False),
        ("def f(xs):\n    ys ys = 'return ys'", False),
        ("def f(xs):\n    def g():\n        return 1\n    ys ys = 1", False),
        ("def f(xs:\n    return 1", False),
        ("def f(xs)\n    return 1", False),
    ],
)
def test_a_slip_inside_a_function_costs_the_syntax_but_not_the_definition(main, defined):
    result = analyze(PROMPT, "f", AUX, main)
    assert (not result.main_problem) == defined
    assert "code for `f`, line" in result.syntax_problem
    assert not result.aux_problem and not result.calls_aux


def test_the_syntax_problem_names_part_line_and_column():
    result = analyze(PROMPT, "f", "def aux(x):\n    y = 1\n    return x x\n", "def f(xs):\n    return 1\n")
    assert result.syntax_problem.startswith("code for `aux`, line 3, column ")
    assert not analyze(PROMPT, "f", None, "def f(xs):\n    return 1\n").syntax_problem


# Collaboration


@pytest.mark.parametrize(
    "main",
    [
        "def f(xs):\n    return aux(xs) + 1",
        "def f(xs):\n    return [aux(x) for x in xs]",
        "def f(xs):\n    g = lambda x: aux(x)\n    return g(xs)",
        "def f(xs):\n    def g(x):\n        return aux(x)\n    return g(xs)",
        "def h(x):\n    return aux(x)\ndef f(xs):\n    return list(map(h, xs))",
        "class A:\n    def go(self, x):\n        return aux(x)\ndef f(xs):\n    return A().go(xs)",
        "def f(xs):\n    '''Calls aux.'''\n    for x in xs:\n        while aux(x):\n            return 1",
        "def f(xs):\n    return 0\ndef f(xs):\n    return aux(xs) + 1",
    ],
)
def test_a_real_call_is_a_call(main):
    result = facts(main)
    assert result.calls_aux and not result.thin_wrapper and not result.ignored_values


@pytest.mark.parametrize(
    "main",
    [
        "def f(xs):\n    # aux(xs)\n    return 1",
        "def f(xs):\n    '''aux(xs)'''\n    y = 'aux(xs)'\n    return y",
        "def f(xs):\n    return aux",
        "def f(xs):\n    return xs.aux(1)",
        "def f(xs):\n    return auxiliary(xs)",
        "def f(xs, aux=len):\n    return aux(xs) + 1",
        "def f(xs):\n    aux = len\n    return aux(xs) + 1",
        "def f(xs):\n    def aux(y):\n        return y\n    return aux(xs) + 1",
        "def f(xs):\n    from math import floor as aux\n    return aux(xs) + 1",
        "def f(xs):\n    return [aux(1) for aux in xs]",
        "def f(xs):\n    return (lambda aux: aux(1))(xs)",
        "def f(aux):\n    def g():\n        return aux(1)\n    return g() + 1",
        "def aux(x):\n    return 5\ndef f(xs):\n    return aux(xs) + 1",
        "aux = len\ndef f(xs):\n    return aux(xs) + 1",
        "def unused(x):\n    return aux(x)\ndef f(xs):\n    return 1",
        "def f(xs):\n    def unused():\n        return aux(xs)\n    return 1",
        "def f(xs):\n    return aux(xs) + 1\ndef f(xs):\n    return 1",
        "def g(xs):\n    return 1\ndef f(xs):\n    return aux(xs) + 1\nf = g",
        "def f(xs):\n    global aux\n    aux = len\n    return aux(xs) + 1",
        "def f(xs):\n    return 1\ny = aux(1)",
    ],
)
def test_what_only_looks_like_a_call_is_none(main):
    result = facts(main)
    assert not result.calls_aux and not result.ignored_values and not result.thin_wrapper
    assert not result.syntax_problem


@pytest.mark.parametrize("aux", ["", "def helper(x):\n    return x", "def aux(x):\n    return x\naux = len"])
def test_there_is_no_call_of_an_aux_that_its_agent_did_not_define(aux):
    assert not facts("def f(xs):\n    return aux(xs) + 1", aux=aux).calls_aux


def test_an_entry_point_from_aux_does_not_count_and_does_not_harm():
    aux = AUX + "def f(xs):\n    return 'from aux'\n"
    assert "no function `f`" in facts("x = 1", aux=aux).main_problem
    result = facts("def f(xs):\n    return aux(xs) + 1", aux=aux)
    assert result.calls_aux and run(result.source)["f"](1) == 2


@pytest.mark.parametrize(
    ("body", "thin"),
    [
        ("return aux(xs)", True),
        ("'''Docstring.'''\n    # comment\n    return aux(sorted(xs))", True),
        ("y = aux(xs)\n    return y", True),
        ("y: list = aux(xs)\n    z = y\n    return z", True),
        ("import math\n    pass\n    return aux(xs)", True),
        ("return aux(xs) + 1", False),
        ("return [aux(xs)]", False),
        ("y = aux(xs)\n    return y[0]", False),
        ("y = aux(xs)\n    return xs", False),
        ("xs = sorted(xs)\n    return aux(xs)", False),
        ("if not xs:\n        return 0\n    return aux(xs)", False),
    ],
)
def test_a_thin_wrapper_only_returns_what_aux_returns(body, thin):
    result = facts(f"def f(xs):\n    {body}")
    assert result.calls_aux and result.thin_wrapper == thin


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("aux(xs)\n    return 1", "dropped"),
        ("aux(xs) + 1\n    return 1", "dropped"),
        ("[aux(x) for x in xs]\n    return 1", "dropped"),
        ("aux(aux(xs))\n    return 1", "dropped"),
        ("y = aux(xs)\n    return 1", "`y` is never read"),
        ("y: int = aux(xs)\n    return 1", "`y` is never read"),
        ("(y := aux(xs))\n    return 1", "`y` is never read"),
        ("y, z = aux(xs)\n    return 1", "`y, z` is never read"),
        ("ys = [x for x in aux(xs)]\n    return 1", "`ys` is never read"),
        ("y = aux(xs)\n    y = 3\n    return y", "`y` is replaced"),
        ("y = 1\n    z = y\n    y = aux(xs)\n    return z", "`y` is replaced"),
        ("for x in xs:\n        y = aux(x)\n        y = 2\n        print(y)\n    return 1", "`y` is replaced"),
        ("def g():\n        aux(xs)\n    g()\n    return 1", "dropped"),
    ],
)
def test_a_value_that_goes_nowhere_is_ignored(body, reason):
    result = facts(f"def f(xs):\n    {body}")
    assert result.calls_aux and len(result.ignored_values) == 1 and reason in result.ignored_values[0]


@pytest.mark.parametrize(
    "body",
    [
        "y = aux(xs)\n    y = y + 1\n    return y",
        "y = aux(xs)\n    y += 1\n    return 0",
        "y = 0\n    y += aux(xs)\n    return y",
        "y, z = aux(xs)\n    return z",
        "print(aux(xs))\n    return 1",
        "xs.append(aux(xs))\n    return xs",
        "xs[0] = aux(xs)\n    return xs",
        "if aux(xs):\n        return 1\n    return 2",
        "for x in aux(xs):\n        print(x)\n    return 1",
        "[print(x) for x in aux(xs)]\n    return 1",
        "y = aux(xs)\n    if y:\n        y = 3\n    return y",
        "y = aux(xs)\n    if xs:\n        y = 3\n    return y",
        "y = 0\n    for x in xs:\n        if y:\n            z = y\n        y = aux(x)\n    return z",
        "y = aux(xs)\n    def g():\n        return y\n    return g()",
        "def g():\n        nonlocal_ = y\n        return nonlocal_\n    y = aux(xs)\n    return g()",
        "yield aux(xs)\n    return 1",
        "y = aux(xs)\n    try:\n        return y\n    finally:\n        y = 1",
    ],
)
def test_a_value_that_somebody_may_read_is_not_ignored(body):
    result = facts(f"def f(xs):\n    {body}")
    assert result.calls_aux and not result.ignored_values


def test_every_ignored_call_has_its_reason():
    result = facts("def f(xs):\n    aux(1)\n    y = aux(2)\n    return aux(3) + 1")
    assert len(result.ignored_values) == 2


# Hostile text

HOSTILE = {
    "null byte": "def f(x):\n    return 1\0",
    "lone surrogate": "def f(x):\n    return '\ud800'",
    "unary minus": "def f(x):\n    return " + "-" * 30_000 + "1",
    "not": "def f(x):\n    return " + "not " * 7_000 + "1",
    "sum": "def f(x):\n    return 1" + "+1" * 15_000,
    "attributes": "x" + ".a" * 15_000,
    "brackets": "x[" * 15_000,
    "closed brackets": "(" * 15_000 + ")" * 15_000,
    "lambdas": "def f(x):\n    return " + "lambda:" * 4_000 + "1",
    "elif": "if x:\n pass\n" + "elif x:\n pass\n" * 2_000,
    "digits": "x = " + "9" * 30_000,
    "open lines": "a=(\n" * 8_000,
    "fences": "```\na\n" * 5_000,
    "decorators": "@a\n" * 10_000,
    "headers": "def f(x):\n" * 3_000,
    "long strings": "'''\n" * 8_000,
    "backslashes": "\\\n" * 15_000,
    "calls": "def f(x):\n" + "  aux(1)\n" * 3_000 + "  return 1",
    "assignments": "def f(x):\n" + "".join(f" a{n}=aux(1)\n" for n in range(2_000)) + " return a0",
    "indentation": "".join(" " * n + "if 1:\n" for n in range(240)),
    "bad escape": "def f(x):\n    return '\\d'",
    "too long": "def f(x):\n    return 1\n" + "# long\n" * 1_000_000,
}


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
def test_no_text_stops_the_analysis(text):
    start = time.process_time()
    for aux, main in ((text, "def f(x):\n    return aux(x)"), (AUX, text)):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            result = analyze(PROMPT, "f", aux, main)
        if not result.syntax_problem:
            ast.parse(result.source)
    assert time.process_time() - start < 10


def test_nothing_of_a_completion_runs_here(tmp_path):
    trap = tmp_path / "ran"
    text = f"open({str(trap)!r}, 'w')\nclass A:\n    open({str(trap)!r}, 'w')\ndef f(x=open({str(trap)!r}, 'w')):\n    return aux(x)"
    assert analyze(PROMPT, "f", text, text).calls_aux is False
    assert not trap.exists()


def test_a_very_long_completion_is_empty():
    assert extract_code("def f(x):\n    return 1\n" + "#" * MAX_CHARS, "f") == ""
