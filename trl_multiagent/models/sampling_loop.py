"""
A sampling loop that is faster than that of transformers: rows that have ended leave the batch, the cache is written in
place, and a token is drawn with one random number instead of one per token of the vocabulary. A row's tokens depend
only on its own random numbers.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, cast

import torch
from transformers import Cache, LogitsProcessor, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers import PreTrainedTokenizerBase as Tokenizer
from transformers.generation import (
    EosTokenCriteria,
    MaxLengthCriteria,
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    StoppingCriteria,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers.utils import logging

from trl_multiagent.models.grouped_lora import Stacked
from trl_multiagent.models.shared_prompts import RoomyLayer, takes_masks


logger = logging.get_logger(__name__)

PENALTY = RepetitionPenaltyLogitsProcessor
WARPERS = (TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper, MinPLogitsWarper)
COVERED = (PENALTY, MinLengthLogitsProcessor, MinNewTokensLengthLogitsProcessor, *WARPERS)
GPU_PERIOD = 8  # tokens between two checks for ended rows, because a check makes the CPU wait for the GPU
MOST_LIVE = 0.75  # ended rows leave the batch when at most this share of its rows is left


class StopStrings(StoppingCriteria):
    """
    Ends a completion with the token that completes a string. The prompt is not searched. `lengths` has the lengths of
    ended completions, one per row. `stops`: the tokenizer and the strings of each agent. `agents`: the agent of each
    row.
    """

    def __init__(self, stops: Sequence[tuple[Tokenizer, Sequence[str]]], agents: torch.Tensor, prompt_length: int):
        self.stops, self.agents, self.prompt_length = stops, agents.cpu(), prompt_length
        self.lengths = torch.full((len(agents),), torch.inf)

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return self.ended(input_ids, torch.arange(len(input_ids)))

    def ended(self, input_ids: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """Returns which rows end with their last token. `places`: their indices in the batch at the start."""
        completions, places = input_ids[:, self.prompt_length :], places.cpu()
        ended = torch.zeros(len(places), dtype=torch.bool)
        for agent, (tokenizer, strings) in enumerate(self.stops):
            own = self.agents[places] == agent
            if strings and own.any():
                num_tokens = 4 + max(len(x.encode()) for x in strings)  # a token of the text has at least one byte
                ids = completions[own.to(completions.device), -num_tokens:]
                texts = tokenizer.batch_decode(ids, skip_special_tokens=True)
                ended[own] = torch.tensor([any(string in text for string in strings) for text in texts])
        lengths = torch.where(ended, completions.size(1), torch.inf)
        self.lengths[places] = lengths.minimum(self.lengths[places])
        return ended.to(input_ids.device)


class EndTokens(StoppingCriteria):
    """
    Ends rows of several agents in transformers' own loop, each with one of its own `tokens`, of shape `(num_rows, n)`.
    """

    def __init__(self, tokens: torch.Tensor):
        self.tokens = tokens

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return (input_ids[:, -1:] == self.tokens.to(input_ids.device)).any(dim=1)


@dataclass
class Rows:
    """The rows that are left in a batch. Tensors have an entry per row."""

    places: torch.Tensor  # indices of the rows at the start
    ids: torch.Tensor  # token ids: the prompt, the completion so far, and room for the rest of it
    mask: torch.Tensor | None  # attention mask, see [`SamplingLoop.first_mask`]; `None` without padding
    positions: torch.Tensor  # position of the last prompt token, of shape `(num_rows, 1)`
    numbers: torch.Tensor  # random numbers, of shape `(num_rows, max_new_tokens)`
    end_tokens: torch.Tensor  # ids of the tokens that end a row, of shape `(num_rows, n)`
    agents: torch.Tensor  # number of the row's agent
    ended: torch.Tensor  # whether the row has ended

    def keep(self, rows: torch.Tensor) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            setattr(self, field.name, None if value is None else value[rows])


class SamplingLoop:
    """
    The argument `custom_generate` of `generate`. For settings that it does not cover, it calls transformers' own loop
    with the same random numbers.

    Args:
        attention_mask (`torch.Tensor`): Mask of the prompts, of shape `(num_rows, prompt_length)`. Padding is on the
            left.
        numbers (`torch.Tensor`): Random numbers between 0 and 1, of shape `(num_rows, max_new_tokens)`, one per token.
        end_tokens (`torch.Tensor`): The tokens that end each row, of shape `(num_rows, n)`, padded with -1.
        agents (`torch.Tensor`): The number of each row's agent.
        group ([`~models.grouped_lora.Stacked`], *optional*): The adapters of the agents, if there are several.
        stops ([`StopStrings`], *optional*): Strings that end a row, too.
        cache ([`~transformers.Cache`], *optional*): Keys and values of the prompts without their last tokens, see
            [`~shared_prompts.prompt_cache`]. Without a cache, the model cannot use this loop.
        **inputs: More arguments of the model.
    """

    def __init__(
        self,
        attention_mask: torch.Tensor,
        numbers: torch.Tensor,
        end_tokens: torch.Tensor,
        agents: torch.Tensor,
        group: Stacked | None = None,
        stops: StopStrings | None = None,
        cache: Cache | None = None,
        **inputs: Any,
    ):
        self.attention_mask, self.numbers, self.end_tokens = attention_mask, numbers, end_tokens
        self.agents, self.group = agents, group
        self.stops, self.cache, self.inputs = stops, cache, inputs

    def __call__(
        self,
        model: PreTrainedModel,
        input_ids: torch.Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: Any,
        **kwargs: Any,
    ) -> torch.Tensor:
        reasons = [type(x).__name__ for x in logits_processor if type(x) not in COVERED]
        known = (MaxLengthCriteria, EosTokenCriteria, StopStrings)
        reasons += [type(x).__name__ for x in stopping_criteria if type(x) not in known]
        if self.cache is None:
            reasons += [f"the cache of {type(model).__name__}"]
        if reasons:
            logger.warning_once(
                f"transformers' own sampling loop is used, because of {', '.join(reasons)}: it draws the same, "
                "but takes longer."
            )
            ends = [x for x in stopping_criteria if not isinstance(x, EosTokenCriteria)]
            stopping_criteria = StoppingCriteriaList([*ends, EndTokens(self.end_tokens)])
            choice = SeededChoice(self.numbers, input_ids.size(1))
            config = copy.copy(generation_config)
            if config.do_sample:
                logits_processor = LogitsProcessorList([*logits_processor, choice])
                config.do_sample = False  # `choice` leaves one token, and taking it is faster than drawing it
            return cast(Any, type(model))._sample(
                model, input_ids, logits_processor, stopping_criteria, config, **kwargs
            )
        with cast(Any, model)._optimize_model_for_decode():  # mixtures of experts on a GPU
            return self.run(model, input_ids, logits_processor, generation_config)

    def run(
        self, model: PreTrainedModel, input_ids: torch.Tensor, processors: LogitsProcessorList, config: Any
    ) -> torch.Tensor:
        """Samples all rows. Returns prompts and completions. Tokens after the end of a completion have no meaning."""
        # transformers' penalty has the padding of all rows, but rows leave this batch
        processors = LogitsProcessorList(PENALTY(x.penalty) if isinstance(x, PENALTY) else x for x in processors)
        rows, length = self.first_rows(model, input_ids, config.pad_token_id), input_ids.size(1)
        result, last, seen = rows.ids.clone(), rows.ids.size(1), length
        period = period_of(input_ids.device)
        while length < last:
            scores = self.forward(model, rows, length)
            if processors:
                scores = processors(cast(Any, rows.ids[:, :length]), cast(Any, scores))
            step = length - input_ids.size(1)
            tokens = choose(scores, rows.numbers[:, step, None]) if config.do_sample else scores.argmax(dim=-1)
            rows.ids[:, length] = tokens
            rows.ended |= (tokens[:, None] == rows.end_tokens).any(dim=1)
            length += 1
            if (length - input_ids.size(1)) % period == 0 or length == last:
                if bool(scores.isnan().any()):
                    raise ValueError(
                        "The logits of the model are not numbers: its weights, or the precision, are broken."
                    )
                if self.stops is not None:
                    for end in range(seen + 1, length + 1):
                        rows.ended |= self.stops.ended(rows.ids[:, :end], rows.places)
                seen = length
                if len(rows.ended) - int(rows.ended.sum()) <= MOST_LIVE * len(rows.ended):
                    live = live_rows(rows.ended)
                    result[rows.places] = rows.ids
                    rows.keep(live)
                    if len(live) == 0:
                        break
                    cast(Cache, self.cache).batch_select_indices(live)
        result[rows.places] = rows.ids
        return result[:, :length]

    def first_rows(self, model: PreTrainedModel, input_ids: torch.Tensor, pad_token_id: int) -> Rows:
        """
        Returns the rows with their prompts. A row's first token replaces its padding, because a repetition penalty
        reads all tokens.
        """
        device, mask = input_ids.device, self.attention_mask
        first = input_ids.gather(1, mask.argmax(dim=1, keepdim=True))
        room = input_ids.new_full(self.numbers.shape, pad_token_id)
        return Rows(
            places=torch.arange(len(input_ids), device=device),
            ids=torch.cat([torch.where(mask == 1, input_ids, first), room], dim=1),
            mask=None if bool(mask.all()) else self.first_mask(model, torch.cat([mask, torch.ones_like(room)], dim=1)),
            positions=mask.sum(dim=1, keepdim=True) - 1,
            numbers=self.numbers.to(device),
            end_tokens=self.end_tokens.to(device),
            agents=self.agents,
            ended=torch.zeros(len(input_ids), dtype=torch.bool, device=device),
        )

    def first_mask(self, model: PreTrainedModel, mask: torch.Tensor) -> torch.Tensor:
        """
        Returns the mask that attention adds, of shape `(num_rows, 1, 1, length)`, so that the model does not make it
        again at every token.
        """
        if not takes_masks(model) or any(type(layer) is not RoomyLayer for layer in cast(Cache, self.cache).layers):
            return mask
        return torch.zeros_like(mask, dtype=model.dtype).masked_fill(mask == 0, -torch.inf)[:, None, None]

    def forward(self, model: PreTrainedModel, rows: Rows, length: int) -> torch.Tensor:
        """
        Returns the logits of the next token of each row, if rows have `length` tokens. A CUDA graph could replay this
        function.
        """
        if self.group is not None:
            self.group.rows = rows.agents
        outputs = model(
            input_ids=rows.ids[:, length - 1 : length],
            attention_mask=None if rows.mask is None else rows.mask[..., :length],
            position_ids=rows.positions + (length - self.attention_mask.size(1)),
            past_key_values=self.cache,
            use_cache=True,
            **self.inputs,
        )
        return outputs.logits[:, -1].float()


def period_of(device: torch.device) -> int:
    """Returns the number of tokens between two checks for ended rows."""
    return 1 if device.type == "cpu" else GPU_PERIOD


def live_rows(ended: torch.Tensor) -> torch.Tensor:
    """
    Returns the indices of the rows that go on. The last ones fill the places of ended rows, so that few rows of the
    cache move.
    """
    live = (~ended).nonzero().squeeze(1)
    order = torch.arange(len(live), device=ended.device)
    holes = ended[: len(live)].nonzero().squeeze(1)
    order[holes] = live[len(live) - len(holes) :]
    return order


def choose(scores: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """
    Returns the next token of each row: the first token at which the cumulative probability exceeds the row's random
    number. `numbers` has the shape `(num_rows, 1)`.
    """
    cumulative = scores.softmax(dim=-1).cumsum(dim=-1)
    total = cumulative[:, -1:]
    # Rounding must not select a token beyond the last one with a probability
    u = torch.minimum(numbers * total, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(cumulative, u, right=True).squeeze(1).clamp(max=scores.size(1) - 1)  # for NaN


class SeededChoice(LogitsProcessor):
    """
    Chooses tokens in transformers' own loop as [`choose`] does: sets the probability of all other tokens to zero.
    """

    def __init__(self, numbers: torch.Tensor, prompt_length: int):
        self.numbers, self.prompt_length = numbers, prompt_length

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        # On a GPU, `generate` may compute steps after the last one, and drop their tokens
        step = min(input_ids.size(1) - self.prompt_length, self.numbers.size(1) - 1)
        chosen = choose(scores.float(), self.numbers[:, step, None].to(scores.device))[:, None]
        return cast(torch.FloatTensor, torch.full_like(scores, -torch.inf).scatter(1, chosen, 0.0))
