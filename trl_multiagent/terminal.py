"""Makes texts of models, data or servers safe to print."""


def printable(text: str) -> str:
    """Returns a text with a dot for each character that could control the terminal. Line breaks and tabs stay."""
    return "".join(c if c in "\n\t" or c.isprintable() else "·" for c in text)
