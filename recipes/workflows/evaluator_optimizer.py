"""
Evaluator and optimizer: a writer writes a sentence with three words, an evaluator says which words are missing, and
the writer writes it again, until the evaluator is content. The evaluator is paid for judging right.

    trl-multiagent train magrpo --task trl_multiagent.configs.recipes.workflows.evaluator_optimizer:TASK \\
        --model_name Qwen/Qwen2.5-0.5B-Instruct --branching episodes
"""

import re

from trl_multiagent import Task, workflow
from trl_multiagent.configs.recipes.workflows.demos import datasets_of, three_words


ROUNDS = 3
RANGES = {"reward": (0.0, 1.0), "reward/writer": (0.0, 1.0), "reward/evaluator": (0.0, 1.0)}


@workflow(roles=("writer", "evaluator"), metric_ranges=RANGES)
async def evaluator_optimizer(item, agents):
    words, advice = [item["noun"], item["verb"], item["place"]], ""
    for _ in range(ROUNDS):
        text = await agents.writer(f"{advice}Write one sentence with the words {', '.join(words)}:\n")
        missing = [word for word in words if word not in re.findall("[a-z]+", text.lower())]
        verdict = await agents.evaluator(
            f"Sentence: {text}\nWhich of the words {', '.join(words)} are missing? Answer with them, or with 'none':\n"
        )
        named = [word for word in words if word in verdict]
        agents.reward((named == missing) / ROUNDS, "evaluator")
        agents.log("passed", not missing)
        if not named:
            break
        advice = f"These words are missing: {', '.join(named)}. "
    agents.reward(1 - len(missing) / 3, "writer")


TASK = Task(lambda settings: evaluator_optimizer, datasets_of(three_words), roles=evaluator_optimizer.roles)
