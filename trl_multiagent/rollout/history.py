"""Builds an agent's prompt from its past turns and the environment's new prompt."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from trl_multiagent.environments.base import Prompt, Turn
from trl_multiagent.models.chat_markers import marker_pattern, without_markers
from trl_multiagent.rollout.history_options import FULL_HISTORY, HistoryOptions
from trl_multiagent.rollout.tree import Node


# Markers that an agent sees in its own responses, because they begin no turn
OWN_MARKERS = re.compile(r"(</?tool_call>)")
EARLIER_ANSWER = "Your earlier answer:\n"  # precedes a response whose prompt is not shown


@dataclass
class WholePrompt:
    """An agent's prompt at a node, with what it sees of its past turns."""

    prompt: Prompt  # a text or chat messages
    ids: list[int]  # its token ids
    # How many past turns were left out, or cut down to the first prompt, because of `max_history_length`; `None` without a limit
    dropped_turns: int | None = None


def uses_chat_template(tokenizer: PreTrainedTokenizerBase, setting: bool | None) -> bool:
    """Returns whether an agent's prompts are chat messages: `setting`, or if that is `None`, whether the tokenizer has a template."""
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

    Chat messages of user and assistant alternate, because many templates require this: a past prompt without its response is put
    in front of the next prompt, in the same message, and so is a response without its prompt.

    Args:
        role (`str`): The agent.
        history (`Sequence[Turn]`): Past turns, oldest first. The agent sees those in which it acted.
        prompt (`Prompt`): The agent's new prompt: a text or chat messages.
        as_chat (`bool`): Whether to return chat messages instead of one text.
        options ([`HistoryOptions`], *optional*): What the agent sees of the past turns. By default, everything.
        dropped (`int`, *optional*, defaults to `0`): How many of the oldest visible turns are left out.
        markers (`re.Pattern`, *optional*): What texts that models may have written must not spell, see [`~chat_markers.marker_pattern`]:
            the responses, except for tool calls, and all prompts after the first.

    Raises:
        ValueError: `as_chat` is False, but the environment returned chat messages.
    """
    own, parts = own_turns(role, history), []
    for turn, (shows_prompt, shows_response) in zip(own, options.shown(len(own), dropped), strict=True):
        past, response = turn.prompts[role], turn.joint_action[role]
        if markers is not None:
            # The prompts of the first turn are the task's own. Later ones may quote what models have written
            past = past if turn is history[0] else without_markers(past, markers)
            texts = enumerate(OWN_MARKERS.split(response))
            response = "".join(x if k % 2 else without_markers(x, markers) for k, x in texts)
        parts.append((past if shows_prompt else None, response if shows_response else None))
    if markers is not None and history:
        prompt = without_markers(prompt, markers)
    if as_chat:
        return _chat(parts, prompt)
    if not isinstance(prompt, str):
        raise ValueError(
            f"The environment returned chat messages for agent {role!r}, but its tokenizer has no chat template: "
            "return plain text, or use a tokenizer with a chat template."
        )
    shown = [
        f"{EARLIER_ANSWER if past_prompt is None else past_prompt}{response or ''}"
        for past_prompt, response in parts
        if (past_prompt, response) != (None, None)
    ]
    return "\n\n".join([*shown, prompt])


def _chat(parts: list[tuple[Prompt | None, str | None]], prompt: Prompt) -> list[dict[str, str]]:
    """Joins the shown parts of the past turns and the new prompt as chat messages, in which user and assistant alternate."""
    messages: list[dict[str, str]] = []
    waiting: list[str] = []  # texts for the next message of the user
    for past_prompt, response in parts:
        if past_prompt is not None:
            of_turn = _after(waiting, past_prompt)
            waiting = []
            if response is None and of_turn[-1]["role"] == "user":
                waiting = [of_turn.pop()["content"]]
            messages += of_turn
            if response is not None:
                messages.append({"role": "assistant", "content": response})
        elif response is not None:
            waiting.append(f"{EARLIER_ANSWER}{response}")
    return messages + _after(waiting, prompt)


def _after(texts: list[str], prompt: Prompt) -> list[dict[str, str]]:
    """Returns a prompt as chat messages, with some texts in front of its first message of the user."""
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
    Makes one agent's prompt at each of some nodes at which it acts.

    If a prompt continues the agent's last prompt and response, it begins with their very token ids, and only the text
    after them is tokenized. Otherwise, for example because the chat template removes parts of past messages, the whole prompt is
    tokenized.

    Args:
        role, nodes, tokenizer, options: The agent, the nodes, its tokenizer, and what it sees of the past turns.
        end_tokens (`Sequence[int]`): The tokens that end a completion.
        as_chat (`bool`): Whether the prompts are chat messages.
        tokenize (`Callable[[list], list[list[int]]]`): Tokenizes whole prompts, texts or lists of chat messages.
        render (`Callable[[list[dict]], str]`): Applies the chat template to messages.
    """
    markers = marker_pattern(tokenizer, render) if as_chat and any(node.history for node in nodes) else None

    def build(chosen: Sequence[Node], dropped: int) -> list[WholePrompt]:
        prompts = [
            whole_prompt(role, node.history, node.prompts[role], as_chat, options, dropped, markers) for node in chosen
        ]
        ids = tokenize(prompts) if prompts else []
        built = [WholePrompt(*x) for x in zip(prompts, ids, strict=True)]
        if options.max_history_length is not None:
            for node, made in zip(chosen, built, strict=True):
                all_turns, turns = (options.shown(len(own_turns(role, node.history)), k) for k in (0, dropped))
                # A first turn of which only the prompt is left counts, too
                made.dropped_turns = sum(part != left for part, left in zip(all_turns, turns, strict=True))
        continue_turns(role, chosen, built, tokenizer, end_tokens, render if as_chat else str)
        return built

    whole = build(nodes, 0)
    if options.max_history_length is None:
        return whole
    later = [k for k, node in enumerate(nodes) if own_turns(role, node.history)]
    alone = tokenize([whole_prompt(role, (), nodes[k].prompts[role], as_chat) for k in later]) if later else []
    room = {k: len(ids) + options.max_history_length for k, ids in zip(later, alone, strict=True)}
    dropped = 0
    while too_long := [k for k in later if len(whole[k].ids) > room[k]]:
        dropped += 1
        # Without any past turn, a prompt fits
        later = [k for k in too_long if dropped <= len(own_turns(role, nodes[k].history)) + 1]
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
    Replaces the token ids of those prompts that continue the agent's last prompt and response, in place; see [`tokenize_nodes`].

    The new ids stand for the same text. They only differ if the tokenizer splits a response differently from the way in which it was
    sampled.
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
            response = response[:-1]  # if it belongs to the text, the rest begins with it
        rest = tokenizer(text[len(start) :], add_special_tokens=False)["input_ids"]
        ids = [*before.prompt_ids, *response, *rest]
        if ids != prompt.ids and tokenizer.decode(ids) == tokenizer.decode(prompt.ids):
            prompt.ids = ids
