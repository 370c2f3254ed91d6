"""The team: N agents, one `nn.Module`."""

import contextlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from huggingface_hub import CommitInfo
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DynamicCache,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import cached_file
from trl.trainer.utils import create_model_from_path

from trl_multiagent.generation import takes_positions


TEAM_FILE = "team.json"
AGENTS_FOLDER = "agents"
FORMAT_VERSION = 1


class AgentTeam(nn.Module):
    """
    Agents that are trained together, each a full model with its own tokenizer.

    As a module it is a thin frame: one forward of the team runs every agent on its own inputs, so that one optimizer,
    one wrapper (DDP, DeepSpeed) and one backward serve all. What a trainer reads from a model (`config`, `generate`,
    ...) comes from the *active* agent, chosen with [`~AgentTeam.activate`].

    Args:
        models (`dict[str, PreTrainedModel]`):
            The agents by role, in the order of the environment's roles.
        tokenizers (`dict[str, PreTrainedTokenizerBase]`):
            Each role's tokenizer. They may be one and the same object.

    Example:

    ```python
    team = AgentTeam.from_pretrained("Qwen/Qwen2.5-Coder-0.5B", roles=["aux", "main"])
    ```
    """

    def __init__(self, models: dict[str, PreTrainedModel], tokenizers: dict[str, PreTrainedTokenizerBase]):
        super().__init__()
        if not models:
            raise ValueError("A team needs at least one agent.")
        if list(models) != list(tokenizers):
            raise ValueError(f"The models are for the roles {list(models)}, the tokenizers for {list(tokenizers)}.")
        for role in models:
            if not role.isidentifier():
                raise ValueError(f"A role names a folder and a module: {role!r} must be a Python identifier.")
        if len({id(model) for model in models.values()}) < len(models):
            raise ValueError("Two roles have the same model object; give each agent a model of its own.")
        self.roles = tuple(models)
        self.agents = nn.ModuleDict(models)
        self.tokenizers = dict(tokenizers)
        self.active = self.roles[0]
        for role, tokenizer in self.tokenizers.items():
            if tokenizer.pad_token is None:
                tokenizer.pad_token = tokenizer.eos_token
            self.agents[role].config.get_text_config().pad_token_id = tokenizer.pad_token_id
            self.agents[role].generation_config.pad_token_id = tokenizer.pad_token_id

    @classmethod
    def from_pretrained(
        cls, name: str | Sequence[str], roles: Sequence[str] | None = None, **model_init_kwargs
    ) -> "AgentTeam":
        """
        Loads a team.

        Args:
            name (`str` or `list[str]`):
                A model id or folder that every agent starts from, a list with one per role, or the id or folder of a
                team that [`~AgentTeam.save_pretrained`] wrote.
            roles (`list[str]`, *optional*):
                The agents' roles. A saved team knows its own.
            **model_init_kwargs:
                Passed to `AutoModelForCausalLM.from_pretrained`, for example `dtype`, `revision` or
                `attn_implementation`.

        Returns:
            [`AgentTeam`]
        """
        revision, token = model_init_kwargs.get("revision"), model_init_kwargs.get("token")
        subfolders = None
        if isinstance(name, str):
            team_file = cached_file(
                name,
                TEAM_FILE,
                revision=revision,
                token=token,
                _raise_exceptions_for_missing_entries=False,
                _raise_exceptions_for_connection_errors=False,
            )
            if team_file is not None:
                saved_roles = _read_team_file(team_file)
                if roles is not None and list(roles) != saved_roles:
                    raise ValueError(f"The team in {name} has the roles {saved_roles}, not {list(roles)}.")
                roles = saved_roles
                subfolders = [f"{AGENTS_FOLDER}/{role}" for role in roles]
            elif roles is None:
                raise ValueError(f"{name} holds no {TEAM_FILE}: to start a team from a model, pass `roles`.")
        names = [name] * len(roles) if isinstance(name, str) else list(name)
        if len(names) != len(roles):
            raise ValueError(
                f"{len(names)} models for the {len(roles)} roles {list(roles)}; give one per role or one for all."
            )
        models, tokenizers = {}, {}
        for k, role in enumerate(roles):
            kwargs = {} if subfolders is None else {"subfolder": subfolders[k]}
            tokenizers[role] = AutoTokenizer.from_pretrained(
                names[k], padding_side="left", truncation_side="left", revision=revision, token=token, **kwargs
            )
            models[role] = _load_model(names[k], **kwargs, **model_init_kwargs)
        return cls(models, tokenizers)

    def save_pretrained(self, folder: str | Path, state_dict: dict[str, torch.Tensor] | None = None) -> None:
        """
        Writes `team.json` and one standard folder per role, `agents/<role>/`, that `AutoModelForCausalLM` loads.

        Args:
            folder (`str` or `Path`):
                Where to write.
            state_dict (`dict[str, torch.Tensor]`, *optional*):
                The team's state dict, where the modules themselves hold only a shard.
        """
        folder = Path(folder)
        for role, model in self.agents.items():
            prefix = f"agents.{role}."
            weights = None
            if state_dict is not None:
                weights = {key.removeprefix(prefix): x for key, x in state_dict.items() if key.startswith(prefix)}
            model.save_pretrained(folder / AGENTS_FOLDER / role, state_dict=weights)
            self.tokenizers[role].save_pretrained(folder / AGENTS_FOLDER / role)
        team = {
            "format_version": FORMAT_VERSION,
            "agents": [{"role": role, "folder": f"{AGENTS_FOLDER}/{role}"} for role in self.roles],
        }
        (folder / TEAM_FILE).write_text(json.dumps(team, indent=2) + "\n")

    def push_to_hub(
        self,
        repo_id: str,
        *,
        private: bool | None = None,
        token: str | None = None,
        revision: str | None = None,
        commit_message: str = "Upload team",
        create_pr: bool = False,
    ) -> CommitInfo:
        """
        Uploads the team and a model card to the Hugging Face Hub.

        Args:
            repo_id (`str`):
                Repository, created if it does not exist.
            private (`bool`, *optional*):
                Whether a repository that is created is private.
            token (`str`, *optional*):
                Token with write access; by default the one of `hf auth login` or of the variable `HF_TOKEN`.
            revision (`str`, *optional*):
                Branch, created if it does not exist; by default `main`.
            commit_message (`str`, *optional*, defaults to `"Upload team"`):
                Message of the commit.
            create_pr (`bool`, *optional*, defaults to `False`):
                Whether to open a pull request, which takes no write access.

        Returns:
            [`~huggingface_hub.CommitInfo`]

        Raises:
            `RuntimeError`: The Hub cannot be reached, refused, or the upload was interrupted.
        """
        from trl_multiagent.hub import push_team  # which needs this class

        return push_team(
            self,
            repo_id,
            private=private,
            token=token,
            revision=revision,
            commit_message=commit_message,
            create_pr=create_pr,
        )

    def load_weights(self, folder: str | Path) -> None:
        """Replaces the agents' weights by those of a team that [`~AgentTeam.save_pretrained`] wrote."""
        saved_roles = _read_team_file(Path(folder) / TEAM_FILE)
        if saved_roles != list(self.roles):
            raise ValueError(f"The team in {folder} has the roles {saved_roles}, this one {list(self.roles)}.")
        for role, model in self.agents.items():
            saved = _load_model(str(Path(folder) / AGENTS_FOLDER / role), dtype=model.dtype, device_map=None)
            model.load_state_dict(saved.state_dict())

    @contextlib.contextmanager
    def activate(self, role: str) -> Iterator[PreTrainedModel]:
        """Makes one agent the active one."""
        previous, self.active = self.active, role
        try:
            yield self.agents[role]
        finally:
            self.active = previous

    def forward(self, *args, team_inputs: dict[str, dict] | None = None, **kwargs):
        """
        Runs every agent on its own inputs, or the active agent.

        Args:
            team_inputs (`dict[str, dict]`, *optional*):
                Keyword arguments of each agent's forward. Without it, the arguments go to the active agent. An agent's
                `shared_prompts` are read first, and its rows continue them: see [`continue_prompts`].

        Returns:
            `dict` of the agents' outputs by role, or the active agent's output.
        """
        if team_inputs is None:
            return self.active_agent(*args, **kwargs)
        outputs = {}
        for role, inputs in team_inputs.items():
            with self.activate(role) as agent:
                outputs[role] = continue_prompts(agent, **inputs)
        return outputs

    # What trainers read from a model comes from the active agent

    @property
    def active_agent(self) -> PreTrainedModel:
        return self.agents[self.active]

    @property
    def config(self):
        return self.active_agent.config

    @property
    def generation_config(self) -> GenerationConfig:
        return self.active_agent.generation_config

    @property
    def dtype(self) -> torch.dtype:
        return self.active_agent.dtype

    @property
    def device(self) -> torch.device:
        return self.active_agent.device

    @property
    def is_gradient_checkpointing(self) -> bool:
        return self.active_agent.is_activation_checkpointing

    def generate(self, *args, **kwargs):
        return self.active_agent.generate(*args, **kwargs)

    def get_output_embeddings(self) -> nn.Module:
        return self.active_agent.get_output_embeddings()

    # What trainers do to a model is done to every agent

    def activation_checkpointing_enable(self, activation_checkpointing_kwargs: dict | None = None, **kwargs) -> None:
        for agent in self.agents.values():
            agent.activation_checkpointing_enable(activation_checkpointing_kwargs, **kwargs)

    def activation_checkpointing_disable(self) -> None:
        for agent in self.agents.values():
            agent.activation_checkpointing_disable()

    # The names that TRL calls; `transformers` knows them as older ones of the two above

    def gradient_checkpointing_enable(self, gradient_checkpointing_kwargs: dict | None = None) -> None:
        self.activation_checkpointing_enable(gradient_checkpointing_kwargs)

    def gradient_checkpointing_disable(self) -> None:
        self.activation_checkpointing_disable()

    def add_model_tags(self, tags: list[str] | str) -> None:
        for agent in self.agents.values():
            agent.add_model_tags(tags)


def continue_prompts(agent: PreTrainedModel, shared_prompts: dict[str, torch.Tensor] | None = None, **inputs):
    """
    One forward in which several rows continue the same prompt, which is read once. Gradients reach the prompts too.

    Args:
        agent ([`~transformers.PreTrainedModel`]):
            The model.
        shared_prompts (`dict[str, torch.Tensor]`, *optional*):
            `owners` of shape `(num_rows,)`, which prompt each row continues; the rest are the backbone's inputs for the
            prompts, of shape `(num_prompts, prompt_length)`, padded on the left.
        **inputs:
            Arguments of the forward; the attention mask covers prompts and rows.
    """
    if shared_prompts is None:
        return agent(**inputs)
    cache = DynamicCache(config=agent.config.get_text_config(decoder=True))
    prompts = {name: x for name, x in shared_prompts.items() if name != "owners"}
    agent.base_model(past_key_values=cache, use_cache=True, **prompts)
    cache.batch_select_indices(shared_prompts["owners"])
    return agent(past_key_values=cache, **inputs)


def can_share_prompts(agent: PreTrainedModel) -> bool:
    """Whether rows of an agent can continue a prompt that was read once. Checkpointed activations keep no cache."""
    plain_cache = agent._supports_default_dynamic_cache() and not agent.is_activation_checkpointing
    return plain_cache and takes_positions(agent)


def _load_model(name: str, **kwargs) -> PreTrainedModel:
    """One agent; on the accelerator only once the trainer places the whole team."""
    return create_model_from_path(name, AutoModelForCausalLM, **{"device_map": None, **kwargs})


def _read_team_file(path: str | Path) -> list[str]:
    team = json.loads(Path(path).read_text())
    if team.get("format_version") != FORMAT_VERSION:
        raise ValueError(
            f"{path} has the format version {team.get('format_version')!r}; this release reads version {FORMAT_VERSION}."
        )
    return [agent["role"] for agent in team["agents"]]
