"""
The prompts of the first turn. No agent is ever shown another agent's code.

`problem` is the statement of the problem. It is the item's `prompt`, except where feedback takes its place.
"""

from dataclasses import dataclass

from trl_multiagent.environments.prompt_files import OwnPrompt, PromptFiles
from trl_multiagent.environments.task import setting
from trl_multiagent.tasks.problems import read_problem


AUX = "aux"  # the agent that writes the helper function, which is also named `aux`
MAIN = "main"  # the agent that writes the entry point

UNSEEN = "You cannot see each other's code."
SEEN = "Your partner's code is above."  # instead of it, in baselines whose agents see each other's code

FIRST = (("prompt", "entry_point", "task_id", "signature"), ("item",))
LATER = ((*FIRST[0], "feedback", "function", "response"), ("item", "feedback", "history"))


@dataclass
class CodePrompts(PromptFiles):
    """The section `prompt_files`."""

    aux: str | None = setting("Template or function for aux's first prompt: a path, or package.module:name.")
    main: str | None = setting("The same for main.")
    feedback: str | None = setting("Template or function for the prompts of later turns.")
    aux_feedback: str | None = setting("The same for aux alone.")
    main_feedback: str | None = setting("The same for main alone.")

    takes = {"aux": FIRST, "main": FIRST, "feedback": LATER, "aux_feedback": LATER, "main_feedback": LATER}

    def feedback_of(self, role: str) -> OwnPrompt | None:
        """Returns the prompt that the user gave for a role's later turns."""
        return self.prompts.get("aux_feedback" if role == AUX else "main_feedback", self.prompts.get("feedback"))


def signature(item: dict) -> str:
    """Returns the header of the function that the item asks for, on one line."""
    return read_problem(item["prompt"], item["entry_point"]).signature


def aux_prompt(item: dict, problem: str) -> str:
    """Returns the first prompt of the aux agent."""
    return f"""\
Two programmers solve the problem below together. You write a helper function, your partner writes \
`{item["entry_point"]}` and can call your helper. {UNSEEN}

{problem.strip()}

Write the helper:
- It is named `aux`, does a useful part of the work, and returns its result.
- Answer with the Python code of the function alone: no explanation, no code fence, no tests, \
no `{item["entry_point"]}`.

The answer has this form:

def aux(...):
    ...
    return result

Your answer:
"""


def main_prompt(item: dict, problem: str) -> str:
    """Returns the first prompt of the main agent in a team with an aux agent."""
    return f"""\
Two programmers solve the problem below together. You write `{item["entry_point"]}`, your partner writes a \
helper function `aux(...)` that you can call. {UNSEEN}

{problem.strip()}

Write the function:
- It solves the problem with the help of `aux`: use the value that `aux` returns, and do your own part of the work.
- Answer with the Python code of the function alone: no explanation, no code fence, no tests, no definition of `aux`.

The answer has this form:

{signature(item)}
    ...
    return result

Your answer:
"""


def single_prompt(item: dict, problem: str) -> str:
    """Returns the first prompt of an agent that works alone."""
    return f"""\
Solve the problem below.

{problem.strip()}

Write the function:
- It is complete: everything that it needs is in your answer.
- Answer with the Python code alone: no explanation, no code fence, no tests.

The answer has this form:

{signature(item)}
    ...
    return result

Your answer:
"""
