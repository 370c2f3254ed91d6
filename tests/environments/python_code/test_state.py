"""Which programs can keep state between calls."""

import pytest

from trl_multiagent.environments.python_code.state import keeps_state


AUX = "def aux(xs):\n    return [x for x in xs if x]\n"
WITHOUT = {
    "two functions": AUX + "def f(xs):\n    return sum(aux(xs))\n",
    "imports": "import math\nimport re as r\nfrom typing import List, Optional\nfrom collections import Counter, deque\n"
    "def f(xs: List[int]) -> Optional[int]:\n    '''Doc.'''\n    xs.append(r.sub('a', 'b', str(math.pi)))\n"
    "    queue = deque(Counter(xs).most_common())\n    queue.popleft()\n    return queue\n",
    "an import in a function": "def f(xs):\n    from functools import reduce\n    return reduce(lambda a, b: a + b, xs)\n",
    "constant defaults": "def f(xs, n=-1, *, sep=', ', pair=(1, 2)):\n    xs[0] += n\n    return sep.join(xs)\n",
    "inner functions": "def f(xs):\n    seen = []\n    def g(x, n=[]):\n        nonlocal seen\n        seen = seen + [x]\n"
    "        yield from seen\n    try:\n        return list(map(g, xs))\n    except (TypeError, ValueError):\n        raise\n",
    "a text": '"""A module."""\ndef f(xs):\n    return f"{xs!r:>10}"\n',
}
WITH = {
    "nothing that parses": "def f(:",
    "a variable": "N = []\ndef f(xs):\n    N.append(1)\n    return len(N)\n",
    "a global": "def f(xs):\n    global n\n    n = 1\n",
    "a class": "class A:\n    n = 0\ndef f(xs):\n    A.n += 1\n",
    "a class in a function": "def f(xs):\n    class A:\n        pass\n    return A\n",
    "a decorator": "import functools\n@functools.cache\ndef f(xs):\n    return 1\n",
    "a default": "def f(xs, seen=[]):\n    seen.append(1)\n    return len(seen)\n",
    "a default of a keyword": "def f(xs, *, seen={}):\n    seen[1] = 1\n",
    "a call in a default": AUX + "def f(xs, n=aux([1])):\n    return n\n",
    "a call in an annotation": AUX + "def f(xs: aux([1])):\n    return 1\n",
    "a call in the module": AUX + "def f(xs):\n    return 1\nf(1)\n",
    "a condition in the module": "if True:\n    def f(xs):\n        return 1\n",
    "a lambda in the module": "f = lambda xs: 1\n",
    "an attribute of a function": "def f(xs):\n    f.n = 1\n",
    "a deleted attribute": "def f(xs):\n    del f.n\n",
    "an attribute as a loop's variable": "def f(xs):\n    for f.n in xs:\n        pass\n",
    "setattr": "def f(xs):\n    setattr(f, 'n', 1)\n",
    "setattr, bound elsewhere": "def g():\n    setattr = 1\ndef f(xs):\n    setattr(f, 'n', 1)\n",
    "getattr": "def f(xs):\n    getattr(f, '__dict__')['n'] = 1\n",
    "globals": "def f(xs):\n    globals()['n'] = 1\n",
    "a private attribute": "def f(xs):\n    f.__dict__['n'] = 1\n",
    "a private name": "def f(xs):\n    __builtins__['n'] = 1\n",
    "exec": "def f(xs):\n    exec('global n; n = 1')\n",
    "a generator's frame": "def f(xs):\n    (x for x in []).gi_frame.f_globals['n'] = 1\n",
    "a traceback's frame": "def f(xs):\n    try:\n        1 / 0\n    except Exception as e:\n        e.tb_frame.f_globals['n'] = 1\n",
    "a pattern": "def f(xs):\n    match f:\n        case object(__dict__=d):\n            d['n'] = 1\n",
    "another module": "import random\ndef f(xs):\n    return random.random()\n",
    "sys": "def f(xs):\n    import sys\n    sys.setrecursionlimit(50)\n",
    "sys by a detour": "import re\ndef f(xs):\n    re.enum.sys.path.append(1)\n",
    "a module as a value": "import re\ndef f(xs):\n    r = re\n    r.n = 1\n",
    "an attribute of a module": "import math\ndef f(xs):\n    math.n = 1\n",
    "one name for two modules": "import re\ndef g():\n    import math as re\ndef f(xs):\n    re.sub('a', 'b', 'c')\n",
    "a submodule": "import os.path\ndef f(xs):\n    return 1\n",
    "everything of a module": "from math import *\ndef f(xs):\n    return 1\n",
    "a relative import": "from . import math\ndef f(xs):\n    return 1\n",
    "methodcaller": "from operator import methodcaller\ndef f(xs):\n    methodcaller('__setattr__', 'n', 1)(f)\n",
    "attrgetter": "import operator\ndef f(xs):\n    operator.attrgetter('__dict__')(f)['n'] = 1\n",
    "a formatter": "import string\ndef f(xs):\n    string.Formatter().get_field('0.__dict__', (f,), {})[0]['n'] = 1\n",
    "an abstract class": "from typing import Sequence\ndef f(xs):\n    Sequence.register(type('A', (), {}))\n",
    "overloads": "import typing\ndef f(xs):\n    typing.overload(f)\n",
    "a mark": "from typing import final\ndef f(xs):\n    final(f)\n    return '{0.__final__}'.format(f)\n",
    "a cache": "import functools\ndef f(xs):\n    return functools.cache(f)\n",
}


@pytest.mark.parametrize("name", WITHOUT)
def test_programs_of_plain_functions_keep_no_state(name):
    assert not keeps_state(WITHOUT[name])


@pytest.mark.parametrize("name", WITH)
def test_any_way_to_keep_state_counts(name):
    assert keeps_state(WITH[name])
