"""
Two debaters see three dice and argue for opposite sides, and a judge who does not see them decides. Each role has a
reward of its own: the judge is paid for being right, and a debater for the verdict, whatever is right.

    trl-multiagent train magrpo --config debate_judge
"""

import asyncio

from trl_multiagent import workflow
from trl_multiagent.configs.recipes.workflows.demos import careless_debates, demo_task, three_dice


CLAIMS = {"pro": "the sum is 11 or more", "con": "the sum is 10 or less"}
RANGES = {"reward": (0.0, 1 / 3), "reward/pro": (-1.0, 1.0), "reward/con": (-1.0, 1.0), "reward/judge": (0.0, 1.0)}


@workflow(roles=("pro", "con", "judge"), metric_ranges=RANGES)
async def debate_judge(item, agents):
    dice = [str(number) for number in item["dice"]]
    asked = f"The dice show {' '.join(dice)}. Name one to argue that"
    named = await asyncio.gather(agents.pro(f"{asked} {CLAIMS['pro']}:\n"), agents.con(f"{asked} {CLAIMS['con']}:\n"))
    shown = [text.strip() if text.strip() in dice else "?" for text in named]
    agents.log("true_dice", sum(text != "?" for text in shown) / 2)

    sides = zip(CLAIMS.items(), shown, strict=True)
    said = " ".join(f"{role} says that {claim} and names a {die}." for (role, claim), die in sides)
    verdict = await agents.judge(f"There are three dice. {said} Who is right, pro or con?\n")
    verdict = verdict.strip().lower()
    right = verdict == ("pro" if sum(item["dice"]) >= 11 else "con")
    won = {"pro": 1.0, "con": -1.0}.get(verdict, 0.0)
    agents.log("passed", right)
    agents.log("pro_wins", won > 0)
    return {"pro": won, "con": -won, "judge": float(right)}


TASK = demo_task(debate_judge, three_dice, careless_debates, steps=600)
