"""
Reads prompts that several sequences continue only once.

In sampling, one forward over the prompts fills a key-value cache, and each prompt's part of it is repeated for its completions. In the
update, the same is done with gradients: rows that continue the same prompt attend to one set of keys and values.
"""

import inspect
from typing import Any, cast

import torch
from transformers import Cache, DynamicCache, GenerationConfig, PreTrainedModel, StaticCache
from transformers.utils import ModelOutput


def can_sample_from_shared_prompts(model: PreTrainedModel, generation_config: GenerationConfig) -> bool:
    """Returns whether completions can be sampled from a prompt that was read once."""
    return _can_continue_cache(model) and not generation_config.cache_implementation


def can_share_prompts(model: PreTrainedModel) -> bool:
    """Returns whether rows of a training batch can continue a prompt. Layers with activation checkpointing fill no cache."""
    return _can_continue_cache(model) and not model.is_activation_checkpointing


def _can_continue_cache(model: PreTrainedModel) -> bool:
    """Returns whether a model's cache holds plain keys and values, and whether the model accepts positions that skip padding."""
    return cast(Any, model)._supports_default_dynamic_cache() and takes_positions(model)


def takes_positions(model: PreTrainedModel) -> bool:
    """Returns whether a model's forward accepts the positions of the tokens. Models with ALiBi, for example, do not."""
    return "position_ids" in inspect.signature(type(model).forward).parameters


def token_positions(attention_mask: torch.Tensor) -> torch.Tensor:
    """Returns the positions of tokens, counted from the first one that is not padding, for a mask `(num_sequences, length)`."""
    return (attention_mask.cumsum(dim=1) - 1).clamp(min=0)


def prompt_cache(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor,
    num_generations: int,
    max_new_tokens: int,
) -> Cache:
    """
    Reads prompts of shape `(num_prompts, prompt_length)`, padded on the left, for sampling. Returns the keys and values of all prompt tokens
    but the last, which `generate` reads itself. The cache has `num_prompts * num_generations` rows; the completions of a prompt, of
    `max_new_tokens` at most, follow each other.
    """
    config = model.config.get_text_config(decoder=True)
    cache = DynamicCache(config=config)
    if input_ids.size(1) == 1:
        return cache
    inputs = cast(Any, model).prepare_inputs_for_generation(
        input_ids[:, :-1],
        attention_mask=attention_mask[:, :-1],
        position_ids=token_positions(attention_mask)[:, :-1],
        past_key_values=cache,
        use_cache=True,
    )
    model.base_model(**inputs)  # the backbone alone, because the logits of prompts are not needed
    # Two cases need a cache that grows: layers that keep only a window, and autocast, which mixes data types
    if any(cache.is_sliding) or torch.is_autocast_enabled(input_ids.device.type):
        cache.batch_repeat_interleave(num_generations)
        return cache
    # Otherwise the cache gets room for the completions at once: a growing cache is copied as a whole at every token
    roomy = StaticCache(config=config, max_cache_len=input_ids.size(1) + max_new_tokens)
    for index, layer in enumerate(cast(Any, cache.layers)):
        keys, values = (x.repeat_interleave(num_generations, dim=0) for x in (layer.keys, layer.values))
        roomy.update(keys, values, index)
    return roomy


def continue_prompts(
    model: PreTrainedModel, shared_prompts: dict[str, torch.Tensor], **inputs: torch.Tensor
) -> ModelOutput:
    """
    Runs one forward in which several rows continue the same prompt. Gradients also flow through the prompts.

    Args:
        model ([`~transformers.PreTrainedModel`]): The model; see [`can_share_prompts`].
        shared_prompts (`dict[str, torch.Tensor]`): `owners` of shape `(num_rows,)` is the index of the prompt that each row continues. The
            other entries are the backbone's inputs for the prompts, of shape `(num_prompts, prompt_length)`, padded on the left.
        **inputs: Arguments of the forward for the rows. The attention mask covers prompts and rows.
    """
    cache = DynamicCache(config=model.config.get_text_config(decoder=True))
    prompts = {name: x for name, x in shared_prompts.items() if name != "owners"}
    model.base_model(past_key_values=cache, use_cache=True, **prompts)
    cache.batch_select_indices(shared_prompts["owners"])
    return model(past_key_values=cache, **inputs)
