"""
A solver answers, a critic confirms the answer or writes another one, and if it does not confirm, the solver answers
again. Both are rewarded for the final answer, the critic also for a number that is right.

    trl-multiagent train magrpo --config solver_critic
"""

from trl_multiagent import workflow
from trl_multiagent.configs.recipes.workflows.demos import careless_sums, demo_task, sums


RANGES = {"reward": (0.0, 1.25), "reward/solver": (0.0, 1.0), "reward/critic": (0.0, 1.5)}


@workflow(roles=("solver", "critic"), metric_ranges=RANGES)
async def solver_critic(item, agents):
    question, total = f"{item['a']} + {item['b']} =", str(item["a"] + item["b"])
    answer = (await agents.solver(f"{question} ? Answer with a number only:\n")).strip()
    agents.log("passed", answer == total)

    verdict = await agents.critic(
        f"{question} {answer} ? Repeat the number if it is right, else write the right one:\n"
    )
    verdict = verdict.strip()
    agents.reward(0.5 * (verdict == total), "critic")
    agents.log("passed", answer == total)
    agents.log("verdict_is_right", verdict == total)
    agents.log("confirmed", verdict == answer)

    if verdict != answer:
        answer = (await agents.solver(f"A critic says {verdict}. Answer again:\n")).strip()
        agents.log("passed", answer == total)
    return float(answer == total)


TASK = demo_task(solver_critic, sums, careless_sums, steps=700)
