"""Writes files that are there completely or not at all."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yields the path of a new file, which replaces the one at `path` at the end, when it is on the disk."""
    unfinished = path.with_name(f"_{path.name}_{os.getpid()}")
    try:
        yield unfinished
        with unfinished.open("rb") as file:
            os.fsync(file.fileno())
        unfinished.replace(path)
    except BaseException:  # such as a full disk
        unfinished.unlink(missing_ok=True)
        raise


def write_text(path: Path, text: str) -> None:
    """Writes a file that is there completely or not at all."""
    with replacing(path) as unfinished:
        unfinished.write_text(text, encoding="utf-8")
