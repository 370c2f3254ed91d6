"""Prevents two programs from writing to the same folder."""

import contextlib
import fcntl
import logging
import os
from collections.abc import Iterator
from pathlib import Path


logger = logging.getLogger(__name__)


@contextlib.contextmanager
def reserve(folder: Path, what: str, advice: str) -> Iterator[None]:
    """
    Makes a folder. Inside, no other program can reserve it, because two would overwrite each other's files. A process that ends, in
    whatever way, gives the folder free.

    Args:
        folder (`Path`): The folder.
        what (`str`): What is written to it, such as "run".
        advice (`str`): What to do if the folder is reserved, after "wait until it has ended, or".

    Raises:
        ValueError: another program has reserved it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    handle = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"Another {what} is writing to {folder}: wait until it has ended, or {advice}.") from None
        except OSError as error:  # some network file systems have no locks
            logger.warning("%s cannot be locked (%s): start no other %s in it.", folder, error.strerror, what)
        yield
    finally:
        os.close(handle)
