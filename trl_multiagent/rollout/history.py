"""Builds an agent's prompt from its past turns and the environment's new prompt."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from trl_multiagent.environments.base import Prompt, Reply, Turn, call_of
from trl_multiagent.models.chat_markers import marker_pattern, without_markers
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


def remembered(role: str, node: Node) -> Sequence[Turn]:
    """Returns the past turns that an agent may see at a node: none, if its question says so."""
    return node.history if call_of(node.prompts[role]).memory else ()


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
            turn_messages = _after(waiting, past_prompt)
            waiting = []
            if answer is None and turn_messages[-1]["role"] == "user":
                waiting = [turn_messages.pop()["content"]]
            messages += turn_messages
            if answer is not None:
                messages.append({"role": "assistant", **answer})
        elif answer is not None:
            waiting.append(f"{EARLIER_ANSWER}{answer['content']}")
    return messages + _after(waiting, prompt)


def _after(texts: list[str], prompt: Prompt) -> list[dict[str, str]]:
    """Returns a prompt as chat messages, with the texts in front of its first user message."""
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
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
    tokenize: Callable[[list], list[list[int]]],
    render: Callable[[list[dict[str, str]]], str],
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
        tokenize (`Callable[[list], list[list[int]]]`): Tokenizes whole prompts, texts or lists of chat messages.
        render (`Callable[[list[dict]], str]`): Applies the chat template to messages.
    """
    markers = marker_pattern(tokenizer, render) if as_chat and nodes else None

    def build(chosen: Sequence[Node], dropped: int) -> list[WholePrompt]:
        prompts = [
            whole_prompt(role, remembered(role, node), node.prompts[role], as_chat, options, dropped, markers)
            for node in chosen
        ]
        ids = tokenize(prompts) if prompts else []
        built = [WholePrompt(*x) for x in zip(prompts, ids, strict=True)]
        if options.max_history_length is not None:
            for node, made in zip(chosen, built, strict=True):
                all_turns, turns = (
                    options.shown(len(own_turns(role, remembered(role, node))), k) for k in (0, dropped)
                )
                # A first turn counts, too, if only its prompt is left
                made.dropped_turns = sum(part != left for part, left in zip(all_turns, turns, strict=True))
        continue_turns(role, chosen, built, tokenizer, end_tokens, render if as_chat else str)
        return built

    whole = build(nodes, 0)
    if options.max_history_length is None:
        return whole
    later = [k for k, node in enumerate(nodes) if own_turns(role, remembered(role, node))]
    new = [whole_prompt(role, (), nodes[k].prompts[role], as_chat, markers=markers) for k in later]
    alone = tokenize(new) if new else []
    room = {k: len(ids) + options.max_history_length for k, ids in zip(later, alone, strict=True)}
    dropped = 0
    while too_long := [k for k in later if len(whole[k].ids) > room[k]]:
        dropped += 1
        # Without any past turn, a prompt fits
        later = [k for k in too_long if dropped <= len(own_turns(role, remembered(role, nodes[k]))) + 1]
        for k, shorter in zip(later, build([nodes[k] for k in later], dropped), strict=True):
            whole[k] = shorter
    return whole


def continue_turns(
    role: str,
    nodes: Sequence[Node],
    prompts: list[WholePrompt],
    tokenizer: PreTrainedTokenizerBase,
    end_tokens: Sequence[int],
    render: Callable[..., str],
) -> None:
    """
    Replaces, in place, the token ids of prompts that continue the agent's last prompt and response, see
    [`tokenize_nodes`].

    The new ids stand for the same text. They differ only if the tokenizer splits a response into other tokens than the
    sampled ones.
    """
    for node, prompt in zip(nodes, prompts, strict=True):
        before, g = node.continues.get(role, (None, 0))
        if before is None or before.prompt is None:
            continue
        text, start = render(prompt.prompt), render(before.prompt) + before.texts[g]
        if not text.startswith(start):
            continue
        response = before.completion_ids[g]
        if response[-1:] and response[-1] in end_tokens:
            response = response[:-1]  # the rest of the text begins with the end token if the text contains it
        rest = tokenizer(text[len(start) :], add_special_tokens=False)["input_ids"]
        ids = [*before.prompt_ids, *response, *rest]
        if ids != prompt.ids and tokenizer.decode(ids) == tokenizer.decode(prompt.ids):
            prompt.ids = ids
