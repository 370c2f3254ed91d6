import ast
import cProfile
import textwrap
import time
import warnings

import pytest

from trl_multiagent.code.extraction import MAX_CHARS, read_function
from trl_multiagent.tasks.code_generation.reward import analyze


PROMPT = 'def f(xs):\n    """Do something with the list."""\n'
AUX = "def aux(x):\n    return x\n"


def code(text):
    return textwrap.dedent(text).strip("\n") + "\n"


def facts(main, aux=AUX, prompt=PROMPT):
    return analyze(prompt, "f", code(aux), code(main))


def extract_code(text, name):
    return read_function(text, name).source


def run(source):
    """Runs a program that this file wrote itself."""
    namespace = {}
    exec(compile(source, "<test>", "exec"), namespace)
    return namespace


# From completions to code


WRAPPINGS = {
    "bare": "{code}",
    "fence": "```python\n{code}```\n",
    "prose around a fence": "Sure! Here is `f`:\n\n```py\n{code}```\n\nIt's def f(x): return 0 with care.\n",
    "unclosed fence": "Here it is:\n```python\n{code}",
    "only the closing fence": "{code}```\nThis function (f) isn't slow.\n",
    "prose": "Here is the answer:\n\n{code}\nI hope that it's useful (really.\n",
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
    text = wrapping.format(code=answer, crlf=answer.replace("\n", "\r\n"))
    assert run(extract_code(text, "f"))["f"]([1]) == 7  # 2 * 1 + 4 + 0 + 1


def test_two_fenced_blocks_are_one_program_whose_future_imports_come_first():
    second = "from __future__ import annotations\ndef f(x: Unknown):\n    return h(x)\n"
    text = f"```python\ndef h(x):\n    return x + 1\n```\nthen\n```\n{second}```"
    result = facts(text, aux="", prompt="import math\n" + PROMPT)
    assert run(result.source)["f"](1) == 2 and result.setup == "import math"
    several = text.replace("import annotations", "import (\n    annotations,\n)")
    assert run(facts(several, aux="").source)["f"](1) == 2


def test_a_scripts_own_part_is_left_out():
    script = code("""
        import sys
        sys.setrecursionlimit(5000)
        STEP: int = 1
        STEP += 1
        example = undefined_name
        f: whatever
        def f(x):
            return x + STEP
        assert f(1) == 100
        print(f(undefined_name))
        for case in [1, 2]:
            print(case)
        main()
        if __name__ == "__main__":
            raise SystemExit
        raise SystemExit
    """)
    source = extract_code(script, "f")
    kept = [ast.unparse(node).split("\n")[0] for node in ast.parse(source).body]
    assert kept[:4] == ["import sys", "sys.setrecursionlimit(5000)", "STEP: int = 1", "STEP += 1"]
    assert kept[4:] == ["def f(x):"]


READS = "def f(x):\n    return TABLE[x]\n"
TABLE = "TABLE = []\n"
ALL_NEEDED = {
    "argument": TABLE + "def fill(t):\n    t.append(1)\nfill(TABLE)\n" + READS,
    "imported function": "from heapq import heapify\nTABLE = [3, 1]\nheapify(TABLE)\n" + READS,
    "elements": "TABLE = [[0]]\nfor row in TABLE:\n    row[0] = 5\n" + READS,
    "attribute": "def f(x):\n    return f.table[x]\nf.table = [1]\n",
}  # fmt: skip


@pytest.mark.parametrize("text", ALL_NEEDED.values(), ids=ALL_NEEDED)
def test_statements_that_a_function_needs_are_kept_and_are_its_own(text):
    assert ast.dump(ast.parse(extract_code(text, "f"))) == ast.dump(ast.parse(text))
    assert analyze(PROMPT, "f", None, text).main_function_share == 1.0


ODD = {
    "a closing fence in the last line": "```python\ndef f(x):\n    return x + 1```",
    "an opening fence in the first line": "```python def f(x):\n    return x + 1\n```",
    "both fences in one line": "It's:\n  ```def f(x): return x + 1```",
    "a fence in a docstring": 'So:\n```\ndef f(x):\n    """\n    ```\n    f(1)\n    ```"""\n    return x + 1\n```',
    "a comment at the margin": "Here it is:\ndef f(x):\n    y = x\n# add one\n    return y + 1\nDone.",
    "a call between prose": "So:\nT = {}\ndef build():\n    T[0] = 1\nbuild()\ndef f(x):\n    return x + T[0]\nDone.",
    "an entry between prose": "Here it is:\nT = {}\nT[(0, 0)] = 1\ndef f(x):\n    return x + T[(0, 0)]\nDone.",
    "calls of a helper as examples in prose": (
        "def g(x):\n    return x + [1][0]\n\ndef f(x):\n    return g(x)\n\nIt is called as\ng('1')\nwhich fails."
    ),
    "a heading with indented text": "def f(x):\n    return x + 1\n\n# Explanation\n  - it adds 1\n",
    "code in a sentence": "I call it as ```g(1)```\n\n   ```\n   def f(x):\n       return x + 1\n   ```",
    "code in a docstring": 'Now:\ndef f(x):\n    """Add, as in ```f(1)```\n    """\n    return x + 1',
    "a docstring with a fence before a list with a block": (
        'So:\n```\ndef f(x):\n    """\n    ```\n    f(1)\n    ```\n    """\n    return x + 1\n```\n1. Run it:\n\n'
        "   ```\n   $ python f.py\n   ```\n"
    ),
    "blocks in a list and after it": (
        "1. Help:\n\n   ```\n   def g(x):\n       return x\n   ```\n\n```\ndef f(x):\n    return g(x) + 1\n```"
    ),
    "an invisible character": "\u200bdef f(x):\n    return x + 1",
    "one after the fence": "```python\n\ufeffdef f(x):\n    return x + 1\n```",
    "a blank before the first line": " import math\ndef f(x):\n    return x + 1",
}


@pytest.mark.parametrize("answer", ODD.values(), ids=ODD)
def test_odd_forms_of_answers_are_read(answer):
    assert run(extract_code(answer, "f"))["f"](1) == 2


def test_statements_in_one_line_before_blank_lines_take_no_longer():
    start = time.process_time()
    read_function("def f(x): return x\n" + "f;" * 4000 + "\n" * 8000, "f")
    assert time.process_time() - start < 3  # in quadratic time 25 s


def test_characters_in_strings_stay_as_they_are():
    text = "def f(x):\n    return '\u00a0\u200b\ufeff' + x\n"
    for answer in (text, f"Sure (yes:\n```\n{text}```\n"):
        assert run(extract_code(answer, "f"))["f"]("!") == "\u00a0\u200b\ufeff!"


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


# How much of a completion is the function


FUNCTION = "def f(x):\n    return x + 1\n"
LONGER = "def f(number):\n    if number < 0:\n        return -1\n    return number + 1\n"


@pytest.mark.parametrize(
    "text",
    [
        FUNCTION.replace("\n", "\r\n"),
        " def f(x):\n    return x\n",
        "def f(x):  # why\n    # how\n    return x  # so\n    # end\n",
        'def f(x):\n    """Doc\n\nstring."""\n    return x\n',
        "@staticmethod\n# why\ndef f(x):\n    return 'é'\n",
        "import math\nN = 3\ndef h(x):\n    return math.floor(x)\ndef f(x):\n    return h(x) + N\n",
        "def f(x):\n    y y = 1\n    return x\n",
        f"```python\n{FUNCTION}```\n",
        "T = {}\ndef build():\n    T[0] = 1\nbuild()\ndef f(x):\n    return x + T[0]\n",
        f"{LONGER}print(f(2))\nassert f(3) == 4\n",
        f'{LONGER}if __name__ == "__main__":\n    print(f(2))\n',
    ],
)
def test_a_completion_that_is_the_function_and_what_it_needs(text):
    result = analyze(PROMPT, "f", text.replace("def f", "def aux").replace("f =", "aux ="), text)
    assert result.aux_function_share == result.main_function_share == 1.0


@pytest.mark.parametrize(
    ("text", "most"),
    [
        (FUNCTION * 10, 0.1),
        ("try:\n    def f(x):\n        return 2\nexcept E:\n    pass\n" * 10, 0.1),
        (FUNCTION + "# junk\n" * 10, 0.3),
        (FUNCTION + "f(1)\nprint(f(2))\nassert f(3)\ny = f(4)\n" * 5, 0.2),
        ("def f(x):\n    return 1\n" + "#" * MAX_CHARS, 0.0),
    ],
)
def test_what_is_not_the_function_lowers_its_share(text, most):
    result = analyze(PROMPT, "f", None, text)
    assert result.main_function_share <= most and (result.main_function_share > 0) == (most > 0)
    assert result.aux_function_share == 1.0


# Definitions and syntax


@pytest.mark.parametrize(
    "text",
    [
        "def aux(x):\n    if x:\n        return 1",
        "def aux(x):\n    pass\ndef aux(x):\n    return 1",
        "def deco(g):\n    return g\n@deco\ndef aux(x):\n    return 1",
        "def aux(x):\n    yield from x",
        'def aux(x):\n    return 1\ndef aux(x):\n    """Does it."""\n',
        "aux = lambda x: x",
        "def g(x):\n    return x\nh = g\naux = h",
        "from math import gcd as aux",
        "class Solution:\n    def aux(self, x):\n        return x",
        "class A:\n    @staticmethod\n    def g(x):\n        return x\naux = A.g",
        "if True:\n    def aux(x):\n        return 1",
        "aux = make()",
        "for aux in [len]:\n    pass",
    ],
)
def test_a_function_with_a_result_is_a_definition_of_aux_and_of_the_entry_point(text):
    assert not analyze(PROMPT, "f", text, "def f(xs):\n    return 1").aux_problem
    assert not analyze(PROMPT, "f", None, text.replace("aux", "f")).main_problem


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("def aux(x):\n    # return x\n    '''return x'''\n    y = 'return x'", "does not return a value"),
        ("def aux(x):\n    def g():\n        return 1\n    g()", "does not return a value"),
        ("```\ndef aux(x):\n    return 1\ndef aux(x):\n    x = 2\n```", "does not return a value"),
        ("def g():\n    def aux(x):\n        return x\n    return 1", "no function `aux`"),
        ("'''\ndef aux(x):\n    return x\n'''", "no function `aux`"),
        ("aux = 5", "no function `aux`"),
        ("aux: int", "no function `aux`"),
        ("aux = [lambda x: x]", "no function `aux`"),
        ("aux = lambda x: None", "does not return a value"),
        ("class A:\n    def aux(self, x):\n        pass", "does not return a value"),
        ("class A:\n    def aux(self, x):\n        pass\naux = A().aux", "does not return a value"),
        ("if __name__ == '__main__':\n    aux = len", "no function `aux`"),
        # neither a value nor an effect
        ("def aux(x):\n    x = list(x)\n    x.sort()", ""),
        ("def g(x):\n    return 1\ndef aux(x):\n    g(x)", ""),
    ],
)
def test_what_has_no_result_is_no_definition(text, problem):
    found = analyze(PROMPT, "f", text, "def f(xs):\n    return 1").aux_problem
    assert found and problem in found
    result = analyze(PROMPT, "f", None, text.replace("aux", "f"))
    assert result.main_problem


# Collaboration


@pytest.mark.parametrize(
    "main",
    [
        "def f(xs):\n    return [aux(x) for x in xs]",
        "def f(xs):\n    def g(x):\n        return aux(x)\n    return g(xs) + 1",
        "def h(x):\n    return aux(x)\ndef f(xs):\n    return list(map(h, xs))",
        "def f(xs):\n    xs.sort(key=aux)\n    return xs",
        "OPS = []\nOPS.append(aux)\ndef f(xs):\n    return OPS[0](xs) + 1",
        "def d(g):\n    def w(x):\n        return aux(g(x))\n    return w\n@d\ndef f(xs):\n    return 1",
    ],
)
def test_what_calls_aux_or_hands_it_on_names_it(main):
    result = facts(main)
    assert result.names_aux and not result.thin_wrapper


@pytest.mark.parametrize(
    "main",
    [
        "def f(xs):\n    '''aux(xs)'''\n    y = 'aux(xs)'  # aux(xs)\n    return y",
        "def f(xs, aux=len):\n    return aux(xs) + 1",
        "def f(xs):\n    def aux(y):\n        return y\n    return aux(xs) + 1",
        "def aux(x):\n    return 5\ndef f(xs):\n    return aux(xs) + 1",
        "def unused(x):\n    return aux(x)\ndef f(xs):\n    return 1",
        "def f(xs):\n    return 1\ny = aux(1)",
    ],
)
def test_what_only_looks_like_the_name_of_aux_is_none(main):
    result = facts(main)
    assert not result.names_aux and not result.thin_wrapper
    assert not result.syntax_problem


@pytest.mark.parametrize("aux", ["", "def helper(x):\n    return x", "def aux(x):\n    return x\naux = 1"])
def test_there_is_no_call_of_an_aux_that_its_agent_did_not_define(aux):
    assert not facts("def f(xs):\n    return aux(xs) + 1", aux=aux).names_aux


def test_an_entry_point_from_aux_does_not_count_and_does_not_harm():
    aux = AUX + "def f(xs):\n    return 'from aux'\n"
    assert "no function `f`" in facts("x = 1", aux=aux).main_problem
    result = facts("def f(xs):\n    return aux(xs) + 1", aux=aux)
    assert result.names_aux and run(result.source)["f"](1) == 2


@pytest.mark.parametrize(
    ("main", "thin"),
    [
        ("def f(xs):\n    '''Docstring.'''\n    # comment\n    return aux(sorted(xs))", True),
        ("def f(xs):\n    y: list = aux(xs)\n    z = y\n    return z", True),
        ("def f(xs):\n    return list(map(aux, xs))", False),
        ("def f(xs):\n    g = lambda x: aux(x) + 1\n    return g(xs)", False),
        ("def f(xs):\n    return [aux(xs)]", False),
        ("def f(xs):\n    y = aux(xs)\n    return y[0]", False),
        ("def f(xs):\n    if not xs:\n        return 0\n    return aux(xs)", False),
        ("f = lambda *xs: aux(*xs)", True),
        ("f = lambda xs: aux(xs) + 1", False),
        ("f = aux", True),
        ("from functools import partial\nf = partial(aux)", True),
        ("from functools import partial\nf = partial(aux, 1)", False),
        ("class Solution:\n    def f(self, xs):\n        return aux(xs)", True),
    ],
)
def test_a_thin_wrapper_only_returns_what_aux_returns(main, thin):
    result = facts(main)
    assert result.names_aux and result.thin_wrapper == thin


# Hostile text

HOSTILE = {
    "null byte": "def f(x):\n    return 1\0",
    "lone surrogate": "def f(x):\n    return '\ud800'",
    "unary minus": "def f(x):\n    return " + "-" * 30_000 + "1",
    "sum": "def f(x):\n    return 1" + "+1" * 15_000,
    "brackets": "x[" * 15_000,
    "digits": "x = " + "9" * 30_000,
    "fences": "```\na\n" * 5_000,
    "calls": "def f(x):\n" + "  aux(1)\n" * 3_000 + "  return 1",
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


REPEATED = {
    "calls": ("def f(x):\n", "  aux({n})\n", "  return 1"),
    "local chain": ("def f(x):\n  a0 = aux(x)\n", "  a{m} = a{n}\n", "  return a1"),
    "chain": ("a0 = 1\n", "a{m} = a{n}\n", "def f(x):\n  return aux(a1)"),
    "entries": ("T = {{}}\n", "T[{n}] = aux\n", "def f(x):\n  return T[x](1)"),
    "functions": ("def f(x):\n  return g0(x)\n", "def g{n}(x):\n  return g{m}(aux(x))\n", ""),
    "globals": ("", "def g{n}():\n  global N{n}\n  N{n} = 1\ng{n}()\n", "def f(x):\n  return aux(N0)"),
}


@pytest.mark.parametrize(("head", "line", "tail"), REPEATED.values(), ids=REPEATED)
def test_the_work_grows_with_the_length_and_not_faster(head, line, tail):
    def work(count):
        lines = "".join(line.format(n=n, m=n + 1) for n in range(count))
        profile = cProfile.Profile()
        result = profile.runcall(analyze, PROMPT, "f", AUX, head.format() + lines + tail)
        assert not result.main_problem and result.names_aux
        return sum(entry.callcount for entry in profile.getstats())

    work(1)  # fills caches
    assert work(400) < 2.2 * work(200)


DOUBLE = "def f(x):\n    return helper(x)\n"
HELPER = "def helper(x):\n    return 2 * x\n\n"


@pytest.mark.parametrize(
    "answer",
    [
        "Here it is:\n\n" + textwrap.indent(HELPER + DOUBLE, "    ") + "\nIt's done.\n",  # a block of Markdown's
        textwrap.indent(HELPER + DOUBLE, "    ").lstrip(),
        f"{HELPER}{DOUBLE}\nNotes:\n```text\nf: doubles, n = 2 * x\n```\n",
        f"```python\n{HELPER}{DOUBLE}```\nTest:\n```python\nfrom solution import f\nassert f(1) == 2\n```",
        f"\u200e{HELPER}{DOUBLE}",
        f"{HELPER}{DOUBLE}\n\ndef f(x):\n    return help",  # cut off
        f"```python\n{HELPER}{DOUBLE}```\n```python\ndef f(x):\n    return helper",
        f"def aux(x): ...\n{HELPER}{DOUBLE}",
    ],
)
def test_a_function_is_found(answer):
    code = read_function(answer, "f")
    assert code.problem == "" and ast.unparse(ast.parse(code.source)) == ast.unparse(ast.parse(HELPER + DOUBLE))


@pytest.mark.parametrize(
    ("answer", "source"),
    [
        (f"{DOUBLE}\nSlower, it's:\n\n    def f(x):\n        return x + x\n", DOUBLE),  # an example in prose
        (f"from fast import f, helper\n{DOUBLE}", f"from fast import f, helper\n{DOUBLE}"),  # which the function needs
    ],
)
def test_what_stands_beside_a_function_does_not_replace_it(answer, source):
    found = read_function(answer, "f").source
    assert ast.unparse(ast.parse(found)) == ast.unparse(ast.parse(source))


def test_only_the_end_of_an_answer_is_a_repetition_that_was_cut_off():
    first, corrected = "def f(n):\n    return n * (n - 1) // 2 + n\n", "def f(n):\n    return n * (n - 1) // 2\n"
    for end in ("```", "```\nThis is right:\n  - no loops", "  ```", "def test():\n    assert f("):
        code = read_function(f"```python\n{first}```\nThat would count loops:\n```python\n{corrected}{end}", "f")
        assert run(code.source)["f"](4) == 6
    for tail in ('    """Half."""\n    half = n', "    # other words\n    if n < 0:\n        return"):
        code = read_function(f"```python\n{corrected}```\nAgain:\n```python\ndef f(n: int) -> int:\n{tail}", "f")
        assert run(code.source)["f"](4) == 6 and not code.problem


def test_a_cut_off_helper_of_main_does_not_replace_the_partners():
    main = "def f(xs):\n    return sorted(aux(xs))\n"
    tail = "```\n```python\ndef aux(xs):\n    result = []\n    for x in xs:\n        result.append(x)\n    return"
    comment = "\n    # and"
    for answer in (main + tail, main + tail + comment):
        assert "def aux" not in read_function(answer, "f", has_partner=True).source
        assert "def aux" in read_function(answer, "f").source
    for answer in (f"{main + tail} result", f"{main + tail}\n```", f"{main + tail}\n\ndef test():\n    assert f("):
        assert "def aux" in read_function(answer, "f", has_partner=True).source


@pytest.mark.parametrize(
    "tail",
    [
        "import pytest\n\n@pytest.mark.parametrize('x', [1])\ndef test_f(x):\n    assert f(x) == 2",
        "import numpy as np\n\nones = np.ones(3)\n\ndef show():\n    return g(ones)\n\ndef g(x):\n    return x",
        "from your_module import f as g\nfrom .base import *\nimport solution as other",
        "def demo(xs):\n    for x in xs:\n        f(x)\n    break",
        "def test_partner():\n    assert partner(3) == 9\n\ntest_partner()",
        "import unittest\n\ndef main():\n    unittest.main()\n\nif True:\n    main()",
    ],
)
def test_what_a_function_does_not_need_cannot_end_its_program(tail):
    answer = "import math\n\n\ndef f(x):\n    return x + 1\n\n\ndef other(x):\n    return math.floor(x)\n\n\n"
    code = read_function(answer + tail, "f")
    assert run(code.source)["f"](1) == 2 and run(code.source)["other"](1.5) == 1
    deep = "".join(f"{'  ' * k}try:\n" for k in range(25)) + "  " * 25 + "f(1)\n"
    deep += "".join(f"{'  ' * k}finally:\n{'  ' * k}  pass\n" for k in reversed(range(25)))  # Python takes 20
    code = read_function(f"{answer}def demo():\n{textwrap.indent(deep, '  ')}", "f")
    assert run(code.source)["f"](1) == 2
    build = "def build():\n    global primes\n    primes = [2, 3]\n\nbuild()\n\ndef f(x):\n    return primes[x]\n"
    assert run(read_function(build, "f").source)["f"](1) == 3
    needed = read_function("import numpy as np\ndef f(x):\n    return np.sum(x)\n", "f")
    assert "import numpy" in needed.source


@pytest.mark.parametrize("line", ['"""Add one to x."""', "total = 0", "import math"])
def test_a_function_with_a_wrong_indentation_is_a_syntax_error(line):
    code = read_function(f"def f(x):\n        {line}\n    y = x + aux(x)\n    return y\n", "f")
    assert code.error and code.defined


def test_imports_may_stand_above_indented_definitions():
    code = read_function("import math\n\n" + textwrap.indent(HELPER + DOUBLE, "    "), "f")
    assert code.problem == "" and not code.error
    block = "    import math\n    SIZE = 2\n\n    def f(x):\n        return SIZE * math.floor(x)\n"
    for prose in ("Sure! Here's the function:\n\n", "It's this:\n  for you, if\n  import is right:\n\n"):
        assert run(extract_code(f"{prose}{block}\nIt's done.", "f"))["f"](1.5) == 2


def test_a_nested_function_is_not_taken_out_of_one_that_does_not_parse():
    code = read_function(
        "def f(x):\n    if x:\n        x\n    def helper(z):\n        return z\n    return helper(x\n", "f"
    )
    assert code.error and code.defined


def test_nothing_of_a_completion_runs_here(tmp_path):
    trap = tmp_path / "ran"
    act = f"open({str(trap)!r}, 'w')"
    text = f"{act}\nclass A:\n    {act}\ndef f(x={act}):\n    return aux(x)"
    assert analyze(PROMPT, "f", text, text).names_aux is False
    assert not trap.exists()
