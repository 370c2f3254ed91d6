"""Uploads of teams to the Hugging Face Hub."""

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path

from huggingface_hub import CommitInfo, HfApi
from huggingface_hub.errors import HFValidationError, HTTPError

from trl_multiagent.hub.model_card import team_card
from trl_multiagent.team.agent_team import TEAM_FILE, AgentTeam


IGNORED = ["_*", "checkpoint-*"]  # what `Trainer.push_to_hub` leaves out


def push_folder(
    folder: str | Path,
    repo_id: str,
    *,
    private: bool | None = None,
    token: str | None = None,
    revision: str | None = None,
    **kwargs,
) -> CommitInfo:
    """
    Uploads the folder of a team or of a training run, without its checkpoints. Files that the repository has already are
    not sent again.

    Args:
        folder (`str` or `Path`):
            What `save_pretrained` of a team or a trainer wrote.
        repo_id (`str`):
            Repository, created if it does not exist.
        private, token, revision, **kwargs:
            See [`AgentTeam.push_to_hub`].

    Returns:
        [`~huggingface_hub.CommitInfo`]

    Raises:
        `ValueError`: The folder holds no team.
        `RuntimeError`: The Hub cannot be reached, refused, or the upload was interrupted.
    """
    if not (Path(folder) / TEAM_FILE).is_file():
        raise ValueError(
            f"{folder} holds no {TEAM_FILE}: push the folder of a saved team, or of a run that saved one."
        )
    repo_id = open_repo(repo_id, private, token, revision, kwargs.get("create_pr", False))
    with explained_failure(repo_id, again_with(folder, repo_id)):
        return _upload(folder, repo_id, token=token, revision=revision, **kwargs)


def push_team(
    team: AgentTeam, repo_id: str, *, private: bool | None, token: str | None, revision: str | None, **kwargs
) -> CommitInfo:
    """Uploads a team with a small card; see [`AgentTeam.push_to_hub`]."""
    repo_id = open_repo(repo_id, private, token, revision, kwargs["create_pr"])
    with tempfile.TemporaryDirectory() as folder:
        team.save_pretrained(folder)
        team_card(team, repo_id).save(Path(folder) / "README.md")
        with explained_failure(repo_id, "Call `push_to_hub` again."):
            return _upload(folder, repo_id, token=token, revision=revision, **kwargs)


def _upload(folder: str | Path, repo_id: str, commit_message: str = "Upload team", **kwargs) -> CommitInfo:
    return HfApi().upload_folder(
        repo_id=repo_id, folder_path=folder, commit_message=commit_message, ignore_patterns=IGNORED, **kwargs
    )


def open_repo(repo_id: str, private: bool | None, token: str | None, revision: str | None, create_pr: bool) -> str:
    """Creates a repository and a branch where they do not exist, checks the right to write, and returns the full id."""
    with explained_refusal(repo_id):
        repo_id = HfApi().create_repo(repo_id, private=private, token=token, exist_ok=True).repo_id
        if not create_pr:
            check_write_access(repo_id, token, revision)
    return repo_id


def check_write_access(repo_id: str, token: str | None, revision: str | None) -> None:
    """Raises the Hub's error if the token may not write to a repository; creates the branch if it does not exist."""
    api = HfApi()
    api.auth_check(repo_id, token=token, write=True)
    if revision is not None and not revision.startswith("refs/"):
        api.create_branch(repo_id, branch=revision, token=token, exist_ok=True)


@contextlib.contextmanager
def explained_refusal(repo_id: str) -> Iterator[None]:
    """Tells what to do where the Hub cannot be reached, or refuses to create or to change a repository."""
    try:
        yield
    except (HTTPError, HFValidationError, OSError) as error:
        raise RuntimeError(
            f"Cannot push to {repo_id!r}: {error}\nLog in with `hf auth login`, or set HF_TOKEN to a token that may write "
            "to this repository; check its name."
        ) from error


@contextlib.contextmanager
def explained_failure(repo_id: str, advice: str) -> Iterator[None]:
    """Tells how to go on after an upload that was interrupted."""
    try:
        yield
    except Exception as error:  # the client raises errors of many kinds
        raise RuntimeError(
            f"The push to {repo_id!r} was not completed: {error}\n{advice} What was uploaded is not sent twice."
        ) from error


def again_with(folder: str | Path, repo_id: str) -> str:
    """Advice to push a folder again."""
    return f"Push it again with `trl-multiagent push {folder} {repo_id}`."
