"""
Demonstrations for the demo's base model. Some contain mistakes, and they divide the work in two different ways.

In convention A the helper keeps elements and main maps them; in convention B the helper keeps and maps. The convention
of each demonstration is drawn independently. So two copies of a model that was trained on them only solve a problem
when both happen to follow the same convention.
"""

import random

from trl_multiagent.demo.problems import Problem
from trl_multiagent.tasks.code_generation.prompts import AUX


CONVENTIONS = ("A", "B")
# Probability of each fault in a demonstration
AUX_FAULTS = {"no return": 0.10, "condition": 0.12, "syntax": 0.10, "name": 0.04}
MAIN_FAULTS = {
    "no return": 0.10,
    "reduction": 0.10,
    "syntax": 0.08,
    "wrapper": 0.10,
    "ignores aux": 0.07,
    "solo": 0.10,
}


def demonstrate(problem: Problem, role: str, rng: random.Random) -> str:
    """Draws one demonstration of an agent's answer, in a random convention and possibly with a fault."""
    convention, fault = draw_style(role, rng)
    return write(problem, role, convention, fault, rng)


def draw_style(role: str, rng: random.Random) -> tuple[str, str]:
    """Draws the convention and the fault of a demonstration. The fault is `""` for none."""
    convention = rng.choice(CONVENTIONS)
    faults = AUX_FAULTS if role == AUX else MAIN_FAULTS
    return convention, rng.choices(["", *faults], [1 - sum(faults.values()), *faults.values()])[0]


def write(problem: Problem, role: str, convention: str, fault: str, rng: random.Random) -> str:
    """Writes an agent's answer, see [`write_aux`] and [`write_main`]."""
    return (write_aux if role == AUX else write_main)(problem, convention, fault, rng)


def write_aux(problem: Problem, convention: str, fault: str = "", rng: random.Random | None = None) -> str:
    """
    Writes the helper's answer: in convention `"A"` it keeps elements, in `"B"` it keeps and maps them. `fault`: a key
    of `AUX_FAULTS`, or none. `rng` draws the wrong condition of the fault `"condition"`.
    """
    condition = problem.condition
    if fault == "condition":
        rng = rng or random.Random(0)
        condition = rng.choice([other for other in problem.family.conditions if other != condition])
    element = "x" if convention == "A" else problem.map.code
    values = f"[{element} for x in {problem.argument} if {condition.code}]"
    name = "helper" if fault == "name" else AUX
    statement = f"ys = {values}" if fault == "no return" else f"return {values}"
    if fault == "syntax":
        statement = statement.replace(" in ", " ", 1)
    return f"def {name}({problem.argument}):\n    {statement}\n"


def write_main(problem: Problem, convention: str, fault: str = "", rng: random.Random | None = None) -> str:
    """
    Writes the main function's answer: in convention `"A"` it maps the values that aux returns, in `"B"` it does not.
    `fault`: a key of `MAIN_FAULTS`, or none. `rng` draws the wrong reduction of the fault `"reduction"`.
    """
    argument, call = problem.argument, f"aux({problem.argument})"
    values = f"[{problem.map.code} for x in {call}]" if convention == "A" else call
    if fault == "solo":
        values = f"[{problem.map.code} for x in {argument} if {problem.condition.code}]"
    reduction = problem.reduction
    if fault == "reduction":
        rng = rng or random.Random(0)
        reduction = rng.choice([other for other in problem.family.reductions if other != reduction])
    result = f"return {reduction.code}"
    if fault == "no return":
        result = f"ys = {reduction.code}"
    if fault == "syntax":
        result = result.replace("ys", "ys ys", 1)
    body = [f"ys = {values}", result]
    if fault == "wrapper":
        body = [f"return {call}"]
    if fault == "ignores aux":
        body = [call, f"ys = {argument}", result]
    return "\n    ".join([f"def {problem.name}({argument}):", *body]) + "\n"
