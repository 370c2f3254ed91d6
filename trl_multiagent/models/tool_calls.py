"""Reads the calls of tools in answers, in the forms that open models write."""

import contextlib
import json
import re
from collections.abc import Mapping
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from trl_multiagent.models.reasoning import CompletionReader


# What stands around a call in the answers of Hermes, Qwen and GLM, Qwen3-Coder, Mistral, Llama, DeepSeek, Kimi K2,
# Cohere, Phi and gpt-oss
CALL = re.compile(
    r"<tool_call>(.*?)(?:</tool_call>|\Z)|(<function=.*?)(?:</function>|\Z)|\[TOOL_CALLS\]((?:(?!\[TOOL_CALLS\]).)*)"
    r"|<\|python_tag\|>(.*)|<｜tool▁call▁begin｜>(.*?)(?:<｜tool▁call▁end｜>|\Z)|to=functions\.(\w[^{]*\{.*)"
    r"|<\|tool_call_begin\|>(.*?)(?:<\|tool_call_end\|>|\Z)|<\|START_ACTION\|>(.*?)(?:<\|END_ACTION\|>|\Z)"
    r"|<\|tool_call\|>(.*?)(?:<\|/tool_call\|>|\Z)",
    re.DOTALL,
)
# A call whose arguments, in JSON, follow its name
NAMED = re.compile(r"(?:function<｜tool▁sep｜>|<function=|functions\.)?([\w.-]+)(?![\w.-])[^{]*(?=\{)")
TEXTS = re.compile(
    r"<parameter=([^<>]+)>\n?((?:(?!<parameter=).)*?)\n?</parameter>"
    r"|<arg_key>([^<]*)</arg_key>\s*<arg_value>((?:(?!<arg_key>).)*?)</arg_value>",
    re.DOTALL,
)
JSON = json.JSONDecoder(strict=False)
# The tags and the JSON are those in the chat templates of these models
INSTRUCTIONS = (
    "You have tools. Each line between these tags describes one:\n<tools>\n{}\n</tools>\n\nTo use one, write its "
    'name and its arguments as JSON between these tags:\n<tool_call>\n{{"name": <name>, "arguments": <JSON '
    "object>}}\n</tool_call>"
)


def find_calls(answer: str) -> list[str]:
    """
    Returns the texts of the tool calls in an answer, in the forms that open models write. An answer may also consist
    of calls in JSON, as those of Llama and of OpenAI's interface do.
    """
    if answer.strip()[:1] in ("{", "["):
        with contextlib.suppress(ValueError, RecursionError):
            calls = read_calls(answer)
            if calls and all(is_call(call) for call in calls):
                return [answer]
    return [next(text for text in match.groups() if text is not None) for match in CALL.finditer(answer)]


def unread_call(tokenizer: PreTrainedTokenizerBase) -> str:
    """Returns how a chat template writes a call, if [`find_calls`] does not read it, or an empty text."""
    call = {"type": "function", "id": "a12345678", "function": {"name": "look_up", "arguments": {"text": "rain"}}}
    asked = [{"role": "user", "content": "?"}]
    with contextlib.suppress(TemplateError, TypeError):  # templates without tools, or for arguments as a text
        prompt = str(tokenizer.apply_chat_template(asked, add_generation_prompt=True, tokenize=False))
        answer = {"role": "assistant", "content": "", "tool_calls": [call]}
        written = str(tokenizer.apply_chat_template([*asked, answer], tokenize=False)).removeprefix(prompt)
        ids, reader = [tokenizer(written, add_special_tokens=False)["input_ids"]], CompletionReader(tokenizer)
        (_, read) = reader.read(tokenizer(prompt)["input_ids"], ids, reader.texts(ids))[0]
        if "look_up" in written and not any("rain" in str(read_calls(x)) for x in find_calls(read)):
            return written
    return ""


def is_call(value: Any) -> bool:
    """Returns whether a JSON value has the keys of a tool call."""
    keys = {*value} if isinstance(value, Mapping) else set()
    return "function" in keys or ("name" in keys and not keys.isdisjoint(("arguments", "parameters")))


def read_calls(text: str) -> list[Any]:
    """Reads the calls in a text that [`find_calls`] returned. Raises `ValueError` if they are malformed."""
    text, found = text.strip(), TEXTS.findall(text)
    named = NAMED.match(text)
    if found or (named is None and text[:1] not in ("{", "[")):  # the arguments are texts
        name = re.split(r"[<>\s]", text.removeprefix("<function="), maxsplit=1)[0]
        return [{"name": name, "texts": {(a or c).strip(): b or d for a, b, c, d in found}}]
    try:
        value, _ = JSON.raw_decode(text, named.end() if named else 0)
    except json.JSONDecodeError as error:
        rest = text[error.pos :][:20]
        raise ValueError(f"The call is not complete JSON: {error.msg}, but there is {rest or 'nothing'!r}.") from None
    if named:
        return [{"name": named[1], "arguments": value}]
    value = value.get("tool_calls", value) if isinstance(value, dict) else value
    return value if isinstance(value, list) else [value]


def from_text(text: str) -> Any:
    """Returns the JSON value that a text is, or the text."""
    try:
        return JSON.decode(text)
    except ValueError:
        return text
