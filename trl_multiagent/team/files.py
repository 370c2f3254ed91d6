"""The folder of a saved team: its layout, the file `team.json`, and its upload to the Hub."""

import json
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import CommitInfo

from trl_multiagent.environments.base import check_roles
from trl_multiagent.hub.push import open_repo, push_command_advice, upload_folder


TEAM_FILE = "team.json"
AGENTS_FOLDER = "agents"
SHARED_FOLDER = "shared"
FORMAT_VERSION = 1


@dataclass
class TeamFile:
    """
    The contents of `team.json`.

    Args:
        form (`str`): `"full"`, `"shared"` or `"lora"`.
        folders (`dict[str, str]`): The folder of each role, relative to the team's folder.
    """

    form: str
    folders: dict[str, str]

    @property
    def roles(self) -> tuple[str, ...]:
        return tuple(self.folders)

    def write(self, folder: Path) -> None:
        """Writes `team.json` into the team's folder."""
        agents = [{"role": role, "folder": agent_folder} for role, agent_folder in self.folders.items()]
        contents = {"format_version": FORMAT_VERSION, "form": self.form, "agents": agents}
        (folder / TEAM_FILE).write_text(json.dumps(contents, indent=2) + "\n")


def read_team_file(path: str | Path) -> TeamFile:
    """
    Reads `team.json`.

    Raises:
        ValueError: the file has another format version, or roles that cannot name agents.
    """
    contents = json.loads(Path(path).read_text())
    if contents.get("format_version") != FORMAT_VERSION:
        raise ValueError(
            f"{path} has the format version {contents.get('format_version')!r}; this release reads version {FORMAT_VERSION}."
        )
    check_roles([agent["role"] for agent in contents["agents"]])
    return TeamFile(contents["form"], {agent["role"]: agent["folder"] for agent in contents["agents"]})


def push_folder(
    folder: str | Path,
    repo_id: str,
    *,
    private: bool | None = None,
    token: str | None = None,
    revision: str | None = None,
    commit_message: str = "Upload team",
    create_pr: bool = False,
) -> CommitInfo:
    """
    Uploads the folder of a saved team or of a training run, without its checkpoints. Files that the repository already
    has are not sent again.

    Args:
        folder (`str` or `Path`):
            A folder that `save_pretrained` of a team or a trainer wrote.
        repo_id (`str`):
            Repository, created if it does not exist.
        private, token, revision, commit_message, create_pr:
            See [`AgentTeam.push_to_hub`].

    Returns:
        [`~huggingface_hub.CommitInfo`]

    Raises:
        `ValueError`: The folder contains no team.
        `RuntimeError`: The Hub cannot be reached, it refuses the upload, or the upload is interrupted.
    """
    if not (Path(folder) / TEAM_FILE).is_file():
        raise ValueError(
            f"{folder} holds no {TEAM_FILE}: push the folder of a saved team, or of a run that saved one."
        )
    repo_id = open_repo(repo_id, private, token, revision, create_pr)
    return upload_folder(
        folder, repo_id, push_command_advice(folder, repo_id), token, revision, commit_message, create_pr
    )
