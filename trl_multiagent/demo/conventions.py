"""Finds which of the two conventions an agent follows, by running its function."""

import random
from collections.abc import Sequence

from trl_multiagent.code.extraction import extract_code
from trl_multiagent.code.sandbox import Program, Sandbox, Verdict
from trl_multiagent.demo.demonstrations import CONVENTIONS, write_aux
from trl_multiagent.demo.problems import Problem
from trl_multiagent.environments.base import JointAction
from trl_multiagent.tasks.code_generation.prompts import AUX, MAIN


INPUTS = 3


def conventions(
    problems: Sequence[Problem], joint_actions: Sequence[JointAction], sandbox: Sandbox
) -> list[dict[str, str | None]]:
    """
    Finds the convention of every agent's answer: `"A"` (aux keeps elements, main maps them), `"B"` (aux keeps and maps
    them), or `None` for an answer that fits neither, for example because it is wrong or because main does not use
    `aux`.

    Each function runs without the partner's function: aux alone, and main with a correct aux of each convention.
    `problems`: the problem of each joint action.
    """
    programs = []
    for problem, answers in zip(problems, joint_actions, strict=True):
        rng = random.Random(problem.name)
        inputs = [problem.inputs(rng, length=6) for _ in range(INPUTS)]
        kept = [problem.kept(values) for values in inputs]
        outputs = {"A": kept, "B": [problem.mapped(values) for values in kept]}
        aux = extract_code(answers[AUX], AUX)  # as the reward does
        main = extract_code(answers[MAIN], problem.name)
        for convention in CONVENTIONS:
            programs.append(Program(aux, AUX, check(inputs, outputs[convention])))
        solutions = [problem.solve(values) for values in inputs]
        for convention in CONVENTIONS:
            source = write_aux(problem, convention) + main
            programs.append(Program(source, problem.name, check(inputs, solutions)))
    verdicts = sandbox.run(programs)
    return [
        {AUX: followed(verdicts[k : k + 2]), MAIN: followed(verdicts[k + 2 : k + 4])}
        for k in range(0, len(verdicts), 4)
    ]


def check(inputs: list, outputs: list) -> str:
    """Writes the source of a test that a function returns the right output for each input."""
    pairs = zip(inputs, outputs, strict=True)
    return "def check(candidate):\n" + "".join(f"    assert candidate({x!r}) == {y!r}\n" for x, y in pairs)


def followed(verdicts: Sequence[Verdict]) -> str | None:
    """Returns the convention whose tests all passed; `None` if neither or both of them passed."""
    passed = [name for name, verdict in zip(CONVENTIONS, verdicts, strict=True) if verdict.passed == INPUTS]
    return passed[0] if len(passed) == 1 else None
