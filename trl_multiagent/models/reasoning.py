"""
Splits completions of reasoning models. Other agents, rewards, graders, seats and tools get the answer. The loss, the
trace and the agent's own chat template get the whole completion.
"""

from collections.abc import Sequence
from typing import Literal

from transformers import PreTrainedTokenizerBase
from trl.chat_template_utils import gptoss_chat_template, gptoss_template


Reasoning = Literal["auto", "keep", "none"]
BEGIN, END = "<think>", "</think>"


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

    If the tokenizer or its chat template has the tags `<think>` and `</think>`, the answer follows the last
    `</think>`, and a reasoning that does not end has none. Otherwise it is what the tokenizer's `parse_response` calls
    content, if the tokenizer has a `response_template` or its chat template is that of gpt-oss. Else it is the whole
    text.
    """
    if END in str(tokenizer.chat_template) or END in tokenizer.get_added_vocab():
        opened = tokenizer.decode(prompt_ids[-8:]).rstrip().endswith(BEGIN)  # as DeepSeek's template does
        return [after_reasoning(text, opened) for text in texts]
    schema = getattr(tokenizer, "response_template", None)
    if schema is None and tokenizer.chat_template == gptoss_chat_template:
        schema = gptoss_template
    if schema is None:
        return list(texts)
    prefix = tokenizer.decode(prompt_ids)
    parsed = tokenizer.parse_response([tokenizer.decode(ids) for ids in completion_ids], schema, prefix=prefix)
    return [message.get("content") or "" for message in parsed]


def after_reasoning(text: str, opened: bool = False) -> str:
    """Returns the text after the last `</think>`. `opened`: whether the prompt ends with `<think>`."""
    _, end, rest = text.rpartition(END)
    if (opened and not end) or rest.lstrip().startswith(BEGIN):
        return ""
    return rest.lstrip("\n") if end else rest
