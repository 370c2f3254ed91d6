"""
Reads the prompt of several completions only once: one forward over the prompts fills a key-value cache, and each
prompt's keys and values are repeated for its completions. In the update, [`~models.packing`] shares prompts.
"""

import inspect
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedModel
from transformers.cache_utils import DummyLayer, DynamicLayer, DynamicSlidingWindowLayer


def can_continue_cache(model: PreTrainedModel) -> bool:
    """
    Returns whether a model's cache holds plain keys and values, and whether the model accepts positions that skip
    padding.
    """
    supports = getattr(model, "_supports_default_dynamic_cache", None)  # a classifier does not say
    if (supports is not None and not supports()) or not takes_positions(model):
        return False
    layers = DynamicCache(config=model.config.get_text_config(decoder=True)).layers
    return all(type(layer) in (DynamicLayer, DynamicSlidingWindowLayer, DummyLayer) for layer in layers)


def takes_positions(model: PreTrainedModel) -> bool:
    """
    Returns whether a model's forward accepts the positions of the tokens. Models with ALiBi, for example, do not.
    """
    return "position_ids" in inspect.signature(type(model).forward).parameters


def takes_masks(model: PreTrainedModel) -> bool:
    """Returns whether a model's attention accepts a 4-dimensional mask and adds it."""
    config = model.config.get_text_config(decoder=True)
    return model._supports_attention_backend and config._attn_implementation in ("sdpa", "eager")


def product_dtype(x: Tensor, dtype: torch.dtype | None = None) -> torch.dtype:
    """Returns the type of products on a tensor's device: autocast's, else `dtype`, by default the tensor's."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else dtype or x.dtype


def token_positions(attention_mask: Tensor) -> Tensor:
    """
    Returns the positions of tokens, counted from the first one that is not padding, for a mask `(num_sequences,
    length)`.
    """
    return (attention_mask.cumsum(dim=1) - 1).clamp(min=0)


class RoomyLayer(DynamicLayer):
    """
    A cache layer with room for `max_length` tokens, which are written in place. A growing layer would be copied at
    every token. Under autocast, keys and values are held in the data type that attention computes in.

    With a `place`, of shape `(1,)`, the next token is written there, and attention sees the whole room: no shape
    changes from token to token.
    """

    def __init__(self, max_length: int):
        super().__init__()
        self.max_length = max_length
        self.place: Tensor | None = None
        self.rooms: list[Tensor] = []

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        start = self.get_seq_length()
        if not self.rooms:
            self.lazy_initialization(key_states, value_states)
            shape, dtype = (*key_states.shape[:-2], self.max_length), product_dtype(key_states)
            # Zeros, because a masked number must be finite
            self.rooms = [x.new_zeros(*shape, x.size(-1), dtype=dtype) for x in (key_states, value_states)]
        end = start + key_states.size(-2)
        for room, states in zip(self.rooms, (key_states, value_states), strict=True):
            if self.place is None:
                room[..., start:end, :] = states
            else:
                room.index_copy_(-2, self.place, states.to(room.dtype))
        if self.place is not None:
            return self.rooms[0], self.rooms[1]
        self.keys, self.values = (room[..., :end, :] for room in self.rooms)
        return self.keys, self.values

    def keep(self, number: int, moved: Tensor, sources: Tensor) -> None:
        """Keeps the first rows, after copying the rows `sources` to the places `moved`."""
        self.rooms = [room[:number].index_copy_(0, moved, room[sources]) for room in self.rooms]
        self.keys, self.values = (room[..., : self.get_seq_length(), :] for room in self.rooms)


def keep_rows(cache: Cache, rows: Tensor) -> None:
    """Keeps some rows of a cache. Rows that keep their place are not copied."""
    moved = (rows != torch.arange(len(rows), device=rows.device)).nonzero().squeeze(1)
    sources = rows[moved]
    for layer in cache.layers:
        if type(layer) is RoomyLayer:
            layer.keep(len(rows), moved, sources)
        else:
            layer.batch_select_indices(rows)


def read_padded(model: PreTrainedModel, input_ids: Tensor, attention_mask: Tensor) -> DynamicCache:
    """
    Reads prompts of shape `(num_prompts, prompt_length)`, padded on the left. Returns the keys and values of all
    tokens but the last.
    """
    cache = DynamicCache(config=model.config.get_text_config(decoder=True))
    if input_ids.size(1) > 1:
        inputs = model.prepare_inputs_for_generation(
            input_ids[:, :-1],
            attention_mask=attention_mask[:, :-1],
            position_ids=token_positions(attention_mask)[:, :-1],
            past_key_values=cache,
            use_cache=True,
        )
        model.base_model(**inputs)  # the backbone alone, because the logits of prompts are not needed
    return cache


def repeat_prompts(cache: DynamicCache, owners: Tensor, max_length: int) -> None:
    """
    Repeats the keys and values of prompts for their completions. Row k gets those of the prompt with the index
    `owners[k]`, and has room for `max_length` tokens.
    """
    for k, layer in enumerate(cache.layers):
        if type(layer) is DynamicLayer:
            cache.layers[k] = RoomyLayer(max_length)
            if layer.get_seq_length() > 0:
                cache.layers[k].update(layer.keys[owners], layer.values[owners])
        else:  # it keeps a window
            layer.batch_select_indices(owners)
