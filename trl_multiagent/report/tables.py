"""Writes tables for the terminal and for Markdown. A table is a list of rows; the first row is the heading."""

from collections.abc import Sequence
from typing import Any


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
