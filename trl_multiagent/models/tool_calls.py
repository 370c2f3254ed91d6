"""Reads the calls of tools in answers, in the forms that open models write."""

import ast
import contextlib
import json
import re
from collections.abc import Mapping
from typing import Any, cast

from trl_multiagent.models.reasoning import MALFORMED


# What quotes a call: a block of code (of limited length, to keep the search fast), or code within a line
QUOTED = r"^[ \t]*(?P<mark>`{3,}|~{3,})[^\n`]*\n(?:[^\n]*\n){0,100}?[ \t]*(?P=mark)[ \t]*$|(?<!`)`[^`\n]+`(?!`)"
# What stands around a call in the answers of Hermes, Qwen and GLM, Qwen3-Coder, MiniMax, Mistral, Llama, DeepSeek,
# Kimi K2, Cohere, Phi, LFM2 and gpt-oss
CALL = re.compile(
    rf"(?P<quoted>{QUOTED})"
    r"|<tool_calls?>(.*?)(?:</tool_calls?>|\Z)|(<function=.*?)(?:</function>|\Z)|(<invoke name=.*?)(?:</invoke>|\Z)"
    r"|\[TOOL_CALLS\]((?:(?!\[TOOL_CALLS\]).)*)"
    r"|<\|python_tag\|>(.*)|<｜tool▁call▁begin｜>(.*?)(?:<｜tool▁call▁end｜>|\Z)|to=functions\.(\w[^{]*\{.*)"
    r"|<\|tool_call_begin\|>(.*?)(?:<\|tool_call_end\|>|\Z)|<\|START_ACTION\|>(.*?)(?:<\|END_ACTION\|>|\Z)"
    r"|<\|tool_call\|>(.*?)(?:<\|/tool_call\|>|\Z)|<\|tool_call_start\|>(.*?)(?:<\|tool_call_end\|>|\Z)",
    re.DOTALL | re.MULTILINE,
)
# A block of JSON, or of Gemma's calls in Python, that ends an answer
BLOCK = re.compile(
    r"^```[ \t]*(?:json|tool_calls?|tool_code|(?=\s*[\[{]))[ \t]*\n((?:(?!^```).)*)^[ \t]*```\s*\Z",
    re.DOTALL | re.MULTILINE,
)
FENCES = re.compile(r"\A\s*```\w*|```\s*\Z")
IN_PYTHON = re.compile(r"\s*\[?\s*[\w.]+\(")
# Of ReAct. What follows an observation was made up
ACTION = re.compile(
    r"^[ \t*]*Action[ \t*]*:[ \t*]*([\w.-]+)[ \t]*(?:(\([^\n]*\)|\[[^\n]*\])[ \t]*$"
    r"|\n[ \t*]*Action[ _]Input[ \t*]*:[ \t*]*\s*(.*?)(?=^[ \t*]*Observation|\Z))",
    re.DOTALL | re.MULTILINE,
)
# A call with its arguments, in JSON, after its name
NAMED = re.compile(r"(?:function<｜tool▁sep｜>|<function=|functions\.)?([\w.-]+)(?![\w.-])[^{]*(?=\{)")
TEXTS = re.compile(
    r"<parameter(?:=| name=\"?)([^<>\"]+)\"?>\n?((?:(?!<parameter[= ]).)*?)\n?</parameter>"
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
    Returns the texts of the tool calls in an answer, in the forms that open models write. Calls that are quoted as
    code are not made. Without tags, an answer may consist of calls, in JSON as in Llama and in OpenAI's
    interface or in Python as in Llama 4; end with them in a block of code; or have a line `Action:`.
    """
    if are_calls(answer):
        return [answer]
    matches = [*CALL.finditer(answer)]
    if calls := [match for match in matches if match["quoted"] is None]:
        return [next(text for text in match.groups() if text is not None) for match in calls]
    if (block := BLOCK.search(answer)) and are_calls(block[1]):
        return [block[1]]
    for action in ACTION.finditer(answer):
        if not any(quote.start() <= action.start() < quote.end() for quote in matches):
            name, brackets, given = action.groups()
            given = brackets[1:-1] if brackets else FENCES.sub("", given).strip()
            in_python = f"{name}({given})"
            return [in_python if brackets and are_calls(in_python) else json.dumps({"name": name, "arguments": given})]
    return []


def are_calls(text: str) -> bool:
    """Returns whether a text consists of calls, in JSON or in Python."""
    with contextlib.suppress(*MALFORMED):
        if text.lstrip()[:1] in ("{", "[") or IN_PYTHON.match(text):
            calls = read_calls(text)
            return bool(calls) and all(map(is_call, calls))
    return False


def is_call(value: Any) -> bool:
    """Returns whether a JSON value has the keys of a tool call."""
    keys = {*value} if isinstance(value, Mapping) else set()
    is_action = {"action", "action_input"} <= keys and value["action"] != "Final Answer"  # of LangChain
    return is_action or "function" in keys or ("name" in keys and not keys.isdisjoint(("arguments", "parameters")))


def read_calls(text: str) -> list[Any]:
    """Reads the calls in a text that [`find_calls`] returned. Malformed ones raise an error of [`MALFORMED`]."""
    if IN_PYTHON.match(text):
        return python_calls(text)
    text, found = FENCES.sub("", text).strip(), TEXTS.findall(text)
    named = NAMED.match(text)
    if found or (named is None and text[:1] not in ("{", "[")):  # the arguments are texts
        name = re.split(r"[<>\s\"]", re.sub(r'^<(?:function=|invoke name="?)', "", text), maxsplit=1)[0]
        return [{"name": name, "texts": {(a or c).strip(): b or d for a, b, c, d in found}}]
    try:
        value, end = JSON.raw_decode(text, named.end() if named else 0)
    except json.JSONDecodeError as error:
        rest = text[error.pos :][:20]
        raise ValueError(f"The call is not complete JSON: {error.msg}, but there is {rest or 'nothing'!r}.") from None
    if named:
        return [{"name": named[1], "arguments": value}]
    value = value.get("tool_calls", value) if isinstance(value, dict) else value
    values = value if isinstance(value, list) else [value]
    rest = text[end:].lstrip(" \n;,")
    return values + read_calls(rest) if rest.startswith("{") else values


def from_text(text: str) -> Any:
    """Returns the JSON value that a text is, or the text."""
    try:
        return JSON.decode(text)
    except ValueError:
        return text


def python_calls(text: str) -> list[dict[str, Any]]:
    """Reads a call in Python, or a list of calls, with named arguments. Raises an error of [`MALFORMED`]."""
    body = ast.parse(text.strip(), mode="eval").body
    calls = []
    for call in cast(list[Any], body.elts if isinstance(body, ast.List) else [body]):
        if call.args:
            raise ValueError("Arguments must be named.")
        arguments = {x.arg: ast.literal_eval(x.value) for x in call.keywords}
        calls.append({"name": ast.unparse(call.func), "arguments": arguments})
    return calls
