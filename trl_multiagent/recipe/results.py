"""Checks, before a run starts, that its results can be written and pushed."""

import contextlib
import os
import re
import tempfile
from collections.abc import Sequence
from pathlib import Path

from huggingface_hub import get_token
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id
from transformers import TrainingArguments

from trl_multiagent.file_names import (
    CARD_FILE,
    CURVE_FILE,
    MODEL_CONFIG,
    MODEL_FILES,
    RECIPE_FILE,
    TEAM_FILE,
    holds_model,
)
from trl_multiagent.settings.read import ConfigError
from trl_multiagent.trainers.base.checkpoint_files import UNFINISHED_FOLDER


RUN_FILES = (RECIPE_FILE, CURVE_FILE, CARD_FILE)


def check_folder(setting: str, folder: Path) -> None:
    """
    Refuses a folder that cannot be created or written to. To find out, an empty folder is made where it would be, and removed.

    Args:
        setting (`str`): The setting that names the folder, for the message.
        folder (`Path`): The folder.

    Raises:
        ConfigError: it is a file or inside of one, or the permission to write is missing.
    """
    existing = next(path for path in (folder, *folder.absolute().parents) if os.path.lexists(path))
    if not existing.is_dir():
        kind = "a link to nothing" if existing.is_symlink() and not existing.exists() else "a file"
        raise ConfigError(f"{setting} names the folder '{folder}', but {existing} is {kind}.")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise ConfigError(f"{setting} names the folder '{folder}', but there is no permission to write to {existing}.")
    try:
        os.rmdir(tempfile.mkdtemp(prefix=".trial_", dir=existing))
    except OSError as error:  # a file system that is read-only, full, or none, such as /proc
        raise ConfigError(
            f"{setting} names the folder '{folder}', but nothing can be created in {existing}: {error.strerror}."
        ) from error


def check_team_folder(folder: Path, run_folder: Path) -> None:
    """Refuses a folder for the team that is inside a checkpoint, because the trainer replaces and removes checkpoints."""
    if not folder.absolute().is_relative_to(run_folder.absolute()):
        return
    inside = folder.absolute().relative_to(run_folder.absolute()).parts
    if inside and (re.fullmatch(r"checkpoint-\d+", inside[0]) or inside[0] == UNFINISHED_FOLDER):
        raise ConfigError(
            f"`output.save_path` is '{folder}', within the run's {inside[0]}, which is replaced and removed during "
            "training. Choose another folder."
        )


def check_model_folder(setting: str, folder: Path) -> None:
    """Refuses a folder without the configuration of a model, an adapter or a team."""
    if not holds_model(folder):
        raise ConfigError(
            f"`{setting}` is '{folder}', a folder with none of {', '.join(MODEL_FILES)}: give the folder of a model or of a saved team."
        )


def check_repo_id(setting: str, repo_id: str) -> None:
    """Refuses a text that cannot be the name of a repository on the Hub."""
    try:
        validate_repo_id(repo_id)
    except HFValidationError as error:
        raise ConfigError(f"`{setting}`: {repo_id!r} is not a valid name of a repository. {error}") from error


def check_push(algorithm: str, args: TrainingArguments) -> str | None:
    """
    Checks the name and the token of a push, without using the network. The trainer checks the rest when it is created.

    Returns:
        `str` or `None`: A message if there is no token on this machine.

    Raises:
        ConfigError: the name of the repository is invalid.
    """
    check_repo_id(f"{algorithm}.hub_model_id", args.hub_model_id or Path(args.output_dir).absolute().name)
    if args.hub_token is None and get_token() is None:
        return (
            f"`{algorithm}.push_to_hub` needs a token that may write: log in with `hf auth login`, or set HF_TOKEN or "
            f"`{algorithm}.hub_token`."
        )
    return None


def try_folders(run_folder: Path, team_folder: Path | None, agent_folders: Sequence[str]) -> None:
    """
    Tries to write small files in all places that will be written to at the end of the run, and removes them again.

    Args:
        run_folder (`Path`): Folder of the run.
        team_folder (`Path`, *optional*): Folder in which the team will be saved, if it will.
        agent_folders (`Sequence[str]`): The folders of the agents, relative to the team's.

    Raises:
        ConfigError: a file cannot be written.
    """
    places = [(run_folder, [*RUN_FILES, f"{UNFINISHED_FOLDER}/trial"])]
    if team_folder is not None:
        agents = [f"{folder}/{name}" for folder in agent_folders for name in (MODEL_CONFIG, "tokenizer.json")]
        places.append((team_folder, [TEAM_FILE, "training_args.bin", *agents]))
    for folder, names in places:
        try:
            for name in names:
                try_file(folder / name)
        except OSError as error:
            what = "the results of the run" if folder == run_folder else "the team (`output.save_path`)"
            raise ConfigError(f"{what} cannot be written to '{folder}': {error}") from error


def try_file(path: Path) -> None:
    """Raises `OSError` if a file cannot be written. Existing files and folders stay unchanged, and new ones are removed."""
    made = [folder for folder in path.parents if not folder.exists()]
    is_new = not os.path.lexists(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab") as file:
            file.flush()
        # On a full disk, an empty file can still be created
        with (path.parent / f".trial_{os.getpid()}").open("wb") as file:
            file.write(bytes(4096))
            file.flush()
            os.fsync(file.fileno())
    finally:
        with contextlib.suppress(OSError):  # if nothing could be created, there is nothing to remove
            (path.parent / f".trial_{os.getpid()}").unlink(missing_ok=True)
            if is_new:
                path.unlink(missing_ok=True)
            for folder in made:
                folder.rmdir()
