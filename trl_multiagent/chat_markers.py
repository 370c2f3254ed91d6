"""
Prevents texts that models wrote from ending or beginning a turn of a chat.

A tokenizer makes a special token, such as the end of a turn, of every text that spells it. An agent could spell one with ordinary tokens,
for example in an error message that becomes a part of its partner's next prompt.
"""

import re
from collections.abc import Callable
from typing import Any, TypeVar

from transformers import PreTrainedTokenizerBase


Text = TypeVar("Text", str, list[dict[str, Any]], str | list[dict[str, Any]])

EXAMPLE = [{"role": role, "content": "x"} for role in ("user", "assistant", "user")]


def marker_pattern(
    tokenizer: PreTrainedTokenizerBase, render: Callable[[list[dict[str, str]]], str]
) -> re.Pattern[str]:
    """
    A pattern for the spellings of a tokenizer's special tokens, and of the other added tokens that its chat template writes.

    Args:
        tokenizer (`PreTrainedTokenizerBase`): The tokenizer.
        render (`Callable[[list[dict]], str]`): Applies its chat template to messages.
    """
    written = render(EXAMPLE)
    markers = [
        token.content
        for token in tokenizer.added_tokens_decoder.values()
        if len(token.content.strip()) > 1 and (token.special or token.content in written)
    ]
    # Of two that begin alike, the longer one comes first. Without any, the pattern matches nothing
    return re.compile("|".join(map(re.escape, sorted(markers, key=len, reverse=True))) or r"(?!)")


def without_markers(prompt: Text, pattern: re.Pattern[str]) -> Text:
    """
    A text or chat messages with a space within every marker, so that it is tokenized like any other text. People and models can still
    read it.

    Args:
        prompt (`str` or `list[dict]`): The text, or the messages, which stay as they are.
        pattern (`re.Pattern`): See [`marker_pattern`].
    """
    if isinstance(prompt, str):
        return pattern.sub(lambda match: f"{match[0][0]} {match[0][1:]}", prompt)
    return [
        {**message, "content": without_markers(message["content"], pattern)}
        if isinstance(message.get("content"), str)
        else message
        for message in prompt
    ]
