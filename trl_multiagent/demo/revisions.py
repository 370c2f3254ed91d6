"""
Demonstrations of a second turn: an agent's first answer, the feedback on the team's program, and a better answer.

The feedback is that of the code generation environment, on the program of two first demonstrations. It tells an agent
which of its functions are missing or malformed and which test fails, but not which convention its partner follows. So
a demonstrator repairs its own mistakes; if it made none and the tests fail, it changes its convention in half of the
cases. Two copies of a model that was trained on these demonstrations often both change it, and disagree again. The
team has to learn which agent changes.
"""

import random
from collections.abc import Sequence

from trl_multiagent.demo.demonstrations import CONVENTIONS, draw_style, write
from trl_multiagent.demo.problems import Problem, demo_prompts
from trl_multiagent.environments.base import History, JointAction, Turn, ask, judge
from trl_multiagent.rollout.history import whole_prompt
from trl_multiagent.tasks.code_generation.environment import CodeGenerationEnvironment
from trl_multiagent.tasks.code_generation.prompts import AUX, MAIN


CHANGE_OF_CONVENTION = 0.5  # if the tests fail without a mistake of the agent's own
REMAINING_FAULT = 0.1  # how often a mistake is not repaired


def demonstrate_revisions(
    items: Sequence[dict], problems: dict[str, Problem], rng: random.Random
) -> list[dict[str, tuple[str, str]]]:
    """
    Draws two first answers to each item, runs their program, and writes each agent's second answer.

    Args:
        items (`Sequence[dict]`): Rows of the demo's dataset.
        problems (`dict[str, Problem]`): The problems, by name.
        rng (`random.Random`): Draws the answers.

    Returns:
        `list[dict[str, tuple[str, str]]]`: For each item, each role's prompt of the second turn, which contains the
        first turn, and its answer.
    """
    environment = CodeGenerationEnvironment(first_prompts=demo_prompts, warn_about_items=False)
    styles = [{role: draw_style(role, rng) for role in (AUX, MAIN)} for _ in items]
    actions: list[JointAction] = [
        {role: write(problems[item["entry_point"]], role, *style[role], rng) for role in (AUX, MAIN)}
        for item, style in zip(items, styles, strict=True)
    ]
    first: list[History] = [()] * len(items)
    outcomes = judge(environment, list(items), actions, first)
    histories: list[History] = [
        [Turn({**demo_prompts(item)}, action, outcome)]
        for item, action, outcome in zip(items, actions, outcomes, strict=True)
    ]
    prompts = ask(environment, list(items), histories)
    demonstrations = []
    for item, style, history, prompt in zip(items, styles, histories, prompts, strict=True):
        problem = problems[item["entry_point"]]
        passed = history[0].outcome.metrics["test_pass_rate"] == 1
        demonstrations.append(
            {
                role: (
                    str(whole_prompt(role, history, prompt[role], as_chat=False)),
                    revise(problem, role, *style[role], history[0].joint_action[role], passed, rng),
                )
                for role in (AUX, MAIN)
            }
        )
    return demonstrations


def revise(
    problem: Problem, role: str, convention: str, fault: str, answer: str, passed: bool, rng: random.Random
) -> str:
    """
    Writes the second answer of an agent, after its first `answer` with this convention and fault (`""` for none).
    """
    if fault and rng.random() >= REMAINING_FAULT:
        return write(problem, role, convention, "", rng)
    if not fault and not passed and rng.random() < CHANGE_OF_CONVENTION:
        (other,) = set(CONVENTIONS) - {convention}
        return write(problem, role, other, "", rng)
    return answer
