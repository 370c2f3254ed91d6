"""The files of a team: the layout of its folder, `team.json`, loading and saving of models."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from huggingface_hub import snapshot_download
from peft import PeftConfig
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.tokenization_utils_base import TOKENIZER_CONFIG_FILE

from trl_multiagent.environments.base import check_roles
from trl_multiagent.environments.task_errors import show
from trl_multiagent.folders import (
    ADAPTER_CONFIG,
    CRITICS_FOLDER,
    TEAM_FILE,
    leads_out,
    naming_damage,
    read_json,
    write_json,
)
from trl_multiagent.models.adapter_config import read_adapter_config
from trl_multiagent.models.pretrained import find_file, hub_arguments
from trl_multiagent.models.reasoning import Reasoning, check_reasoning, check_template_kwargs


AGENTS_FOLDER = "agents"
SHARED_FOLDER = "shared"
TEMPLATE_FILE = "chat_template.json"  # which transformers reads only for processors
FORMAT_VERSION = 1
TEAM_PATTERNS = [TEAM_FILE, f"{AGENTS_FOLDER}/*"]  # of the files that loading a team needs

Form = Literal["full", "shared", "lora", "mixed"]


@dataclass
class TeamFile:
    """
    The contents of `team.json`: the form of the team and, of each role, the folder in the folder of the team, what
    others see of its reasoning, and arguments of its chat template, see [`AgentTeam`].
    """

    form: Form
    folders: dict[str, str]
    reasoning: dict[str, Reasoning]
    chat_template_kwargs: dict[str, dict[str, Any]]

    @property
    def roles(self) -> tuple[str, ...]:
        return tuple(self.folders)

    def write(self, folder: Path) -> None:
        """Writes `team.json` into the team's folder."""
        agents = [
            {
                "role": role,
                "folder": folder,
                "reasoning": self.reasoning[role],
                "chat_template_kwargs": self.chat_template_kwargs[role],
            }
            for role, folder in self.folders.items()
        ]
        write_json(folder / TEAM_FILE, {"format_version": FORMAT_VERSION, "form": self.form, "agents": agents})


def read_team_file(path: str | Path) -> TeamFile:
    """
    Reads `team.json`.

    Raises:
        ValueError: the file is damaged or has another format version, a role cannot name an agent, or a file of the
            team is not in its folder, for example because of a link that leads out of it.
    """
    path = Path(path)
    contents = read_json(path)
    with naming_damage(path):
        version, form, agents = contents["format_version"], contents["form"], contents["agents"]
        roles = [agent["role"] for agent in agents]
        folders = {agent["role"]: str(agent["folder"]) for agent in agents}
        reasoning = {agent["role"]: agent.get("reasoning", "auto") for agent in agents}
        template_kwargs = {agent["role"]: agent.get("chat_template_kwargs", {}) for agent in agents}
    if version != FORMAT_VERSION or form not in get_args(Form):
        raise ValueError(
            f"{path} has the format version {version!r} and the form {form!r}; this release reads version "
            f"{FORMAT_VERSION}."
        )
    check_roles(roles)
    for role, value in reasoning.items():
        check_reasoning(f"{path}: the `reasoning` of {role!r}", value)
        check_template_kwargs(f"{path}: `chat_template_kwargs` of {role!r}", template_kwargs[role])
    parts = [path.parent / folder for folder in (*folders.values(), CRITICS_FOLDER)]
    for file in (path, *parts, *(file for part in parts for file in part.rglob("*"))):
        if leads_out(file, path.parent):
            raise ValueError(f"{file} leads out of the team's folder: replace it by a copy of {file.resolve()}.")
    return TeamFile(form, folders, reasoning, template_kwargs)


# Loading


def find_sources(
    name: str | Path | Sequence[str], roles: Sequence[str] | None, hub: dict[str, Any]
) -> tuple[dict[str, str], TeamFile | None]:
    """
    Finds what each agent of a team is loaded from: its folder in a saved team, which is downloaded if it is on the
    Hub, or the folder or Hub id of a model. Returns these by role, and the `team.json` of a saved team, or `None` for
    models.

    Raises:
        ValueError: the roles are missing, or do not fit the saved team or the number of models.
    """
    from trl_multiagent.models.packaged import packaged

    if isinstance(name, str | Path):
        name = packaged(str(name))
        if find_file(name, TEAM_FILE, **hub, required=roles is None) is not None:
            is_local = Path(name).is_dir()
            folder = Path(name if is_local else snapshot_download(name, allow_patterns=TEAM_PATTERNS, **hub))
            team = read_team_file(folder / TEAM_FILE)
            if roles is not None and roles != team.roles:
                raise ValueError(f"The team in {name} has the roles {list(team.roles)}, not {list(roles)}.")
            return {role: str(folder / place) for role, place in team.folders.items()}, team
    elif not (isinstance(name, list | tuple) and all(isinstance(x, str | Path) for x in name)):
        raise ValueError(
            f"`name` is {show(name)}; it must be a model's name or folder, or a list with one per role. "
            "`AgentTeam(models, tokenizers)` takes loaded models, in dicts by role."
        )
    if roles is None:
        raise ValueError(f"{name} holds no {TEAM_FILE}: to start a team from a model, pass `roles`.")
    names = [name] * len(roles) if isinstance(name, str) else [packaged(str(x)) for x in name]
    if len(names) != len(roles):
        raise ValueError(
            f"{len(names)} models for the {len(roles)} roles {list(roles)}; give one per role or one for all."
        )
    return dict(zip(roles, names, strict=True)), None


def form_of_sources(
    sources: dict[str, str],
    saved_form: Form | None,
    peft_configs: Mapping[str, PeftConfig],
    share_weights: bool,
    hub: dict[str, Any],
) -> tuple[bool, list[str]]:
    """
    Returns whether all agents are one model, and which of them have a LoRA adapter. `saved_form`: the form in a
    `team.json`. `peft_configs`: the adapters of the agents that get a fresh one. `hub`: arguments for reading files.
    Raises `ValueError` if the arguments contradict the sources.
    """
    unknown = [role for role in peft_configs if role not in sources]
    if unknown:
        raise ValueError(f"`peft_config` has the roles {unknown}, the team has the roles {list(sources)}.")
    shares = share_weights or saved_form == "shared"
    if shares and len(set(sources.values())) > 1:
        raise ValueError("`share_weights` needs one model for all roles.")
    found = {source: find_file(source, ADAPTER_CONFIG, **hub) is not None for source in {*sources.values()}}
    for role in peft_configs:
        if found[sources[role]]:
            raise ValueError(
                f"The agent in {sources[role]} has a LoRA adapter, which is loaded: leave `peft_config` out."
            )
    adapted = [role for role, source in sources.items() if found[source] or role in peft_configs]
    if adapted and share_weights:
        raise ValueError("Each agent has an adapter of its own, which excludes `share_weights`.")
    return shares, adapted


def load_tokenizer(source: str, hub: dict[str, Any]) -> PreTrainedTokenizerBase:
    """
    Loads an agent's tokenizer, which pads and truncates on the left. An adapter without one has its base's. Raises
    `ValueError` if it has no words, or no end token.
    """
    from trl_multiagent.models.gguf import converted
    from trl_multiagent.models.packaged import packaged

    files = hub_arguments(hub)
    if find_file(source, ADAPTER_CONFIG, **files) and not find_file(source, TOKENIZER_CONFIG_FILE, **files):
        adapter = read_adapter_config(source, **files)
        return load_tokenizer(packaged(str(adapter.base_model_name_or_path)), {**hub, "revision": adapter.revision})
    source = converted(source, **files, weights=False)
    # With `mistral-common`, Mistral's would be another class with other methods
    kwargs = {"mistral_format": False, "trust_remote_code": False, **hub}
    tokenizer = AutoTokenizer.from_pretrained(source, padding_side="left", truncation_side="left", **kwargs)
    if len(tokenizer) <= len(tokenizer.all_special_ids):  # transformers makes an empty one where no file is
        raise ValueError(f"{source} has no tokenizer: save one there, with `tokenizer.save_pretrained({source!r})`.")
    if tokenizer.chat_template is None and (path := find_file(source, TEMPLATE_FILE, **files)):
        tokenizer.chat_template = read_json(Path(path))["chat_template"]
    if tokenizer.eos_token is None and tokenizer.pad_token is None:
        raise ValueError(
            f"The tokenizer of {source} names no token that ends a text: give it as `tokenizer_kwargs`, for example "
            "{'eos_token': '</s>'}."
        )
    return tokenizer


# Saving


def part_of(state_dict: dict[str, torch.Tensor] | None, prefix: str) -> dict[str, torch.Tensor] | None:
    """Returns the entries of a state dict that have a prefix, with the prefix removed from their names."""
    if state_dict is None:
        return None
    return {key.removeprefix(prefix): x for key, x in state_dict.items() if key.startswith(prefix)}


def save_model(model: PreTrainedModel, folder: Path, state_dict: dict[str, torch.Tensor] | None) -> None:
    """Saves an agent without adapters. A model that holds only a shard of its weights needs the `state_dict`."""
    if state_dict is not None:
        # Weights that are tied in the model are separate copies once they are gathered
        state_dict = {name: x for name, x in state_dict.items() if name not in model.all_tied_weights_keys}
    model.save_pretrained(folder, state_dict=state_dict)
    for file, content in getattr(model, "processor_files", {}).items():
        (folder / file).write_bytes(content)
    (folder / ADAPTER_CONFIG).unlink(missing_ok=True)  # a LoRA team may have been saved here before
