"""History: how an agent's past turns and its new prompt become one prompt."""

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from trl_multiagent.environments.base import Prompt, Turn


def uses_chat_template(tokenizer: PreTrainedTokenizerBase, setting: bool | None) -> bool:
    """Whether an agent's prompts are chat messages: as set, or by default where its tokenizer has a chat template."""
    return tokenizer.chat_template is not None if setting is None else setting


def whole_prompt(role: str, history: Sequence[Turn], prompt: Prompt, as_chat: bool) -> list[dict[str, str]] | str:
    """
    Puts together an agent's own past prompts and responses, and its new prompt.

    Args:
        role (`str`): The agent.
        history (`Sequence[Turn]`): Past turns, oldest first.
        prompt (`Prompt`): The agent's new prompt.
        as_chat (`bool`): Whether to return chat messages or one text.

    Raises:
        ValueError: one text is wanted, but the environment gives chat messages.
    """
    if as_chat:
        messages = []
        for turn in history:
            messages += _as_messages(turn.prompts[role])
            messages.append({"role": "assistant", "content": turn.joint_action[role]})
        return messages + _as_messages(prompt)
    if not isinstance(prompt, str):
        raise ValueError(
            f"The environment gives agent {role!r} chat messages, but its tokenizer has no chat template: give plain "
            "text, or a tokenizer with a chat template."
        )
    return "".join(f"{turn.prompts[role]}{turn.joint_action[role]}\n\n" for turn in history) + prompt


def _as_messages(prompt: Prompt) -> list[dict[str, str]]:
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
