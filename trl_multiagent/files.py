"""Writes files atomically: a file is complete, or it does not exist."""

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """
    Yields the path of a new file, which replaces the one at `path` at the end, when it is on the disk. A process that is killed leaves the
    new file behind, and the next one overwrites it.
    """
    unfinished = unfinished_path(path)
    try:
        with naming(path):
            yield unfinished
            with unfinished.open("rb") as file:
                os.fsync(file.fileno())
            unfinished.replace(path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise


def is_disk_full(error: BaseException) -> bool:
    """Whether an error of the system says that a disk is full, or that a limit of the user or of a file's size is reached."""
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Inside, an error such as that of a full disk names the file."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise


def unfinished_path(path: Path) -> Path:
    """Where the new content of a file is written first."""
    return path.with_name(f"_{path.name}_unfinished")


def write_text(path: Path, text: str) -> None:
    """Writes a file atomically."""
    with replacing(path) as unfinished:
        unfinished.write_text(text, encoding="utf-8")
