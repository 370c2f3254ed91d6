"""
Reads prompts that several completions continue only once: one forward over the prompts fills a key-value cache, and each prompt's part of it is
repeated for its completions. In the update, [`~models.packing`] does this.
"""

import inspect
from typing import Any, cast

import torch
from transformers import Cache, DynamicCache, GenerationConfig, PreTrainedModel, StaticCache


def can_sample_from_shared_prompts(model: PreTrainedModel, generation_config: GenerationConfig) -> bool:
    """Returns whether completions can be sampled from a prompt that was read once."""
    has_plain_cache = cast(Any, model)._supports_default_dynamic_cache()
    return has_plain_cache and takes_positions(model) and not generation_config.cache_implementation


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
