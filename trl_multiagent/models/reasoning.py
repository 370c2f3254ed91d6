"""
Splits completions of reasoning models. Other agents, rewards, graders, seats and tools get the answer. The loss, the
trace and the agent's own chat template get the whole completion.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import json
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, get_args


if TYPE_CHECKING:  # rewards for plain TRL read answers without torch
    from transformers import PreTrainedTokenizerBase


Reasoning = Literal["auto", "keep", "none"]
BEGIN, END = "<think>", "</think>"
# What stands around a reasoning: of Qwen, DeepSeek and others, of Mistral, Seed, Gemma 4 and Cohere
TAGS = {
    BEGIN: END,
    "[THINK]": "[/THINK]",
    "<seed:think>": "</seed:think>",
    "<|channel>": "<channel|>",
    "<|START_THINKING|>": "<|END_THINKING|>",
}
# A completion of gpt-oss or Muse Glimmer is a list of messages. Their headers name a channel, or who reads them
MESSAGE, STARTS = "<|message|>", "<|start|>"
ANALYSIS = re.compile(r"analysis<\|message\|>(.*?)<\|end\|>", re.DOTALL)
MESSAGE_END = re.compile(r"<\|(?:end|return|call|eom|eot)\|>")
IS_MESSAGES = re.compile(r"\s*(?:<\|(?:start|channel)\|>|to=)[^\n]{,200}?<\|message\|>")
WITHOUT_TOKENS = re.compile(r"\A\s*analysis(?:.*assistantfinal|(?=[A-Z]).*)", re.DOTALL)  # as TRL gives gpt-oss's
ANSWERS, CALLS = re.compile(r"<\|channel\|>final|to=user"), re.compile(r"to=functions\.[\w.-]+")
PARTS = {MESSAGE, STARTS, "<|channel|>", "<|end|>", "<|eom|>"}
# Of calls of tools: special tokens in some tokenizers
CALL_TOKENS = """
    [TOOL_CALLS] [ARGS] <|python_tag|> <tool_call> </tool_call> <|tool_call|> <|/tool_call|> <|tool_call_begin|>
    <|tool_call_argument_begin|> <|tool_call_end|> <|START_ACTION|> <|END_ACTION|> <|tool_call_start|>
""".split()
HIDDEN = {f"<|{place}_{part}|>" for place in ("START", "END") for part in ("RESPONSE", "TEXT")}  # of Cohere
MALFORMED = (ValueError, TypeError, SyntaxError, AttributeError, RecursionError, MemoryError)
KEY = "reasoning_content"  # of a message, in chat templates
CUTS = re.compile(r"split\(\s*['\"]</think>")  # a chat template drops what stands in front of the tag
# Where tags are ordinary text: within quotation marks (begin, mark, end) on one line. Two marks with white space
# between them may belong to two quotations, so these count only around a tag, and after the reasoning
MARKS = [
    ("(?<!`)`(?!`)", "`", "`(?!`)"),
    ("(?<!`)``(?!`)", "`", "``(?!`)"),
    ('"', '"', '"'),
    ("“", "“”", "”"),
    (r"(?:(?<!\w)|\b[bfru]{1,2})'", "'", r"'(?!\w)"),
]
WORDS = "|".join(rf"{begin}[^{mark}\s]*{end}" for begin, mark, end in MARKS)
PHRASES = "|".join(rf"{begin}[^{mark}\n]*</?think>[^{mark}\n]*{end}" for begin, mark, end in MARKS)
CODE = r"```[^\n`]*\n(?:(?!```)[\s\S])*^[ \t]*```[ \t]*$"


def check_reasoning(name: str, value: Any) -> None:
    """Raises `ValueError`, which begins with `name`, if a value is none of [`Reasoning`]."""
    if value not in get_args(Reasoning):
        raise ValueError(f"{name} is {value!r}; it must be 'auto', 'keep' or 'none'.")


def check_template_kwargs(name: str, value: Any) -> None:
    """
    Raises `ValueError`, which begins with `name`, if a value is no mapping of arguments for chat templates, sets
    arguments of `apply_chat_template` that the package sets, or cannot be saved in `team.json`.
    """
    if not isinstance(value, dict):
        raise ValueError(f"{name} is {value!r}; it must be a mapping.")
    from transformers import PreTrainedTokenizerBase

    own = {*inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters, "conversations", "messages"}
    if reserved := (own - {"documents"}) & value.keys():
        raise ValueError(f"{name} must not set {', '.join(sorted(reserved))}: only what a chat template reads.")
    try:
        json.dumps(value)
    except TypeError as error:
        raise ValueError(f"{name} is {value!r}, which cannot be saved as JSON: {error}.") from error


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
        self.parser = (
            tokenizer if getattr(tokenizer, "response_template", None) and self.tags != (BEGIN, END) else None
        )
        if self.parser is None and "<|tool_call>" in self.template:  # of Gemma 4: its calls are no JSON
            from trl.chat_template_utils import add_response_schema

            with contextlib.suppress(ValueError):  # TRL knows other templates
                self.parser = add_response_schema(copy.copy(tokenizer))

    def texts(self, completion_ids: Sequence[Sequence[int]]) -> list[str]:
        """Returns completions as text. Of the special tokens, it keeps a reasoning's and a tool call's."""
        shown = [[token for token in ids if token not in self.hidden] for ids in completion_ids]
        return self.tokenizer.batch_decode(shown)

    def read(
        self, prompt_ids: Sequence[int], completion_ids: Sequence[Sequence[int]], texts: Sequence[str]
    ) -> list[tuple[str, str]]:
        """
        Returns the reasoning and the answer in completions of one prompt. `texts`: the result of
        [`~CompletionReader.texts`]. A reasoning without an end is left out, and its answer is empty.

        - Messages: if the chat template has `<|message|>`, see [`last_message`]. The reasoning is left out.
        - Tags: otherwise, if the chat template or the tokenizer has a tag in `TAGS`, see [`split_reasoning`].
        - Templates of responses: if the tokenizer has a `response_template`, or TRL has one for Gemma 4's, its
          `parse_response` finds calls, which are given in the form of Qwen. Without tags, it also finds the reasoning
          and the content.
        - Else it is the whole text.
        """
        decode = self.tokenizer.decode
        if self.has_messages:
            return [("", last_message(decode(ids))) for ids in completion_ids]
        begin, _ = self.tags or ("", "")
        opened = bool(begin) and decode(prompt_ids[-32:]).rstrip().endswith(begin)  # as DeepSeek's does
        found = [split_reasoning(text, opened, self.tags) if self.tags else ("", text) for text in texts]
        if self.parser is None:
            return found
        prefix = decode(prompt_ids)
        for k, (ids, text) in enumerate(zip(completion_ids, texts, strict=True)):
            with contextlib.suppress(ValueError):  # what a model writes need not be well formed
                parsed = self.parser.parse_response(decode(ids), prefix=prefix)
                content, calls = parsed.get("content") or "", parsed.get("tool_calls") or []
                calls = "".join(f"<tool_call>{json.dumps(call['function'])}</tool_call>" for call in calls)
                # White space is stripped, which code may need
                is_read = self.parser is self.tokenizer and not self.tags and content != text.strip()
                if calls or is_read:
                    found[k] = (found[k][0] or parsed.get(KEY) or "", content + calls)
        return found

    def has_reasoning(self, text: str) -> bool:
        """Returns whether a text of [`~CompletionReader.texts`] has marks of a reasoning."""
        return MESSAGE in text if self.has_messages else any(tag in text for tag in self.tags or ())

    def message(self, text: str, reasoning: str, answer: str) -> dict[str, str]:
        """
        Returns the fields of a completion's message in its agent's own history. Most templates of reasoning models
        read the reasoning from a field, others from the content. Of these, some cut the content at `</think>`, so
        that one within the answer or the reasoning is written with a space. `tool_calls` is an answer in which the
        model wrote calls in another form that the template knows, see [`~rollout.history.render_chat`].
        """
        content, call, _ = answer.partition("to=functions." if self.has_messages else "<tool_call>")
        if call and answer not in text and "tool_calls" in self.template:
            thought = reasoning or "\n".join(ANALYSIS.findall(text))
            return {"content": content, KEY: thought, "thinking": thought, "tool_calls": answer}
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
    Returns the reasoning in a text, and the answer: what follows the last closing tag. `</think>` does not count in
    quotation marks and, after the reasoning, in a block of code; no text quotes the tags of other models. `opened`:
    whether the prompt ends with the opening tag. A reasoning that does not end is left out, and has no answer. It
    begins with a tag, which for `<think>` has to begin a line.
    """
    begin, end = map(re.escape, tags)
    words, others = (WORDS, f"{CODE}|{WORDS}|{PHRASES}") if tags[0] == BEGIN else ("(?!)", "(?!)")
    inside = re.compile(f"{words}|(?P<end>{end})")
    place_of_begin = rf"(?:^|(?<={end})) *" if tags[0] == BEGIN else ""
    outside = re.compile(f"{others}|(?P<begin>{place_of_begin}{begin})|(?P<end>{end})", re.MULTILINE)
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


def find_answer(text: str, prompt: str, tags: tuple[str, str] | None) -> str:
    """
    Returns the answer in a completion of an unknown tokenizer. Messages are read by [`last_message`]. Tags are
    read by [`split_reasoning`]: these `tags`, or the first of `TAGS` in the text or at the end of the `prompt`. One in
    quotation marks is none.
    """
    if IS_MESSAGES.match(text):
        return last_message(text)
    known = dict([tags]) if tags else TAGS
    text = next((begin for begin in known if prompt.rstrip().endswith(begin)), "") + WITHOUT_TOKENS.sub("", text, 1)
    bare = re.sub(WORDS, "", text)
    found = [(bare.find(tag), pair) for pair in known.items() for tag in pair if tag in bare]
    return split_reasoning(text, tags=min(found)[1])[1] if found else text
