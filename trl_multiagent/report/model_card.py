"""Writes the model card of a team: its agents, its training, its results, and how to load it."""

import os
import re
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData

from trl_multiagent.console import markdown_table
from trl_multiagent.folders import CARD_FILE


TEMPLATE = Path(__file__).with_name("team_card.md")
TAGS = ["trl", "trl-multiagent", "multi-agent"]
PACKAGES = {"trl_multiagent": "trl-multiagent", "TRL": "trl", "Transformers": "transformers", "Pytorch": "torch"}
PACKAGES |= {"Datasets": "datasets", "Tokenizers": "tokenizers", "PEFT": "peft"}
HUB_ID = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")


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
            model that it started from, if any), `is_adapter` (whether it is an adapter), and the adapter's
            `base_revision`.
        repo_id (`str`): The repository or the folder that the team is loaded from.
        model_name (`str`, *optional*): Name of the team; by default that of the repository.
        dataset_name (`str`, *optional*): Hub id of the dataset that the team was trained on.
        tags (`Sequence[str]`, *optional*): Tags in addition to those that every team has.
        training (`Mapping[str, Any]`, *optional*): The facts about the training that the template shows. Tables are
            lists of rows. By default, the card describes only the team.
        revision (`str`, *optional*): The branch that the team is loaded from.
    """
    model_name = model_name or repo_id.split("/")[-1]
    has_environment = training is None or training["environment"] is not None
    several = f"A team of {len(agents)} language models"
    several += " that solve one task together, each with its own completion" if has_environment else ""
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
        description="One language model" if len(agents) == 1 else several,
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
    named = revision is not None and revision != "main" and not revision.startswith("refs/")
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
    path.write_text(text, encoding="utf-8")


def hub_id(name: str) -> str | None:
    """
    Returns the name of a model if it is a Hub id; `None` for a folder, and for the empty name of a model that was not
    loaded.
    """
    return name if HUB_ID.fullmatch(name) and not os.path.exists(name) else None


def environment_name(environment: object) -> str:
    """Returns the `repr` of an environment, or the name of its class if the class defines no `__repr__`."""
    cls = type(environment)
    return cls.__qualname__ if cls.__repr__ is object.__repr__ else repr(environment)
