"""
The demo's base model: a small Llama trained from scratch on noisy demonstrations.

There are two such models: one for a single turn, and one that was also trained on revisions after feedback.
"""

import random
from pathlib import Path

from trl_multiagent.demo.demonstrations import demonstrate
from trl_multiagent.demo.problems import demo_dataset, demo_problems, demo_prompts
from trl_multiagent.demo.revisions import demonstrate_revisions
from trl_multiagent.models.imitation import ImitationModel
from trl_multiagent.tasks.code_generation import feedback
from trl_multiagent.tasks.code_generation.prompts import AUX, MAIN


def make_demonstrations(number: int, rng: random.Random, num_turns: int = 1) -> list[tuple[str, str]]:
    """
    Draws pairs of a prompt and one agent's answer, for random training problems. With two turns, half of them are
    revisions.
    """
    problems = {problem.name: problem for problem in demo_problems("train")}
    items = demo_dataset("train").to_list()
    pairs = []
    for _ in range(number // num_turns):
        item = rng.choice(items)
        role = rng.choice((AUX, MAIN))
        pairs.append((demo_prompts(item)[role], demonstrate(problems[item["entry_point"]], role, rng)))
    if num_turns == 2:
        drawn = rng.choices(items, k=(number - len(pairs)) // 2)  # each gives two demonstrations, one per role
        for revisions in demonstrate_revisions(drawn, problems, rng):
            pairs += revisions.values()
        rng.shuffle(pairs)
    return pairs


SOURCES = [
    *(Path(__file__).with_name(name) for name in ("problems.py", "demonstrations.py", "revisions.py", "model.py")),
    Path(feedback.__file__),
]
ONE_TURN = ImitationModel("demo", make_demonstrations, 600, SOURCES)
TWO_TURNS = ImitationModel("demo-two-turns", lambda number, rng: make_demonstrations(number, rng, 2), 1000, SOURCES)


def demo_model(progress: bool = True, num_turns: int = 1) -> str:
    """
    Returns the path of the demo's base model and tokenizer. The first call builds them, which takes about half a
    minute on one core, or two minutes for two turns. See [`ImitationModel.path`].

    Args:
        progress (`bool`, *optional*, defaults to `True`): Whether to show a progress bar while building.
        num_turns (`int`, *optional*, defaults to `1`): `2` for the model that was also trained on revisions.
    """
    return (ONE_TURN if num_turns == 1 else TWO_TURNS).path(progress)
