"""Checkpoints on disk: written so that a crash at any instant leaves the previous one whole, and checked when they are read."""

import hashlib
import json
import os
import re
import shutil
from importlib.metadata import version
from pathlib import Path
from typing import Any

from accelerate import PartialState
from accelerate.utils import gather_object
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, sort_checkpoints


FORMAT_VERSION = 1
STATE_FILE = "team_trainer_state.json"  # what the checkpoint belongs to, and the list of its files
PROCESS_FILE = "team_process_{}.json"  # what every process has for itself, next to its random number generators
ENVIRONMENT_FILE = "environment_{}.pt"
REFERENCE_FILE = "reference.pt"
# Checkpoints that are being written or removed. The name keeps it out of uploads, and out of what counts as a checkpoint
UNFINISHED_FOLDER = "_unfinished"


# Reading


def read_checkpoint(folder: str | Path) -> dict[str, Any]:
    """
    What `team_trainer_state.json` says of a checkpoint that can be resumed. Contents of files are not read; for them see
    [`check_files`].

    Args:
        folder (`str` or `Path`): Folder of the checkpoint.

    Returns:
        `dict`: With the keys `global_step`, `settings`, `versions`, `tracking`, `files` (sizes in bytes), and except for
        checkpoints of the first release `checksums` and `changes`.

    Raises:
        ValueError: it is no checkpoint of a team trainer, another release wrote it, or something is missing.
    """
    folder = Path(folder)
    path = folder / STATE_FILE
    if not path.is_file():
        raise ValueError(f"{folder} is no complete checkpoint of a team trainer: there is no {path}.{advice(folder)}")
    try:
        state = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {error}.{advice(folder)}") from error
    if not isinstance(state, dict) or state.get("format_version") != FORMAT_VERSION:
        found = state.get("format_version") if isinstance(state, dict) else None
        raise ValueError(f"{path} has the format version {found!r}; this release reads version {FORMAT_VERSION}.")
    if "checksum" in state and state["checksum"] != checksum_of_state(state):
        raise ValueError(f"{path} is damaged: it is not what was saved.{advice(folder)}")
    sizes = {path.relative_to(folder).as_posix(): path.stat().st_size for path in folder.rglob("*") if path.is_file()}
    damaged = [name for name, size in state["files"].items() if sizes.get(name) != size]
    if damaged:
        raise ValueError(
            f"{folder} is not complete: missing or of another size than when it was saved: {', '.join(damaged)}."
            f"{advice(folder)}"
        )
    kinds = {kind_of(name) for name in state["files"]}
    extra = sorted(name for name in sizes.keys() - state["files"].keys() if kind_of(name) in kinds)
    if extra:
        raise ValueError(
            f"{folder} has files of another checkpoint, which were not there when it was saved: {', '.join(extra)}. Remove "
            "them if they got there by mistake."
        )
    if state["weights_only"]:
        raise ValueError(
            f"{folder} was saved with `save_only_model`: it holds weights, and nothing to resume from. Start a run from "
            f"them: AgentTeam.from_pretrained({str(folder)!r})."
        )
    return state


def check_files(folder: str | Path) -> dict[str, Any]:
    """
    Reads a whole checkpoint and compares it with the checksums of when it was saved. All processes take part, those of a
    node share its files.

    Args:
        folder (`str` or `Path`): Folder of the checkpoint.

    Returns:
        `dict`: See [`read_checkpoint`].

    Raises:
        ValueError: on all processes, if a file is missing or damaged; the message names it.
    """
    state, problems = None, []
    index, count = share_of_node()
    try:
        state = read_checkpoint(folder)
        names = sorted(state.get("checksums", ()))[index::count]
        damaged = [name for name in names if checksum_of_file(Path(folder) / name) != state["checksums"][name]]
        if damaged:
            problems = [f"{folder} is damaged: not as it was saved: {', '.join(damaged)}.{advice(folder)}"]
    except (ValueError, OSError) as error:
        problems = [str(error)]
    problems = list(dict.fromkeys(gather_object(problems)))
    if problems:
        raise ValueError(" ".join(problems))
    return state


def advice(folder: str | Path) -> str:
    """The end of a message about a damaged checkpoint: the newest older one that is complete."""
    folder = Path(folder)
    before = [path for path in sort_checkpoints(str(folder.parent)) if step_of(path) < step_of(folder)]
    for path in sorted(before, key=step_of, reverse=True):
        if (Path(path) / STATE_FILE).is_file():
            try:
                read_checkpoint(path)
            except ValueError:
                continue
            return f" Copy it again, or resume from the checkpoint before it that is complete: {path}."
    return " Copy it again, or resume from another checkpoint."


def step_of(checkpoint: str | Path) -> int:
    match = re.fullmatch(rf"{PREFIX_CHECKPOINT_DIR}-(\d+)", Path(checkpoint).name)
    return int(match[1]) if match else 0


def kind_of(name: str) -> str:
    """The name of a file without the number of its process."""
    return re.sub(r"_?\d+", "", name)


def share_of_node() -> tuple[int, int]:
    """Number of this process on its node, and how many processes the node has. All processes take part."""
    state = PartialState()
    nodes = gather_object([state.process_index - state.local_process_index])
    return state.local_process_index, nodes.count(state.process_index - state.local_process_index)


def checksum_of_file(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 22):
            digest.update(chunk)
    return digest.hexdigest()


def checksum_of_state(state: dict[str, Any]) -> str:
    state = {name: value for name, value in state.items() if name != "checksum"}
    return hashlib.sha256(json.dumps(state, sort_keys=True).encode()).hexdigest()


# Writing


def checksums_of_node(folder: Path) -> dict[str, str]:
    """Checksums of all files in a folder, by name. All processes take part, those of a node share its files."""
    state = PartialState()
    node = state.process_index - state.local_process_index
    index, count = share_of_node()
    names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())[index::count]
    shares = gather_object([(node, {name: checksum_of_file(folder / name) for name in names})])
    return {name: digest for other, share in shares if other == node for name, digest in share.items()}


def write_state(folder: Path, checksums: dict[str, str], **state) -> None:
    """Completes a checkpoint. What it lists must be there, as it is, when it is read."""
    state = {
        "format_version": FORMAT_VERSION,
        **state,
        "versions": {name: version(name) for name in ("torch", "transformers", "trl")},
        "files": {name: (folder / name).stat().st_size for name in checksums},
        "checksums": checksums,
    }
    state = json.loads(json.dumps(state))  # as it is read
    state["checksum"] = checksum_of_state(state)
    (folder / STATE_FILE).write_text(json.dumps(state, indent=2) + "\n")
    flush(folder / STATE_FILE)
    flush(folder)


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
