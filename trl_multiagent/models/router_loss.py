"""
The load-balancing loss of mixture-of-experts agents, over a whole batch.

With weights w_t of the tokens of all layers, probabilities p_te and the k experts that each token is sent to, it is

    num_experts * sum over experts e of load_e * P_e,   load_e = sum of w_t over the tokens sent to e / T,
                                                        P_e = sum over tokens of w_t p_te / T,   T = sum of w_t

as transformers has it. Gradients flow through P alone. Once the load of a batch is known, its loss is a sum over tokens,
so it does not matter how the batch is split into micro-batches and processes.
"""

import contextlib
from collections.abc import Iterator

import torch
from transformers import PreTrainedConfig, PreTrainedModel


def has_routers(model: PreTrainedModel) -> bool:
    """Whether a model is a mixture of experts that can return its routers' logits; GRPOTrainer asks the same."""
    return hasattr(model.config.get_text_config(), "output_router_logits")


def without_router_logits(model: PreTrainedModel) -> dict[str, bool]:
    """Arguments of a forward that computes no router loss, whatever the model's configuration says."""
    return {"output_router_logits": False} if has_routers(model) else {}


def router_loss_coef(config: PreTrainedConfig, given: float | None) -> float:
    """The weight of a model's router loss: what is given, else what its configuration declares, as in GRPOTrainer."""
    return getattr(config.get_text_config(), "router_aux_loss_coef", 0.0) if given is None else given


@contextlib.contextmanager
def router_logits_of(model: PreTrainedModel) -> Iterator[list[torch.Tensor]]:
    """Inside, the logits of the model's routers in its next forward are collected, `(num_tokens, num_experts)` each."""
    collected = []

    def ask(backbone, args, kwargs):
        return args, {**kwargs, "output_router_logits": True}

    def collect(backbone, args, outputs):
        collected.extend(outputs.router_logits)

    # Of the backbone: the whole model would compute a loss of its own from them
    hooks = [
        model.base_model.register_forward_pre_hook(ask, with_kwargs=True),
        model.base_model.register_forward_hook(collect),
    ]
    try:
        yield collected
    finally:
        for hook in hooks:
            hook.remove()


def expert_sums(router_logits: list[torch.Tensor], experts_per_token: int, weights: torch.Tensor) -> torch.Tensor:
    """
    What the routers of all layers did with some tokens.

    Args:
        router_logits (`list[torch.Tensor]`): One tensor per layer, of shape `(num_tokens, num_experts)`.
        experts_per_token (`int`): How many experts a token is sent to.
        weights (`torch.Tensor`): Weight of each token; zero for padding. Any shape with `num_tokens` elements.

    Returns:
        `torch.Tensor` of shape `(2, num_experts)`: the weight that was sent to each expert, and the weighted sum of its
        probabilities, which alone has a gradient.
    """
    weights = weights.reshape(-1, 1).float()
    sent, probability = 0.0, 0.0
    for logits in router_logits:
        probabilities = logits.softmax(dim=-1)
        chosen = torch.zeros_like(logits).scatter(1, probabilities.topk(experts_per_token).indices, 1.0)
        sent = sent + (weights * chosen).sum(dim=0)  # autocast would round the result of a matrix product
        probability = probability + (weights * probabilities).sum(dim=0)
    return torch.stack([sent, probability])


def expert_load(sent: torch.Tensor, experts_per_token: int) -> torch.Tensor:
    """
    The factors of the experts' summed probabilities in the loss of a batch.

    Args:
        sent (`torch.Tensor` of shape `(num_experts,)`): The weight that the whole batch sent to each expert.
        experts_per_token (`int`): How many experts a token is sent to.
    """
    total = sent.sum() / experts_per_token
    return len(sent) * sent / total**2
