"""Builds an agent's prompt from its past turns and the environment's new prompt."""

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from trl_multiagent.environments.base import Prompt, Turn


def uses_chat_template(tokenizer: PreTrainedTokenizerBase, setting: bool | None) -> bool:
    """
    Whether an agent's prompts are chat messages: `setting`, or if that is `None`, whether the tokenizer has a
    template.
    """
    return tokenizer.chat_template is not None if setting is None else setting


def whole_prompt(role: str, history: Sequence[Turn], prompt: Prompt, as_chat: bool) -> list[dict[str, str]] | str:
    """
    Joins an agent's own past prompts and responses with its new prompt.

    Args:
        role (`str`): The agent.
        history (`Sequence[Turn]`): Past turns, oldest first.
        prompt (`Prompt`): The agent's new prompt: a text or chat messages.
        as_chat (`bool`): Whether to return chat messages instead of one text.

    Returns:
        `list[dict[str, str]]` or `str`: The chat messages or the text.

    Raises:
        ValueError: `as_chat` is False, but the environment returned chat messages.
    """
    if as_chat:
        messages = []
        for turn in history:
            messages += _as_messages(turn.prompts[role])
            messages.append({"role": "assistant", "content": turn.joint_action[role]})
        return messages + _as_messages(prompt)
    if not isinstance(prompt, str):
        raise ValueError(
            f"The environment returned chat messages for agent {role!r}, but its tokenizer has no chat template: "
            "return plain text, or use a tokenizer with a chat template."
        )
    return "".join(f"{turn.prompts[role]}{turn.joint_action[role]}\n\n" for turn in history) + prompt


def _as_messages(prompt: Prompt) -> list[dict[str, str]]:
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
