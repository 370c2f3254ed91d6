"""Builds an agent's prompt from its past turns and the environment's new prompt, and tokenizes it."""

import contextlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template
from trl.data_utils import prepare_multimodal_messages

from trl_multiagent.environments.base import Prompt, Reply, Turn, as_messages, call_of
from trl_multiagent.models.chat_markers import CONTENT, marker_pattern, without_markers
from trl_multiagent.models.reasoning import MALFORMED
from trl_multiagent.rollout.options import FULL_HISTORY, HistoryOptions
from trl_multiagent.rollout.tree import Node


EARLIER_ANSWER = "Your earlier answer:\n"  # precedes a response that is shown without its prompt


@dataclass
class WholePrompt:
    """An agent's prompt at a node, with the visible part of its past turns."""

    prompt: Prompt  # a text or chat messages
    ids: list[int]  # its token ids
    # Number of past turns that `max_history_length` removed, or cut down to the first prompt; `None` without a limit
    dropped_turns: int | None = None


def uses_chat_template(tokenizer: PreTrainedTokenizerBase, setting: bool | None) -> bool:
    """
    Returns whether an agent's prompts are chat messages: `setting`, or, if it is `None`, whether the tokenizer has a
    template.
    """
    return tokenizer.chat_template is not None if setting is None else setting


def own_turns(role: str, history: Sequence[Turn]) -> list[Turn]:
    """Returns the past turns in which a role acted."""
    return [turn for turn in history if role in turn.prompts]


def whole_prompt(
    role: str,
    history: Sequence[Turn],
    prompt: Prompt,
    as_chat: bool,
    options: HistoryOptions = FULL_HISTORY,
    dropped: int = 0,
    markers: re.Pattern[str] | None = None,
) -> list[dict[str, str]] | str:
    """
    Joins an agent's own past prompts and responses with its new prompt.

    Chat messages of user and assistant alternate, because many templates require this. So a past prompt without its
    response, or a response without its prompt, is put in front of the next prompt, in the same message.

    Args:
        role (`str`): The agent.
        history (`Sequence[Turn]`): Past turns, oldest first. The agent sees the turns in which it acted.
        prompt (`Prompt`): The agent's new prompt: a text or chat messages.
        as_chat (`bool`): Whether to return chat messages instead of one text.
        options ([`HistoryOptions`], *optional*): The part of the past turns that the agent sees. By default,
            everything.
        dropped (`int`, *optional*, defaults to `0`): Number of the oldest visible turns that are left out.
        markers (`re.Pattern`, *optional*): Markers of the chat, see [`~chat_markers.marker_pattern`], that texts of
            models must not spell. By default, they are not looked for.

    Raises:
        ValueError: `as_chat` is False, but the environment returned chat messages.
    """
    own, parts = own_turns(role, history), []
    for turn, (shows_prompt, shows_response) in zip(own, options.shown(len(own), dropped), strict=True):
        past, response = turn.prompts[role], turn.joint_action[role]
        message = response.message if isinstance(response, Reply) else {"content": response}
        if markers is not None:
            past, response = without_markers(past, markers), without_markers(response, markers)
            message = {name: without_markers(text, markers) for name, text in message.items()}
        answer = message if as_chat and shows_prompt else {"content": response}
        parts.append((past if shows_prompt else None, answer if shows_response else None))
    if markers is not None:
        prompt = without_markers(prompt, markers)
    if as_chat:
        return _chat(parts, prompt)
    if not isinstance(prompt, str):
        raise ValueError(
            f"The environment returned chat messages for agent {role!r}, but its tokenizer has no chat template: "
            "return plain text, or use a tokenizer with a chat template."
        )
    shown = [
        f"{EARLIER_ANSWER if past_prompt is None else past_prompt}{'' if answer is None else answer['content']}"
        for past_prompt, answer in parts
        if (past_prompt, answer) != (None, None)
    ]
    return "\n\n".join([*shown, prompt])


def _chat(parts: list[tuple[Prompt | None, dict[str, str] | None]], prompt: Prompt) -> list[dict[str, str]]:
    """
    Joins the shown parts of the past turns and the new prompt as chat messages, in which user and assistant alternate.
    """
    messages = []
    waiting: list[str] = []  # texts for the next message of the user
    for past_prompt, answer in parts:
        if past_prompt is not None:
            messages += _after(waiting, past_prompt)
            waiting = []
            if answer is not None:
                messages.append({"role": "assistant", **answer})
            elif messages[-1]["role"] == "user":
                waiting = [messages.pop()["content"]]
        elif answer is not None:
            waiting.append(f"{EARLIER_ANSWER}{answer['content']}")
    return messages + _after(waiting, prompt)


def _after(texts: list[str], prompt: Prompt) -> list[dict[str, str]]:
    """Returns a prompt as chat messages, with the texts in front of its first user message."""
    messages = [*as_messages(prompt)]
    if not texts:
        return messages
    for k, message in enumerate(messages):
        if message["role"] == "user":
            messages[k] = {**message, "content": "\n\n".join([*texts, message["content"]])}
            return messages
    return [{"role": "user", "content": "\n\n".join(texts)}, *messages]


def tokenize_nodes(
    role: str,
    nodes: Sequence[Node],
    tokenizer: PreTrainedTokenizerBase,
    end_tokens: Sequence[int],
    as_chat: bool,
    options: HistoryOptions,
    template_kwargs: Mapping[str, Any],
) -> list[WholePrompt]:
    """
    Makes an agent's prompts at nodes at which it acts.

    If a prompt continues the agent's last prompt and response, it begins with the same token ids, and only the text
    after them is tokenized. Otherwise, for example because the chat template removes parts of past messages, the whole
    prompt is tokenized.

    Args:
        role, nodes, tokenizer, options: The agent, the nodes, its tokenizer, and the part of the past turns that it
            sees.
        end_tokens (`Sequence[int]`): The tokens that end a completion.
        as_chat (`bool`): Whether the prompts are chat messages.
        template_kwargs (`Mapping[str, Any]`): Arguments of the chat template.
    """
    render: Callable[..., str] = partial(render_chat, tokenizer, **template_kwargs) if as_chat else str
    tokenize = partial(tokenize_prompts, tokenizer, **template_kwargs)
    markers = marker_pattern(tokenizer, render) if as_chat and nodes else None
    # A question may leave all past turns out
    pasts = [own_turns(role, node.history if call_of(node.prompts[role]).memory else ()) for node in nodes]

    def continue_turn(node: Node, made: WholePrompt) -> None:
        """
        Replaces the token ids of a prompt that continues the last one. The new ids stand for the same text. They
        differ only if the tokenizer splits a response into other tokens than the sampled ones.
        """
        before, g = node.continues.get(role, (None, 0))
        if before is None or before.prompt is None:
            return
        text, start = render(made.prompt), render(before.prompt) + before.texts[g]
        if not text.startswith(start):
            return
        response = before.completion_ids[g]
        if response[-1:] and response[-1] in end_tokens:
            response = response[:-1]  # the rest of the text begins with the end token if the text contains it
        ids = [*before.prompt_ids, *response, *tokenizer(text[len(start) :], add_special_tokens=False)["input_ids"]]
        if ids != made.ids and tokenizer.decode(ids) == tokenizer.decode(made.ids):
            made.ids = ids

    def build(chosen: Sequence[int], dropped: Mapping[int, int]) -> list[WholePrompt]:
        prompts = [
            whole_prompt(role, pasts[k], nodes[k].prompts[role], as_chat, options, dropped.get(k, 0), markers)
            for k in chosen
        ]
        built = [WholePrompt(*x) for x in zip(prompts, tokenize(prompts), strict=True)]
        for k, made in zip(chosen, built, strict=True):
            if options.max_history_length is not None:
                all_turns, turns = (options.shown(len(pasts[k]), number) for number in (0, dropped.get(k, 0)))
                # A first turn counts, too, if only its prompt is left
                made.dropped_turns = sum(part != left for part, left in zip(all_turns, turns, strict=True))
            continue_turn(nodes[k], made)
        return built

    whole = build(range(len(nodes)), {})
    if options.max_history_length is None:
        return whole
    later = [k for k, past in enumerate(pasts) if past]
    alone = tokenize([whole_prompt(role, (), nodes[k].prompts[role], as_chat, markers=markers) for k in later])
    room = {k: len(ids) + options.max_history_length for k, ids in zip(later, alone, strict=True)}
    # By bisection, the fewest dropped turns with which a prompt fits; without any past turn, it does
    fails = {k: 0 for k in later if len(whole[k].ids) > room[k]}
    fits = {k: len(pasts[k]) + 2 for k in fails}
    while tried := {k: (fails[k] + fits[k]) // 2 for k in fails if fits[k] - fails[k] > 1}:
        for k, shorter in zip(tried, build([*tried], tried), strict=True):
            if len(shorter.ids) > room[k]:
                fails[k] = tried[k]
            else:
                fits[k], whole[k] = tried[k], shorter
    return whole


def render_chat(tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, Any]], /, **kwargs: Any) -> str:
    """
    Returns the text of chat messages that [`tokenize_prompts`] tokenizes. Some chat templates take contents as lists
    of parts alone, as SmolVLM's does, refuse empty answers, as Ministral's does, or refuse or leave out the results of
    tools, as Gemma's does: these become messages of the user. Calls that a model wrote in another form, see
    [`~models.reasoning.CompletionReader.message`], get the template's form, if their results follow.
    """
    from trl_multiagent.models.tool_calls import find_calls, read_calls

    template = tokenizer.get_chat_template()
    asked, answered = ("user", ""), ("assistant", CONTENT)
    takes_results = CONTENT in probe(template, asked, answered, ("tool", CONTENT)).replace(CONTENT, "", 1)
    if all(message["role"] != "user" for message in messages):  # Qwen3.5's template demands one
        takes_results &= CONTENT in probe(template, ("tool", CONTENT))
    messages, result = [*messages], -1  # the place of the next result that the template takes
    for k, message in enumerate(messages):
        if isinstance(calls := message.get("tool_calls"), str):
            messages[k] = {"role": "assistant", "content": calls}
            with contextlib.suppress(*MALFORMED):  # a malformed call stays a text
                if messages[k + 1]["role"] == "tool":
                    found = [{"function": call} for text in find_calls(calls) for call in read_calls(text)]
                    messages[k], result = {**message, "tool_calls": found}, k + 1
        elif message["role"] == "tool" and k == result:
            result += 1
        elif message["role"] == "tool" and not takes_results:
            messages[k] = {**message, "role": "user"}
    if not probe(template, asked, ("assistant", "")) and probe(template, asked, answered):
        messages = [{**message, "content": message["content"] or " "} for message in messages]
    if CONTENT not in (probe(template, ("user", CONTENT)) or CONTENT):  # it may demand other messages
        messages = prepare_multimodal_messages(messages)
    try:
        return tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False, **kwargs)
    except TypeError as error:  # a template joins a number and a text
        raise TemplateError(f"with {kwargs}: {error}") from error


@lru_cache
def probe(template: str, *messages: tuple[str, str]) -> str:
    """Returns what a chat template makes of messages, each a role and a content. It is empty if it refuses them."""
    chat = [{"role": role, "content": content} for role, content in messages]
    with contextlib.suppress(TemplateError):
        return render_jinja_template([chat], chat_template=template, bos_token="", eos_token="")[0][0]
    return ""


def tokenize_prompts(tokenizer: PreTrainedTokenizerBase, prompts: list[Any], /, **kwargs: Any) -> list[list[int]]:
    """Returns the token ids of texts, or of lists of chat messages. `kwargs`: arguments of the chat template."""
    if not prompts:
        return []
    if isinstance(prompts[0], str):
        ids, begin, end = tokenizer(prompts)["input_ids"], tokenizer.bos_token_id, tokenizer.eos_token
        if len(ids[0]) > 1 and ids[0][-1] == tokenizer.eos_token_id and not prompts[0].endswith(str(end)):
            raise ValueError(
                f"The tokenizer {tokenizer.name_or_path!r} ends every prompt with {end}, so that a completion would "
                "begin after the end of the text: load it with `add_eos_token=False`."
            )
        # A prompt that begins with the token itself would get a second one
        return [own[1:] if own[:2] == [begin, begin] else own for own in ids]
    texts = [render_chat(tokenizer, messages, **kwargs) for messages in prompts]
    return tokenizer(texts, add_special_tokens=False)["input_ids"]
