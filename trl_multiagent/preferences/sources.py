"""Loads datasets of joint preferences from folders, files and the Hub, and pushes them."""

from collections.abc import Sequence
from pathlib import Path

from datasets import Dataset, load_dataset, load_from_disk
from huggingface_hub import CommitInfo, HfApi

from trl_multiagent.environments.dataset_rows import LOCAL_FILE, LOCAL_SUFFIXES, read_file, select_rows
from trl_multiagent.hub.push import access_error_with_advice, upload_error_with_advice
from trl_multiagent.preference_rows import check_preferences
from trl_multiagent.preferences.collection import CANDIDATES_FOLDER, DATASET_STATE
from trl_multiagent.preferences.report import PICTURE_FILE


def load_preferences(name: str, roles: Sequence[str], split: str | None = None) -> Dataset:
    """
    Loads joint preferences, from a collection or from anywhere else, and checks every row.

    Args:
        name (`str`):
            Folder of a collection or of another dataset that `Dataset.save_to_disk` wrote, a `.jsonl`, `.json` or `.parquet` file,
            or the id of a dataset on the Hub.
        roles (`Sequence[str]`):
            The roles of the team that is to be trained.
        split (`str`, *optional*):
            The rows, such as `"train[:100]"`. By default, all rows, or those of the split `train` of a dataset on the Hub.

    Returns:
        `datasets.Dataset`

    Raises:
        FileNotFoundError: there is no such file or folder.
        ValueError: the collection is not complete, or a column or row is malformed; the message names the row and the field.
    """
    path = Path(name)
    if path.suffix in LOCAL_SUFFIXES:
        preferences = select_rows(Dataset.from_list(read_file(path)), split, name)
    elif path.is_dir():
        if not (path / DATASET_STATE).is_file():
            what = "an unfinished collection; start it again to finish it" if is_unfinished(path) else "no dataset"
            raise ValueError(f"{path} holds {what}.")
        preferences = select_rows(load_from_disk(path), split, name)
    elif path.is_absolute() or name.count("/") != 1:
        raise FileNotFoundError(
            f"There is no folder {name}. Preferences are in a folder, a {LOCAL_FILE}, or on the Hub."
        )
    else:
        preferences = load_dataset(name, split=split or "train")
    check_preferences(preferences, roles, name)
    return preferences


def is_unfinished(folder: Path) -> bool:
    """Whether a folder holds candidates, but no dataset yet."""
    return (folder / CANDIDATES_FOLDER).is_dir()


def push_preferences(
    folder: str | Path, repo_id: str, *, private: bool | None = None, token: str | None = None
) -> CommitInfo:
    """
    Uploads collected preferences and their card to a dataset repository. The candidates stay on this machine.

    Args:
        folder (`str` or `Path`): Folder of a collection.
        repo_id (`str`): Repository, created if it does not exist.
        private (`bool`, *optional*): Whether a repository that is created is private.
        token (`str`, *optional*): Token with write access; by default the one of `hf auth login` or of the variable `HF_TOKEN`.

    Returns:
        [`~huggingface_hub.CommitInfo`]

    Raises:
        ValueError: the folder holds no complete collection.
        RuntimeError: the Hub cannot be reached, it refuses the upload, or the upload is interrupted.
    """
    folder = Path(folder)
    if not (folder / DATASET_STATE).is_file() or not (folder / "README.md").is_file():
        raise ValueError(f"{folder} holds no complete collection of preferences.")
    api = HfApi(token=token)
    with access_error_with_advice(repo_id):
        repo_id = api.create_repo(repo_id, repo_type="dataset", private=private, exist_ok=True).repo_id
    with upload_error_with_advice(repo_id, "Push the preferences again."):
        # The card comes first: `Dataset.push_to_hub` adds the description of the columns to the card that it finds
        api.upload_folder(
            repo_id=repo_id,
            repo_type="dataset",
            folder_path=folder,
            allow_patterns=["README.md", PICTURE_FILE],
            commit_message="Upload card",
        )
        return load_from_disk(folder).push_to_hub(repo_id, token=token, commit_message="Upload preferences")
