"""
transformers' own sampling loop with our random numbers, for what [`~models.sampling_loop.SamplingLoop`] does not
cover: other processors of logits, other criteria to stop, and models with other caches.
"""

import copy
from dataclasses import dataclass
from typing import Any, cast

import torch
from transformers import LogitsProcessor, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation import EosTokenCriteria, NoRepeatNGramLogitsProcessor, StoppingCriteria


def sample_elsewhere(
    loop: Any,
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: Any,
    **kwargs: Any,
) -> torch.Tensor:
    """
    Samples with transformers.

    Args:
        loop ([`~models.sampling_loop.SamplingLoop`]): Our loop, with the mask of the prompts, the random numbers and
            the tokens that end a row.
        model, input_ids, logits_processor, stopping_criteria, generation_config, **kwargs: transformers' arguments.
    """
    ends = [x for x in stopping_criteria if not isinstance(x, EosTokenCriteria)]
    stopping_criteria = StoppingCriteriaList([*ends, EndTokens(loop.end_tokens)])
    config = copy.copy(generation_config)
    logits_processor = LogitsProcessorList(
        WithoutPadding(x, loop.attention_mask) if isinstance(x, NoRepeatNGramLogitsProcessor) else x
        for x in logits_processor
    )
    if config.do_sample:
        logits_processor.append(SeededChoice(loop, input_ids.size(1)))
        config.do_sample = False  # one token is left, and taking it is faster than drawing it
    return cast(Any, type(model))._sample(model, input_ids, logits_processor, stopping_criteria, config, **kwargs)


@dataclass(eq=False)
class EndTokens(StoppingCriteria):
    """
    Ends rows of several agents in transformers' own loop, each with one of its own `tokens`, of shape `(num_rows, n)`.
    """

    tokens: torch.Tensor

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return (input_ids[:, -1:] == self.tokens.to(input_ids.device)).any(dim=1)


@dataclass(eq=False)
class WithoutPadding(LogitsProcessor):
    """Hides the padding of the prompts from a processor, so that its scores do not depend on the batch."""

    processor: LogitsProcessor
    attention_mask: torch.Tensor

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        # Processors ignore tokens beyond the vocabulary
        prompts, completions = input_ids.tensor_split([self.attention_mask.size(1)], dim=1)
        shown = torch.cat([prompts.masked_fill(self.attention_mask == 0, scores.size(1)), completions], dim=1)
        return self.processor(cast(torch.LongTensor, shown), scores)


@dataclass(eq=False)
class SeededChoice(LogitsProcessor):
    """
    Chooses tokens in transformers' own loop as our loop does: sets the probability of all other tokens to zero.
    """

    loop: Any
    prompt_length: int

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        # On a GPU, `generate` may compute steps after the last one, and drop their tokens
        step = input_ids.size(1) - self.prompt_length
        if step == self.loop.numbers.size(1):
            return scores
        numbers = self.loop.numbers[:, step, None].to(scores.device)
        chosen = self.loop.choose(scores.float(), numbers)[:, None]
        self.loop.numbers[:, step, None] = numbers
        return cast(torch.FloatTensor, torch.full_like(scores, -torch.inf).scatter(1, chosen, 0.0))
