"""
Orchestrator and workers: the orchestrator divides a sum of four numbers into two, one for each worker, the workers
answer at the same time, and the orchestrator makes the final answer of what they found.

    trl-multiagent train magrpo --task trl_multiagent.configs.recipes.workflows.orchestrator_workers:TASK \\
        --model_name Qwen/Qwen2.5-0.5B-Instruct --branching episodes
"""

import asyncio
from itertools import product

from trl_multiagent import Task, workflow
from trl_multiagent.configs.recipes.workflows.demos import datasets_of, shuffled


WORKERS = ("worker_1", "worker_2")


def four_numbers():
    items = shuffled([{"numbers": list(numbers)} for numbers in product(range(1, 6), repeat=4)])
    return items[64:], items[:64]


@workflow(roles=("orchestrator", *WORKERS), metric_ranges={"reward": (0.0, 1.0)})
async def orchestrator_workers(item, agents):
    question = " + ".join(map(str, item["numbers"]))
    plan = await agents.orchestrator(f"Divide the sum {question} into two sums, one on each line:\n")
    parts = [*plan.strip().split("\n"), "", ""][:2]
    asked = zip(WORKERS, parts, strict=True)
    found = await asyncio.gather(*(agents[role](f"{part} = ? Answer with a number only:\n") for role, part in asked))
    answer = await agents.orchestrator(f"The workers found {found[0].strip()} and {found[1].strip()}. {question} = ")
    right = answer.strip() == str(sum(item["numbers"]))
    agents.log("passed", right)
    return float(right)


TASK = Task(lambda settings: orchestrator_workers, datasets_of(four_numbers), roles=orchestrator_workers.roles)
