"""Loads datasets of joint preferences from folders, files and the Hub, and pushes them."""

import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

from datasets import Dataset, load_from_disk
from huggingface_hub import CommitInfo

from trl_multiagent.environments.dataset_rows import (
    LOCAL_FILE,
    LOCAL_SUFFIXES,
    load_from_hub,
    make_dataset,
    read_file,
    select_rows,
)
from trl_multiagent.folders import CARD_FILE, DATASET_STATE, is_collection
from trl_multiagent.hub import open_repo, push_command_advice, upload_folder
from trl_multiagent.preferences.config import CANDIDATES_FOLDER
from trl_multiagent.preferences.report import HUB_FILE, PICTURE_FILE
from trl_multiagent.preferences.rows import check_preferences


def load_preferences(name: str, roles: Sequence[str], split: str | None = None) -> Dataset:
    """
    Loads joint preferences of a collection or from another source, and checks every row.

    Args:
        name (`str`): Folder of a collection or of another dataset that `Dataset.save_to_disk` wrote, a `.jsonl`,
            `.json` or `.parquet` file, or the id of a dataset on the Hub.
        roles (`Sequence[str]`): The roles of the team that is to be trained.
        split (`str`, *optional*): The rows, such as `"train[:100]"`. By default, all rows, or those of the split
            `train` of a dataset on the Hub.

    Raises:
        FileNotFoundError: there is no such file or folder. OSError: the Hub cannot be reached. ValueError: the file is
        of another kind, the collection is not complete, or a column or row is malformed; the
            message names the row and the field.
    """
    path = Path(name)
    if path.suffix in LOCAL_SUFFIXES:
        preferences = select_rows(make_dataset(read_file(path), name), split, name)
    elif path.is_dir():
        if not (path / DATASET_STATE).is_file():
            is_unfinished = (path / CANDIDATES_FOLDER).is_dir()
            what = "an unfinished collection; start it again to finish it" if is_unfinished else "no dataset"
            raise ValueError(f"{path} holds {what}.")
        preferences = select_rows(load_from_disk(path), split, name)
    elif path.is_file():
        raise ValueError(f"{path} is not a {LOCAL_FILE}, from which preferences are read.")
    elif path.is_absolute() or name.count("/") != 1:
        advice = f"a folder that `trl-multiagent collect` wrote, a {LOCAL_FILE}, or an id on the Hub"
        raise FileNotFoundError(f"There is no folder {name}. Give {advice}.")
    else:
        preferences = load_from_hub(name, None, split or "train")
    check_preferences(preferences, roles, name)
    return preferences


def push_preferences(
    folder: str | Path,
    repo_id: str,
    *,
    private: bool | None = None,
    token: str | None = None,
    revision: str | None = None,
    commit_message: str = "Upload preferences",
    create_pr: bool = False,
) -> CommitInfo:
    """
    Uploads collected preferences and their card to a dataset repository. The candidates stay on this machine.

    Args:
        folder (`str` or `Path`): Folder of a collection.
        repo_id (`str`): Repository, created if it does not exist.
        private, token, revision, commit_message, create_pr: See [`AgentTeam.push_to_hub`].

    Raises:
        ValueError: the folder holds no complete collection.
        RuntimeError: the Hub cannot be reached, it refuses the upload, or the upload is interrupted.
    """
    folder = Path(folder)
    if not is_collection(folder):
        raise ValueError(f"{folder} holds no complete collection of preferences.")
    repo_id = open_repo(repo_id, private, token, revision, create_pr, repo_type="dataset")
    with tempfile.TemporaryDirectory() as upload:
        for path in (folder / CARD_FILE, folder / PICTURE_FILE):
            if path.is_file():
                shutil.copy(path, upload)
        (Path(upload) / HUB_FILE).parent.mkdir()
        load_from_disk(folder).to_parquet(Path(upload) / HUB_FILE)
        advice = push_command_advice(folder, repo_id, revision)
        return upload_folder(upload, repo_id, advice, token, revision, commit_message, create_pr, repo_type="dataset")
