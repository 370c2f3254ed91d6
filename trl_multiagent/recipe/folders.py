"""Chooses the folder of a run, and checks before the run starts that its results can be written and pushed."""

import os
import re
import tempfile
import time
from pathlib import Path

from accelerate.utils import broadcast_object_list
from huggingface_hub import get_token
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id
from transformers import TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

from trl_multiagent.settings.read import ConfigError
from trl_multiagent.trainers.base.checkpoint_files import UNFINISHED_FOLDER, read_checkpoint


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


def choose_folder(
    output_dir: str | None, base_dir: str, prefix: str, resume: str | bool | None
) -> tuple[str, str | None]:
    """
    Chooses the folder of the run, the same on all processes, and the checkpoint to continue from.

    Raises:
        ConfigError: there is no complete checkpoint where `resume` says.
    """
    run_id = os.environ.get("RUN_ID") or os.environ.get("JOB_ID")
    names = [re.sub(r"[^\w.-]", "_", run_id) if run_id else f"{time.strftime('%Y%m%d-%H%M%S')}_{os.getpid()}"]
    broadcast_object_list(names)
    folder = output_dir or str(Path(base_dir) / f"{prefix}_{names[0]}")
    if not resume:
        return folder, None
    if isinstance(resume, str):
        if not Path(resume).is_dir():
            raise ConfigError(f"`resume_from_checkpoint` is {resume!r}, but there is no such folder.")
        check_complete(resume)
        return output_dir or str(Path(resume).parent), resume
    if output_dir is None and run_id is None:
        raise ConfigError(
            "`resume_from_checkpoint: true` continues the run that the environment variable RUN_ID or `output_dir` "
            "names; set one of them, or give the folder of a checkpoint."
        )
    checkpoint = get_last_checkpoint(folder) if Path(folder).is_dir() else None
    if checkpoint is None:
        raise ConfigError(f"`resume_from_checkpoint: true`, but there is no checkpoint in {folder}.")
    check_complete(checkpoint)
    return folder, checkpoint


def check_complete(checkpoint: str) -> None:
    """Refuses a folder that is not a complete checkpoint."""
    try:
        read_checkpoint(checkpoint)
    except ValueError as error:
        raise ConfigError(f"`resume_from_checkpoint`: {error}") from error
