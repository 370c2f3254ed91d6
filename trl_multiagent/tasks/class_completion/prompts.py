"""The prompts of class completion. In the first turn, no agent sees what the others write."""

from collections.abc import Sequence

from trl_multiagent.code.sandbox import Verdict
from trl_multiagent.code.shown_text import shown_line


UNSEEN = "You cannot see each other's answers."
MAX_FAILURES = 5  # failing tests that are shown


def first_prompt(item: dict, own: Sequence[str], num_agents: int) -> str:
    """Returns an agent's first prompt."""
    if num_agents == 1:
        work = "Write the methods of the Python class below that have no body yet."
    else:
        others = "partner writes" if num_agents == 2 else f"{num_agents - 1} partners write"
        work = (
            f"You and your partner{'s' * (num_agents > 2)} complete the Python class below. You write some "
            f"methods, your {others} the others. {UNSEEN}"
        )
    return f"""\
{work}

{item["skeleton"].strip()}

{_request(own)}
"""


def _request(own: Sequence[str]) -> str:
    if not own:
        return "All methods belong to your partners. Answer with a single line: pass\n\nYour answer:"
    return f"""\
Your methods: {", ".join(own)}
- Keep their names and parameters. They may call the other methods of the class, which do what their descriptions say.
- Answer with the definitions of your methods alone: no other methods, no explanation, no code fence.

Your methods:"""


def feedback_prompt(result: str, own: Sequence[str]) -> str:
    """Returns an agent's prompt of a later turn; `result` is a text of [`describe_result`], or empty."""
    again = "Write your methods again, all of them, and better." if own else ""
    return "\n\n".join(part for part in (result, again, _request(own)) if part) + "\n"


def describe_result(item: dict, verdict: Verdict, missing: Sequence[str]) -> str:
    """
    Describes the results of a merged class, and the methods that no agent wrote that had to. Only tests of several
    methods are shown.
    """
    lines = [f"These methods are missing: {', '.join(missing)}."] if missing else []
    together = [test for test in item["tests"] if test.split(".")[0] not in item["method_tests"]]
    shown = [check for check in verdict.checks if check.source in together]
    if verdict.definitions.status != "passed":
        lines.append(f"The class cannot be defined: {shown_line(verdict.definitions.error)}")
    elif shown:
        failing = [check for check in shown if check.status != "passed"]
        passing = len(shown) - len(failing)
        lines.append(f"The completed class passes {passing} of {len(shown)} tests of its parts together.")
        lines += [f"- {check.source}: {shown_line(check.error) or check.status}" for check in failing[:MAX_FAILURES]]
    return "\n".join(lines)
