"""Forwards of a team as an update makes them, without a trainer."""

import torch
from trl.trainer.utils import add_fused_lm_head

from trl_multiagent import AgentTeam
from trl_multiagent.rollout.tree import Samples
from trl_multiagent.trainers.base.batch import Row, agent_tensors, forward_inputs


def inputs_of(team: AgentTeam, prompts: dict[str, list[list[int]]]) -> dict:
    """The arguments of a forward of the team: completions of 2 to 4 tokens for each prompt."""
    inputs = {}
    for k, (role, own) in enumerate(prompts.items()):
        rows = [
            Row(0, {role: Samples(ids, [[20 + k, 21 + n, *range(n)] for n in range(3)], [""] * 3)}, g, {role: 1.0})
            for ids in own
            for g in range(3 if len(own) == 1 else 1)
        ]
        inputs[role] = forward_inputs(team.agents[role], agent_tensors(rows, role, 0, [1]))
    return inputs


def gradients(team: AgentTeam, inputs: dict, **checkpointing) -> list[torch.Tensor]:
    for model in team.base_models:
        add_fused_lm_head(model, outputs=("log_probs", "entropy"))
    if checkpointing:
        team.enable_input_require_grads()
        team.activation_checkpointing_enable(checkpointing)
    outputs = team(team_inputs=inputs)
    weighted = (x.log_probs * torch.arange(x.log_probs.numel()).view_as(x.log_probs) for x in outputs.values())
    sum(x.sum() for x in weighted).backward()
    return [x.grad for x in team.parameters() if x.requires_grad]
