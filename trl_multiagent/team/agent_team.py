"""The team: N agents, one `nn.Module`."""

import contextlib
import copy
import hashlib
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import CommitInfo
from peft import (
    LoraConfig,
    PeftConfig,
    PeftModel,
    get_peft_model,
    get_peft_model_state_dict,
    load_peft_weights,
    set_peft_model_state_dict,
)
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import AuxiliaryTrainingWrapper, ModulesToSaveWrapper
from torch import nn
from transformers import (
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.integrations import is_deepspeed_zero3_enabled
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils import ModelOutput
from trl.trainer.utils import get_config_model_id

from trl_multiagent.environments.base import Environment, Turn, ask, check_roles, judge
from trl_multiagent.hub.model_card import AgentSummary, TeamSummary, team_card
from trl_multiagent.hub.push import open_repo, upload_folder
from trl_multiagent.models.generation import generate_groups, whole_prompt
from trl_multiagent.models.pretrained import ADAPTER_CONFIG, adapter_parameters, find_file, load_model
from trl_multiagent.models.router_loss import forward_with_expert_sums
from trl_multiagent.models.shared_prompts import continue_prompts
from trl_multiagent.team.files import AGENTS_FOLDER, SHARED_FOLDER, TEAM_FILE, TeamFile, read_team_file


# Initialisations that change the base, which the agents have in common
# Parts of the names of modules that PEFT adds, which hold the names of adapters
ADAPTER_PARTS = ("lora_", "modules_to_save.", "trainable_tokens_", "token_adapter.")
BASE_CHANGING_INITS = ("pissa", "olora", "corda", "eva", "loftq", "lora_ga")


class AgentTeam(nn.Module):
    """
    Agents that are trained together.

    Three forms: *full*, every agent a model of its own; *shared weights*, one model for all, told apart by their prompts;
    *LoRA*, one adapter per agent on a base that exists once. With several bases, each carries the adapters of some agents.

    As a module it is a thin frame: one forward of the team runs every agent on its own inputs, so that one optimizer,
    one wrapper (DDP, DeepSpeed) and one backward serve all. What a trainer reads from a model (`config`, `generate`,
    ...) comes from the *active* agent, chosen with [`~AgentTeam.activate`].

    Args:
        models (`dict[str, PreTrainedModel | PeftModel]`):
            The agents by role, in the order of the environment's roles. One model for all roles is a team with shared
            weights. A `PeftModel` must have an adapter with the name of each role that it stands for.
        tokenizers (`dict[str, PreTrainedTokenizerBase]`):
            Each role's tokenizer. They may be one and the same object.

    Attributes:
        models (`nn.ModuleDict`): The distinct models, by the first role that uses each.
        agents (`dict[str, PreTrainedModel]`): The model that computes for each role; a LoRA base if it has an adapter.
        frozen (`frozenset[str]`): Roles that generate but are not trained.
        uses_dropout (`bool`): Whether training mode switches the agents' dropout on. By default it does not: an update by
            the policy's log-probabilities needs those of the policy that sampled, which had none.

    Example:

    ```python
    from peft import LoraConfig

    team = AgentTeam.from_pretrained("Qwen/Qwen2.5-Coder-0.5B", roles=["aux", "main"])  # full models
    team = AgentTeam.from_pretrained("Qwen/Qwen2.5-Coder-0.5B", roles=["aux", "main"], share_weights=True)
    team = AgentTeam.from_pretrained("Qwen/Qwen2.5-Coder-7B", roles=["aux", "main"], peft_config=LoraConfig(r=16))
    ```
    """

    def __init__(self, models: dict[str, PreTrainedModel | PeftModel], tokenizers: dict[str, PreTrainedTokenizerBase]):
        super().__init__()
        if not isinstance(models, dict):
            raise ValueError(f"`models` must be a dict with one model per role, not {type(models).__name__}.")
        self.roles = _check_agent_names(list(models))
        if list(models) != list(tokenizers):
            raise ValueError(f"The models are for the roles {list(models)}, the tokenizers for {list(tokenizers)}.")
        first_roles = {}
        for role, model in models.items():
            first_roles.setdefault(id(model), role)
        self.models = nn.ModuleDict({role: models[role] for role in first_roles.values()})
        self._model_names = {role: first_roles[id(model)] for role, model in models.items()}
        self.tokenizers = dict(tokenizers)
        self.frozen = frozenset()
        self.uses_dropout = False
        self.has_adapters = isinstance(models[self.roles[0]], PeftModel)
        self.has_shared_weights = not self.has_adapters and len(self.models) < len(self.roles)
        self._check_forms()
        self._adapted_layers = {
            name: [m for m in model.modules() if isinstance(m, (BaseTunerLayer, AuxiliaryTrainingWrapper))]
            for name, model in self.models.items()
        }
        self._quantized_layers = [
            m
            for m in self.models.modules()
            if not any(m.children())
            and not all(x.is_floating_point() for x in (*m.parameters(recurse=False), *m.buffers(recurse=False)))
        ]
        if self.has_adapters:
            for role in self.roles:  # PEFT leaves only one adapter trainable
                for parameter in self.agent_parameters(role):
                    parameter.requires_grad_(True)
        self._reference_adapters = set()  # roles whose reference policy is a copy of their first adapter
        self._as_reference = False
        self._select(self.roles[0])
        for role, tokenizer in self.tokenizers.items():
            if tokenizer.pad_token is None:
                tokenizer.pad_token = tokenizer.eos_token
            self.agents[role].config.get_text_config().pad_token_id = tokenizer.pad_token_id
            self.agents[role].generation_config.pad_token_id = tokenizer.pad_token_id
        self.train()

    def _check_forms(self):
        if any(isinstance(model, PeftModel) != self.has_adapters for model in self.models.values()):
            raise ValueError("Either every agent of a team has a LoRA adapter, or none has.")
        if self.has_shared_weights and len(self.models) > 1:
            raise ValueError("Either all agents of a team share one model, or each has a model of its own.")
        for role, model in self.policies.items() if self.has_adapters else ():
            _check_adapter(role, model)

    @classmethod
    def from_pretrained(
        cls,
        name: str | Sequence[str],
        roles: Sequence[str] | None = None,
        peft_config: LoraConfig | None = None,
        share_weights: bool = False,
        seed: int = 42,
        **model_init_kwargs,
    ) -> "AgentTeam":
        """
        Loads a team.

        Args:
            name (`str` or `list[str]`):
                A model id or folder that every agent starts from, a list with one per role, or the id or folder of a
                team that [`~AgentTeam.save_pretrained`] wrote. A LoRA adapter's id or folder loads its base, once for
                all adapters on the same one.
            roles (`list[str]`, *optional*):
                The agents' roles. A saved team knows its own.
            peft_config ([`~peft.LoraConfig`], *optional*):
                Gives every agent a fresh LoRA adapter. Agents with the same model id have their base in common.
            share_weights (`bool`, *optional*, defaults to `False`):
                Whether all agents are one model.
            seed (`int`, *optional*, defaults to `42`):
                Decides the weights that no file holds: fresh adapters, and parts that the files of a model lack, such as
                a head. Every role has weights of its own, which depend on the seed and the role's name alone, not on the
                other roles, on what is random elsewhere in the process, or on the process. The global random
                generators are left as they are.
            **model_init_kwargs:
                Passed to `AutoModelForCausalLM.from_pretrained`, for example `dtype`, `revision`, `attn_implementation`
                or a `quantization_config` for the base of a LoRA team.

        Returns:
            [`AgentTeam`]
        """
        if peft_config is not None and share_weights:
            raise ValueError(
                "`peft_config` gives every agent an adapter of its own; it does not go with `share_weights`."
            )
        roles = None if roles is None else _check_agent_names(roles)
        if peft_config is not None:
            _check_adapter_config("every agent", peft_config)
        hub = {"revision": model_init_kwargs.get("revision"), "token": model_init_kwargs.get("token")}
        team_file = find_file(name, TEAM_FILE, **hub) if isinstance(name, str) else None
        if team_file is not None:
            team = read_team_file(team_file)
            form, saved = team.form, team.folders
            if roles is not None and list(roles) != list(saved):
                raise ValueError(f"The team in {name} has the roles {list(saved)}, not {list(roles)}.")
            roles = list(saved)
            in_folders = Path(name).is_dir()
            sources = [
                (str(Path(name) / folder), {}) if in_folders else (name, {"subfolder": folder})
                for folder in saved.values()
            ]
            share_weights = share_weights or form == "shared"
        elif roles is None:
            raise ValueError(f"{name} holds no {TEAM_FILE}: to start a team from a model, pass `roles`.")
        else:
            names = [name] * len(roles) if isinstance(name, str) else list(name)
            if len(names) != len(roles):
                raise ValueError(
                    f"{len(names)} models for the {len(roles)} roles {list(roles)}; give one per role or one for all."
                )
            sources = [(name, {}) for name in names]
        if share_weights and len({(name, *kwargs.values()) for name, kwargs in sources}) > 1:
            raise ValueError("`share_weights` needs one model for all roles.")

        tokenizers = {}
        for role, (source, kwargs) in zip(roles, sources, strict=True):
            tokenizers[role] = AutoTokenizer.from_pretrained(
                source, padding_side="left", truncation_side="left", **hub, **kwargs
            )
        source, kwargs = sources[0]
        if team_file is not None:
            has_adapters = form == "lora"
        else:
            has_adapters = find_file(source, ADAPTER_CONFIG, **hub) is not None
        if has_adapters and peft_config is not None:
            raise ValueError(f"The agents in {name} have LoRA adapters, which are loaded: leave `peft_config` out.")
        if has_adapters or peft_config is not None:
            models = _load_adapters(dict(zip(roles, sources, strict=True)), peft_config, seed, model_init_kwargs)
        elif share_weights:
            with seeded(seed, SHARED_FOLDER):
                models = dict.fromkeys(roles, load_model(source, **kwargs, **model_init_kwargs))
        else:
            models = {}
            for role, (source, kwargs) in zip(roles, sources, strict=True):
                with seeded(seed, role):
                    models[role] = load_model(source, **kwargs, **model_init_kwargs)
        return cls(models, tokenizers)

    def save_pretrained(self, folder: str | Path, state_dict: dict[str, torch.Tensor] | None = None) -> None:
        """
        Writes `team.json` and one standard folder per role, `agents/<role>/`, that `AutoModelForCausalLM` loads. A LoRA
        agent's folder holds its adapter; agents that share their weights share the folder `agents/shared/`.

        Args:
            folder (`str` or `Path`):
                Where to write.
            state_dict (`dict[str, torch.Tensor]`, *optional*):
                The team's state dict, where the modules themselves hold only a shard.
        """
        folder = Path(folder)
        for role, name in self._model_names.items():
            target = folder / self.folder(role)
            target.mkdir(parents=True, exist_ok=True)  # where a file is in the way, transformers would save nothing
            model = self.models[name]
            weights = None
            if state_dict is not None:
                prefix = f"models.{name}."
                weights = {key.removeprefix(prefix): x for key, x in state_dict.items() if key.startswith(prefix)}
            if self.has_adapters:
                model.save_pretrained(
                    target.parent, selected_adapters=[role], state_dict=weights, save_embedding_layers=False
                )
                (target.parent / "README.md").unlink()  # PEFT's card is about a repository with one adapter
            elif role == name:
                if weights is not None:
                    for key in model.all_tied_weights_keys:  # gathered shards are copies, tied or not
                        weights.pop(key, None)
                model.save_pretrained(target, state_dict=weights)
                (target / ADAPTER_CONFIG).unlink(missing_ok=True)  # of a LoRA team saved here before
            self.tokenizers[role].save_pretrained(target)
        TeamFile(self.form, {role: self.folder(role) for role in self.roles}).write(folder)

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
        repo_id = open_repo(repo_id, private, token, revision, create_pr)
        with tempfile.TemporaryDirectory() as folder:
            self.save_pretrained(folder)
            team_card(self.summary(), repo_id).save(Path(folder) / "README.md")
            advice = "Call `push_to_hub` again."
            return upload_folder(folder, repo_id, advice, token, revision, commit_message, create_pr)

    def summary(self) -> TeamSummary:
        """The facts about the team that a model card shows."""
        agents = [
            AgentSummary(role, get_config_model_id(agent.config), self.folder(role))
            for role, agent in self.agents.items()
        ]
        return TeamSummary(agents, self.has_adapters)

    def load_weights(self, folder: str | Path) -> None:
        """Replaces the agents' weights by those of a team that [`~AgentTeam.save_pretrained`] wrote."""
        team = read_team_file(Path(folder) / TEAM_FILE)
        form, saved = team.form, team.folders
        if list(saved) != list(self.roles):
            raise ValueError(f"The team in {folder} has the roles {list(saved)}, this one {list(self.roles)}.")
        if form != self.form:
            raise ValueError(f"The team in {folder} has the form {form!r}, this one {self.form!r}.")
        for role, name in self._model_names.items():
            model, source = self.models[name], Path(folder) / saved[role]
            if self.has_adapters:
                weights = load_peft_weights(str(source), device="cpu")
                set_peft_model_state_dict(model, weights, adapter_name=role)
            elif role == name:
                loaded = load_model(str(source), dtype=model.dtype, device_map=None)
                model.load_state_dict(loaded.state_dict())

    @property
    def form(self) -> str:
        """`"full"`, `"shared"` or `"lora"`."""
        return "lora" if self.has_adapters else "shared" if self.has_shared_weights else "full"

    def folder(self, role: str) -> str:
        """Where an agent stands in the folder of a saved team."""
        return f"{AGENTS_FOLDER}/{SHARED_FOLDER if self.has_shared_weights else role}"

    # Use after training

    def collaborate(
        self,
        item: dict | str,
        environment: Environment,
        num_turns: int = 1,
        use_chat_template: bool | None = None,
        **generation_kwargs,
    ) -> list[Turn]:
        """
        Plays one episode.

        Args:
            item (`dict` or `str`):
                A row of the task's dataset, or the text of its `prompt` column. A text alone is answered once and not
                scored, which takes the other columns.
            environment ([`Environment`]):
                The task; its roles are those of the team.
            num_turns (`int`, *optional*, defaults to `1`):
                Turns of the episode.
            use_chat_template (`bool`, *optional*):
                As in training: by default each agent does where its tokenizer has a chat template.
            **generation_kwargs:
                Fields of [`~transformers.GenerationConfig`]; by default sampling at temperature 1, 256 tokens.

        Returns:
            `list[Turn]`: Prompts, joint action and outcome of each turn; the outcome of a text alone is `None`.

        Example:

        ```python
        >>> team = AgentTeam.from_pretrained("user/collectors")  # doctest: +SKIP
        >>> (turn,) = team.collaborate("Sort a list.", environment, do_sample=False)  # doctest: +SKIP
        >>> turn.joint_action["main"]  # doctest: +SKIP
        ```
        """
        if self.roles != tuple(environment.roles):
            raise ValueError(f"The team has the roles {list(self.roles)}, the environment {list(environment.roles)}.")
        is_text = isinstance(item, str)
        if is_text and num_turns > 1:
            raise ValueError("Several turns need feedback, and that needs a whole item: give a row of the dataset.")
        item = {"prompt": item} if is_text else dict(item)
        history = []
        with self.evaluating():
            for _ in range(num_turns):
                prompts = ask(environment, item, history)
                joint_action = {
                    role: self._answer(role, history, prompts[role], use_chat_template, generation_kwargs)
                    for role in self.roles
                }
                outcome = (
                    None if is_text else judge(environment, [item], [joint_action], [history], evaluation=True)[0]
                )
                history = [*history, Turn(prompts, joint_action, outcome)]
        return history

    def _answer(self, role, history, prompt, use_chat_template, generation_kwargs) -> str:
        tokenizer = self.tokenizers[role]
        as_chat = tokenizer.chat_template is not None if use_chat_template is None else use_chat_template
        text = whole_prompt(role, history, prompt, as_chat)
        if as_chat:
            ids = tokenizer.apply_chat_template(text, add_generation_prompt=True, return_dict=True)["input_ids"]
        else:
            ids = tokenizer(text)["input_ids"]
        defaults = {"max_new_tokens": 256, "do_sample": True, "pad_token_id": tokenizer.pad_token_id}
        settings = {**defaults, "eos_token_id": self.end_tokens(role), **generation_kwargs}
        with self.activate(role) as agent:
            ((completion_ids,),) = generate_groups(agent, [ids], 1, GenerationConfig(**settings))
        return tokenizer.decode(completion_ids, skip_special_tokens=True)

    def end_tokens(self, role: str) -> list[int]:
        """Tokens that end an agent's completion: its tokenizer's, and those that its model declares."""
        declared = self.agents[role].generation_config.eos_token_id
        declared = [] if declared is None else [declared] if isinstance(declared, int) else declared
        return list(dict.fromkeys([self.tokenizers[role].eos_token_id, *declared]))

    # Which agent computes

    @property
    def agents(self) -> dict[str, PreTrainedModel]:
        return {role: _without_adapter(model) for role, model in self.policies.items()}

    @property
    def policies(self) -> dict[str, PreTrainedModel | PeftModel]:
        """The model of each role as it is saved: of a LoRA agent the one that carries its adapter."""
        return {role: self.models[name] for role, name in self._model_names.items()}

    @property
    def base_models(self) -> list[PreTrainedModel]:
        """The distinct models, without their adapters."""
        return [_without_adapter(model) for model in self.models.values()]

    @contextlib.contextmanager
    def activate(self, role: str) -> Iterator[PreTrainedModel]:
        """Makes one agent the active one."""
        previous = self.active
        self._select(role)
        try:
            yield self.active_agent
        finally:
            self._select(previous)

    def _select(self, role: str) -> None:
        self.active = role
        # Not PEFT's own `set_adapter`: it also freezes the adapters of all other agents
        for layer in self._adapted_layers[self._model_names[role]]:
            layer._active_adapter = [_reference_name(role)] if self._as_reference else [role]
            layer._disable_adapters = self._as_reference and role not in self._reference_adapters

    # What is trained, and in which mode

    def train(self, mode: bool = True) -> "AgentTeam":
        """
        Sets the mode of the team. Unless it `uses_dropout`, its agents stay in evaluation mode, which switches off all
        that makes a forward in training random: modules, functions that read a rate from the configuration, skipped
        layers, noise of routers.
        """
        super().train(mode)
        if mode and not self.uses_dropout:
            self.models.eval()
            for layer in self._checkpointed_layers():
                layer.training = True  # or transformers would not checkpoint it; see `_checkpointing`
        # In evaluation mode, bitsandbytes computes on the CPU in other ways, which lose gradients or round differently
        for layer in self._quantized_layers:
            layer.training = True
        return self

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        """Inside, the whole team is in evaluation mode."""
        training = self.training
        self.eval()
        try:
            yield
        finally:
            self.train(training)

    @property
    def trained_roles(self) -> tuple[str, ...]:
        return tuple(role for role in self.roles if role not in self.frozen)

    def freeze(self, roles: Iterable[str]) -> None:
        """Makes agents partners that generate but are not trained."""
        if isinstance(roles, str):
            raise ValueError(f"The agents to freeze must be a list of roles, such as [{roles!r}], not {roles!r}.")
        roles = frozenset(roles)
        if not roles <= set(self.roles):
            raise ValueError(f"The agents to freeze are {sorted(roles)}, the team has the roles {list(self.roles)}.")
        if roles and self.has_shared_weights:
            raise ValueError("Agents with shared weights are trained together; none of them can be frozen.")
        if roles == set(self.roles):
            raise ValueError("All agents of the team are frozen: there is nothing to train.")
        for role in self.frozen | roles:  # some may have been frozen by an earlier trainer
            for parameter in self.agent_parameters(role):
                parameter.requires_grad_(role not in roles)
        self.frozen = roles

    def agent_parameters(self, role: str) -> list[nn.Parameter]:
        """What training an agent changes: its adapter, or all of its model."""
        model = self.policies[role]
        return adapter_parameters(model, role) if self.has_adapters else list(model.parameters())

    # The reference policy: a frozen copy of the team. For a LoRA team the base alone, or a copy of the adapter that an
    # agent began from

    def frozen_copy(self) -> "AgentTeam":
        """A copy whose weights are its own and are not trained."""
        gathered = contextlib.nullcontext()
        if is_deepspeed_zero3_enabled():
            import deepspeed

            gathered = deepspeed.zero.GatheredParameters(list(self.parameters()))  # a shard's copy would be empty
        with gathered:
            return copy.deepcopy(self).requires_grad_(False).eval()

    def keep_reference(self) -> None:
        """Remembers the current adapters of a LoRA team as its reference policy."""
        for role in self._reference_adapters:  # of an earlier trainer
            self.policies[role].delete_adapter(_reference_name(role))
        self._reference_adapters.clear()
        for role, model in self.policies.items():
            weights = get_peft_model_state_dict(model, adapter_name=role, save_embedding_layers=False)
            if _changes_nothing(model, role, weights):
                continue
            model.add_adapter(_reference_name(role), model.peft_config[role])
            set_peft_model_state_dict(model, weights, adapter_name=_reference_name(role))
            self._reference_adapters.add(role)
        for role in self._reference_adapters:
            for parameter in adapter_parameters(self.policies[role], _reference_name(role)):
                parameter.requires_grad_(False)
        for role in self.trained_roles:
            for parameter in self.agent_parameters(role):
                parameter.requires_grad_(True)
        self._select(self.active)
        self.train(self.training)  # new modules are in training mode

    @contextlib.contextmanager
    def as_reference(self) -> Iterator[None]:
        """Inside, the agents of a LoRA team are their reference policies."""
        self._as_reference = True
        self._select(self.active)
        try:
            yield
        finally:
            self._as_reference = False
            self._select(self.active)

    def forward(self, *args, team_inputs: dict[str, dict] | None = None, **kwargs):
        """
        Runs agents on their own inputs, or the active agent.

        Args:
            team_inputs (`dict[str, dict]`, *optional*):
                Keyword arguments of each agent's forward. Without it, the arguments go to the active agent. Two entries
                of an agent's arguments change its forward, and exclude each other: `shared_prompts`, prompts that its rows
                continue, see [`~shared_prompts.continue_prompts`]; and `router_weights`, the weights of its tokens in the
                router loss, see [`~router_loss.forward_with_expert_sums`].

        Returns:
            `dict` of the agents' outputs by role, or the active agent's output.
        """
        if team_inputs is None:
            return self.active_agent(*args, **kwargs)
        outputs = {}
        for role, inputs in team_inputs.items():
            with self.activate(role) as agent:
                outputs[role] = _run_agent(agent, **inputs)
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
        for model in self.base_models:
            model.activation_checkpointing_enable(activation_checkpointing_kwargs, **kwargs)
        for layer in self._checkpointed_layers():
            layer._gradient_checkpointing_func = self._checkpointing(layer, layer._gradient_checkpointing_func)
        self.train(self.training)

    def _checkpointed_layers(self) -> list[nn.Module]:
        """The modules that ask, in training mode, for their forward or that of their children to be checkpointed."""
        modules = [m for m in self.modules() if "_gradient_checkpointing_func" in vars(m) and m.gradient_checkpointing]
        # Today's models do it layer by layer, older ones in the module that holds the layers
        return [m for m in modules if isinstance(m, GradientCheckpointingLayer)] or modules

    def _checkpointing(self, layer: nn.Module, checkpoint: Callable) -> Callable:
        """
        A checkpointed layer runs in evaluation mode unless the team uses dropout. It runs again in the backward pass,
        when another agent's adapter may be active.
        """

        def checkpoint_for_agent(function, *args, **kwargs):
            role = self.active

            def run(*inputs):
                training = layer.training
                layer.training = self.uses_dropout
                try:
                    with self.activate(role):
                        return function(*inputs)
                finally:  # torch ends a recomputation early by an exception
                    layer.training = training

            return checkpoint(run, *args, **kwargs)

        return checkpoint_for_agent

    def activation_checkpointing_disable(self) -> None:
        for model in self.base_models:
            model.activation_checkpointing_disable()
        self.train(self.training)

    # The names that TRL calls; `transformers` knows them as older ones of the two above

    def gradient_checkpointing_enable(self, gradient_checkpointing_kwargs: dict | None = None) -> None:
        self.activation_checkpointing_enable(gradient_checkpointing_kwargs)

    def gradient_checkpointing_disable(self) -> None:
        self.activation_checkpointing_disable()

    def enable_input_require_grads(self) -> None:
        """Lets gradients reach the adapters through checkpointed layers of a frozen base."""
        for model in self.base_models:
            model.enable_input_require_grads()

    def add_model_tags(self, tags: list[str] | str) -> None:
        for model in self.models.values():
            model.add_model_tags(tags)


def _check_agent_names(roles: Sequence[str]) -> tuple[str, ...]:
    """Refuses roles that cannot name agents, by [`~environments.base.check_roles`], or modules of torch."""
    roles = check_roles(roles)
    modules = nn.ModuleDict()
    for role in roles:
        if hasattr(modules, role):  # torch refuses such names with an error that does not say why
            raise ValueError(f"The role {role!r} is a method or an attribute of torch modules: choose another name.")
        if _reference_name(role) in roles:
            raise ValueError(
                f"The role {_reference_name(role)!r} is the name of the reference policy of {role!r}: choose another name."
            )
    return roles


def _run_agent(
    agent: PreTrainedModel,
    shared_prompts: dict[str, torch.Tensor] | None = None,
    router_weights: torch.Tensor | None = None,
    **inputs: Any,
) -> ModelOutput:
    """Runs one agent on its entry of `team_inputs`, see [`AgentTeam.forward`]."""
    if router_weights is not None:
        return forward_with_expert_sums(agent, router_weights, **inputs)
    if shared_prompts is not None:
        return continue_prompts(agent, shared_prompts, **inputs)
    return agent(**inputs)


# LoRA


def _load_adapters(
    sources: dict[str, tuple[str, dict]], peft_config: LoraConfig | None, seed: int, model_init_kwargs: dict
) -> dict[str, PeftModel]:
    """The agents of a LoRA team, with fresh adapters or saved ones. Agents on the same base share it."""
    hub = {"revision": model_init_kwargs.get("revision"), "token": model_init_kwargs.get("token")}
    # ZeRO-3 gathers parameters together, which must have one data type
    dtype = {"autocast_adapter_dtype": not is_deepspeed_zero3_enabled()}
    models, bases = {}, {}

    def load_base(*args, **kwargs) -> PreTrainedModel:
        with seeded(seed, SHARED_FOLDER):
            return load_model(*args, **kwargs)

    for role, (source, kwargs) in sources.items():
        if peft_config is not None:
            base = (source, *kwargs.values())
            model = None if base in bases else load_base(source, **kwargs, **model_init_kwargs)
            with seeded(seed, role):
                if model is None:
                    bases[base].add_adapter(role, copy.deepcopy(peft_config), **dtype)
                else:
                    bases[base] = get_peft_model(model, copy.deepcopy(peft_config), adapter_name=role, **dtype)
        else:
            base = PeftConfig.from_pretrained(source, **hub, **kwargs).base_model_name_or_path
            adapter = {"adapter_name": role, "is_trainable": True, **hub, **kwargs, **dtype}
            model = None if base in bases else load_base(base, **{**model_init_kwargs, "revision": None})
            with seeded(seed, role):  # for what a file lacks, and because PEFT draws weights before it replaces them
                if model is None:
                    bases[base].load_adapter(source, **adapter)
                else:
                    bases[base] = PeftModel.from_pretrained(model, source, **adapter)
        models[role] = bases[base]
    return models


@contextlib.contextmanager
def seeded(seed: int, name: str) -> Iterator[None]:
    """
    Inside, torch's random numbers depend on a seed and a name alone. Afterwards they go on as if none had been drawn.
    """
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        torch.manual_seed(int.from_bytes(digest[:7], "big"))
        yield


def _changes_nothing(model: PeftModel, role: str, weights: dict[str, torch.Tensor]) -> bool:
    """Whether an adapter with these weights is fresh: it adds zero to the base, and its copies of modules are as there."""
    copies = [
        (module.modules_to_save[role], module.original_module)
        for module in model.modules()
        if isinstance(module, ModulesToSaveWrapper) and role in module.modules_to_save
    ]
    num_copied = sum(len(copy.state_dict()) for copy, _ in copies)
    of_lora = {name: x for name, x in weights.items() if "lora_" in name}
    return (
        len(of_lora) + num_copied == len(weights)
        and not any(x.any() for name, x in of_lora.items() if "lora_A" not in name and "lora_embedding_A" not in name)
        and all(
            torch.equal(*pair)
            for copy, original in copies
            for pair in zip(copy.parameters(), original.parameters(), strict=True)
        )
    )


def _check_adapter(role: str, model: PeftModel) -> None:
    if role not in model.peft_config:
        raise ValueError(
            f"The PeftModel of the role {role!r} has the adapters {list(model.peft_config)}; name one as the role."
        )
    modules = [
        name for name, _ in model.get_base_model().named_modules() if not any(part in name for part in ADAPTER_PARTS)
    ]
    if role in "lora_" or any(f".{role}" in f".{name}" for name in modules):
        raise ValueError(  # PEFT finds an adapter's parameters by this name
            f"The role {role!r} is part of the names of the model's parameters; a LoRA agent needs another name."
        )
    _check_adapter_config(f"agent {role!r}", model.peft_config[role])
    copied = [
        name
        for name, module in model.named_modules()
        if isinstance(module, ModulesToSaveWrapper) and role in module.modules_to_save
    ]
    for name in model.peft_config[role].modules_to_save or ():
        if not any(module.endswith(name) for module in copied):
            raise ValueError(f"`modules_to_save` names {name!r}, but no module of the model has a name that ends so.")
    if isinstance(model.get_output_embeddings(), (BaseTunerLayer, AuxiliaryTrainingWrapper)):
        raise ValueError(
            "The LoRA adapter covers the output embeddings, whose weights the log-probabilities are computed from "
            "directly: remove them from `target_modules` and `modules_to_save`."
        )


def _check_adapter_config(whose: str, config: PeftConfig) -> None:
    if not isinstance(config, LoraConfig):
        raise ValueError(f"The adapter of {whose} is a {config.peft_type} adapter; a team takes LoRA adapters.")
    if isinstance(config.init_lora_weights, str) and config.init_lora_weights.startswith(BASE_CHANGING_INITS):
        raise ValueError(
            f"`init_lora_weights: {config.init_lora_weights}` changes the base, which all agents have in common; use "
            "true or 'gaussian'."
        )
    if config.bias != "none" or config.layer_replication:
        raise ValueError(
            "`bias` and `layer_replication` of a LoRA adapter change the base, which all agents have in common; leave them."
        )
    if isinstance(config.modules_to_save, str):
        raise ValueError(f"`modules_to_save` must be a list of names, such as [{config.modules_to_save!r}].")


def _without_adapter(model: PreTrainedModel | PeftModel) -> PreTrainedModel:
    return model.get_base_model() if isinstance(model, PeftModel) else model


def _reference_name(role: str) -> str:
    return f"{role}_reference"
