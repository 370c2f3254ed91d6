"""
The text that a joint reward model reads: the prompt of every role, then the answer of every role, each below a
heading.

The wording is stored in the configuration of the trained model, so it is the same in training and in use.
"""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


CONFIG_KEY = "joint_text"  # in the model's config.json
PROMPT_TEMPLATE = "### Prompt of {role}\n{text}\n\n"
ANSWER_TEMPLATE = "### Answer of {role}\n{text}\n\n"

Text = str | Sequence[Mapping[str, Any]]  # plain text or chat messages


@dataclass(frozen=True)
class JointText:
    """
    Wording, order and length of the text of a joint answer.

    Args:
        roles (`tuple[str, ...]`): The roles, in the order in which they are written.
        prompt_template (`str`, *optional*): How the prompt of a role is written, with `{role}` and `{text}`.
        answer_template (`str`, *optional*): How the answer of a role is written. All answers follow all prompts.
        max_length (`int`, *optional*): Tokens of a text. Prompts are truncated at the end to fit; answers are never
            truncated.
    """

    roles: tuple[str, ...]
    prompt_template: str = PROMPT_TEMPLATE
    answer_template: str = ANSWER_TEMPLATE
    max_length: int | None = None

    @classmethod
    def from_config(cls, values: Mapping[str, Any]) -> "JointText":
        """Reads the fields from a configuration, in which the roles are a list."""
        return cls(**{**values, "roles": tuple(values["roles"])})

    def text(self, prompts: Mapping[str, Text], answers: Mapping[str, Text], prompt_length: int | None = None) -> str:
        """
        Writes the text of a joint answer.

        Args:
            prompts, answers (`Mapping[str, str | list[dict]]`): The prompt and the answer of every role. For chat
                messages, only the contents are used.
            prompt_length (`int`, *optional*): Number of characters to which each prompt is truncated.
        """
        parts = [write(self.prompt_template, role, plain(prompts[role])[:prompt_length]) for role in self.roles]
        return "".join(parts + [write(self.answer_template, role, plain(answers[role])) for role in self.roles])

    def encode(
        self, tokenizer: Any, prompts: Mapping[str, Text], answers: Mapping[str, Text]
    ) -> tuple[list[int], bool]:
        """
        Tokenizes a joint answer, with an end-of-sequence token at its end. The prompts are truncated as little as
        needed for at most `max_length` tokens. If the answers alone are longer, so is the text.

        Returns:
            `tuple[list[int], bool]`: The token ids, and whether the prompts were truncated.
        """

        def tokenize(prompt_length: int | None = None) -> list[int]:
            text, end = self.text(prompts, answers, prompt_length), tokenizer.eos_token or ""
            return tokenizer(text=text if text.endswith(end) else text + end)["input_ids"]  # as TRL's RewardTrainer

        whole = tokenize()
        if self.max_length is None or len(whole) <= self.max_length:
            return whole, False
        longest = max(len(plain(prompts[role])) for role in self.roles)
        fitting = bisect_right(range(longest), self.max_length, key=lambda length: len(tokenize(length)))
        return tokenize(max(0, fitting - 1)), True


def plain(text: Text) -> str:
    """Returns a text, or the contents of chat messages, one below the other. A tool call has no contents."""
    return text if isinstance(text, str) else "\n\n".join(message["content"] or "" for message in text)


def write(template: str, role: str, text: str) -> str:
    """Fills a template. Braces in the text have no meaning."""
    before, after = template.replace("{role}", role).split("{text}")
    return before + text + after
