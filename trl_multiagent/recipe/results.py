"""The places for the results of a run, which are tried before it starts."""

import contextlib
import os
import re
from collections.abc import Sequence
from pathlib import Path

from huggingface_hub import get_token
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id

from trl_multiagent.hub.model_card import CURVE_FILE, RECIPE_FILE
from trl_multiagent.recipe.settings import ConfigError
from trl_multiagent.team.files import TEAM_FILE
from trl_multiagent.trainers.base.checkpoint_files import UNFINISHED_FOLDER
from trl_multiagent.trainers.magrpo_config import MAGRPOConfig


RUN_FILES = (RECIPE_FILE, CURVE_FILE, "README.md")


def check_folder(setting: str, folder: Path) -> None:
    """
    Refuses a folder that cannot be made or written to, as far as that shows without writing.

    Raises:
        ConfigError: it is a file, lies beneath one, or may not be written to.
    """
    existing = next(path for path in (folder, *folder.absolute().parents) if os.path.lexists(path))
    if not existing.is_dir():
        kind = "a link to nothing" if existing.is_symlink() and not existing.exists() else "a file"
        raise ConfigError(f"{setting} asks for the folder '{folder}', but {existing} is {kind}.")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise ConfigError(f"{setting} asks for the folder '{folder}', but {existing} may not be written to.")


def check_team_folder(folder: Path, run_folder: Path) -> None:
    """Refuses a folder for the team inside one that the trainer replaces or removes."""
    if not folder.absolute().is_relative_to(run_folder.absolute()):
        return
    inside = folder.absolute().relative_to(run_folder.absolute()).parts
    if inside and (re.fullmatch(r"checkpoint-\d+", inside[0]) or inside[0] == UNFINISHED_FOLDER):
        raise ConfigError(
            f"`output.save_path` is '{folder}', within the run's {inside[0]}, which is replaced and removed during "
            "training. Choose another folder."
        )


def check_push(algorithm: str, args: MAGRPOConfig) -> str | None:
    """
    Checks what a push needs, as far as possible without a network. The trainer checks the rest when it is created.

    Returns:
        `str`, *optional*: What is missing on this machine.

    Raises:
        ConfigError: no repository can have the name.
    """
    repo_id = args.hub_model_id or Path(args.output_dir).absolute().name
    try:
        validate_repo_id(repo_id)
    except HFValidationError as error:
        problem = " ".join(str(error).split())
        raise ConfigError(f"`{algorithm}.hub_model_id`: {repo_id!r} is no name of a repository. {problem}") from error
    if args.hub_token is None and get_token() is None:
        return (
            f"`{algorithm}.push_to_hub` needs a token that may write: log in with `hf auth login`, or set HF_TOKEN or "
            f"`{algorithm}.hub_token`."
        )
    return None


def try_folders(run_folder: Path, team_folder: Path | None, agent_folders: Sequence[str]) -> None:
    """
    Tries to write small files in the places that the end of the run writes to, and removes them again.

    Args:
        run_folder (`Path`): The run's.
        team_folder (`Path`, *optional*): Where the team will be saved.
        agent_folders (`Sequence[str]`): The folders of the agents in it.

    Raises:
        ConfigError: something is in the way, or cannot be written.
    """
    places = [(run_folder, [*RUN_FILES, f"{UNFINISHED_FOLDER}/trial"])]
    if team_folder is not None:
        agents = [f"{folder}/{name}" for folder in agent_folders for name in ("config.json", "tokenizer.json")]
        places.append((team_folder, [TEAM_FILE, "training_args.bin", *agents]))
    for folder, names in places:
        try:
            for name in names:
                try_file(folder / name)
        except OSError as error:
            what = "the results of the run" if folder == run_folder else "the team (`output.save_path`)"
            raise ConfigError(f"{what} cannot be written to '{folder}': {error}") from error


def try_file(path: Path) -> None:
    """Raises `OSError` if a file cannot be written; leaves everything as it was."""
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
        with contextlib.suppress(OSError):  # there is nothing to remove if nothing could be made
            (path.parent / f".trial_{os.getpid()}").unlink(missing_ok=True)
            if is_new:
                path.unlink(missing_ok=True)
            for folder in made:
                folder.rmdir()
