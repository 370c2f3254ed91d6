"""
Program and repair: a coder writes a function. If it fails a test, a fixer sees this test and writes the function
again. The sandbox runs the programs of all branches in one call.

    trl-multiagent train magrpo --task trl_multiagent.configs.recipes.workflows.program_repair:TASK \\
        --model_name Qwen/Qwen2.5-Coder-0.5B-Instruct --num_turns 2
"""

import math
import operator

from trl_multiagent import Task, workflow
from trl_multiagent.code.extraction import read_function
from trl_multiagent.code.sandbox import Program, Sandbox
from trl_multiagent.configs.recipes.workflows.demos import datasets_of


WISHES = {"the larger of a and b": max, "a minus b": operator.sub, "the rest of a divided by b": operator.mod}
WISHES |= {"the smaller of a and b": min, "a times b": operator.mul, "the largest divisor of a and b": math.gcd}
SANDBOX = Sandbox()


def wishes():
    pairs = [(6, 4), (3, 9), (8, 2), (5, 7)]
    checks = {wish: [f"assert f{pair} == {right(*pair)}" for pair in pairs] for wish, right in WISHES.items()}
    items = [{"wish": wish, "checks": "\n".join(lines)} for wish, lines in checks.items()]
    return items[1:], items[:1]


@workflow(roles=("coder", "fixer"), metric_ranges={"reward": (0.0, 1.0)})
async def program_repair(item, agents):
    asked = f"Write a Python function f(a, b) that returns {item['wish']}, and nothing else:\n"
    source = await agents.coder(asked)
    verdict = await agents.call(SANDBOX.run, Program(read_function(source, "f").source, "f", item["checks"]))
    failed = [check.source for check in verdict.checks if check.status != "passed"]
    if failed:
        source = await agents.fixer(f"{asked}{source}\nThis test fails: {failed[0]}. Write the function again:\n")
        verdict = await agents.call(SANDBOX.run, Program(read_function(source, "f").source, "f", item["checks"]))
    agents.log("passed", verdict.passed == verdict.total)
    return verdict.passed / verdict.total


TASK = Task(lambda settings: program_repair, datasets_of(wishes), roles=program_repair.roles)
