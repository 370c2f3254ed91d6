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
CALL_TOKENS = {"[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", "<tool_call>", "</tool_call>"}  # special in some tokenizers
HIDDEN = {f"<|{place}_{part}|>" for place in ("START", "END") for part in ("RESPONSE", "TEXT")}  # of Cohere
KEY = "reasoning_content"  # of a message, in chat templates
CUTS = re.compile(r"split\(\s*['\"]</think>")  # a chat template drops what stands in front of the tag
# Where tags are ordinary text
QUOTED = (
    r"""(?<!`)(?P<ticks>`{1,2})(?!`)[^`\n]+(?P=ticks)(?!`)|"[^"\n]*"|“[^”\n]*”"""
    r"""|(?:(?<!\w)|\b[bfru]{1,2})'[^'\n]*'(?!\w)"""
)
CODE = r"```[^\n`]*\n(?:(?!```)[\s\S])*^[ \t]*```[ \t]*$"


class CompletionReader:
    """Reads the completions of a tokenizer's model: as texts, and the reasoning and the answers in them."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        self.tokenizer = tokenizer
        tokens, self.template = tokenizer.added_tokens_decoder, str(tokenizer.chat_template)
        names = {token.content for token in tokens.values()}
        self.tags = next(((x, y) for x, y in TAGS.items() if y in self.template or y in names), None)
        self.has_messages = MESSAGE in self.template
        shown = {*CALL_TOKENS, *(PARTS if self.has_messages else self.tags or ())}
        self.hidden = {k for k, token in tokens.items() if token.special or token.content in HIDDEN}
        self.hidden |= {*tokenizer.all_special_ids}
        self.hidden -= {k for k, token in tokens.items() if token.content in shown}

    def texts(self, completion_ids: Sequence[Sequence[int]]) -> list[str]:
        """Returns completions as text, without special tokens other than those of a reasoning or of a tool's call."""
        shown = [[token for token in ids if token not in self.hidden] for ids in completion_ids]
        return self.tokenizer.batch_decode(shown)

    def read(
        self, prompt_ids: Sequence[int], completion_ids: Sequence[Sequence[int]], texts: Sequence[str]
    ) -> list[tuple[str, str]]:
        """
        Returns the reasoning and the answer in completions of one prompt. `texts`: the result of
        [`~CompletionReader.texts`]. A reasoning without an end is left out, and its answer is empty.

        - Messages: if the chat template has `<|message|>`, see [`last_message`]. The reasoning is left out.
        - Templates of responses: otherwise, if the tokenizer has a `response_template`, and its reasoning is not
          between `<think>` and `</think>`, the answer is what its `parse_response` calls content, and its calls of
          tools, in the form of Qwen.
        - Tags: otherwise, if the chat template or the tokenizer has a tag in `TAGS`, see [`split_reasoning`], which
          also reads what `parse_response` cannot.
        - Else it is the whole text.
        """
        if self.has_messages:
            return [("", last_message(self.tokenizer.decode(ids))) for ids in completion_ids]
        begin, _ = self.tags or ("", "")
        opened = bool(begin) and self.tokenizer.decode(prompt_ids[-32:]).rstrip().endswith(begin)  # as DeepSeek's does
        if getattr(self.tokenizer, "response_template", None) is None or begin == BEGIN:
            return [split_reasoning(text, opened, self.tags) if self.tags else ("", text) for text in texts]
        prefix, found = self.tokenizer.decode(prompt_ids), []
        for ids, text in zip(completion_ids, texts, strict=True):
            try:
                parsed = self.tokenizer.parse_response(self.tokenizer.decode(ids), prefix=prefix)
            except ValueError:  # what a model writes need not be well formed, such as a call of a tool
                found.append(split_reasoning(text, opened, self.tags) if self.tags else ("", ""))
                continue
            calls = [json.dumps(call["function"]) for call in parsed.get("tool_calls") or []]
            answer = (parsed.get("content") or "") + "".join(f"<tool_call>{x}</tool_call>" for x in calls)
            found.append((parsed.get(KEY) or "", answer))
        return found

    def message(self, text: str, reasoning: str, answer: str) -> dict[str, str]:
        """
        Returns the fields of a completion's message in its agent's own history. Most templates of reasoning models
        read the reasoning from a field, others from the content. Of these, some cut the content at `</think>`, so
        that one within the answer or the reasoning is written with a space.
        """
        if KEY in self.template:
            return {"content": answer, KEY: reasoning}
        if self.tags != (BEGIN, END) or not (reasoning or answer):
            return {"content": answer}
        if not CUTS.search(self.template):
            return {"content": text}
        before, end, gap = text.removesuffix(answer).rpartition(END)
        before, answer = (x.replace(END, "< /think>") for x in (before, answer))
        return {"content": f"{before}{end}{gap}{answer}"}


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


def split_reasoning(text: str, opened: bool = False, tags: tuple[str, str] = (BEGIN, END)) -> tuple[str, str]:
    """
    Returns the reasoning in a text, and the answer: what follows the last closing tag that stands neither in quotation
    marks nor, after the reasoning, in a block of code. `opened`: whether the prompt ends with the opening tag. A
    reasoning that begins a line and does not end is left out, and has no answer.
    """
    begin, end = map(re.escape, tags)
    inside = re.compile(f"{QUOTED}|(?P<end>{end})")
    outside = re.compile(f"{CODE}|{QUOTED}|(?P<begin>(?:^|(?<={end})) *{begin})|(?P<end>{end})", re.MULTILINE)
    place, last, is_open = 0, None, opened
    while match := (inside if is_open else outside).search(text, place):
        place = match.end()
        if match["end"]:
            last, is_open = match, False
        elif not is_open and match["begin"]:
            is_open = True
    if is_open or last is None:
        return "", "" if is_open else text
    reasoning, answer = text[: last.start()], text[last.end() :]
    return re.sub(rf"^\s*(?:<\|channel>thought\n|{begin})", "", reasoning).strip("\n"), answer.lstrip("\n")
