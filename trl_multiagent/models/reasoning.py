"""
Splits completions of reasoning models. Other agents, rewards, graders, seats and tools get the answer. The loss, the
trace and the agent's own chat template get the whole completion.
"""

import json
import re
from collections.abc import Sequence
from typing import Literal

from transformers import PreTrainedTokenizerBase


Reasoning = Literal["auto", "keep", "none"]
BEGIN, END = "<think>", "</think>"
# What stands around a reasoning: of Qwen, DeepSeek and others, of Mistral, Seed, Gemma 4 and Cohere
TAGS = {BEGIN: END, "[THINK]": "[/THINK]", "<seed:think>": "</seed:think>", "<|channel>": "<channel|>"}
TAGS |= {"<|START_THINKING|>": "<|END_THINKING|>"}
# A completion of gpt-oss or Muse Glimmer is a list of messages. Their headers name a channel, or who reads them
MESSAGE, STARTS = "<|message|>", "<|start|>"
MESSAGE_END = re.compile(r"<\|(?:end|return|call|eom|eot)\|>")
ANSWERS, CALLS = re.compile(r"<\|channel\|>final|to=user"), re.compile(r"to=functions\.[\w.-]+")
PARTS = {MESSAGE, STARTS, "<|channel|>", "<|end|>", "<|eom|>"}
HIDDEN = {f"<|{place}_{part}|>" for place in ("START", "END") for part in ("RESPONSE", "TEXT")}  # of Cohere


class CompletionReader:
    """Reads the completions of a tokenizer's model: as texts, and the answers in them."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        self.tokenizer = tokenizer
        tokens, template = tokenizer.added_tokens_decoder, str(tokenizer.chat_template)
        names = {token.content for token in tokens.values()}
        self.tags = next(((x, y) for x, y in TAGS.items() if y in template or y in names), None)
        self.has_messages = MESSAGE in template
        shown = PARTS if self.has_messages else self.tags or ()
        self.hidden = {k for k, token in tokens.items() if token.special or token.content in HIDDEN}
        self.hidden |= {*tokenizer.all_special_ids}
        self.hidden -= {k for k, token in tokens.items() if token.content in shown}

    def texts(self, completion_ids: Sequence[Sequence[int]]) -> list[str]:
        """Returns completions as text, without special tokens other than those of a reasoning."""
        shown = [[token for token in ids if token not in self.hidden] for ids in completion_ids]
        return self.tokenizer.batch_decode(shown)

    def answers(
        self, prompt_ids: Sequence[int], completion_ids: Sequence[Sequence[int]], texts: Sequence[str]
    ) -> list[str]:
        """
        Returns the answers in completions of one prompt. `texts`: the result of [`~CompletionReader.texts`].

        - Messages: if the chat template has `<|message|>`, see [`last_message`].
        - Templates of responses: otherwise, if the tokenizer has a `response_template`, and its reasoning is not
          between `<think>` and `</think>`, the answer is what its `parse_response` calls content, and its calls of
          tools, in the form of Qwen.
        - Tags: otherwise, if the chat template or the tokenizer has a tag in `TAGS`, see [`after_reasoning`], which
          also reads what `parse_response` cannot.
        - Else it is the whole text.
        """
        if self.has_messages:
            return [last_message(self.tokenizer.decode(ids)) for ids in completion_ids]
        begin, _ = self.tags or ("", "")
        opened = bool(begin) and self.tokenizer.decode(prompt_ids[-8:]).rstrip().endswith(begin)  # as DeepSeek's does
        if getattr(self.tokenizer, "response_template", None) is None or begin == BEGIN:
            return [after_reasoning(text, opened, self.tags) if self.tags else text for text in texts]
        prefix, answers = self.tokenizer.decode(prompt_ids), []
        for ids, text in zip(completion_ids, texts, strict=True):
            try:
                parsed = self.tokenizer.parse_response(self.tokenizer.decode(ids), prefix=prefix)
            except ValueError:  # what a model writes need not be well formed, such as a call of a tool
                answers.append(after_reasoning(text, opened, self.tags) if self.tags else "")
                continue
            calls = [json.dumps(call["function"]) for call in parsed.get("tool_calls") or []]
            answers.append((parsed.get("content") or "") + "".join(f"<tool_call>{x}</tool_call>" for x in calls))
        return answers


def last_message(text: str) -> str:
    """
    Returns the text of the last message in the channel `final` or to the user, or the last call of a tool, with its
    name in front. Without one, the answer is empty.
    """
    for message in reversed(text.split(STARTS)):
        header, is_message, body = message.partition(MESSAGE)
        call = CALLS.search(header)
        if is_message and (call or ANSWERS.search(header)):
            return (f"{call[0]} " if call else "") + MESSAGE_END.split(body)[0]
    return ""


def after_reasoning(text: str, opened: bool = False, tags: tuple[str, str] = (BEGIN, END)) -> str:
    """
    Returns the text after the last closing tag that does not stand in quotation marks. `opened`: whether the prompt
    ends with the opening tag. A reasoning that begins a line and does not end has no answer.
    """
    begin, end = map(re.escape, tags)
    ends = [match.end() for match in re.finditer(rf"(?<!['\"`]){end}", text)]
    rest = text[ends[-1] :] if ends else text
    if (opened and not ends) or re.search(rf"^\s*{begin}", rest, re.MULTILINE):
        return ""
    return rest.lstrip("\n") if ends else rest
