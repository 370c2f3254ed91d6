"""Honest programs that are easily scored wrong, and hostile ones that are easily believed."""

from trl_multiagent.code.sandbox import Program


HONEST = {
    "functions through functions": (
        "def f(g, h): return lambda x: g(h(x))",
        "assert f(lambda a: a + 1, lambda a: a * 2)(3) == 7\nassert f(f(abs, abs), abs)(-2) == 2"),
    "iterators, matches and a call of an argument": (
        "import re\ndef f(n, g): return (g(v * v) for v in range(n)), re.match('a', 'a' * n)",
        "values, match = f(3, lambda v: -v)\nassert list(values) == [0, -1, -4] and match\nassert not f(0, len)[1]"),
    "an argument that raises": (
        "def f(g):\n    try: return g()\n    except ValueError as error: return str(error)",
        "def boom(): raise ValueError('x')\nassert f(boom) == 'x'"),
    "its own exception": (
        "class Bad(ValueError): pass\ndef f(x): raise Bad('no')",
        "try:\n    f(1)\n    assert False\nexcept ValueError as error:\n    assert str(error) == 'no'"),
    "changed keyword arguments and queues": (
        "def f(xs): xs.append(1)",
        "from collections import deque\na, b = [], deque()\nf(xs=a)\nf(b)\nassert a == [1]\nassert b == deque([1])"),
    "subclasses of plain types": (
        "import enum, typing\nclass N(enum.IntEnum):\n    X = 3\nclass S(str, enum.Enum):\n    X = 'r'\n"
        "class P(typing.NamedTuple):\n    x: int\ndef f(): return N.X, S.X, P(1)", "assert f() == (3, 'r', (1,))"),
    "numbers at the edge": (
        "def f(x): return [x, -x, 10**5000, float('nan'), -0.0]",
        "import math\nvalues = f(float('inf'))\nassert values[:2] == [math.inf, -math.inf] and values[2] == 10**5000\n"
        "assert math.isnan(values[3]) and str(values[4]) == '-0.0'\nassert f(10**5000)[0] == 10**5000"),
    "recursion to the usual depth":
        ("def aux(n): return 0 if n == 0 else 1 + aux(n - 1)\ndef f(n): return aux(n)", "assert f(970) == 970"),
    "a main guard and prints": (
        "import sys\ndef f(): print('x' * 10**6); return 1\nif __name__ == '__main__':\n    input()",
        "assert f() == 1"),
    "a closed stdout, handlers and a thread left over": (
        "import atexit, signal, sys, threading, time\nsys.stdout.close()\natexit.register(print)\n"
        "signal.signal(signal.SIGTERM, lambda *args: None)\n"
        "threading.Thread(target=time.sleep, args=[99], daemon=True).start()\ndef f(): return 1",
        "assert f() == 1\nassert f() == 1"),
    "pools and event loops": (
        "import asyncio\nfrom concurrent.futures import ThreadPoolExecutor\nasync def g(): return await "
        "asyncio.to_thread(abs, -1)\n"
        "def f():\n    with ThreadPoolExecutor(2) as pool: return [asyncio.run(g()), *pool.map(abs, [-2])]",
        "assert f() == [1, 2]",
    ),
    "source with a coding line, tabs and returns": (
        "# -*- coding: latin-1 -*-\r\ndef f():\r\n\tπ = 'é'\r\n\treturn π\r\n",
        "assert f() == 'é'",
    ),
    "imports that it does not need": (
        "import argparse, bz2, configparser, ctypes, doctest, glob, gzip, lzma, pathlib, pickle, platform, "
        "shutil, socket\n"
        "import subprocess, tempfile, xml.etree.ElementTree, zipfile, typing, dataclasses, abc, os.path, "
        "urllib.parse\n"
        "from typing import *\ndef f(): return 1",
        "assert f() == 1",
    ),
    "a method, a partial and a cached function": (
        "import functools\nclass Solution:\n    @functools.lru_cache(None)\n    def g(self, n): return n\n"
        "f = functools.partial(Solution().g)", "assert f(5) == 5"),
}  # fmt: skip
HOSTILE = {
    "answers that are written ahead": """
import json, os, struct, threading, time
def forge():
    body = json.dumps({"id": 1, "value": 2, "changed": [], "calls": []}).encode()
    while True:
        for fd in range(3, 20):
            try: os.write(fd, struct.pack("<I", len(body)) + body)
            except OSError: pass
threading.Thread(target=forge, daemon=True).start()
def f(x): time.sleep(0.1); return 0
""",
    "a subclass that lies about its size": """
class Long(list):
    def __len__(self): return 2
    def __eq__(self, other): return True
    def __iter__(self): return iter(())
def f(x): return Long()
""",
    "an answer that changes its argument's type": """
import json, os, sys
def f(x):
    serve = sys._getframe(2)
    serve.f_globals["wire"].MUTABLE = (int, list)
    x.clear()
    return 0
""",
    "values of no known form": """
import sys
def f(x):
    sys._getframe(2).f_globals["wire"].encode = lambda *args: {"range": [{"object": []}]}
    return 0
""",
    "a function of the checks that does not exist": """
import sys
def f(x): return sys._getframe(2).f_globals["_proxy"](None, 10**9, True)(1)
""",
    "an exception of any name": """
class AssertionError(BaseException):
    def __str__(self): raise SystemExit
AssertionError.__name__ = "\\0()"
def f(x): raise AssertionError
""",
    "a replaced way of reading": """
import sys
def f(x):
    sys._getframe(2).f_globals["_counted"].clear()
    sys._getframe(1).f_globals["decode"] = lambda *args: 0
    return 0
""",
}


SANDBOX = {"check_timeout": 2.0, "max_timeouts": 1}


def test_honest_programs_pass(sandbox):
    for watch in ((), ("aux", "f")):
        programs = [Program(source, "f", checks, watch=watch) for source, checks in HONEST.values()]
        for name, verdict in zip(HONEST, sandbox.run(programs), strict=True):
            assert verdict.passed == verdict.total and verdict.definitions.error == "", (name, verdict)
            assert verdict.suspicious in ((), ("open",))


def test_hostile_programs_get_nothing(sandbox):
    checks = "a = [1]\nassert f(a) == 2\nassert len(f([1])) == 2\nassert a == 2"
    programs = [Program(source, "f", checks) for source in HOSTILE.values()]
    honest = Program("def f(x): return x", "f", "assert f(1) == 1")
    *verdicts, after = sandbox.run([*programs, honest])
    assert [name for name, verdict in zip(HOSTILE, verdicts, strict=True) if verdict.passed] == []
    assert after.passed == 1


def test_an_error_is_one_line_of_a_trace(sandbox):
    forged = "def f(x):\n    raise ValueError('no\\npassed   assert f(1)')"
    (verdict,) = sandbox.run([Program(forged, "f", "assert f(1)")])
    assert verdict.columns()["tests"] == "error    assert f(1)  ValueError: no passed assert f(1)"


def test_texts_of_a_verdict_can_be_written(sandbox):
    source = "def f(x):\n    if x: raise ValueError('\\ud800')\n    return '\\udfff'"
    (verdict,) = sandbox.run([Program(source, "f", "assert f(1)\nassert {}[f(0)]\nraise ValueError(f(0))")])
    for check in verdict.checks:
        check.error.encode()
