"""Chooses the folder of a run, and checks before the run starts that its results can be written and pushed."""

import os
import re
import time
from pathlib import Path

from accelerate.utils import broadcast_object_list
from huggingface_hub.utils import validate_repo_id
from transformers.trainer_utils import get_last_checkpoint

from trl_multiagent.settings.algorithms import ALGORITHMS, ROLLOUTS
from trl_multiagent.settings.derive import Settings, run_id
from trl_multiagent.settings.read import ConfigError, config_errors


AUTO = "auto"  # value of `resume_from_checkpoint`: the last checkpoint in the folder of the run, if there is one
NO_FOLDER = "`resume_from_checkpoint` continues the run that RUN_ID or `output_dir` names: set one of them."


def check_folder(setting: str, folder: Path) -> None:
    """Raises `ConfigError` if the folder that a setting names is a file, is inside a file, or cannot be written to."""
    existing = next(path for path in (folder, *folder.absolute().parents) if os.path.lexists(path))
    if not existing.is_dir():
        raise ConfigError(f"{setting} names the folder '{folder}', but {existing} is a file or a broken link.")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise ConfigError(f"{setting} names the folder '{folder}', but there is no permission to write to {existing}.")


def check_repo_id(setting: str, repo_id: str) -> None:
    """Raises `ConfigError` if a text cannot be the name of a repository on the Hub."""
    with config_errors(f"`{setting}`: {repo_id!r} is not a valid name of a repository. "):
        validate_repo_id(repo_id)


def choose_folder(settings: Settings, prefix: str) -> tuple[str, str | None]:
    """
    Chooses the folder of the run, the same on all processes, and the checkpoint to resume from. Raises `ConfigError`
    if there is none.
    """
    output_dir, resume, name = settings.arguments.get("output_dir"), settings.extras.resume_from_checkpoint, run_id()
    names = [re.sub(r"[^\w.-]", "_", name) if name else f"{time.strftime('%Y%m%d-%H%M%S')}_{os.getpid()}"]
    broadcast_object_list(names)
    folder = output_dir or str(Path(settings.output.base_dir) / f"{prefix}_{names[0]}")
    if isinstance(resume, str) and resume != AUTO:
        if not Path(resume).is_dir():
            raise ConfigError(f"`resume_from_checkpoint` is {resume!r}, but there is no such folder.")
        return output_dir or str(Path(resume).parent), resume
    if resume and output_dir is None and name is None:
        raise ConfigError(NO_FOLDER)
    last = get_last_checkpoint(folder) if Path(folder).is_dir() else None
    if resume is True and last is None:
        raise ConfigError(f"`resume_from_checkpoint: true`, but there is no checkpoint in {folder}.")
    if last is not None and not resume and ALGORITHMS[settings.algorithm].run == ROLLOUTS:
        settings.notes.append(
            f"{last} is not used: this run starts at step 0. `--resume_from_checkpoint auto` continues from it."
        )
    return folder, last if resume else None
