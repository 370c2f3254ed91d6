"""
Voting: three agents answer the same question at the same time, and what most of them say is the answer. All are
rewarded for it, so an agent gains if its errors are others than those of its partners.

    trl-multiagent train magrpo --task trl_multiagent.configs.recipes.workflows.voting:TASK \\
        --model_name Qwen/Qwen2.5-0.5B-Instruct --credit sibling --num_turns 1
"""

import asyncio
from collections import Counter

from trl_multiagent import Task, workflow
from trl_multiagent.configs.recipes.workflows.demos import datasets_of, sums


ROLES = ("voter_1", "voter_2", "voter_3")


@workflow(roles=ROLES, metric_ranges={"reward": (0.0, 1.0)})
async def voting(item, agents):
    question = f"{item['a']} + {item['b']} = ? Answer with a number only:\n"
    answers = await asyncio.gather(*(agents[role](question) for role in ROLES))
    votes, total = [answer.strip() for answer in answers], str(item["a"] + item["b"])
    (most, number), *_ = Counter(votes).most_common(1)
    agents.log("agreement", number / len(votes))
    agents.log("right_votes", votes.count(total) / len(votes))
    agents.log("passed", most == total and number > 1)
    return float(most == total and number > 1)


TASK = Task(lambda settings: voting, datasets_of(sums), roles=ROLES)
