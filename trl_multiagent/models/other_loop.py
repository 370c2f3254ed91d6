"""
transformers' own sampling loop with our random numbers, for what [`~models.sampling_loop.SamplingLoop`] does not
cover: other processors of logits, other criteria to stop, and models with other caches.
"""

import copy
from functools import partial
from typing import Any

import torch
from transformers import LogitsProcessor, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation import EosTokenCriteria, NoRepeatNGramLogitsProcessor


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
    prompt_length = input_ids.size(1)

    def end(input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        """Ends rows of several agents, each with one of its own tokens."""
        return (input_ids[:, -1:] == loop.end_tokens.to(input_ids.device)).any(dim=1)

    def choose(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Chooses tokens as our loop does: sets the probability of all other tokens to zero."""
        # On a GPU, `generate` may compute steps after the last one, and drop their tokens
        step = input_ids.size(1) - prompt_length
        if step == loop.numbers.size(1):
            return scores
        numbers = loop.numbers[:, step, None].to(scores.device)
        chosen = loop.choose(scores.float(), numbers)[:, None]
        loop.numbers[:, step, None] = numbers
        return torch.full_like(scores, -torch.inf).scatter(1, chosen, 0.0)

    others = [x for x in stopping_criteria if not isinstance(x, EosTokenCriteria)]
    config = copy.copy(generation_config)
    logits_processor = LogitsProcessorList(
        partial(without_padding, x, loop.attention_mask) if isinstance(x, NoRepeatNGramLogitsProcessor) else x
        for x in logits_processor
    )
    if config.do_sample:
        logits_processor.append(choose)
        config.do_sample = False  # one token is left, and taking it is faster than drawing it
    return type(model)._sample(
        model, input_ids, logits_processor, StoppingCriteriaList([*others, end]), config, **kwargs
    )


def without_padding(
    processor: LogitsProcessor, attention_mask: torch.Tensor, input_ids: torch.Tensor, scores: torch.Tensor
) -> torch.Tensor:
    """
    Hides the padding of the prompts from a processor, so that its scores do not depend on the batch. Processors ignore
    tokens beyond the vocabulary.
    """
    prompts, completions = input_ids.tensor_split([attention_mask.size(1)], dim=1)
    shown = torch.cat([prompts.masked_fill(attention_mask == 0, scores.size(1)), completions], dim=1)
    return processor(shown, scores)
