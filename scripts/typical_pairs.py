"""
What both kinds of the code reward pay for typical pairs. Run as a script, it prints the table of
docs/reward_notes.md.
"""

import textwrap

from trl_multiagent.code.sandbox import Sandbox
from trl_multiagent.tasks.code_generation import CodeGenerationEnvironment


ITEM = {
    "task_id": "pairs/0",
    "prompt": (
        'def f(xs):\n    """Return the sum of the squares of the even numbers.\n\n    >>> f([1, 2, 4])\n    '
        '20\n    """\n'
    ),
    "entry_point": "f",
    "test": "def check(candidate):\n"
    + "".join(
        f"    assert candidate({xs}) == {sum(x * x for x in xs if x % 2 == 0)}\n"
        for xs in ([1, 2, 4], [3, 6], [], [5], [2, 2, 7], [8, 1, 8])
    ),
    "canonical_solution": "    return sum(x * x for x in xs if x % 2 == 0)\n",
}
EVEN = "def aux(xs):\n    return [x for x in xs if x % 2 == 0]"
SUM_OF_SQUARES = "def f(xs):\n    return sum(x * x for x in aux(xs))"
ALL_AUX = "def aux(xs):\n    return sum(x * x for x in xs if x % 2 == 0)"
ALL_MAIN = "def f(xs):\n    return sum(x * x for x in xs if x % 2 == 0)"

# group -> description -> (aux, or None for a single agent; main)
PAIRS = {
    "work that is divided": {
        "aux keeps, main squares and adds": (EVEN, SUM_OF_SQUARES),
        "aux tells of one element, main filters by it":
            ("def aux(x):\n    return x % 2 == 0", "def f(xs):\n    return sum(x * x for x in filter(aux, xs))"),
        "aux yields": (
            "def aux(xs):\n    for x in xs:\n        if x % 2 == 0:\n            yield x * x",
            "def f(xs):\n    return sum(aux(xs))"),
        "aux works in place": (
            "def aux(xs):\n    xs[:] = [x * x for x in xs if x % 2 == 0]",
            "def f(xs):\n    aux(xs)\n    return sum(xs)"),
        "aux has a memo": (
            "import functools\n\n\n@functools.cache\ndef aux(x):\n    return x * x",
            "def f(xs):\n    return sum(aux(x) for x in xs if x % 2 == 0)"),
        "the same as the first, five of the six tests pass":
            (EVEN, "def f(xs):\n    return sum(x * x for x in aux(xs) if x < 8)"),
    },
    "one agent does all": {
        "a single agent": (None, ALL_MAIN),
        "main does not call aux": (EVEN, ALL_MAIN),
        "main calls aux where no test comes by": (
            EVEN,
            "def f(xs):\n    if len(xs) > 99:\n        xs = aux(xs)\n    return sum(x * x for x in xs if x % 2 == 0)"),
        "main returns what aux returns": (ALL_AUX, "def f(xs):\n    return aux(xs)"),
        "the same as `int(...) + 0`": (ALL_AUX, "def f(xs):\n    return int(aux(xs)) + 0"),
    },
    "both write everything": {
        "main throws aux's value away":
            (ALL_AUX, "def f(xs):\n    aux(xs)\n    return sum(x * x for x in xs if x % 2 == 0)"),
        "main compares both results": (
            ALL_AUX,
            "def f(xs):\n    total = sum(x * x for x in xs if x % 2 == 0)\n    return total if aux(xs) == total "
            "else None",
        ),
        "main answers itself if aux fails": (
            ALL_AUX, "def f(xs):\n    try:\n        return aux(xs)\n    except Exception:\n"
            "        return sum(x * x for x in xs if x % 2 == 0)"),
        "main answers itself if aux says nothing": (
            EVEN,
            "def f(xs):\n    evens = aux(xs)\n    if evens is None:\n        evens = [x for x in xs if x % 2 == 0]\n"
            "    return sum(x * x for x in evens)"),
    },
    "gates": {
        "aux returns 1, main asks for 1 and does everything": (
            "def aux():\n    return 1",
            "def f(xs):\n    if aux() != 1:\n        return None\n    return sum(x * x for x in xs if x % 2 == 0)"),
        "main does aux's part too and asks for the same": (
            EVEN,
            "def f(xs):\n    evens = [x for x in xs if x % 2 == 0]\n    if aux(xs) != evens:\n        return None\n"
            "    return sum(x * x for x in evens)"),
        "aux's answer is encoded, main decodes it":
            ("def aux(xs):\n    return -sum(x * x for x in xs if x % 2 == 0)", "def f(xs):\n    return -aux(xs)"),
    },
    "answers that do not solve the task": {
        "main always returns 0": (EVEN, "def f(xs):\n    return 0"),
        "main looks the example up": (EVEN, "def f(xs):\n    return {(1, 2, 4): 20}.get(tuple(xs), 0)"),
        "main returns its argument": (EVEN, "def f(xs):\n    return xs"),
        "main does not parse": (EVEN, "def f(xs):\n    return sum(x * x for x in aux(xs)"),
        "main says nothing": (EVEN, ""),
    },
    "text besides the function": {
        "main explains its code":
            (EVEN, SUM_OF_SQUARES + "\n\nThis function adds the squares of the even numbers that the helper keeps."),
        "main tests its function, in a code fence":
            (EVEN, f"```python\n{SUM_OF_SQUARES}\n\nassert f([1, 2]) == 4\nprint(f([]))\n```"),
        "main runs on with functions that nobody needs":
            (EVEN, SUM_OF_SQUARES + "".join(f"\n\n\ndef g{k}(x):\n    return x * {k} + {k}" for k in range(8))),
        "aux writes its function five times": ("\n\n\n".join([EVEN] * 5), SUM_OF_SQUARES),
    },
}  # fmt: skip


def payments(sandbox: Sandbox) -> dict[str, dict[str, tuple[float, float]]]:
    """group -> description -> what `paper` and `earned` pay."""
    paid = {}
    for group, pairs in PAIRS.items():
        paid[group] = {}
        for description, (aux, main) in pairs.items():
            environment = CodeGenerationEnvironment(1 if aux is None else 2, sandbox=sandbox)
            joint_action = {"main": main} if aux is None else {"aux": aux, "main": main}
            (outcome,) = environment.evaluate([ITEM], [joint_action], [[]])
            paid[group][description] = (outcome.metrics["paper_reward"], outcome.metrics["earned_reward"])
    return paid


def table(sandbox: Sandbox) -> str:
    lines = ["| | `paper` | `earned` |", "| --- | --- | --- |"]
    for group, rows in payments(sandbox).items():
        lines.append(f"| **{group}** | | |")
        lines += [f"| {description} | {paper:.2f} | {earned:.2f} |" for description, (paper, earned) in rows.items()]
    return "\n".join(lines)


if __name__ == "__main__":
    with Sandbox() as sandbox:
        print(textwrap.dedent(table(sandbox)))
