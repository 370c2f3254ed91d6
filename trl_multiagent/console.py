"""
What programs print and show: fewer messages of other libraries, no control characters, and tables, which are lists of
rows with the heading first. Its import is fast.
"""

import functools
import logging
import re
import sys
import warnings
from collections.abc import Sequence
from typing import Any


MAX_TEXT = 300  # characters of a line that is shown in a prompt


def quiet_libraries() -> None:
    """Hides messages of other libraries. The package calls this on its import, before it imports these libraries."""
    # On a machine without a GPU, bitsandbytes recommends a package for 4-bit weights, even if a run has none. torchao
    # lists the kernels that need another GPU when it is imported
    for name in ("bitsandbytes.backends.cpu.ops", "torchao", "torch.utils._pytree"):
        logging.getLogger(name).setLevel(logging.ERROR)
    # TRL's own default is the deprecated name
    warnings.filterwarnings("ignore", "`(is_)?gradient_checkpointing(_kwargs)?` is deprecated", FutureWarning)
    # transformers from 5.24 on calls it `cache`, which 5.23 does not know
    warnings.filterwarnings("ignore", "`past_key_values` is deprecated", FutureWarning)
    # `accelerate launch` lists the flags that were left out. Their defaults are right
    logging.getLogger("accelerate.commands.launch").addFilter(
        lambda record: "had defaults used instead" not in str(record.msg)
    )


def install_command(extra: str) -> str:
    """Returns the command that installs the packages of an extra. It names them, because no index has this package."""
    from importlib.metadata import requires

    needed = [x.split(";")[0] for x in requires("trl-multiagent") or () if f'"{extra}"' in x]
    return " ".join(["pip install", *(f'"{requirement}"' for requirement in needed)])


@functools.cache
def tell(text: str) -> None:
    """Prints a text to stderr once."""
    print(text, file=sys.stderr)


def printable(text: str) -> str:
    """Returns a text with a dot for each character that could control the terminal. Line breaks and tabs stay."""
    return "".join(c if c in "\n\t" or c.isprintable() else "·" for c in text)


def one_line(text: str) -> str:
    """Returns a text on one line, without control characters."""
    return printable(" ".join(text.split()))


def shown_line(text: str) -> str:
    """
    Shortens a text that an agent may have written, and makes it one line that is fit to stand in another agent's
    prompt, without control characters. A space behind each `<` breaks the markers of chats, such as `<|im_end|>`,
    which would end the prompt. Python code has this space anyway.
    """
    return re.sub(r"<(?=[^\s=])", "< ", one_line(text[:MAX_TEXT]))


def text_table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Returns the lines of a table as text. All columns but the first are aligned to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows]
    return [lines[0].rstrip(), "-" * len(lines[0]), *[line.rstrip() for line in lines[1:]]]


def markdown_table(rows: Sequence[Sequence[Any]]) -> str:
    """Returns a table in Markdown."""
    cells = [[str(cell).replace("|", r"\|") for cell in row] for row in rows]
    cells.insert(1, ["---"] * len(cells[0]))
    return "".join(f"| {' | '.join(row)} |\n" for row in cells)
