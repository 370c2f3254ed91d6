"""
File names in the folders of models, teams and runs; locks of folders; atomic writes. Importing this module must stay
fast.
"""

import errno
import fcntl
import hashlib
import json
import logging
import os
import re
import secrets
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO


logger = logging.getLogger(__name__)

MACHINE_FAULTS = [
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EFBIG,
    errno.EIO,
    errno.EROFS,
    errno.ESTALE,
    errno.ENOMEM,
    errno.EMFILE,
    errno.ENFILE,
]
# As torch, safetensors, NumPy and Python say it, in errors of many kinds
OUT_OF_MEMORY = re.compile(r"(can't|can ?not|[Uu]nable to) (allocate|start new thread)|os error (5|12|28)\b")

# transformers, PEFT, datasets and the Hub decide these names
MODEL_CONFIG = "config.json"
ADAPTER_CONFIG = "adapter_config.json"
# Of a composite checkpoint. They are saved with an agent, because vLLM and `AutoProcessor` need them
PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json")
CARD_FILE = "README.md"
DATASET_STATE = "state.json"  # of `Dataset.save_to_disk`
# This package decides these
TEAM_FILE = "team.json"
CRITICS_FOLDER = "critics"  # in the folder of a team
RECIPE_FILE = "config.yaml"  # the settings of a run
RUN_FILE = "run.json"  # facts about a run
LOG_FILE = "log.jsonl"  # the entries of its log
ALARMS_FILE = "alarms.jsonl"
COST_FILE = "training_cost.json"  # what a training has cost
PREFERENCES_FILE = "collection.json"  # of collected preferences, written last
CHECKSUMS_FILE = "sha256.json"  # of a model in the cache, written last

MODEL_FILES = (MODEL_CONFIG, ADAPTER_CONFIG, TEAM_FILE)  # a folder with a model, an adapter or a team has one of them


def cache_folder() -> Path:
    """Returns the folder of cached models and data: `TRL_MULTIAGENT_CACHE`, by default `~/.cache/trl_multiagent`."""
    user_cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(os.environ.get("TRL_MULTIAGENT_CACHE") or user_cache / "trl_multiagent")


def open_cache() -> Path:
    """
    Returns [`cache_folder`], and makes it if necessary. Raises `ValueError` if others own it or can write to it,
    because they could exchange the models.
    """
    folder = cache_folder()
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    facts = folder.stat()
    if facts.st_uid not in (0, os.geteuid()) or facts.st_mode & 0o022:
        raise ValueError(
            f"The cache {folder} must be yours or root's, and only its owner may write to it: make it so (chmod "
            "go-w), or name another one in TRL_MULTIAGENT_CACHE."
        )
    return folder


def seal(folder: Path) -> None:
    """Writes the SHA-256 of all files of a model in the cache beside them."""
    write_json(folder / CHECKSUMS_FILE, _checksums(folder))


def build_once(folder: Path, build: Callable[[Path], Path]) -> None:
    """
    Builds a model in the cache, unless it is there. `build` gets an empty folder, and returns the model's folder in
    it, which is moved when it is complete. Of several processes, one builds. Raises `ValueError` as [`open_cache`]
    does, and if the files of a model are not as [`seal`] left them.
    """
    import tempfile

    from filelock import FileLock

    open_cache()
    if not folder.is_dir():
        with (
            FileLock(f"{folder}.lock"),
            tempfile.TemporaryDirectory(dir=folder.parent, prefix=".building-") as scratch,
        ):
            if not folder.is_dir():  # another process may have built it meanwhile
                built = build(Path(scratch))
                seal(built)
                built.rename(folder)
    path = folder / CHECKSUMS_FILE
    if not path.is_file() or read_json(path) != _checksums(folder):
        raise ValueError(f"{folder} was changed after it was built, or is damaged: remove it, and it is built again.")


def _checksums(folder: Path) -> dict[str, str]:
    return {path.name: checksum_of_file(path) for path in sorted(folder.iterdir()) if path.name != CHECKSUMS_FILE}


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """
    Yields a new file, which replaces `path` once it is on the disk. It is opened exclusively under a random name, so
    it is never behind a link, and several processes may write the same path. A killed process leaves the file.
    """
    unfinished = path.with_name(f"_{path.name}_{secrets.token_hex(8)}_unfinished")
    try:
        with naming(path):
            with unfinished.open("xb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            unfinished.replace(path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise


def is_machine_fault(error: BaseException) -> bool:
    """
    Returns whether an error is the machine's and no bug: a disk or quota is full, a disk fails or cannot be written,
    or there is too little memory, address space, threads or open files.
    """
    if isinstance(error, OSError) and error.errno in MACHINE_FAULTS:
        return True
    return isinstance(error, MemoryError) or bool(OUT_OF_MEMORY.search(str(error)))


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Adds the file to an `OSError` within the block that names none, such as a full disk raises."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise


def write_lines(path: Path, values: Iterable[Any]) -> None:
    """Writes a file of one line of JSON per value atomically."""
    write_text(path, "".join(f"{json.dumps(value)}\n" for value in values))


def write_text(path: Path, text: str) -> None:
    """Writes a file atomically."""
    with replacing(path) as file:
        file.write(text.encode())


def write_json(path: Path, value: Any) -> None:
    """Writes plain values to a file atomically."""
    write_text(path, json.dumps(value, indent=2) + "\n")


def read_json(path: Path) -> Any:
    """Reads a file that [`write_json`] wrote. Raises a `ValueError` that names the file if it is damaged."""
    with naming_damage(path):
        return json.loads(path.read_text(encoding="utf-8"))


@contextmanager
def naming_damage(path: Path) -> Iterator[None]:
    """Adds the file to an error of JSON, of the encoding or of missing values within the block."""
    try:
        yield
    except (ValueError, RecursionError, LookupError, TypeError) as error:
        raise ValueError(f"{path} is damaged: {error}.") from error


def checksum_of_file(path: Path) -> str:
    """Computes the SHA-256 digest of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def locked(folder: Path, advice: str) -> Iterator[None]:
    """
    Makes a folder and locks it, because two programs would overwrite each other's files. The lock ends with the
    process. Raises a `ValueError` that ends with `advice` if another program has locked the folder, or if it is a
    file.
    """
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is a file: {advice}.")
    folder.mkdir(parents=True, exist_ok=True)
    handle = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"Another program is writing to {folder}: wait until it ends, or {advice}.") from None
        except OSError as error:  # some network file systems have no locks
            logger.warning("%s cannot be locked (%s): start no other program in it.", folder, error.strerror)
        yield
    finally:
        os.close(handle)


def leads_out(path: Path, folder: Path) -> bool:
    """
    Returns whether a path in a folder is a link out of it. A snapshot in the cache of the Hub links to its
    repository's blobs, which is allowed.
    """
    root, target = (Path(os.path.realpath(x)) for x in (folder, path))
    blobs = root.parents[1] / "blobs" if root.parent.name == "snapshots" else root
    return not (target.is_relative_to(root) or target.is_relative_to(blobs))


def holds_model(folder: Path) -> bool:
    """Returns whether a folder holds a model, an adapter or a saved team."""
    return any((folder / name).is_file() for name in MODEL_FILES)


def last_checkpoint(folder: str | Path) -> str | None:
    """Returns the last checkpoint in the folder of a run; `None` if there is none, or no such folder."""
    from transformers.trainer_utils import get_last_checkpoint

    return get_last_checkpoint(str(folder)) if Path(folder).is_dir() else None


def is_collection(folder: str | Path) -> bool:
    """Returns whether a folder holds a complete collection of preferences."""
    return all((Path(folder) / name).is_file() for name in (DATASET_STATE, PREFERENCES_FILE))
