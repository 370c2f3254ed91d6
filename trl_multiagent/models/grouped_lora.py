"""
Several LoRA adapters of one base in one forward, each on its own rows of the batch.

The base computes all rows at once. A forward hook of every LoRA layer adds the output of each agent's adapter to that
agent's rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import cast

import torch
from peft import LoraConfig, PeftModel
from peft.tuners.lora.layer import LoraLayer, MultiheadAttention, ParamWrapper
from torch import nn
from torch.nn.functional import linear


def can_group(model: PeftModel, adapter: str) -> bool:
    """
    Returns whether an adapter can share a forward with others. It must be LoRA or rsLoRA of linear layers, without
    biases. DoRA needs more than the base's result, a copied module replaces the base's module, and an expert gets
    tokens without their row numbers.
    """
    config = cast(LoraConfig, model.peft_config[adapter])
    if config.modules_to_save or config.trainable_token_indices is not None or config.lora_bias:
        return False
    for name, layer in model.named_modules():
        if not isinstance(layer, LoraLayer) or adapter not in {*layer.lora_A, *layer.lora_embedding_A}:
            continue
        is_linear = adapter in layer.lora_A and isinstance(layer.lora_A[adapter], nn.Linear)
        if not is_linear or isinstance(layer, MultiheadAttention | ParamWrapper):
            return False
        if adapter in layer.lora_variant or "expert" in name:
            return False
    return True


@dataclass
class Stacked:
    """
    Computes rows of several adapters, in any order, for sampling, where weights do not change. A layer's weights are
    stacked once. So it adds two products for any number of adapters: with all A, where a row keeps only the part of
    its own adapter, and with all B. A name without an adapter stands for the base alone. Before a forward, the caller
    sets `rows`: the position of each row's adapter in `adapters`.
    """

    adapters: Sequence[str]
    rows: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    weights: dict[LoraLayer, tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = field(default_factory=dict)

    def add(self, layer: LoraLayer, x: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
        if layer.lora_A.keys().isdisjoint(self.adapters):
            return result
        if layer not in self.weights:
            self.weights[layer] = stack(layer, self.adapters)
        all_a, all_b, scales = self.weights[layer]
        x = x.reshape(len(self.rows), -1, x.size(-1)).to(all_a.dtype)  # some models merge rows and tokens
        added = linear(linear(x, all_a) * scales[self.rows], all_b)
        return (result + added.view_as(result)).to(result.dtype)


@torch.no_grad()
def stack(layer: LoraLayer, adapters: Sequence[str]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """
    Returns the weights A of all adapters of a layer, of shape `(sum of ranks, inputs)`, the weights B, of shape
    `(outputs, sum of ranks)`, and the factors between them, of shape `(num_adapters, 1, sum of ranks)`: for each
    adapter, its scaling at its own ranks and 0 elsewhere. Under autocast, the weights have the type of its products.
    """
    present = [adapter for adapter in adapters if adapter in layer.lora_A]
    all_a = torch.cat([layer.lora_A[adapter].weight for adapter in present])
    all_b = torch.cat([layer.lora_B[adapter].weight for adapter in present], dim=1)
    factors, start = all_a.new_zeros(len(adapters), 1, len(all_a)), 0
    if torch.is_autocast_enabled(all_a.device.type):
        dtype = torch.get_autocast_dtype(all_a.device.type)
        all_a, all_b = all_a.to(dtype), all_b.to(dtype)
    for adapter in present:
        end = start + len(layer.lora_A[adapter].weight)
        factors[list(adapters).index(adapter), :, start:end] = layer.scaling[adapter]
        start = end
    return all_a, all_b, factors
