"""Prompts to completions for one agent, in one `generate` call for a whole level of the rollout trees."""

import inspect

import torch
from transformers import Cache, DynamicCache, GenerationConfig, PreTrainedModel, StaticCache
from trl.trainer.utils import pad

from trl_multiagent.models.router_loss import without_router_logits


@torch.no_grad()
def generate_groups(
    model: PreTrainedModel,
    prompt_ids: list[list[int]],
    num_generations: int,
    generation_config: GenerationConfig,
    token_budget: int | None = None,
) -> list[list[list[int]]]:
    """
    Samples `num_generations` completions for each prompt.

    A prompt is read once and its key-value cache is copied to its completions. Prompts are padded on the left; those
    of similar length share a call when the budget asks for more than one.

    Args:
        model ([`~transformers.PreTrainedModel`]):
            The agent.
        prompt_ids (`list[list[int]]`):
            Token ids of the prompts, without padding.
        num_generations (`int`):
            Number of completions of each prompt.
        generation_config ([`~transformers.GenerationConfig`]):
            Sampling settings; `max_new_tokens`, `pad_token_id` and a list `eos_token_id` must be set.
        token_budget (`int`, *optional*):
            Upper bound of the prompt and completion tokens, padding included, of one `generate` call. A prompt that
            exceeds it on its own is generated alone.

    Returns:
        `list[list[list[int]]]`: For each prompt its completions, as token ids up to and including the first
        end-of-sequence token.
    """
    completions = [None] * len(prompt_ids)
    for chunk in _chunks(prompt_ids, num_generations, generation_config.max_new_tokens, token_budget):
        groups = _generate_chunk(model, [prompt_ids[k] for k in chunk], num_generations, generation_config)
        for k, group in zip(chunk, groups, strict=True):
            completions[k] = group
    return completions


def _chunks(
    prompt_ids: list[list[int]], num_generations: int, max_new_tokens: int, token_budget: int | None
) -> list[list[int]]:
    """Positions of the prompts of each `generate` call."""
    if token_budget is None:
        return [list(range(len(prompt_ids)))] if prompt_ids else []
    longest_first = sorted(range(len(prompt_ids)), key=lambda k: -len(prompt_ids[k]))
    chunks, room = [], 0
    for k in longest_first:
        if room == 0:  # the first prompt of a chunk is its longest
            chunks.append([])
            room = max(1, token_budget // (num_generations * (len(prompt_ids[k]) + max_new_tokens)))
        chunks[-1].append(k)
        room -= 1
    return chunks


def _generate_chunk(
    model: PreTrainedModel, prompt_ids: list[list[int]], num_generations: int, generation_config: GenerationConfig
) -> list[list[list[int]]]:
    device = model.device
    tensors = [torch.tensor(ids) for ids in prompt_ids]
    input_ids = pad(tensors, padding_value=generation_config.pad_token_id, padding_side="left").to(device)
    attention_mask = pad([torch.ones_like(ids) for ids in tensors], padding_value=0, padding_side="left").to(device)
    cache = {}
    if _can_share_prompts(model, generation_config):
        cache["past_key_values"] = _read_prompts(
            model, input_ids, attention_mask, num_generations, generation_config.max_new_tokens
        )
    output_ids = model.generate(
        input_ids=input_ids.repeat_interleave(num_generations, dim=0),
        attention_mask=attention_mask.repeat_interleave(num_generations, dim=0),
        generation_config=generation_config,
        synced_gpus=False,  # the weights are here, also under ZeRO-3; other processes may have nothing to generate
        **cache,
        **without_router_logits(model),
    )
    completion_ids = output_ids[:, input_ids.size(1) :].cpu()
    is_eos = torch.isin(completion_ids, torch.tensor(generation_config.eos_token_id))
    # Tokens up to the first end-of-sequence token: those before which there was none
    kept = (is_eos.cumsum(dim=1) - is_eos.long()) == 0
    sequences = [ids[mask].tolist() for ids, mask in zip(completion_ids, kept, strict=True)]
    return [sequences[k : k + num_generations] for k in range(0, len(sequences), num_generations)]


def _can_share_prompts(model: PreTrainedModel, generation_config: GenerationConfig) -> bool:
    """Whether the model keeps plain keys and values, and takes the positions that left padding asks for."""
    plain_cache = model._supports_default_dynamic_cache() and not generation_config.cache_implementation
    return plain_cache and takes_positions(model)


def takes_positions(model: PreTrainedModel) -> bool:
    """Whether the positions of the tokens can be told to the model (not with ALiBi, which needs none)."""
    return "position_ids" in inspect.signature(type(model).forward).parameters


def token_positions(attention_mask: torch.Tensor) -> torch.Tensor:
    """Positions that do not count padding, of the mask's shape."""
    return (attention_mask.cumsum(dim=1) - 1).clamp(min=0)


def _read_prompts(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor,
    num_generations: int,
    max_new_tokens: int,
) -> Cache:
    """The cache of all prompt tokens but the last, which `generate` feeds itself, repeated for each completion."""
    config = model.config.get_text_config(decoder=True)
    cache = DynamicCache(config=config)
    if input_ids.size(1) == 1:
        return cache
    inputs = model.prepare_inputs_for_generation(
        input_ids[:, :-1],
        attention_mask=attention_mask[:, :-1],
        position_ids=token_positions(attention_mask)[:, :-1],
        past_key_values=cache,
        use_cache=True,
    )
    model.base_model(**inputs)  # the backbone: nothing here needs logits
    # Layers that keep a window, and autocast, whose keys and values have several types, need a cache that grows
    if any(cache.is_sliding) or torch.is_autocast_enabled(input_ids.device.type):
        cache.batch_repeat_interleave(num_generations)
        return cache
    # Otherwise one with room for the completions: one that grows is copied as a whole at every token
    roomy = StaticCache(config=config, max_cache_len=input_ids.size(1) + max_new_tokens)
    for index, layer in enumerate(cache.layers):
        keys, values = (x.repeat_interleave(num_generations, dim=0) for x in (layer.keys, layer.values))
        roomy.update(keys, values, index)
    return roomy
