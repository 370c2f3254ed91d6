"""
The load-balancing loss of mixture-of-experts agents, over a whole batch.

Every token of every sparse layer has a weight w_t. The router gives it the probabilities p_te, and sends it to the k
most probable experts. The loss is the same as in transformers:

    num_experts * sum over experts e of load_e * P_e,   load_e = sum of w_t over the tokens sent to e / T,
                                                        P_e = sum over tokens of w_t p_te / T,   T = sum of w_t

Gradients flow through P alone. With the load of the whole batch, the loss is a sum over tokens, so it does not depend
on how the batch is split into micro-batches and processes.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from trl_multiagent.models.packing import run_scored


def forward_with_expert_sums(
    model: PreTrainedModel, token_weights: torch.Tensor, **inputs: torch.Tensor
) -> ModelOutput:
    """
    Runs [`run_scored`] of a mixture of experts. The `aux_loss` of its output holds the result of [`expert_sums`] in
    place of a loss. The `token_weights` have the shape of the `input_ids`.
    """
    collected: list[torch.Tensor] = []  # the logits of the routers, `(num_tokens, num_experts)` per layer

    def request(backbone: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return args, {**kwargs, "output_router_logits": True}

    def collect(backbone: nn.Module, args: Any, outputs: Any) -> None:
        collected.extend(outputs.router_logits or ())

    # The hooks are on the backbone, because the whole model would compute a loss of its own from the logits
    backbone = model.base_model
    with backbone.register_forward_pre_hook(request, with_kwargs=True), backbone.register_forward_hook(collect):
        (outputs,) = run_scored(model, inputs)
    outputs.aux_loss = expert_sums(collected, model.config.get_text_config().num_experts_per_tok, token_weights)
    return outputs


def factors_of(sent: torch.Tensor, experts_per_token: int) -> torch.Tensor:
    """
    Returns the factors of the experts' summed probabilities in the loss, of shape `(num_experts,)`: 0 without tokens.
    `sent`: the first result of [`expert_sums`], summed over the batch.
    """
    weight = sent.sum() / experts_per_token  # of all tokens
    return len(sent) * sent / torch.where(weight > 0, weight, 1.0) ** 2


def expert_sums(
    router_logits: Sequence[torch.Tensor], experts_per_token: int, token_weights: torch.Tensor
) -> torch.Tensor:
    """
    Sums up the choices and the probabilities of all routers.

    Args:
        router_logits (`Sequence[torch.Tensor]`): One tensor of shape `(num_tokens, num_experts)` per sparse layer.
        experts_per_token (`int`): Number of experts that each token is sent to.
        token_weights (`torch.Tensor`): The weight of each token, 0 for padding. Any shape with `num_tokens` elements.

    Returns:
        `torch.Tensor` of shape `(2, num_experts)`: for each expert, the total weight of the tokens that were sent to
        it, and the weighted sum of its probabilities, which has a gradient. For a model without a sparse layer
        `num_experts` is 0.
    """
    if not router_logits:
        return token_weights.new_zeros(2, 0, dtype=torch.float32)
    token_weights = token_weights.reshape(-1, 1).float()
    sent = probability = 0.0
    for logits in router_logits:
        probabilities = logits.softmax(dim=-1)
        chosen = torch.zeros_like(logits).scatter(1, probabilities.topk(experts_per_token).indices, 1.0)
        sent = sent + (token_weights * chosen).sum(dim=0)  # a matrix product would be rounded under autocast
        probability = probability + (token_weights * probabilities).sum(dim=0)
    return torch.stack([sent, probability])
