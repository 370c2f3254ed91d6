"""
Prevents texts that models wrote from ending or beginning a turn of a chat.

A tokenizer turns every text that spells a special token, such as the end of a turn, into that token. A model also
follows the plain text with which its chat template begins a turn. An agent could write either, for example in an error
message that its partner's next prompt contains.
"""

import contextlib
import re
import unicodedata
from collections.abc import Callable
from functools import lru_cache
from itertools import pairwise
from typing import Any, TypeVar

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from trl_multiagent.models.reasoning import BEGIN, CALL_TOKENS, END


Text = TypeVar("Text", str, list[dict[str, Any]], str | list[dict[str, Any]])

CONTENT = "zqxj"  # no template writes it
TURNS = [{"role": role, "content": CONTENT} for role in ("user", "assistant", "user")]
WITH_SYSTEM = [{"role": role, "content": CONTENT} for role in ("system", "user")]
ROLES = ("user", "assistant", "system", "tool")
HARMLESS = {BEGIN, END, *CALL_TOKENS}  # begin and end no turn, even where they are special tokens
WORD = re.compile(r"[^\W\d_]{3}")
NAMES_A_ROLE = re.compile(rf"{'|'.join(ROLES)}|<.+>|\[.+\]", re.IGNORECASE)


def marker_pattern(
    tokenizer: PreTrainedTokenizerBase, render: Callable[[list[dict[str, str]]], str]
) -> re.Pattern[str]:
    """
    Returns a pattern for the spellings of a tokenizer's special tokens, and of the plain text that its chat template
    writes beside a message, such as `### User:` or `[INST]`. Single words do not count, and neither do other added
    tokens, such as `<think>` or Gemma's `<b>`, which ordinary texts contain. A marker that begins with a word, such as
    `User:`, counts at the start of a line, unless the template writes it in the line of a message.

    `render` applies the chat template to messages. The pattern matches where a marker begins in a folded text, see
    [`fold`].
    """
    tokens = [x.content for x in tokenizer.added_tokens_decoder.values() if x.special and x.content not in HARMLESS]
    separators = re.compile("|".join([f"({CONTENT})", "\n", "</?think>", *map(re.escape, tokens)]))

    def beside_messages(text: str) -> list[str]:
        parts = [part for part in separators.split(text) if part and part.strip()]
        return [y for x, y in [*pairwise(parts), *pairwise(parts[::-1])] if x == CONTENT]

    turns = render(TURNS)
    lines = beside_messages(turns)
    with contextlib.suppress(TemplateError):  # many templates take no system message
        lines += filter(NAMES_A_ROLE.search, beside_messages(render(WITH_SYSTEM)))
    tokens, lines = (["".join(map(fold, text)).strip() for text in texts] for texts in (tokens, lines))
    lines = [line.lower() for line in lines]
    lines += [line.replace(role, other) for line in lines for role in ("user", "assistant") for other in ROLES]
    lines = [line for line in lines if WORD.search(line) and re.search(r"[^\w\s]", line)]
    tokens, lines = (sorted({marker for marker in texts if len(marker) > 1}) for texts in (tokens, lines))
    turns = "".join(map(fold, turns)).lower()

    def places(marker: str) -> str:
        """Returns a pattern for a marker, at the places where it counts."""
        pattern = re.escape(marker).replace(r"\ ", r"\ *")
        if not marker[0].isalnum():
            return pattern
        return (r"(?<!\S)" if re.search(rf"{CONTENT} *{re.escape(marker.lower())}", turns) else "^") + pattern

    markers = [*tokens, *lines]
    # No tokenizer reads `<EOS>` as `<eos>`. A model may read `[inst]` as the `[INST]` of its template
    chosen = "|".join([*map(places, tokens), *(f"(?i:{places(line)})" for line in lines)])
    beginnings = "".join({re.escape(x) for marker in markers for x in (marker[0], marker[0].upper())})
    # Lookahead consumes nothing, because a marker may be within another one. Without markers, the pattern never
    # matches
    return re.compile(f"(?=[{beginnings}])(?={chosen})" if markers else r"(?!)", re.MULTILINE)


@lru_cache(maxsize=65536)
def fold(character: str) -> str:
    """
    Normalizes a character as a tokenizer may: removes accents, width, kinds of white space (SentencePiece writes
    `▁`) other than a new line, and characters that are invisible, private or unknown.
    """
    return "".join(
        x if x == "\n" else " " if x.isspace() or x == "▁" else x
        for x in unicodedata.normalize("NFKD", character)
        if x in "\t\n\r" or (unicodedata.category(x)[0] not in "CM" and x != "\ufffd")
    )


def without_markers(prompt: Text, pattern: re.Pattern[str]) -> Text:
    """
    Returns a text, or chat messages, with a space within every marker of a [`marker_pattern`], so that it is tokenized
    like any other text. People and models can still read it.
    """
    if isinstance(prompt, str):
        folded = [fold(character) for character in prompt]
        places = [k for k, characters in enumerate(folded) for _ in characters]
        cuts: list[int] = [places[match.start()] + 1 for match in pattern.finditer("".join(folded))]
        return " ".join(prompt[start:end] for start, end in pairwise([0, *cuts, len(prompt)]))
    return [
        {**message, "content": without_markers(message["content"], pattern)}
        if isinstance(message.get("content"), str)
        else message
        for message in prompt
    ]
