"""The files of a checkpoint: complete and undamaged, or refused; written so that a crash leaves the previous one whole."""

import functools
import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

from transformers.trainer_utils import sort_checkpoints
from transformers.utils import logging


logger = logging.get_logger(__name__)

FORMAT_VERSION = 1
STATE_FILE = "team_trainer_state.json"  # what the checkpoint belongs to, and the list of its files
# Checkpoints that are being written or removed. The name keeps it out of uploads, and out of what counts as a checkpoint
UNFINISHED_FOLDER = "_unfinished"


def read_checkpoint(folder: str | Path, verify: bool = False) -> dict[str, Any]:
    """
    What `team_trainer_state.json` says of a checkpoint that can be resumed.

    Args:
        folder (`str` or `Path`): Folder of the checkpoint.
        verify (`bool`, *optional*, defaults to `False`):
            Whether to read all files and compare their checksums. Without it only names and sizes are looked at.

    Returns:
        `dict`: With the keys `global_step`, `settings`, `versions`, `tracking`, `files` (sizes in bytes), `checksums` and
        `changes` (settings that were changed when the run was resumed).

    Raises:
        ValueError: it is no checkpoint of a team trainer, another release wrote it, or a file is missing or damaged.
    """
    folder = Path(folder)
    path = folder / STATE_FILE
    if not path.is_file():
        raise ValueError(f"{folder} is no complete checkpoint of a team trainer: there is no {path}.")
    try:
        state = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {error}. {_advice(folder)}") from error
    if not isinstance(state, dict) or state.get("format_version") != FORMAT_VERSION:
        found = state.get("format_version") if isinstance(state, dict) else None
        raise ValueError(f"{path} has the format version {found!r}; this release reads version {FORMAT_VERSION}.")
    if state.get("checksum", own_checksum(state)) != own_checksum(state):
        raise ValueError(f"{path} is damaged: it is not what was saved. {_advice(folder)}")
    sizes = {path.relative_to(folder).as_posix(): path.stat().st_size for path in folder.rglob("*") if path.is_file()}
    damaged = [name for name, size in state["files"].items() if sizes.get(name) != size]
    if damaged:
        raise ValueError(
            f"{folder} is not complete: missing or of another size than when it was saved: {', '.join(damaged)}. "
            f"{_advice(folder)}"
        )
    if state["weights_only"]:
        raise ValueError(
            f"{folder} was saved with `save_only_model`: it holds weights, and nothing to resume from. Start a run from "
            f"them: AgentTeam.from_pretrained({str(folder)!r})."
        )
    if verify:
        _verify(folder, tuple(sorted((name, (folder / name).stat().st_mtime_ns) for name in [*sizes, STATE_FILE])))
    return state


@functools.lru_cache(maxsize=8)
def _verify(folder: Path, times: tuple[tuple[str, int], ...]) -> None:
    """Compares the checksums of all files, once for a checkpoint whose files keep their times of change."""
    checksums = json.loads((folder / STATE_FILE).read_text()).get("checksums")
    if checksums is None:
        logger.warning(f"{folder} was saved by a release that kept no checksums: a damaged file would not be noticed.")
        return
    damaged = [name for name, checksum in checksums.items() if file_checksum(folder / name) != checksum]
    if damaged:
        raise ValueError(f"{folder} is damaged: not as they were saved: {', '.join(damaged)}. {_advice(folder)}")


def _advice(folder: Path) -> str:
    """What to do about a damaged checkpoint: the last whole one before it, if there is one."""
    for other in reversed(sort_checkpoints(str(folder.absolute().parent))):
        if Path(other) != folder.absolute() and _step(other) < _step(folder):
            try:
                read_checkpoint(other, verify=True)
            except ValueError:
                continue
            return f"Copy it again, or resume from {other}."
    return "Copy it again, or resume from another checkpoint."


def _step(folder: str | Path) -> int:
    number = Path(folder).name.rpartition("-")[2]
    return int(number) if number.isdecimal() else 0


def file_checksum(path: str | Path) -> str:
    """SHA-256 of a file's content."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 22):
            digest.update(block)
    return digest.hexdigest()


def own_checksum(state: dict[str, Any]) -> str:
    """SHA-256 of what `team_trainer_state.json` holds besides this checksum itself."""
    content = {name: value for name, value in state.items() if name != "checksum"}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def publish(unfinished: Path, finished: Path) -> None:
    """Makes a checkpoint of a folder that is written completely. The rename is the instant from which it counts."""
    if finished.exists():
        remove(finished)
    os.replace(unfinished, finished)
    flush(finished.parent)


def rotate(run_folder: Path, limit: int | None, protected: list[str | Path | None]) -> None:
    """Removes the oldest checkpoints that are not protected until `limit` are left."""
    if limit is None or limit < 1:
        return
    checkpoints = [Path(path).resolve() for path in sort_checkpoints(str(run_folder), use_mtime=True)]
    kept = [Path(path).resolve() for path in protected if path is not None]
    for checkpoint in [path for path in checkpoints if path not in kept][: max(0, len(checkpoints) - limit)]:
        remove(checkpoint)


def remove(checkpoint: Path) -> None:
    """Removes a checkpoint so that no part of it is ever taken for one."""
    doomed = checkpoint.parent / UNFINISHED_FOLDER / f"removed-{checkpoint.name}"
    doomed.parent.mkdir(exist_ok=True)
    os.replace(checkpoint, doomed)
    shutil.rmtree(doomed)


def remove_unfinished(run_folder: str | Path) -> None:
    """Removes what an interrupted run left behind."""
    folder = Path(run_folder) / UNFINISHED_FOLDER
    if folder.exists():
        shutil.rmtree(folder)


def flush_tree(folder: Path) -> None:
    """Returns when the disk holds everything in a folder, so that a crash of the machine loses none of it."""
    for path, _, names in os.walk(folder):
        for name in names:
            flush(os.path.join(path, name))
        flush(path)


def flush(path: str | Path) -> None:
    """Returns when the disk holds a file, or the list of names in a folder."""
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)
