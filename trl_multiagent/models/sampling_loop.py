"""
A sampling loop that is faster than the one in transformers: rows that have ended leave the batch, the cache is written
in place, and a token is drawn with one random number instead of one per token of the vocabulary. A row's tokens depend
only on its own random numbers.

A token is computed in one of two forms. [`GrowingToken`] attends to the tokens so far. [`FixedToken`] attends to the
whole room of the cache under a mask, so that a CUDA graph can replay it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, cast

import torch
from torch import Tensor
from transformers import LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
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
from trl_multiagent.models.reasoning import CompletionReader
from trl_multiagent.models.shared_prompts import RoomyLayer, keep_rows, product_dtype, takes_masks


logger = logging.get_logger(__name__)

PENALTY = RepetitionPenaltyLogitsProcessor
WARPERS = (TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper, MinPLogitsWarper)
COVERED = (PENALTY, MinLengthLogitsProcessor, MinNewTokensLengthLogitsProcessor, *WARPERS)
GPU_PERIOD = 20  # tokens between two checks for ended rows, because a check makes the CPU wait for the GPU
# Ended rows leave the batch when at most this share of its rows is left. Then a graph has to be captured again
MOST_LIVE, MOST_LIVE_IN_GRAPHS = 0.75, 0.5
WARM_UP = 2  # tokens before a graph is captured: libraries allocate, and autocast casts the weights


class StopStrings(StoppingCriteria):
    """
    Ends a completion with the token that completes a string. The prompt is not searched. `lengths` has the lengths of
    ended completions, one per row. `stops`: the tokenizer and the strings of each agent. `agents`: the agent of each
    row.
    """

    def __init__(self, stops: Sequence[tuple[Tokenizer, Sequence[str]]], agents: Tensor, prompt_length: int):
        self.stops = [(CompletionReader(tokenizer), strings) for tokenizer, strings in stops]
        self.agents, self.prompt_length = agents.cpu(), prompt_length
        self.lengths = torch.full((len(agents),), torch.inf)

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        return self.ended(input_ids, torch.arange(len(input_ids)))

    def ended(self, input_ids: Tensor, places: Tensor) -> Tensor:
        """Returns which rows end with their last token. `places`: their indices in the batch at the start."""
        completions, places = input_ids[:, self.prompt_length :], places.cpu()
        ended = torch.zeros(len(places), dtype=torch.bool)
        for agent, (reader, strings) in enumerate(self.stops):
            own = self.agents[places] == agent
            if strings and own.any():
                num_tokens = 4 + max(len(x.encode()) for x in strings)  # a token of the text has at least one byte
                texts = reader.texts(completions[own.to(completions.device), -num_tokens:].tolist())
                ended[own] = torch.tensor([any(string in text for string in strings) for text in texts])
        self.lengths[places] = torch.where(ended, completions.size(1), torch.inf).minimum(self.lengths[places])
        return ended.to(input_ids.device)


@dataclass
class Rows:
    """The rows that are left in a batch. Tensors have an entry per row."""

    places: Tensor  # indices of the rows at the start
    ids: Tensor  # token ids: the prompt, the completion so far, and room for the rest of it
    mask: Tensor  # attention mask of the prompt and of all tokens to come
    positions: Tensor  # position of the last prompt token, of shape `(num_rows, 1)`
    # Random numbers, of shape `(num_rows, max_new_tokens)`. Log-probabilities replace those that have chosen a token
    numbers: Tensor
    end_tokens: Tensor  # ids of the tokens that end a row, of shape `(num_rows, n)`
    agents: Tensor  # number of the row's agent
    ended: Tensor  # whether the row has ended

    def keep(self, rows: Tensor) -> None:
        for field in fields(self):
            setattr(self, field.name, getattr(self, field.name)[rows])


@dataclass(eq=False)
class SamplingLoop:
    """
    The argument `custom_generate` of `generate`. For settings that it does not cover, it calls transformers' own loop
    with the same random numbers.

    Args:
        attention_mask (`torch.Tensor`): Mask of the prompts, of shape `(num_rows, prompt_length)`. Padding is on the
            left.
        numbers (`torch.Tensor`): Random numbers between 0 and 1, of shape `(num_rows, max_new_tokens)`, one per token.
            Afterwards, the attribute `numbers` has the log-probabilities of the sampled tokens in their place.
        end_tokens (`torch.Tensor`): The tokens that end each row, of shape `(num_rows, n)`, padded with -1.
        agents (`torch.Tensor`): The number of each row's agent.
        group ([`~models.grouped_lora.Stacked`], *optional*): The adapters of the agents, if there are several.
        stops ([`StopStrings`], *optional*): Strings that end a row, too.
        cache ([`~transformers.Cache`], *optional*): Keys and values of the prompts without their last tokens, see
            [`~shared_prompts.repeat_prompts`]. Without a cache, the model cannot use this loop.
        inputs (`dict[str, Any]`): More arguments of the model.
    """

    attention_mask: Tensor
    numbers: Tensor
    end_tokens: Tensor
    agents: Tensor
    group: Stacked | None
    stops: StopStrings | None
    cache: Any
    inputs: dict[str, Any]

    def __call__(
        self,
        model: PreTrainedModel,
        input_ids: Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: Any,
        **kwargs: Any,
    ) -> Tensor:
        known = (*COVERED, MaxLengthCriteria, EosTokenCriteria, StopStrings)
        reasons = [type(x).__name__ for x in (*logits_processor, *stopping_criteria) if type(x) not in known]
        if self.cache is None:
            reasons += [f"the cache of {type(model).__name__}"]
        if reasons:
            logger.warning_once(
                f"transformers' own sampling loop is used, because of {', '.join(reasons)}: it draws the same, "
                "but takes longer."
            )
            from trl_multiagent.models.other_loop import sample_elsewhere

            return sample_elsewhere(
                self, model, input_ids, logits_processor, stopping_criteria, generation_config, **kwargs
            )
        with model._optimize_model_for_decode():  # mixtures of experts on a GPU
            return self.run(model, input_ids, logits_processor, generation_config)

    def run(self, model: PreTrainedModel, input_ids: Tensor, processors: LogitsProcessorList, config: Any) -> Tensor:
        """Samples all rows. Returns prompts and completions. Tokens after the end of a completion have no meaning."""
        # transformers' penalty has the padding of all rows, but rows leave this batch
        processors = LogitsProcessorList(PENALTY(x.penalty) if isinstance(x, PENALTY) else x for x in processors)
        rows, length = self.first_rows(input_ids, config.pad_token_id), input_ids.size(1)
        result, logps, last = rows.ids.clone(), rows.numbers.clone(), rows.ids.size(1)
        # It needs neither a growing cache nor the tokens so far
        fixed = (
            replays(input_ids.device) and self.adds_masks(model) and all(isinstance(x, WARPERS) for x in processors)
        )
        token = (FixedToken if fixed else GrowingToken)(self, model, rows, processors, config.do_sample)
        period, most_live = period_of(input_ids.device), MOST_LIVE_IN_GRAPHS if fixed else MOST_LIVE
        while length < last:
            seen, length = length, min(length + period, last)
            for end in range(seen, length):
                token.sample(end)
            if self.stops is not None:
                for end in range(seen + 1, length + 1):
                    rows.ended |= self.stops.ended(rows.ids[:, :end], rows.places)
            broken, ended = torch.stack([token.scores.isnan().sum(), rows.ended.sum()]).tolist()
            if broken:
                raise ValueError("The logits of the model are not numbers: its weights, or the precision, are broken.")
            if len(rows.ended) - ended <= most_live * len(rows.ended):
                live = live_rows(rows.ended)
                result[rows.places], logps[rows.places] = rows.ids, rows.numbers
                rows.keep(live)
                if len(live) == 0:
                    break
                keep_rows(self.cache, live)
                token.renew()
        result[rows.places], logps[rows.places] = rows.ids, rows.numbers
        self.numbers = logps
        return result[:, :length]

    @staticmethod
    def choose(scores: Tensor, numbers: Tensor) -> Tensor:
        """
        Returns the next token of each row: the first token at which the cumulative probability exceeds the row's
        random number. `numbers` has the shape `(num_rows, 1)`; the log-probabilities of the tokens, in nats, replace
        them.
        """
        probabilities = scores.softmax(dim=-1)
        cumulative = probabilities.cumsum(dim=-1)
        total = cumulative[:, -1:]
        # Rounding must not select a token beyond the last one with a probability
        u = torch.minimum(numbers * total, torch.nextafter(total, torch.zeros_like(total)))
        tokens = torch.searchsorted(cumulative, u, right=True).clamp(max=scores.size(1) - 1)  # for NaN
        numbers.copy_(probabilities.gather(1, tokens).log())
        return tokens.squeeze(1)

    def adds_masks(self, model: PreTrainedModel) -> bool:
        """
        Returns whether attention adds a mask of the whole room to its scores. Otherwise, the model makes one again at
        every token.
        """
        return takes_masks(model) and all(type(x) is RoomyLayer for x in self.cache.layers)

    def first_rows(self, input_ids: Tensor, pad_token_id: int) -> Rows:
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
            mask=torch.cat([mask, torch.ones_like(room)], dim=1),
            positions=mask.sum(dim=1, keepdim=True) - 1,
            numbers=self.numbers.to(device),
            end_tokens=self.end_tokens.to(device),
            agents=self.agents,
            ended=torch.zeros(len(input_ids), dtype=torch.bool, device=device),
        )


@dataclass
class GrowingToken:
    """
    Samples the next token of each row, with keys and values that grow. The fastest form where a launch costs nothing.
    `scores` has the processed logits of the last token.
    """

    loop: SamplingLoop
    model: PreTrainedModel
    rows: Rows
    processors: LogitsProcessorList
    do_sample: bool

    def __post_init__(self) -> None:
        self.prompt_length = self.loop.attention_mask.size(1)
        self.mask: Tensor | None = None
        self.padded = not bool(self.rows.mask.all())
        self.renew()

    def renew(self) -> None:
        """Follows a change of the rows."""
        if self.loop.group is not None:
            self.loop.group.set_rows(self.rows.agents)
        if self.padded:
            adds = self.loop.adds_masks(self.model)
            self.mask = additive(self.rows.mask, self.model.dtype) if adds else self.rows.mask

    def sample(self, length: int) -> None:
        """Samples a token of rows that have `length` tokens."""
        rows = self.rows
        positions = rows.positions + (length - self.prompt_length)
        mask = None if self.mask is None else self.mask[..., :length]
        numbers = rows.numbers[:, length - self.prompt_length, None]
        rows.ids[:, length] = self.draw(
            rows.ids[:, length - 1 : length], mask, positions, numbers, rows.ids[:, :length]
        )

    def draw(
        self,
        last: Tensor,
        mask: Tensor | None,
        positions: Tensor,
        numbers: Tensor,
        ids: Tensor | None,
    ) -> Tensor:
        """Returns the tokens that follow the tokens `last`, and marks the rows that end with them."""
        outputs = self.model(
            input_ids=last,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=self.loop.cache,
            use_cache=True,
            **self.loop.inputs,
        )
        self.scores = self.processors(ids, outputs.logits[:, -1].float())
        tokens = self.loop.choose(self.scores, numbers) if self.do_sample else self.scores.argmax(dim=-1)
        self.rows.ended |= (tokens[:, None] == self.rows.end_tokens).any(dim=1)
        return tokens


class FixedToken(GrowingToken):
    """
    Samples the next token of each row with tensors of constant shapes and addresses. After [`WARM_UP`] tokens,
    a CUDA graph replays the rest: a launch for a token instead of hundreds. The graph lives until rows leave the
    batch.
    """

    def renew(self) -> None:
        super().renew()
        self.graph: torch.cuda.CUDAGraph | None = None
        self.sampled = 0
        self.mask = None

    def sample(self, length: int) -> None:
        if self.mask is None:
            layers = self.loop.cache.layers
            self.place = torch.tensor([length - 1], device=self.rows.ids.device)  # of the last token
            self.mask = additive(self.rows.mask, self.model.dtype)
            self.mask = torch.nn.functional.pad(
                self.mask, (0, layers[0].max_length - self.mask.size(-1)), value=-torch.inf
            )
            self.mask[..., length - 1 :] = -torch.inf
            for layer in layers:
                layer.place = self.place
        if self.sampled == WARM_UP and self.rows.ids.is_cuda:
            self.capture()
        if self.graph is not None:
            self.graph.replay()
        else:
            self.sample_here()
        self.sampled += 1

    def sample_here(self) -> None:
        """Samples a token. Neither a shape nor a number of the host depends on how many tokens there are."""
        rows, mask = self.rows, cast(Tensor, self.mask)
        mask.index_fill_(3, self.place, 0)
        step = self.place - (self.prompt_length - 1)
        last = rows.ids.index_select(1, self.place)
        numbers = rows.numbers.index_select(1, step)
        tokens = self.draw(last, mask, rows.positions + step, numbers, None)
        rows.numbers.index_copy_(1, step, numbers)
        self.place += 1
        rows.ids.index_copy_(1, self.place, tokens[:, None])

    def capture(self) -> None:
        """Captures a graph, which computes nothing yet. What cannot be captured goes on without one."""
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.device(self.rows.ids.device), torch.cuda.graph(graph):
                self.sample_here()
            self.graph = graph
        except RuntimeError as error:  # a model that waits for the device, or too little memory
            logger.warning_once(f"Tokens are sampled without a CUDA graph, which takes longer: {error}")


def additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """
    Returns a mask of shape `(num_rows, 1, 1, length)` that attention adds to its scores. `dtype`: the model's.
    """
    return torch.zeros_like(mask, dtype=product_dtype(mask, dtype)).masked_fill(mask == 0, -torch.inf)[:, None, None]


def replays(device: torch.device) -> bool:
    """Returns whether tokens are computed in fixed shapes, which costs more than it saves without graphs."""
    return device.type == "cuda"


def period_of(device: torch.device) -> int:
    """Returns the number of tokens between two checks for ended rows."""
    return 1 if device.type == "cpu" else GPU_PERIOD


def live_rows(ended: Tensor) -> Tensor:
    """
    Returns the indices of the rows that go on. The last ones fill the places of ended rows, so that few rows of the
    cache move.
    """
    live = (~ended).nonzero().squeeze(1)
    order = torch.arange(len(live), device=ended.device)
    holes = ended[: len(live)].nonzero().squeeze(1)
    order[holes] = live[len(live) - len(holes) :]
    return order
