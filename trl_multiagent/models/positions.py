"""Checks of prompts and texts for models with learned positions, which limit the number of tokens."""

import math
from collections.abc import Sequence
from typing import Any, cast

from torch import nn
from transformers import PreTrainedModel
from transformers.utils import logging


logger = logging.get_logger(__name__)


class TooLongError(ValueError):
    """A text has more tokens than its model has positions. The message names the text, and says what to do."""


def learned_positions(model: PreTrainedModel) -> int | None:
    """
    Returns the number of positions with learned embeddings, as in GPT-2 and OPT, which fail on longer texts. Returns
    `None` if the model computes positions, such as rotary or ALiBi positions.
    """
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    tokens = model.get_input_embeddings()
    for name, module in model.named_modules():
        if limit is None or not isinstance(module, nn.Embedding) or module is tokens or "lora" in name:
            continue
        rows = cast(int, module.num_embeddings)
        # OPT and others keep two more rows, for positions of padding
        if limit <= rows <= limit + 2:
            # RoBERTa counts from the position of padding, and these rows are part of the limit
            return int(limit) if module.padding_idx is None else min(int(limit), rows - module.padding_idx - 1)
    return None


def check_prompts(
    role: str, model: PreTrainedModel, prompts: Sequence[Any], lengths: Sequence[int], max_new_tokens: int
) -> None:
    """
    Checks that prompts of an agent leave enough learned positions for a completion of `max_new_tokens`. Without
    prompts, it checks the completions alone. `lengths`: the number of tokens of each prompt.

    Raises:
        TooLongError: a prompt and its completion may have more tokens than the model has positions.
    """
    limit, config = learned_positions(model), model.config.get_text_config()
    longest, most = max(lengths, default=1), getattr(config, "max_position_embeddings", None) or math.inf
    rope = getattr(config, "rope_parameters", None) or {}
    is_plain = limit is None and rope.get("rope_type", "default") == "default"
    if is_plain and longest + max_new_tokens > most:
        logger.warning_once(
            f"A prompt of {role!r} and its completion may have {longest + max_new_tokens} tokens, but its model was "
            f"made for {most}: shorten the prompts or the completions."
        )
    if rope.get("rope_type") in ("longrope", "dynamic"):
        original = rope.get("original_max_position_embeddings", config.max_position_embeddings)
        if longest + max_new_tokens > original:
            logger.warning_once(
                f"The model of {role!r} changes its rotary positions beyond {original} tokens for all rows of a "
                "batch: the completions and the update "
                "depend on which rows are computed together. Shorter prompts, or fewer completion tokens, avoid this."
            )
    if limit is None or longest + max_new_tokens <= limit:
        return
    positions = f"the model of {role!r} has only {limit} positions, which are learned"
    if max_new_tokens >= limit:
        raise TooLongError(
            f"A completion may have {max_new_tokens} tokens, but {positions}: let completions have fewer tokens, "
            "or choose a model that reads longer texts."
        )
    start = " ".join(str(prompts[list(lengths).index(longest)]).split())[:80]
    raise TooLongError(
        f"A prompt of {role!r} has {longest} tokens and its completion may have {max_new_tokens}, but "
        f"{positions}: shorten the prompt or its history, let completions have fewer tokens, or choose a model that "
        f"reads longer texts. The prompt is {start!r}..."
    )


def check_texts(name: str, model: PreTrainedModel, lengths: Sequence[int]) -> None:
    """
    Raises [`TooLongError`] if a text with one of these numbers of tokens is too long for the model. `name`: the model,
    for the message.
    """
    limit = learned_positions(model)
    longest = max(lengths, default=0)
    if limit is not None and longest > limit:
        raise TooLongError(
            f"A text has {longest} tokens, but {name} has only {limit} positions, which are learned: shorten the "
            "prompts or the answers, or choose a model that reads longer texts."
        )


def padded(length: float, multiple: int | None) -> float:
    """Returns a number of tokens after padding to a multiple."""
    return length if multiple is None else -(-length // multiple) * multiple
