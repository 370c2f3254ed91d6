"""
Writes the files of a checkpoint, so that a crash at any time leaves the previous checkpoint intact, and verifies them.
"""

import contextlib
import json
import os
import re
import shutil
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

from accelerate import PartialState
from accelerate.utils import gather_object
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, sort_checkpoints

from trl_multiagent.folders import checksum_of_file
from trl_multiagent.jobs.fingerprint import checksum_of_entries


FORMAT_VERSION = 1
STATE_FILE = "team_trainer_state.json"  # the settings of the run, and the list of the checkpoint's files
PROCESS_FILE = "team_process_{}.json"  # the state of one process
ENVIRONMENT_FILE = "environment_{}.pt"  # the state of the environment, of one process
REFERENCE_FILE = "reference.pt"
# Folder of checkpoints that are being written or removed. It is not uploaded, and its folders do not count as
# checkpoints
UNFINISHED_FOLDER = "_unfinished"


# Reading


def read_checkpoint(folder: str | Path) -> dict[str, Any]:
    """
    Reads the state of a checkpoint and verifies that a run can resume from it. Checks only names and sizes of the
    other files; for their contents see [`verify_checkpoint`].

    Returns:
        `dict`: The keys are `global_step`, `versions` and `files` (sizes in bytes); for a team also `settings` and
        `tracking`; unless the first release wrote the checkpoint, also `checksums` and `changes`.

    Raises:
        ValueError: The folder is not a complete checkpoint, or another release wrote it.
    """
    folder = Path(folder)
    path = folder / STATE_FILE
    if not path.is_file():
        raise ValueError(
            f"{folder} is not a complete checkpoint of trl_multiagent: there is no {path}.{resume_advice(folder)}"
        )
    try:
        state = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {error}.{resume_advice(folder)}") from error
    saved = state.get("format_version") if isinstance(state, dict) else None
    if saved != FORMAT_VERSION:
        raise ValueError(f"{path} has the format version {saved!r}; this release reads version {FORMAT_VERSION}.")
    if "checksum" in state and state["checksum"] != checksum_of_entries(state):
        raise ValueError(f"{path} is damaged: it has changed since it was saved.{resume_advice(folder)}")
    sizes = {name: (folder / name).stat().st_size for name in files_in(folder)}
    damaged = [name for name, size in state["files"].items() if sizes.get(name) != size]
    if damaged:
        raise ValueError(
            f"{folder} is not complete: these files are missing or their size has changed since they were saved: "
            f"{', '.join(damaged)}.{resume_advice(folder)}"
        )
    patterns = {without_number(name) for name in state["files"]}
    extra = sorted(name for name in sizes.keys() - state["files"].keys() if without_number(name) in patterns)
    if extra:
        raise ValueError(
            f"{folder} has files of another checkpoint, which were added after it was saved: {', '.join(extra)}. "
            "Remove them if they were added by mistake."
        )
    if state["weights_only"]:
        raise ValueError(
            f"{folder} was saved with `save_only_model`: it holds only weights, so no run can resume from it. Start a "
            "new run from the weights."
        )
    return state


def verify_checkpoint(folder: str | Path) -> dict[str, Any]:
    """
    Reads the state of a checkpoint, see [`read_checkpoint`], and compares all its files with their checksums. All
    processes must call this function; the processes of a node share the work.

    Raises:
        ValueError: On all processes, if a file is missing or damaged on any node. The message names the file.
    """
    share = share_of_node()
    with refusing_together():
        state = read_checkpoint(folder)
        checksums = state.get("checksums", {})
        own = sorted(checksums)[share]
        damaged = [name for name in own if checksum_of_file(Path(folder, name)) != checksums[name]]
        if damaged:
            files = ", ".join(damaged)
            raise ValueError(f"{folder} is damaged: changed since it was saved: {files}.{resume_advice(folder)}")
    return state


@contextlib.contextmanager
def refusing_together() -> Iterator[None]:
    """Raises a `ValueError` on all processes if one of them raises one, or an `OSError`, within the block."""
    problems = []
    try:
        yield
    except (ValueError, OSError) as error:
        problems = [str(error)]
    problems = list(dict.fromkeys(gather_object(problems)))
    if problems:
        raise ValueError(" ".join(problems))


def resume_advice(folder: str | Path) -> str:
    """
    Returns the last sentence of a message about a damaged checkpoint, with the newest older checkpoint that is
    complete.
    """
    folder = Path(folder)
    for path in reversed(sort_checkpoints(str(folder.parent))):
        if step_of(path) < step_of(folder) and (Path(path) / STATE_FILE).is_file():
            try:
                read_checkpoint(path)
            except ValueError:
                continue
            return f" Copy it again, or resume from the last complete checkpoint before it: {path}."
    return " Copy it again, or resume from another checkpoint."


def step_of(checkpoint: str | Path) -> int:
    """Returns the optimizer step in the name of a checkpoint, or 0."""
    match = re.fullmatch(rf"{PREFIX_CHECKPOINT_DIR}-(\d+)", Path(checkpoint).name)
    return int(match[1]) if match else 0


def files_in(folder: Path) -> list[str]:
    """Returns the sorted names of all files below a folder."""
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def without_number(name: str) -> str:
    """Returns the name of a file without the number of its process."""
    return re.sub(r"_?\d+", "", name)


def share_of_node() -> slice:
    """
    Returns the share of this process in a list that the processes of a node divide. All processes must call this
    function.
    """
    node = first_of_node()
    return slice(PartialState().process_index - node, None, gather_object([node]).count(node))


def first_of_node() -> int:
    """Returns the first process of this node."""
    return PartialState().process_index - PartialState().local_process_index


# Writing


def checksums_of_node(folder: Path) -> dict[str, str]:
    """
    Computes the checksums of all files in a folder, by name. All processes must call this; those of a node share the
    work.
    """
    own = {name: checksum_of_file(folder / name) for name in files_in(folder)[share_of_node()]}
    gathered = gather_object([(first_of_node(), own)])
    return {name: digest for node, part in gathered if node == first_of_node() for name, digest in part.items()}


def write_state(folder: Path, checksums: dict[str, str], **entries: Any) -> None:
    """
    Writes the state of a checkpoint, which is its last file, with the checksums of all other files by name and further
    entries.
    """
    state = {
        "format_version": FORMAT_VERSION,
        **entries,
        "versions": {name: version(name) for name in ("torch", "transformers", "trl")},
        "files": {name: (folder / name).stat().st_size for name in checksums},
        "checksums": checksums,
    }
    state = json.loads(json.dumps(state))  # the checksum covers the values as they are read
    state["checksum"] = checksum_of_entries(state)
    (folder / STATE_FILE).write_text(json.dumps(state, indent=2) + "\n")
    flush(folder / STATE_FILE)
    flush(folder)


def publish(unfinished: Path, finished: Path) -> None:
    """Moves a completely written folder to its final place. Only then does it count as a checkpoint."""
    if finished.exists():
        remove(finished)
    os.replace(unfinished, finished)
    flush(finished.parent)


def rotate(run_folder: Path, limit: int | None, protected: list[str | Path | None]) -> None:
    """
    Removes the unprotected checkpoints of the first steps until at most `limit` checkpoints are left, if possible.
    """
    if limit is None or limit < 1:
        return
    checkpoints = [Path(path).resolve() for path in sort_checkpoints(str(run_folder))]
    kept = [Path(path).resolve() for path in protected if path is not None]
    for checkpoint in [path for path in checkpoints if path not in kept][: max(0, len(checkpoints) - limit)]:
        remove(checkpoint)


def remove(checkpoint: Path) -> None:
    """Removes a checkpoint. It is renamed first, so that a partly removed folder never counts as a checkpoint."""
    renamed = checkpoint.parent / UNFINISHED_FOLDER / f"removed-{checkpoint.name}"
    renamed.parent.mkdir(exist_ok=True)
    os.replace(checkpoint, renamed)
    shutil.rmtree(renamed)


def remove_unfinished(run_folder: str | Path) -> None:
    """Removes the unfinished checkpoints that an interrupted run has left."""
    folder = Path(run_folder) / UNFINISHED_FOLDER
    if folder.exists():
        shutil.rmtree(folder)


def flush_tree(folder: Path) -> None:
    """Flushes all files in a folder to the disk, so that they survive a crash of the machine."""
    for path, _, names in os.walk(folder):
        for name in names:
            flush(os.path.join(path, name))
        flush(path)


def flush(path: str | Path) -> None:
    """Flushes a file, or the list of names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)
