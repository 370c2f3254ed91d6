"""Finds the teams that an evaluation is given: folders of runs, of saved teams and of checkpoints, and ids on the Hub."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from pathlib import Path

from trl_multiagent.environments.task import Task
from trl_multiagent.evaluation.config import BASELINES
from trl_multiagent.folders import RECIPE_FILE, TEAM_FILE, holds_model
from trl_multiagent.settings.derive import check_names
from trl_multiagent.settings.read import ConfigError, read_yaml


@dataclasses.dataclass(frozen=True)
class TeamSource:
    """
    A team to evaluate.

    Args:
        name (`str`): Its name in the report.
        location (`str`): Folder or Hub id of a saved team, or of a model that every agent starts from.
        roles (`tuple[str, ...]`, *optional*): The roles of a saved team; `None` for a model.
    """

    name: str
    location: str
    roles: tuple[str, ...] | None


def find_team(text: str) -> str:
    """
    The folder of the team that an argument names; the argument itself if it is not a folder.

    Raises:
        ConfigError: there is no such folder, or it holds no team.
    """
    path = Path(text)
    if not path.is_dir():
        if path.is_file():
            raise ConfigError(f"{text} is a file: give the folder of a saved team or of a run, or a Hub id.")
        check_names(text, "TEAM")
        return text
    if holds_model(path):
        return text
    run = find_config(text)
    if run is not None:
        output = read_yaml(run).get("output")
        saved = output.get("save_path") if isinstance(output, dict) else None
        if saved and (Path(saved) / TEAM_FILE).is_file():
            return str(saved)
    checkpoints = [x.parent for x in path.glob(f"checkpoint-*/{TEAM_FILE}") if x.parent.name[11:].isdecimal()]
    if checkpoints:
        return str(max(checkpoints, key=lambda x: int(x.name[11:])))
    inside = sorted(str(x.parent) for x in path.glob(f"*/{TEAM_FILE}"))
    where = f" These folders do: {', '.join(inside)}." if inside else ""
    raise ConfigError(
        f"{text} holds no {TEAM_FILE}: give the folder of a saved team, or of a run that saved one.{where}"
    )


def find_config(text: str) -> str | None:
    """The settings of the run that wrote a folder or a checkpoint, or that are in a repository."""
    path = Path(text)
    if path.is_dir():
        folders = [path, path.absolute().parent] if path.name.startswith("checkpoint-") else [path]
        return next((str(x / RECIPE_FILE) for x in folders if (x / RECIPE_FILE).is_file()), None)
    return find_in_repository(text, RECIPE_FILE) if "/" in text else None


def find_in_repository(name: str, file: str) -> str | None:
    """
    The local copy of a file on the Hub; `None` if the repository does not have it.

    Raises:
        ConfigError: there is no such repository, or the Hub cannot be reached.
    """
    from trl_multiagent.models.pretrained import find_file
    from trl_multiagent.recipe.folders import check_repo_id

    check_repo_id("TEAM", name)
    try:
        return find_file(name, file)
    except OSError as error:
        raise ConfigError(f"TEAM {name!r} is neither a folder nor a repository that can be read: {error}") from error


def name_teams(texts: Sequence[str], locations: Sequence[str], task: Task) -> list[TeamSource]:
    """
    Gives every team a name that is also that of a folder, and reads its roles.

    Raises:
        ConfigError: a `team.json` cannot be read, or the same team is given twice.
    """
    from trl_multiagent.team.files import read_team_file

    same = {str(Path(x).resolve()) if Path(x).is_dir() else x for x in locations}
    if len(same) < len(locations):
        raise ConfigError(f"The teams {', '.join(texts)} contain the same one twice.")
    names: list[str] = []
    teams = []
    for text, location in zip(texts, locations, strict=True):
        file: str | None = str(Path(location) / TEAM_FILE)
        if not Path(location).is_dir():
            file = None if location in task.models else find_in_repository(location, TEAM_FILE)
        try:
            roles = None if file is None or not Path(file).is_file() else read_team_file(file).roles
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{file} cannot be read: {error}") from error
        parts = Path(text).absolute().parts[1:] if Path(text).is_dir() else Path(text).parts
        longer = ("_".join(parts[-k:]) for k in range(1, len(parts) + 1))
        numbered = (f"{parts[-1]}_{k}" for k in itertools.count(2))
        # A name is also that of a folder, which baselines have, too
        names.append(next(x for x in itertools.chain(longer, numbered) if x not in (*names, *BASELINES)))
        teams.append(TeamSource(names[-1], location, roles))
    return teams
