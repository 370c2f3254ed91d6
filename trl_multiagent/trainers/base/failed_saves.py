"""Errors of writing, and the folders in which a team is saved if the intended one cannot be written."""

import contextlib
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from trl_multiagent.environments.task_errors import describe
from trl_multiagent.team.agent_team import AgentTeam


class SaveError(RuntimeError):
    """
    Raised if a team could not be saved in the intended folder. The message says why, and names the folder that was
    used instead.
    """


class WriteError(SaveError):
    """
    Raised if files could not be written, for example because the disk is full. This is not a bug, so a recipe shows
    only the message.
    """


def write_problem(folder: Path, error: BaseException) -> str:
    """Formats an error of writing to a folder, with the free space on its disk."""
    existing = next(path for path in (folder, *folder.absolute().parents) if path.is_dir())
    return f"{describe(error)}; {shutil.disk_usage(existing).free / 1e6:.1f} MB are free there"


@contextlib.contextmanager
def writing(what: str, folder: Path) -> Iterator[None]:
    """
    Turns any exception within the block into a [`WriteError`] that names `what` was being written, and the folder.
    """
    try:
        yield
    except WriteError:
        raise
    except Exception as error:  # on a full disk, the libraries raise errors of many kinds
        raise WriteError(f"{what} could not be written in {folder} ({write_problem(folder, error)}).") from error


def save_team(
    team: AgentTeam, folder: Path, state_dict: dict[str, torch.Tensor] | None, run_folder: str | Path
) -> None:
    """
    Saves a team in a folder. If that fails, saves it with [`save_in_fallback_folder`], and raises a [`WriteError`].
    """
    is_new = not os.path.lexists(folder)
    try:
        team.save_pretrained(folder, state_dict)
    except Exception as error:
        problem = write_problem(folder, error)
        if is_new:
            shutil.rmtree(folder, ignore_errors=True)  # frees the space that the team needs
        result = save_in_fallback_folder(team, run_folder, state_dict)
        raise WriteError(f"The team could not be saved in {folder} ({problem}). {result}") from error


def save_in_fallback_folder(
    team: AgentTeam, run_folder: str | Path, state_dict: dict[str, torch.Tensor] | None = None
) -> str:
    """
    Saves a team in the folder of the run, else the working directory, else that for temporary files. Returns a
    sentence that names the folder.
    """
    problems = []
    for parent in (Path(run_folder), Path.cwd(), Path(tempfile.gettempdir())):
        folder = fallback_folder(parent)
        try:
            team.save_pretrained(folder, state_dict)
        except Exception as error:
            shutil.rmtree(folder, ignore_errors=True)
            problems.append(f"{folder} ({describe(error)})")
        else:
            return f"The team is in {folder.absolute()}."
    return f"Nor could the team be saved in {', '.join(problems)}."


def fallback_folder(parent: Path) -> Path:
    """Returns the path of a folder whose name no other process and no earlier fallback uses."""
    return parent / f"rescued_team_{time.strftime('%Y%m%d-%H%M%S')}_{os.getpid()}"
