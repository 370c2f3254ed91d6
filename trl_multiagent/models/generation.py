"""Samples completions with transformers, in one `generate` call for a whole level of the rollout trees."""

import copy
from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np
import torch
from transformers import Cache, GenerationConfig, LogitsProcessor, LogitsProcessorList, PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer
from trl.trainer.utils import pad

from trl_multiagent.models.router_loss import without_router_logits
from trl_multiagent.models.shared_prompts import can_sample_from_shared_prompts, prompt_cache


@torch.no_grad()
def generate_groups(
    model: PreTrainedModel,
    prompt_ids: list[list[int]],
    num_generations: int,
    generation_config: GenerationConfig,
    token_budget: int | None = None,
    seeds: list[list[int]] | None = None,
    stops: tuple[Tokenizer, Sequence[str]] | None = None,
) -> list[list[list[int]]]:
    """
    Samples `num_generations` completions for each prompt.

    Each prompt is read once, see [`~shared_prompts.prompt_cache`]. Prompts are padded on the left. If the budget requires several calls,
    prompts of similar length share a call.

    Args:
        model ([`~transformers.PreTrainedModel`]): The agent.
        prompt_ids (`list[list[int]]`): Token ids of the prompts, without padding.
        num_generations (`int`): Number of completions of each prompt.
        generation_config ([`~transformers.GenerationConfig`]): Sampling settings; `max_new_tokens`, `pad_token_id` and a list
            `eos_token_id` must be set.
        token_budget (`int`, *optional*): Upper bound of the number of prompt and completion tokens in one `generate` call, padding
            included. If the completions of a single prompt exceed it, they are sampled in several calls. A call samples at least one.
        seeds (`list[list[int]]`, *optional*): A seed for each completion of each prompt. A completion then depends on its prompt and its
            seed alone, up to rounding. By default, torch's global generator decides.
        stops (`tuple`, *optional*): The agent's tokenizer, and strings that end a completion, too.

    Returns:
        `list[list[list[int]]]`: For each prompt its completions, as token ids up to and including the one that ends it.
    """
    completions: list[list[list[int]]] = [[] for _ in prompt_ids]
    for chunk, number in plan_calls(prompt_ids, num_generations, generation_config.max_new_tokens, token_budget):
        chunk_seeds = None
        if seeds is not None:
            chunk_seeds = [seed for k in chunk for seed in seeds[k][len(completions[k]) :][:number]]
        groups = _generate_chunk(model, [prompt_ids[k] for k in chunk], number, generation_config, chunk_seeds, stops)
        for k, group in zip(chunk, groups, strict=True):
            completions[k] += group
    return completions


def plan_calls(
    prompt_ids: list[list[int]], num_generations: int, max_new_tokens: int, token_budget: int | None
) -> list[tuple[list[int], int]]:
    """Splits the work into `generate` calls: the indices of the prompts of each call, and the number of completions of each."""
    if token_budget is None:
        return [(list(range(len(prompt_ids))), num_generations)] if prompt_ids else []
    longest_first = sorted(range(len(prompt_ids)), key=lambda k: -len(prompt_ids[k]))
    chunks: list[tuple[list[int], int]] = []
    room = 0  # how many more prompts the last chunk can take
    for k in longest_first:
        if room == 0:  # all prompts of a chunk are padded to the length of its first
            rows = max(1, token_budget // (len(prompt_ids[k]) + max_new_tokens))  # of one call
            whole, rest = divmod(num_generations, rows)
            if whole > 0 and num_generations > rows:
                chunks += [([k], rows)] * whole + ([([k], rest)] if rest else [])
                continue
            chunks.append(([], num_generations))
            room = rows // num_generations
        chunks[-1][0].append(k)
        room -= 1
    return chunks


def _generate_chunk(
    model: PreTrainedModel,
    prompt_ids: list[list[int]],
    num_generations: int,
    generation_config: GenerationConfig,
    seeds: list[int] | None,
    stops: tuple[Tokenizer, Sequence[str]] | None,
) -> list[list[list[int]]]:
    """Samples the completions of all given prompts in one call; see [`generate_groups`]. `seeds`: one per completion."""
    device = model.device
    tensors = [torch.tensor(ids) for ids in prompt_ids]
    input_ids = pad(tensors, padding_value=generation_config.pad_token_id, padding_side="left").to(device)
    attention_mask = pad([torch.ones_like(ids) for ids in tensors], padding_value=0, padding_side="left").to(device)
    cache: dict[str, Cache] = {}
    ending = StopStrings(*stops, input_ids.size(1)) if stops and stops[1] else None
    decoding: dict[str, Any] = {"stopping_criteria": None if ending is None else [ending]}
    if seeds is not None and generation_config.do_sample:
        decoding["custom_generate"] = seeded_decoding(seeds, input_ids.size(1), generation_config.max_new_tokens)
    if can_sample_from_shared_prompts(model, generation_config):
        cache["past_key_values"] = prompt_cache(
            model, input_ids, attention_mask, num_generations, generation_config.max_new_tokens
        )
    output_ids = cast(Any, model).generate(
        input_ids=input_ids.repeat_interleave(num_generations, dim=0),
        attention_mask=attention_mask.repeat_interleave(num_generations, dim=0),
        generation_config=generation_config,
        synced_gpus=False,  # the caller gathers ZeRO-3 weights, and other processes may have nothing to generate
        **cache,
        **decoding,
        **without_router_logits(model),
    )
    completion_ids = output_ids[:, input_ids.size(1) :].cpu()
    is_eos = torch.isin(completion_ids, torch.tensor(generation_config.eos_token_id))
    # A token is kept if no end-of-sequence token precedes it
    kept = (is_eos.cumsum(dim=1) - is_eos.long()) == 0
    if ending is not None:  # padding follows, which may be an end-of-sequence token
        kept &= torch.arange(kept.size(1)) < ending.lengths[:, None]
    sequences = [ids[mask].tolist() for ids, mask in zip(completion_ids, kept, strict=True)]
    return [sequences[k : k + num_generations] for k in range(0, len(sequences), num_generations)]


class StopStrings:
    """Ends a completion with the token that completes a string, not reading the prompt. Keeps the lengths of completions that ended."""

    def __init__(self, tokenizer: Tokenizer, strings: Sequence[str], prompt_length: int):
        self.tokenizer, self.strings, self.prompt_length = tokenizer, strings, prompt_length
        self.num_tokens = 4 + max(len(x.encode()) for x in strings)  # a token of the text has at least one byte
        self.lengths = torch.tensor(torch.inf)

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        completions = input_ids[:, self.prompt_length :]
        texts = self.tokenizer.batch_decode(completions[:, -self.num_tokens :], skip_special_tokens=True)
        ended = torch.tensor([any(string in text for string in self.strings) for text in texts])
        self.lengths = torch.where(ended, completions.size(1), torch.inf).minimum(self.lengths)
        return ended.to(input_ids.device)


def seeded_decoding(seeds: list[int], prompt_length: int, max_new_tokens: int) -> Callable[..., torch.Tensor]:
    """
    Returns the argument `custom_generate` of `generate`: the sampling loop of transformers, in which the random numbers of each row depend
    on the row's seed alone.
    """
    numbers = [np.random.default_rng(seed).random(max_new_tokens, dtype=np.float32) for seed in seeds]
    choice = SeededChoice(torch.from_numpy(np.stack(numbers)), prompt_length)

    def decode(
        model: PreTrainedModel,
        input_ids: torch.Tensor,
        logits_processor: LogitsProcessorList,
        generation_config: GenerationConfig,
        **kwargs: Any,
    ) -> torch.Tensor:
        greedy = copy.copy(generation_config)
        greedy.do_sample = False  # one token is left, which is slower to draw than to find
        processors = LogitsProcessorList([*logits_processor, choice])
        sample = cast(Any, type(model))._sample
        return sample(model, input_ids, logits_processor=processors, generation_config=greedy, **kwargs)

    return decode


class SeededChoice(LogitsProcessor):
    """
    Chooses the next token of each row with a given number u between 0 and 1: the first token at which the cumulative probability exceeds u.
    All other tokens get the probability zero. `numbers` are the u of each row, of shape `(num_rows, max_new_tokens)`; the first of them is for
    the token after a prompt of `prompt_length` tokens.
    """

    def __init__(self, numbers: torch.Tensor, prompt_length: int):
        self.numbers, self.prompt_length = numbers, prompt_length

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        self.numbers = self.numbers.to(scores.device)
        # On a GPU, `generate` may compute steps after the last one, whose tokens it drops
        step = min(input_ids.size(1) - self.prompt_length, self.numbers.size(1) - 1)
        cumulative = scores.float().softmax(dim=-1).cumsum(dim=-1)
        total = cumulative[:, -1:]
        # Rounding must not lead beyond the last token that has a probability
        u = torch.minimum(self.numbers[:, step : step + 1] * total, torch.nextafter(total, torch.zeros_like(total)))
        chosen = torch.searchsorted(cumulative, u, right=True)
        return cast(torch.FloatTensor, torch.full_like(scores, -torch.inf).scatter(1, chosen, 0.0))
