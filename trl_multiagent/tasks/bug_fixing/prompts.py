"""The prompts of the tester and the fixer. In the first turn, neither sees what the other writes."""

from collections.abc import Iterable, Sequence

from trl_multiagent.code.sandbox import Check
from trl_multiagent.code.shown_text import shown_line


TESTER, FIXER = "tester", "fixer"
UNSEEN = "You cannot see each other's answers."


def tester_prompt(item: dict) -> str:
    """Returns the tester's first prompt."""
    return f"""\
The Python function below has a fault. You write tests that find it, your partner repairs the function. {UNSEEN}

{item["faulty"]}

Write the tests:
- Each is one line such as `assert {item["entry_point"]}(...) == ...`, with values written out. There are at most 8.
- They pass if the function does what its description says, and at least one of them fails for the function above.
- Answer with these lines alone: no explanation, no code fence.

Your tests:
"""


def fixer_prompt(item: dict, alone: bool) -> str:
    """Returns the fixer's first prompt."""
    work = "Repair it." if alone else f"You repair it, your partner writes tests that find the fault. {UNSEEN}"
    return f"""\
The Python function below has a fault. {work}

{item["faulty"]}

Write the repaired function:
- Change as little as possible. What is right stays as it is.
- Answer with the Python code of the function alone: no explanation, no code fence, no tests.

Your function:
"""


def tester_feedback(tests: Sequence[str], checks: Sequence[Check]) -> str:
    """Returns the tester's prompt of a later turn: the results of its tests for the faulty function."""
    results = "Your last answer contains no test of the form `assert function(...) == ...`."
    if tests:
        shown = _list(zip(tests, checks, strict=True))
        results = f"These are the results of your tests for the faulty function:\n{shown}"
    return f"{results}\n\nWrite better tests, in the same form.\n\nYour tests:\n"


def fixer_feedback(tests: Sequence[str], checks: Sequence[Check], alone: bool) -> str:
    """Returns the fixer's prompt of a later turn: which of the tester's tests its function fails."""
    failed = [(text, check) for text, check in zip(tests, checks, strict=True) if check.status != "passed"]
    of_all = f"of your partner's {len(tests)} tests. A test may be wrong."
    if alone:
        results = "Check your function once more."
    elif not tests:
        results = "Your partner wrote no tests."
    elif not failed:
        results = f"Your function passes all {of_all}"
    else:
        results = f"Your function fails {len(failed)} {of_all}\n{_list(failed)}"
    return f"{results}\n\nWrite the repaired function again.\n\nYour function:\n"


def _list(results: Iterable[tuple[str, Check]]) -> str:
    lines = []
    for text, check in results:
        error = f", {shown_line(check.error)}" if check.error else ""
        lines.append(f"- `{shown_line(text)}`: {check.status}{error}")
    return "\n".join(lines)
