"""
Splits completions of reasoning models. Other agents, rewards, graders, seats and tools get the answer. The loss, the
trace and the agent's own chat template get the whole completion.
"""

import re
from collections.abc import Sequence
from typing import Literal

from transformers import PreTrainedTokenizerBase


Reasoning = Literal["auto", "keep", "none"]
BEGIN, END = "<think>", "</think>"
CLOSE, UNCLOSED = re.compile(rf"(?<!['\"`]){END}"), re.compile(rf"^\s*{BEGIN}", re.MULTILINE)
CHANNEL, FINAL = "<|channel|>", "<|channel|>final<|message|>"
CHANNEL_END = re.compile(r"<\|(?:end|return|start|call)\|>")


def whole_texts(tokenizer: PreTrainedTokenizerBase, completion_ids: Sequence[Sequence[int]]) -> list[str]:
    """Returns completions as text, without special tokens other than the tags of a reasoning."""
    if END not in tokenizer.all_special_tokens:
        return tokenizer.batch_decode(completion_ids, skip_special_tokens=True)
    hidden = {*tokenizer.all_special_ids} - {*tokenizer.convert_tokens_to_ids([BEGIN, END])}
    return tokenizer.batch_decode([[token for token in ids if token not in hidden] for ids in completion_ids])


def answers_of(
    tokenizer: PreTrainedTokenizerBase,
    prompt_ids: Sequence[int],
    completion_ids: Sequence[Sequence[int]],
    texts: Sequence[str],
) -> list[str]:
    """
    Returns the answers in completions of one prompt. `texts`: the result of [`whole_texts`].

    - Tags: if the tokenizer or its chat template has `</think>`, see [`after_reasoning`].
    - Channels: if the chat template has those of gpt-oss, the answer is the last message in the channel `final`.
    - Else, if the tokenizer has a `response_template`, the answer is what its `parse_response` calls content. A
      completion that it cannot parse has no answer.
    - Else it is the whole text.
    """
    template = str(tokenizer.chat_template)
    if END in template or END in tokenizer.get_added_vocab():
        opened = tokenizer.decode(prompt_ids[-8:]).rstrip().endswith(BEGIN)  # as DeepSeek's template does
        return [after_reasoning(text, opened) for text in texts]
    if CHANNEL in template:
        found = [tokenizer.decode(ids).rpartition(FINAL) for ids in completion_ids]
        return [CHANNEL_END.split(rest)[0] if final else "" for _, final, rest in found]
    if getattr(tokenizer, "response_template", None) is None:
        return list(texts)
    prefix = tokenizer.decode(prompt_ids)
    return [parsed_content(tokenizer, tokenizer.decode(ids), prefix) for ids in completion_ids]


def parsed_content(tokenizer: PreTrainedTokenizerBase, text: str, prefix: str) -> str:
    try:
        return tokenizer.parse_response(text, prefix=prefix).get("content") or ""
    except ValueError:  # what a model writes need not be well formed, such as a call of a tool
        return ""


def after_reasoning(text: str, opened: bool = False) -> str:
    """
    Returns the text after the last `</think>` that does not stand in quotation marks. `opened`: whether the prompt
    ends with `<think>`. A reasoning that begins a line and does not end has no answer.
    """
    ends = [match.end() for match in CLOSE.finditer(text)]
    rest = text[ends[-1] :] if ends else text
    if (opened and not ends) or UNCLOSED.search(rest):
        return ""
    return rest.lstrip("\n") if ends else rest
