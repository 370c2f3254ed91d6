"""Makes texts that a model or its program wrote fit to stand in another agent's prompt."""

import re

from trl_multiagent.console import printable


MAX_TEXT = 300  # characters
MARKER = re.compile(r"<(?=[^\s=])")


def shown_line(text: str) -> str:
    """
    Shortens a text that an agent may have written, and makes it one line without control characters. A space behind
    each `<` breaks the markers of chats, such as `<|im_end|>`, which would end the prompt. Python code has this space
    anyway.
    """
    return MARKER.sub("< ", printable(" ".join(text[:MAX_TEXT].split())))
