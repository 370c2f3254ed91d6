"""Model cards of teams, and uploads of folders to the Hugging Face Hub."""

import contextlib
import glob
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from huggingface_hub import CommitInfo, HfApi, ModelCard, ModelCardData
from huggingface_hub.errors import HFValidationError, HTTPError

from trl_multiagent.console import markdown_table
from trl_multiagent.folders import (
    ADAPTER_CONFIG,
    CARD_FILE,
    CRITICS_FOLDER,
    MODEL_CONFIG,
    PROCESSOR_FILES,
    RECIPE_FILE,
    TEAM_FILE,
    leads_out,
    read_json,
    write_text,
)


TEMPLATE = Path(__file__).with_name("team_card.md")
TAGS = ["trl", "trl-multiagent", "multi-agent"]
PACKAGES = {
    "trl_multiagent": "trl-multiagent",
    "TRL": "trl",
    "Transformers": "transformers",
    "Pytorch": "torch",
    "Datasets": "datasets",
    "Tokenizers": "tokenizers",
    "PEFT": "peft",
}
# The files of a team beside its agents': its description, the card, and the files that the card shows or links
TOP_FILES = (TEAM_FILE, CARD_FILE, RECIPE_FILE, "training_args.bin")
# The files of a model, an adapter or a critic, and of a tokenizer, as `save_pretrained` names them
# The Python files are of a model with code of its own
AGENT_FILES = [MODEL_CONFIG, ADAPTER_CONFIG, CARD_FILE, *PROCESSOR_FILES]
AGENT_FILES += """
    generation_config.json *.safetensors *.safetensors.index.json
    tokenizer.json tokenizer_config.json special_tokens_map.json added_tokens.json
    vocab.json vocab.txt merges.txt *.model chat_template.* additional_chat_templates/*.jinja
    configuration_*.py modeling_*.py tokenization_*.py
""".split()


def push_folder(
    folder: str | Path,
    repo_id: str,
    *,
    private: bool | None = None,
    token: str | None = None,
    revision: str | None = None,
    commit_message: str = "Upload team",
    create_pr: bool = False,
    with_critics: bool = False,
    advice: str | None = None,
) -> CommitInfo:
    """
    Uploads only the team in the folder of a saved team or of a training run, see [`team_files`]. Files that the
    repository already has are not sent again. The code in the model card of the folder is changed to load the team
    from this repository.

    Args:
        folder (`str` or `Path`): A folder that `save_pretrained` of a team or a trainer wrote.
        repo_id (`str`): Repository, created if it does not exist.
        private, token, revision, commit_message, create_pr: See [`AgentTeam.push_to_hub`].
        with_critics (`bool`, *optional*, defaults to `False`): Whether to upload the critics of an actor-critic run,
            too.
        advice (`str`, *optional*): How to repeat an upload that fails; by default by the command `push`.

    Raises:
        `ValueError`: The folder contains no team.
        `RuntimeError`: The Hub cannot be reached, it refuses the upload, or the upload is interrupted.
    """
    folder = Path(folder)
    if not (folder / TEAM_FILE).is_file():
        raise ValueError(
            f"{folder} holds no {TEAM_FILE}: push the folder of a saved team, or of a run that saved one."
        )
    repo_id = open_repo(repo_id, private, token, revision, create_pr)
    rename_card(folder, repo_id, None if create_pr else revision)
    return upload_folder(
        folder,
        repo_id,
        advice or push_command_advice(folder, repo_id, revision, create_pr),
        allow_patterns=team_files(folder, with_critics),
        token=token,
        revision=revision,
        commit_message=commit_message,
        create_pr=create_pr,
    )


def team_files(folder: str | Path, with_critics: bool = False) -> list[str]:
    """
    Lists the files of the team in a folder, as patterns for the Hub's client that match only these paths: `team.json`,
    the models and tokenizers of its agents, the model card, and the settings. Links that lead out of the folder are
    left out.
    """
    folder = Path(folder)
    patterns = [*TOP_FILES]
    for agent in read_json(folder / TEAM_FILE)["agents"]:
        patterns += [f"{agent['folder']}/{name}" for name in AGENT_FILES]
    if with_critics:
        patterns += [f"{CRITICS_FOLDER}/*.json", *(f"{CRITICS_FOLDER}/*/{name}" for name in AGENT_FILES)]
    paths = {path for pattern in patterns for path in folder.glob(pattern) if path.is_file()}
    return sorted(glob.escape(str(path.relative_to(folder))) for path in paths if not leads_out(path, folder))


def upload_folder(folder: str | Path, repo_id: str, advice: str, **options: Any) -> CommitInfo:
    """
    Uploads a folder to a repository, see [`open_repo`]. `options` are the options of the Hub's client.

    Raises:
        `RuntimeError`: The upload failed or was interrupted. The message ends with `advice` on how to repeat it.
    """
    with upload_error_with_advice(repo_id, advice):
        return HfApi().upload_folder(repo_id=repo_id, folder_path=folder, **options)


def open_repo(
    repo_id: str,
    private: bool | None,
    token: str | None,
    revision: str | None,
    create_pr: bool,
    repo_type: str = "model",
) -> str:
    """Creates a repository and a branch if they do not exist, checks the right to write, and returns the full id."""
    with access_error_with_advice(repo_id):
        url = HfApi().create_repo(repo_id, private=private, token=token, repo_type=repo_type, exist_ok=True)
        if not create_pr:
            check_write_access(url.repo_id, token, revision, repo_type)
    return url.repo_id


def check_write_access(repo_id: str, token: str | None, revision: str | None, repo_type: str = "model") -> None:
    """Raises the Hub's error if the token may not write to a repository. Creates the branch if it does not exist."""
    api = HfApi()
    api.auth_check(repo_id, repo_type=repo_type, token=token, write=True)
    if revision and not revision.startswith("refs/"):
        api.create_branch(repo_id, branch=revision, repo_type=repo_type, token=token, exist_ok=True)


@contextlib.contextmanager
def access_error_with_advice(repo_id: str) -> Iterator[None]:
    """Adds advice to the error if the Hub cannot be reached, or if it refuses to create or change a repository."""
    try:
        yield
    except (HTTPError, HFValidationError, OSError) as error:
        raise RuntimeError(
            f"Cannot push to {repo_id!r}: {error}\nThe name has the form user/team. `hf auth login` or HF_TOKEN gives "
            "the token, which must be allowed to write there. HF_ENDPOINT names another server, HF_HUB_OFFLINE=1 "
            "none."
        ) from error


@contextlib.contextmanager
def upload_error_with_advice(repo_id: str, advice: str) -> Iterator[None]:
    """Adds advice to the error of an upload that was interrupted."""
    try:
        yield
    except Exception as error:  # the client raises errors of many kinds
        raise RuntimeError(
            f"The push to {repo_id!r} was not completed: {error}\n{advice} Files that were uploaded are not sent "
            "again."
        ) from error


def push_command_advice(folder: str | Path, repo_id: str, revision: str | None, create_pr: bool = False) -> str:
    """Returns the command that repeats the upload of a folder, as a sentence for an error message."""
    branch = [*(["--revision", revision] if revision else []), *["--create_pr"] * create_pr]
    return f"Push it again with `{shlex.join(['trl-multiagent', 'push', str(folder), repo_id, *branch])}`."


# Model cards


def team_card(
    agents: Sequence[Mapping[str, Any]],
    repo_id: str,
    model_name: str | None = None,
    dataset_name: str | None = None,
    tags: Sequence[str] = (),
    training: Mapping[str, Any] | None = None,
    revision: str | None = None,
) -> ModelCard:
    """
    Writes the card of a team.

    Args:
        agents (`Sequence[Mapping[str, Any]]`): For each agent, its `role`, its `folder`, its `base` (the Hub id of the
            model that it started from, if any), its `gguf_file` (in the base, if any), `is_adapter` (whether it is an
            adapter), the adapter's `base_revision`, the `model_class` that loads it or its base, and the
            `template_kwargs` of its chat template, if any.
        repo_id (`str`): The repository or the folder that the team is loaded from.
        model_name (`str`, *optional*): Name of the team; by default the repository's.
        dataset_name (`str`, *optional*): Hub id of the dataset that the team was trained on.
        tags (`Sequence[str]`, *optional*): Tags in addition to those that every team has.
        training (`Mapping[str, Any]`, *optional*): The facts about the training that the template shows. Tables are
            lists of rows. By default, the card describes only the team.
        revision (`str`, *optional*): The branch that the team is loaded from.
    """
    model_name = model_name or repo_id.split("/")[-1]
    has_environment = training is None or training["environment"]
    together = " that solve one task together, each with its own completion" if has_environment else ""
    return ModelCard.from_template(
        ModelCardData(
            base_model=list(dict.fromkeys(agent["base"] for agent in agents if agent["base"])) or None,
            datasets=dataset_name,
            library_name="trl-multiagent",
            model_name=model_name,
            pipeline_tag="text-generation",
            tags=list(dict.fromkeys([*TAGS, *tags, *(["generated_from_trainer"] if training else [])])),
        ),
        template_path=str(TEMPLATE),
        model_name=model_name,
        description="One language model" if len(agents) == 1 else f"A team of {len(agents)} language models{together}",
        place=place(repo_id, revision),
        dataset_name=dataset_name,
        has_environment=has_environment,
        agents=agents,
        agent=agents[-1],
        training=training,
        table=markdown_table,
        versions={name: metadata.version(package) for name, package in PACKAGES.items()},
    )


def place(repo_id: str, revision: str | None = None) -> str:
    """
    Returns the arguments of `from_pretrained` for a repository or a folder, as code. A pull request counts as `main`.
    """
    named = revision and revision != "main" and not revision.startswith("refs/")
    return f'"{repo_id}", revision="{revision}"' if named else f'"{repo_id}"'


def rename_card(folder: str | Path, repo_id: str, revision: str | None = None) -> None:
    """
    Changes the code in a card of [`team_card`], if the folder has one, to load the team from another place, see
    [`place`].
    """
    path = Path(folder) / CARD_FILE
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    loading = re.search(r'AgentTeam\.from_pretrained\(("([^"\n]+)"(?:, revision="[^"\n]+")?)\)', text)
    if loading is None:
        return
    name, new_name = (path_or_id.split("/")[-1] for path_or_id in (loading[2], repo_id))
    text = text.replace(loading[1], place(repo_id, revision))
    text = re.sub(
        rf"^(# Model Card for |model_name: ){re.escape(name)}$", rf"\g<1>{new_name}", text, flags=re.MULTILINE
    )
    write_text(path, text)
