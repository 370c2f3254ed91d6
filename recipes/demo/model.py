"""
The demo's base model: a small Llama trained from scratch on noisy demonstrations of both roles.

Some demonstrations contain mistakes, and they divide the work in two different ways. In convention A the helper keeps
elements and main maps them; in convention B the helper keeps and maps. The convention of each demonstration is drawn
independently. So two copies of a model that was trained on them only solve a problem when both happen to follow the
same convention.

A second model was also trained on revisions: an agent's first answer, the feedback on the team's program, and a better
answer. The feedback comes from the code generation environment, on the program of two first demonstrations. It tells
an agent which of its functions are missing or malformed and which test fails, but not which convention its partner
follows. So a demonstrator repairs its own mistakes; if it made none and the tests fail, it changes its convention in
half of the cases. Two copies of this model often both change it, and disagree again. The team has to learn which agent
changes.
"""

import random
from pathlib import Path

from trl_multiagent.configs.recipes.demo.problems import Problem, demo_dataset, demo_prompts, problem_of
from trl_multiagent.environments.base import History, Turn, ask, judge
from trl_multiagent.models.imitation import Demonstration, ImitationModel
from trl_multiagent.tasks.code_generation import environment as code_generation
from trl_multiagent.tasks.code_generation.environment import CodeGenerationEnvironment
from trl_multiagent.tasks.code_generation.reward import AUX, MAIN


ROLES = (AUX, MAIN)
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
CHANGE_OF_CONVENTION = 0.5  # if the tests fail without a mistake of the agent's own
REMAINING_FAULT = 0.1  # how often a mistake is not repaired


def make_demonstrations(number: int, rng: random.Random) -> list[Demonstration]:
    """Draws pairs of a prompt and one agent's answer, for random training problems."""
    items, pairs = demo_dataset("train").to_list(), []
    for _ in range(number):
        item, role = rng.choice(items), rng.choice(ROLES)
        pairs.append((demo_prompts(item)[role], write(item, role, *draw_style(role, rng), rng)))
    return pairs


def with_revisions(number: int, rng: random.Random) -> list[Demonstration]:
    """Draws pairs as [`make_demonstrations`] does; half of them are second answers."""
    pairs = make_demonstrations(number // 2, rng)
    items = rng.choices(demo_dataset("train").to_list(), k=(number - len(pairs)) // 2)  # two pairs each, one per role
    pairs += make_revisions(items, rng)
    rng.shuffle(pairs)
    return pairs


def make_revisions(items: list[dict], rng: random.Random) -> list[Demonstration]:
    """
    Draws two first answers to each item, runs their program, and writes each agent's second answer. Returns its
    prompts, which contain the first turn, and the second answers: aux's and main's for each item.
    """
    from trl_multiagent.rollout.history import whole_prompt  # imports transformers

    environment = CodeGenerationEnvironment(first_prompts=demo_prompts, warn_about_items=False)
    styles = [{role: draw_style(role, rng) for role in ROLES} for _ in items]
    actions = [
        {role: write(item, role, *style[role], rng) for role in ROLES}
        for item, style in zip(items, styles, strict=True)
    ]
    outcomes = judge(environment, items, actions, [()] * len(items))
    histories: list[History] = [
        [Turn({**demo_prompts(item)}, action, outcome)]
        for item, action, outcome in zip(items, actions, outcomes, strict=True)
    ]
    prompts = ask(environment, items, histories)
    pairs = []
    for item, style, history, prompt in zip(items, styles, histories, prompts, strict=True):
        passed = history[0].outcome.metrics["test_pass_rate"] == 1
        for role in ROLES:
            answer = revise(item, role, *style[role], history[0].joint_action[role], passed, rng)
            pairs.append((str(whole_prompt(role, history, prompt[role], as_chat=False)), answer))
    return pairs


def draw_style(role: str, rng: random.Random) -> tuple[str, str]:
    """Draws the convention and the fault of a demonstration. The fault is `""` for none."""
    convention = rng.choice(CONVENTIONS)
    faults = AUX_FAULTS if role == AUX else MAIN_FAULTS
    return convention, rng.choices(["", *faults], [1 - sum(faults.values()), *faults.values()])[0]


def write(item: dict, role: str, convention: str, fault: str, rng: random.Random) -> str:
    """Writes an agent's answer, see [`write_aux`] and [`write_main`]."""
    return (write_aux if role == AUX else write_main)(problem_of(item), convention, fault, rng)


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


def revise(item: dict, role: str, convention: str, fault: str, answer: str, passed: bool, rng: random.Random) -> str:
    """
    Writes the second answer of an agent, after its first `answer` with this convention and fault (`""` for none).
    """
    if fault and rng.random() >= REMAINING_FAULT:
        return write(item, role, convention, "", rng)
    if not fault and not passed and rng.random() < CHANGE_OF_CONVENTION:
        (other,) = set(CONVENTIONS) - {convention}
        return write(item, role, other, "", rng)
    return answer


ONE_TURN = ImitationModel("demo", make_demonstrations, 600)
TWO_TURNS = ImitationModel("demo-two-turns", with_revisions, 1000, [Path(code_generation.__file__)])


def demo_model(progress: bool = True, num_turns: int = 1) -> str:
    """
    Returns the path of the demo's base model and tokenizer. The first call builds them, which takes about half a
    minute on one core, or two minutes for two turns. See [`ImitationModel.path`].

    Args:
        progress (`bool`, *optional*, defaults to `True`): Whether to show a progress bar while building.
        num_turns (`int`, *optional*, defaults to `1`): `2` for the model that was also trained on revisions.
    """
    return (ONE_TURN if num_turns == 1 else TWO_TURNS).path(progress)
