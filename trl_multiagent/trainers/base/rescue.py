"""Where a trained team goes when it cannot be written to where it should."""

import os
import shutil
import tempfile
import time
from pathlib import Path

import torch

from trl_multiagent.environments.task_errors import describe
from trl_multiagent.team.agent_team import AgentTeam


class SaveError(RuntimeError):
    """A team could not be saved where it should; the message says why, and where it is."""


def save_or_rescue(
    team: AgentTeam, folder: Path, state_dict: dict[str, torch.Tensor] | None, run_folder: str | Path
) -> None:
    """
    Saves a team in a folder, or in the first other place that works.

    Args:
        team ([`AgentTeam`]):
            The team.
        folder (`Path`):
            Where it should be saved.
        state_dict (`dict[str, torch.Tensor]`, *optional*):
            See [`AgentTeam.save_pretrained`].
        run_folder (`str` or `Path`):
            The first other place to try; then the working folder, and the one for temporary files.

    Raises:
        SaveError: it could not be saved in `folder`.
    """
    is_new = not os.path.lexists(folder)
    try:
        team.save_pretrained(folder, state_dict)
    except Exception as error:  # the libraries raise errors of many kinds for a full disk
        if is_new:
            shutil.rmtree(folder, ignore_errors=True)  # what was written takes the space that the team needs
        raise SaveError(
            f"The team could not be saved in {folder} ({describe(error)}). {rescue(team, state_dict, run_folder)}"
        ) from error


def rescue(team: AgentTeam, state_dict: dict[str, torch.Tensor] | None, run_folder: str | Path) -> str:
    """Saves a team in the first place that works. Returns a sentence that says where, or why nowhere."""
    problems = []
    for parent in (Path(run_folder), Path.cwd(), Path(tempfile.gettempdir())):
        place = rescue_folder(parent)
        try:
            team.save_pretrained(place, state_dict)
        except Exception as error:
            shutil.rmtree(place, ignore_errors=True)
            problems.append(f"{place} ({describe(error)})")
        else:
            return f"The team is in {place.absolute()}."
    return f"Nor could the team be saved in {', '.join(problems)}."


def rescue_folder(parent: str | Path) -> Path:
    """A folder that no other run and no earlier rescue uses."""
    return Path(parent) / f"rescued_team_{time.strftime('%Y%m%d-%H%M%S')}_{os.getpid()}"
