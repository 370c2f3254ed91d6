"""The prompts of the first turn. No agent is ever shown another agent's code."""

from trl_multiagent.environments.python_code.problems import read_problem


UNSEEN = "You cannot see each other's code."
SEEN = "Your partner's code is above."  # instead of it, in baselines whose agents see each other's code


def aux_prompt(item: dict) -> str:
    """The first prompt of the aux agent."""
    return f"""\
Two programmers solve the problem below together. You write a helper function, your partner writes `{item["entry_point"]}` \
and can call your helper. {UNSEEN}

{item["prompt"].strip()}

Write the helper:
- It is named `aux`, does a useful part of the work, and returns its result.
- Answer with the Python code of the function alone: no explanation, no code fence, no tests, no `{item["entry_point"]}`.

The answer has this form:

def aux(...):
    ...
    return result

Your answer:
"""


def main_prompt(item: dict) -> str:
    """The first prompt of the main agent in a team with an aux agent."""
    return f"""\
Two programmers solve the problem below together. You write `{item["entry_point"]}`, your partner writes a helper function \
`aux(...)` that you can call. {UNSEEN}

{item["prompt"].strip()}

Write the function:
- It solves the problem with the help of `aux`: use the value that `aux` returns, and do your own part of the work.
- Answer with the Python code of the function alone: no explanation, no code fence, no tests, no definition of `aux`.

The answer has this form:

{read_problem(item["prompt"], item["entry_point"]).signature}
    ...
    return result

Your answer:
"""


def single_prompt(item: dict) -> str:
    """The first prompt of an agent that works alone."""
    return f"""\
Solve the problem below.

{item["prompt"].strip()}

Write the function:
- It is complete: everything that it needs is in your answer.
- Answer with the Python code alone: no explanation, no code fence, no tests.

The answer has this form:

{read_problem(item["prompt"], item["entry_point"]).signature}
    ...
    return result

Your answer:
"""
