"""
Several LoRA adapters of one base in one forward, each on its own rows of the batch.

The base computes all rows at once. A forward hook of every LoRA layer adds the output of each agent's adapter to that
agent's rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from peft import PeftModel
from peft.tuners.lora.layer import LoraLayer, MultiheadAttention, ParamWrapper
from torch import nn
from torch.nn.functional import linear

from trl_multiagent.models.shared_prompts import product_dtype


def can_group(model: PeftModel, adapter: str) -> bool:
    """
    Returns whether an adapter can share a forward with others. It must be LoRA or rsLoRA of linear layers, without
    biases. DoRA needs more than the base's result, a copied module replaces the base's module, and an expert gets
    tokens without their row numbers.
    """
    config = model.peft_config[adapter]
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


@dataclass(eq=False)
class Stacked:
    """
    Computes rows of several adapters, in any order. It adds two products to a layer for any number of adapters: with
    all A, where a row keeps only the part of its own adapter, and with all B. A name without an adapter stands for the
    base alone. Before a forward, the caller sets the rows. In sampling, where weights do not change, a layer's weights
    are stacked once.
    """

    adapters: Sequence[str]
    rows: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    weights: dict[LoraLayer, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    columns: dict[Any, torch.Tensor] = field(default_factory=dict)  # see `_columns`

    def set_rows(self, rows: torch.Tensor) -> None:
        """`rows`: for each row of the next forwards, the position of its adapter in `adapters`."""
        self.rows, self.columns = rows, {}

    def add(self, layer: LoraLayer, x: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
        """Adds the outputs of the adapters to the result of a layer's base."""
        if not any(adapter in layer.lora_A for adapter in self.adapters):
            return result
        if torch.is_grad_enabled():
            all_a, all_b = self.stack(layer)
        else:
            if layer not in self.weights:
                self.weights[layer] = self.stack(layer)
            all_a, all_b = self.weights[layer]
        x = x.reshape(len(self.rows), -1, x.size(-1)).to(all_a.dtype)  # some models merge rows and tokens
        own = linear(x, all_a) * self._columns(layer, all_a.dtype)
        # One product with an addition, of which the sum is rounded once
        added = torch.addmm(result.reshape(-1, result.size(-1)).to(all_b.dtype), own.flatten(0, 1), all_b.t())
        return added.view_as(result).to(result.dtype)

    def stack(self, layer: LoraLayer) -> tuple[torch.Tensor, torch.Tensor]:
        """
        Returns the weights A of all adapters of a layer, of shape `(sum of ranks, inputs)`, and their scaled weights
        B, of shape `(outputs, sum of ranks)`. Under autocast, they have the type of its products.
        """
        present = [adapter for adapter in self.adapters if adapter in layer.lora_A]
        all_a = torch.cat([layer.lora_A[adapter].weight for adapter in present])
        all_b = torch.cat([layer.lora_B[adapter].weight for adapter in present], dim=1)
        dtype = product_dtype(all_a)
        return all_a.to(dtype), (all_b * self._columns(layer, None)).to(dtype)

    def _columns(self, layer: LoraLayer, dtype: torch.dtype | None) -> torch.Tensor:
        """
        Returns numbers for the ranks of all adapters of a layer: with a `dtype`, for each row 1 at the ranks of its
        own adapter and 0 elsewhere, of shape `(num_rows, 1, sum of ranks)`; without, the scaling of each rank. Layers
        with the same ranks share them.
        """
        ranks = tuple((k, layer.r[x], layer.scaling[x]) for k, x in enumerate(self.adapters) if x in layer.lora_A)
        if (ranks, dtype) not in self.columns:
            owners, scales = zip(*((k, scaling) for k, rank, scaling in ranks for _ in range(rank)), strict=True)
            if dtype is None:
                self.columns[ranks, dtype] = torch.tensor(scales, device=self.rows.device)
            else:
                own = self.rows[:, None, None] == torch.tensor(owners, device=self.rows.device)
                self.columns[ranks, dtype] = own.to(dtype)
        return self.columns[ranks, dtype]
