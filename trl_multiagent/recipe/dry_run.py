"""The output of `--dry_run`, the same for every command."""

from collections.abc import Mapping
from typing import Any


HEADING = "Dry run: no model was loaded, nothing was written."


def print_lines(lines: Mapping[str, Any]) -> None:
    """Prints the lines of a plan, each with its name."""
    for name, text in lines.items():
        print(f"  {name:<15}  {text}")
