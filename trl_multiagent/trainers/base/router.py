"""
The router loss of agents that are mixtures of experts, over a whole batch: see [`~models.router_loss`].

The load of the experts is counted over the batch first. The loss is then a sum over micro-batches and processes.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch

from trl_multiagent.models.router_loss import expert_load, without_router_logits
from trl_multiagent.team.agent_team import AgentTeam


if TYPE_CHECKING:
    from transformers import Trainer as Base
else:
    Base = object  # the trainer itself follows in the bases of the class that mixes this in


class RouterLossMixin(Base):
    """Computes the router losses of the trained agents. Part of [`TeamTrainerMixin`]."""

    team: AgentTeam
    _router_loss_coefs: dict[str, float]  # by role, of the agents that have a router loss
    _expert_loads: dict[str, torch.Tensor]  # by role, of the current batch

    def _router_inputs(self, role: str, token_weights: torch.Tensor | None) -> dict[str, Any]:
        """
        Builds the arguments of an agent's forward that concern its routers.

        Args:
            role (`str`): The agent.
            token_weights (`torch.Tensor`, *optional*): The weight of each token in the agent's router loss, if it has
                one.
        """
        inputs: dict[str, Any] = without_router_logits(self.team.agents[role])
        if token_weights is not None and role in self._router_loss_coefs:
            inputs["router_weights"] = token_weights
        return inputs

    @torch.no_grad()
    def _expert_load(self, role: str, chunks: Iterable[dict[str, Any]]) -> torch.Tensor:
        """
        Computes the load of an agent's experts over the batch of all processes.

        Args:
            role (`str`): The agent.
            chunks (`Iterable[dict]`): The arguments of its forwards. They contain `router_weights`.
        """
        sent = 0.0
        with self.team.evaluating(), self.accelerator.autocast():
            for inputs in chunks:
                sent = sent + self.model_wrapped(team_inputs={role: inputs})[role].aux_loss[0]
        experts_per_token = self.team.agents[role].config.get_text_config().num_experts_per_tok
        return expert_load(self.accelerator.reduce(sent, "sum"), experts_per_token)

    def _router_loss(self, role: str, expert_sums: torch.Tensor) -> torch.Tensor:
        """
        Computes the part of one micro-batch in an agent's router loss, without its coefficient.

        Args:
            role (`str`): The agent.
            expert_sums (`torch.Tensor` of shape `(2, num_experts)`): The `aux_loss` of the agent's output.
        """
        return self._expert_loads[role] @ expert_sums[1]
