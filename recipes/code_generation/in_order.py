"""
One after the other: `main` reads the helper that `aux` has written before it writes the requested function.

    trl-multiagent train magrpo --config magrpo_demo_coder --num_turns 2 --branching episodes \\
        --task trl_multiagent.configs.recipes.code_generation.in_order:TASK
"""

import dataclasses

from trl_multiagent import workflow
from trl_multiagent.configs.recipes.demo.task import TASK as CODE_GENERATION


ROLES = ("aux", "main")


def make_environment(settings):
    code = CODE_GENERATION.make_environment(settings)

    def score(answers):
        items, joint_actions = zip(*answers, strict=True)
        return code.evaluate(items, joint_actions, [[] for _ in items])  # with both kinds of the reward as metrics

    @workflow(roles=ROLES, metric_ranges=code.metric_ranges)
    async def in_order(item, agents):
        prompts = code.prompts(item, [])
        helper = await agents.aux(prompts["aux"])
        if any(isinstance(prompt, str) for prompt in prompts.values()):
            prompt = code.show_answers("main", prompts["main"], {"aux": helper})
        else:
            solved = [message["content"] for message in prompts["aux"] if message["role"] == "assistant"]
            prompt = with_helpers(prompts["main"], [*solved, helper])
        function = await agents.main(prompt)
        return await agents.call(score, (item, {"aux": helper, "main": function}))

    in_order.metrics = code.metrics  # of the sandbox
    return in_order


def with_helpers(messages, helpers):
    """Adds a helper to each question: to those of the solved problems, and to the last one."""
    messages = [dict(message) for message in messages]
    questions = [message for message in messages if message["role"] == "user"]
    for question, helper in zip(questions, helpers, strict=True):
        question["content"] += f"\nThe helper is:\n{helper}"
    return messages


TASK = dataclasses.replace(
    CODE_GENERATION,
    make_environment=make_environment,
    roles=ROLES,
    introduction=None,  # the demo's
    callbacks=None,
)
