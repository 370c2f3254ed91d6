"""The team: N agents as one `nn.Module`."""

import copy
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast, overload

import torch
from accelerate.utils import gather_object, send_to_device
from huggingface_hub import CommitInfo
from peft import LoraConfig, PeftModel
from torch import nn
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.integrations.deepspeed import deepspeed_config, is_deepspeed_zero3_enabled
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils import ModelOutput

from trl_multiagent.environments.base import Environment, Outcome, Turn, check_roles
from trl_multiagent.folders import CARD_FILE, TEAM_FILE
from trl_multiagent.models.adapter_config import check_adapter_config
from trl_multiagent.models.grouped_lora import Stacked, can_group
from trl_multiagent.models.packing import is_little_padding, run_scored
from trl_multiagent.models.pretrained import (
    adapter_parameters,
    base_of,
    copied,
    hub_arguments,
    load_model,
    seeded,
    temporarily_set,
    text_parameters,
)
from trl_multiagent.models.reasoning import Reasoning, check_reasoning, check_template_kwargs
from trl_multiagent.rollout.options import FULL_HISTORY, HistoryOptions
from trl_multiagent.rollout.sampler import TeamSampler, TransformersGenerator, check_stop_strings
from trl_multiagent.rollout.tree import Node, judge_nodes, play_episodes, turns_of_episodes
from trl_multiagent.team.adapters import (
    AgentAdapters,
    load_adapter_weights,
    load_adapters,
    reference_name,
    save_adapter,
)
from trl_multiagent.team.files import (
    AGENTS_FOLDER,
    SHARED_FOLDER,
    Form,
    TeamFile,
    find_sources,
    form_of_sources,
    load_tokenizer,
    part_of,
    read_team_file,
    save_model,
)


if TYPE_CHECKING:
    from trl_multiagent.team.critics import Critics

# On a CPU, an update of two LoRA agents in one forward took 0.93 times the time of two at a width of 64, 1.05 at 576
WIDEST_ON_CPU = 256
# Arguments for loading a model that a team does not take
ADVICE = dict.fromkeys(("tokenizer", "processing_class"), "give the tokenizers' options as `tokenizer_kwargs`")
ADVICE |= {
    "cache_dir": "set HF_HOME",
    "device": "the trainer moves the team, or `team.to(device)` does",
    "local_files_only": "set HF_HUB_OFFLINE=1",
    "model_init_kwargs": "give each of its entries as an argument",
    "subfolder": "name the folder itself, on this machine",
    "torch_dtype": "it is called `dtype` now",
}


class Computing(NamedTuple):
    """What a model of the team computes with: an agent's, a reference policy's or a critic's adapter, or a group's."""

    role: str  # of the agent with this model
    adapter: str
    group: Stacked | None = None
    autocast: bool = False  # whether it casts the inputs of products


class AgentTeam(nn.Module):
    """
    Agents that are trained together.

    A team has one of four forms. *Full*: every agent has its own model. *Shared weights*: all agents are one model,
    and differ in their prompts. *LoRA*: every agent has its own adapter on a base that is loaded once; several bases
    are possible. *Mixed*: some agents have an adapter, and the others their own model.

    One forward of the team runs every agent on its own inputs, so the whole team has one optimizer, one wrapper (DDP,
    DeepSpeed) and one backward pass. Attributes and methods that a trainer expects of a single model (`config`,
    `generate`, ...) belong to the *active* agent, see [`~AgentTeam.activate`].

    Args:
        models (`dict[str, PreTrainedModel | PeftModel]`): The agents by role, in the order of the environment's roles.
            The same model for all roles makes a team with shared weights. A `PeftModel` must have an adapter named
            after each role that uses it.
        tokenizers (`dict[str, PreTrainedTokenizerBase]`): The tokenizer of each role. Roles may have the same
            tokenizer object.

    Attributes:
        models (`nn.ModuleDict`): The distinct models, by the first role that uses each.
        policies (`dict[str, PreTrainedModel | PeftModel]`): The model of each role; a LoRA agent's has its adapter.
        agents (`dict[str, PreTrainedModel]`): The model of each role, without adapters.
        reasoning (`dict[str, str]`): What others see of each role's completions with a reasoning, see
            [`~models.reasoning.CompletionReader`]: with `"auto"` the answer, with `"keep"` all of it. With `"none"`,
            the chat template also gets `enable_thinking=False`.
        chat_template_kwargs (`dict[str, dict]`): More arguments of each role's chat template.
        frozen (`frozenset[str]`): Roles that generate but are not trained.
        critics ([`~team.critics.Critics`], *optional*): Value models, which an actor-critic trainer adds. They are
            saved and loaded with the team; [`~AgentTeam.from_pretrained`] loads the agents alone.
        devices (`dict[str, torch.device]`): The device of each agent, if they are on several devices, see
            [`~AgentTeam.place`].
        uses_dropout (`bool`): Whether training mode enables the agents' dropout. By default it does not: sampling has
            no dropout, and the update needs the log-probabilities of the policy that sampled.

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
        if not (isinstance(models, Mapping) and isinstance(tokenizers, Mapping)):
            raise TypeError("`models` and `tokenizers` must be dicts by role; `AgentTeam.from_pretrained` loads them.")
        self.roles = check_agent_names(list(models))
        if list(models) != list(tokenizers):
            raise ValueError(f"The models are for the roles {list(models)}, the tokenizers for {list(tokenizers)}.")
        first_roles = {id(model): role for role, model in reversed([*models.items()])}
        self._model_names = {role: first_roles[id(model)] for role, model in models.items()}
        self.models = nn.ModuleDict({name: models[name] for name in dict.fromkeys(self._model_names.values())})
        self.policies = dict(models)
        self.agents = {role: base_of(model) for role, model in models.items()}
        self.tokenizers = dict(tokenizers)
        self.reasoning: dict[str, Reasoning] = dict.fromkeys(self.roles, "auto")
        self.chat_template_kwargs: dict[str, dict[str, Any]] = {role: {} for role in self.roles}
        self.frozen: frozenset[str] = frozenset()
        self.critics: Critics | None = None
        self.uses_dropout = False
        self.devices: dict[str, torch.device] = {}

        adapted = {role: model for role, model in models.items() if isinstance(model, PeftModel)}
        self.adapted_roles = tuple(adapted)
        full = [self._model_names[role] for role in self.roles if role not in adapted]
        self.has_shared_weights = len(full) == len(self.roles) > 1 and len(set(full)) == 1
        if len(set(full)) < len(full) and not self.has_shared_weights:
            raise ValueError("Either all agents of a team share one model, or each has a model of its own.")
        if self.has_shared_weights and len({str(x.chat_template) for x in tokenizers.values()}) > 1:
            raise ValueError("Agents that share one model are saved with one tokenizer: give all one chat template.")
        self._adapters = AgentAdapters(adapted)
        self._quantized_layers = [
            m
            for m in self.models.modules()
            if not any(m.children()) and not all(x.is_floating_point() for x in (*m.parameters(), *m.buffers()))
        ]
        # The agents that can compute together with others, each with the name of its model
        self.joinable = {
            role: name
            for role, name in self._model_names.items()
            if self.has_shared_weights or (role in adapted and can_group(adapted[role], role))
        }
        self._is_reference = False
        self._now = Computing(self.roles[0], self.roles[0])
        self._choose_adapter()
        for role, tokenizer in self.tokenizers.items():
            if tokenizer.pad_token is None:
                tokenizer.pad_token = tokenizer.eos_token
            agent = self.agents[role]
            agent.config.get_text_config().pad_token_id = tokenizer.pad_token_id
            agent.generation_config.pad_token_id = tokenizer.pad_token_id
        self.train()

    # Files

    @classmethod
    def from_pretrained(
        cls,
        name: str | Path | Sequence[str] | Mapping[str, str],
        roles: Sequence[str] | None = None,
        peft_config: LoraConfig | Mapping[str, LoraConfig] | None = None,
        share_weights: bool = False,
        seed: int = 42,
        base_dtype: str | torch.dtype | None = None,
        tokenizer_kwargs: dict[str, Any] | None = None,
        reasoning: Reasoning | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        **model_init_kwargs: Any,
    ) -> "AgentTeam":
        """
        Loads a team.

        Args:
            name (`str`, `Path`, `list[str]` or `dict[str, str]`): A model id, folder or GGUF file that every agent
                starts from; a list with one per role, or a dict by role; or the id or folder of a team that
                [`~AgentTeam.save_pretrained`] wrote. The name of a LoRA adapter loads its base, too. A base is loaded
                once for all adapters on it.
            roles (`list[str]`, *optional*): The agents' roles. Not needed for a saved team: its roles are in its
                files.
            peft_config ([`~peft.LoraConfig`] or `dict[str, LoraConfig]`, *optional*): Gives every agent a fresh LoRA
                adapter. A dict gives one to each of its roles alone; the other agents are full models.
            share_weights (`bool`, *optional*, defaults to `False`): Whether all agents are one model.
            seed (`int`, *optional*, defaults to `42`): Decides the weights that no file contains: fresh adapters, and
                parts that a model's files lack, such as a head. They depend on the seed and on the role's name alone.
                The state of the global random generators does not change.
            base_dtype (`str` or `torch.dtype`, *optional*): Data type of the bases of LoRA agents, by default `dtype`.
                The adapters are float32.
            tokenizer_kwargs (`dict`, *optional*): Passed to `AutoTokenizer.from_pretrained`, for example
                `add_bos_token`.
            reasoning (`str`, *optional*): The attribute of that name, for all agents. By default a saved team's own,
                or `"auto"`.
            chat_template_kwargs (`dict`, *optional*): Likewise.
            **model_init_kwargs: Passed to `AutoModelForCausalLM.from_pretrained`, for example `dtype` (float32 by
                default), `revision`, `attn_implementation`, `gguf_file` or a `quantization_config` for the base of a
                LoRA team.

        Raises:
            ValueError: the arguments do not fit each other or the saved team.
            OSError: a file cannot be read, or the Hub cannot be reached.
        """
        from trl_multiagent.models.packaged import load_as_published

        check_loading(peft_config, reasoning, chat_template_kwargs, model_init_kwargs)
        if isinstance(name, Mapping):
            roles = roles or list(name)
            if {*roles} != name.keys():
                raise ValueError(f"`name` has models for {list(name)}, but the roles are {list(roles)}.")
            name = [name[role] for role in roles]
        hub = hub_arguments(model_init_kwargs)
        sources, saved = find_sources(name, None if roles is None else check_agent_names(roles), hub)
        configs = peft_config if isinstance(peft_config, Mapping) else dict.fromkeys(sources, peft_config)
        configs = {role: config for role, config in configs.items() if config is not None}
        shares, adapted = form_of_sources(sources, None if saved is None else saved.form, configs, share_weights, hub)
        kwargs = {"trust_remote_code": model_init_kwargs.get("trust_remote_code", False), **(tokenizer_kwargs or {})}
        gguf_file = model_init_kwargs.pop("gguf_file", None)
        if gguf_file is not None and saved is None:  # a saved team started from models in that file
            sources = {role: str(Path(source) / gguf_file) for role, source in sources.items()}
        tokenizers = {role: load_tokenizer(source, hub | kwargs) for role, source in sources.items()}
        models: dict[str, PreTrainedModel | PeftModel] = {}
        for role in (role for role in sources if role not in adapted):
            if shares and models:
                models[role] = next(iter(models.values()))
            else:
                with seeded(seed, SHARED_FOLDER if shares else role):
                    models[role] = load_as_published(sources[role], **model_init_kwargs)
        if base_dtype is not None:
            model_init_kwargs["dtype"] = base_dtype
        if adapted:
            models |= load_adapters({role: sources[role] for role in adapted}, configs, seed, model_init_kwargs)
        team = cls({role: models[role] for role in sources}, tokenizers)
        if saved is not None:
            team.reasoning, team.chat_template_kwargs = saved.reasoning, saved.chat_template_kwargs
        if reasoning is not None:
            team.reasoning = dict.fromkeys(team.roles, reasoning)
        if chat_template_kwargs is not None:
            team.chat_template_kwargs = {role: {**chat_template_kwargs} for role in team.roles}
        return team

    def __getitem__(self, role: str) -> tuple[PreTrainedModel | PeftModel, PreTrainedTokenizerBase]:
        """
        Returns the model of an agent and its tokenizer. A LoRA agent's computes as that agent only within `with
        team.activate(role) as model:`. Raises `KeyError` if there is no such role.
        """
        if role not in self.policies:
            raise KeyError(f"The team has no role {role!r}: its roles are {', '.join(self.roles)}.")
        return self.policies[role], self.tokenizers[role]

    def save_pretrained(self, folder: str | Path, state_dict: dict[str, torch.Tensor] | None = None) -> None:
        """
        Writes `team.json` and one standard folder per role, `agents/<role>/`, that `AutoModelForCausalLM` loads. The
        folder of a LoRA agent contains its adapter. Agents with shared weights have one folder, `agents/shared/`. The
        critics, if there are any, are in `critics/`.

        Args:
            folder (`str` or `Path`): The team's folder.
            state_dict (`dict[str, torch.Tensor]`, *optional*): The team's state dict, needed if the modules themselves
                hold only a shard.
        """
        folder = Path(folder)
        for role, name in self._model_names.items():
            target = folder / self.folder(role)
            # Raises if a file is in the way, where transformers only logs it
            target.mkdir(parents=True, exist_ok=True)
            weights = part_of(state_dict, f"models.{name}.")
            model = self.policies[role]
            if isinstance(model, PeftModel):
                save_adapter(model, role, target, weights)
            elif role == name:  # a shared model is saved once
                save_model(model, target, weights)
            self.tokenizers[role].save_pretrained(target)
        folders = {role: self.folder(role) for role in self.roles}
        TeamFile(self.form, folders, self.reasoning, self.chat_template_kwargs).write(folder)
        if self.critics is not None:
            self.critics.save(folder, state_dict)

    def load_weights(self, folder: str | Path) -> None:
        """
        Replaces the weights of the agents and of the critics by the weights of a team that
        [`~AgentTeam.save_pretrained`] wrote.

        Raises:
            ValueError: the saved team has other roles or another form, or not the same critics.
        """
        saved = read_team_file(Path(folder) / TEAM_FILE)
        if saved.roles != self.roles:
            raise ValueError(f"The team in {folder} has the roles {list(saved.roles)}, this one {list(self.roles)}.")
        if saved.form != self.form:
            raise ValueError(f"The team in {folder} has the form {saved.form!r}, this one {self.form!r}.")
        for role, name in self._model_names.items():
            model, source = self.policies[role], Path(folder) / saved.folders[role]
            if isinstance(model, PeftModel):
                load_adapter_weights(model, role, source)
            elif role == name:
                model.load_state_dict(
                    load_model(str(source), architecture=type(model), dtype=model.dtype).state_dict()
                )
        if self.critics is not None:
            self.critics.load(folder)

    def push_to_hub(
        self, repo_id: str, *, revision: str | None = None, create_pr: bool = False, **options: Any
    ) -> CommitInfo:
        """
        Uploads the agents and a model card to the Hugging Face Hub. Critics are not uploaded.

        Args:
            repo_id (`str`): Repository, created if it does not exist.
            revision (`str`, *optional*): Branch, created if it does not exist; by default `main`.
            create_pr (`bool`, *optional*, defaults to `False`): Whether to open a pull request, which needs no write
                access.
            **options: `private` (`bool`): Whether to make the repository private if it is created. `token` (`str`):
                Token with write access; by default from `hf auth login` or the variable `HF_TOKEN`.
                `commit_message` (`str`): Message of the commit.

        Raises:
            `RuntimeError`: The Hub cannot be reached, it refuses the upload, or the upload is interrupted.
        """
        from trl_multiagent.hub import push_folder, team_card
        from trl_multiagent.team.card import facts_of

        options |= {"revision": revision, "create_pr": create_pr, "advice": "Call `push_to_hub` again."}
        with tempfile.TemporaryDirectory() as folder:
            self.save_pretrained(folder)
            card = team_card(facts_of(self), repo_id, revision=None if create_pr else revision)
            card.save(Path(folder) / CARD_FILE)
            return push_folder(folder, repo_id, **options)

    @property
    def form(self) -> Form:
        """`"full"`, `"shared"`, `"lora"` or `"mixed"`."""
        if not self.adapted_roles:
            return "shared" if self.has_shared_weights else "full"
        return "lora" if len(self.adapted_roles) == len(self.roles) else "mixed"

    @property
    def has_adapters(self) -> bool:
        """Whether any agent has a LoRA adapter."""
        return bool(self.adapted_roles)

    def folder(self, role: str) -> str:
        """Returns the folder of an agent, relative to the folder of the saved team."""
        return f"{AGENTS_FOLDER}/{SHARED_FOLDER if self.has_shared_weights else role}"

    # Use after training

    @overload
    def collaborate(
        self, item: dict | str, environment: Environment, num_turns: int | None = None, **kwargs: Any
    ) -> list[Turn]: ...

    @overload
    def collaborate(
        self, item: Iterable[dict | str], environment: Environment, num_turns: int | None = None, **kwargs: Any
    ) -> list[list[Turn]]: ...

    def collaborate(
        self,
        item: dict | str | Iterable[dict | str],
        environment: Environment,
        num_turns: int | None = None,
        use_chat_template: bool | None = None,
        generation_token_budget: int | None = 262144,
        history_options: HistoryOptions = FULL_HISTORY,
        stop_strings: Mapping[str, Sequence[str]] | None = None,
        seed: int | None = None,
        **generation_kwargs: Any,
    ) -> list[Turn] | list[list[Turn]]:
        """
        Plays one episode, or one for each of several items, which are played together, turn by turn.

        Args:
            item (`dict`, `str`, or a list or [`~datasets.Dataset`] of them): A row of the task's dataset, or the text
                of its `prompt` column. A text is answered in one turn and not scored, because scoring needs the other
                columns.
            environment ([`Environment`]): The task; it has the team's roles.
            num_turns (`int`, *optional*): Turns of an episode, by default 1. A workflow goes on until it ends.
            use_chat_template (`bool`, *optional*): Whether prompts are chat messages; by default where there is a chat
                template.
            generation_token_budget (`int`, *optional*, defaults to `262144`): Upper bound of prompt and completion
                tokens in one `generate` call. More tokens need several calls. With `None`, all items share one call.
            history_options ([`~rollout.history.HistoryOptions`], *optional*): The part of their past turns that agents
                see; by default all.
            stop_strings (`dict[str, list[str]]`, *optional*): Strings that end an answer of a role. The answer keeps
                the string.
            seed (`int`, *optional*): Seed of the draws; by default drawn from torch's global generator.
            **generation_kwargs: Fields of [`~transformers.GenerationConfig`]; by default temperature 1 (0 is greedy)
                and 256 tokens.

        Returns:
            `list[Turn]`: Prompts, joint action and outcome (`None` for a text) of each turn; for several items, a list
            of such lists.

        Raises:
            TypeError: An argument is unknown, or an item is neither a row nor a text.
            ValueError: An argument has an impossible value, or the roles are not the team's.

        Example:

        ```python
        >>> episodes = team.collaborate(dataset, environment, num_turns=2)  # doctest: +SKIP
        ```
        """
        from trl_multiagent.rollout.sampling_arguments import sampling_arguments

        self.check_roles_of(environment)
        check_stop_strings(stop_strings, self.roles)
        seed = int(torch.randint(2**62, ())) if seed is None else seed
        arguments = sampling_arguments(generation_kwargs)
        generator = TransformersGenerator(self, arguments, generation_token_budget, stop_strings, seed)
        sampler = TeamSampler(self, generator, use_chat_template, history_options)
        rows, are_texts = rows_of(item, num_turns)

        def score(nodes: list[Node]) -> list[list[Outcome]]:
            if are_texts:
                return [[Outcome(0.0)] for _ in nodes]  # removed below
            return judge_nodes(environment, nodes, evaluation=True, chat_roles=sampler.chat_roles)

        with self.evaluating():
            turns = play_episodes(rows, environment, sampler, score, num_turns=1 if are_texts else num_turns)
            episodes = turns_of_episodes(turns)
        for (turn,) in episodes if are_texts else ():
            turn.outcome = cast(Any, None)
        return episodes[0] if isinstance(item, str | Mapping) else episodes

    def check_roles_of(self, environment: Environment) -> None:
        """Raises `ValueError` if an environment has other roles than the team."""
        if self.roles != tuple(environment.roles):
            raise ValueError(f"The team has the roles {list(self.roles)}, the environment {list(environment.roles)}.")

    def end_tokens(self, role: str) -> list[int]:
        """
        Returns the ids of the tokens that end an agent's completion: its tokenizer's and its model's. Raises
        `ValueError` if there are none.
        """
        declared = self.agents[role].generation_config.eos_token_id
        declared = declared if isinstance(declared, list | tuple) else [declared]
        tokens = [*dict.fromkeys(k for k in (self.tokenizers[role].eos_token_id, *declared) if k is not None)]
        if not tokens:
            raise ValueError(f"Neither the tokenizer of {role!r} nor its model names a token that ends a text.")
        return tokens

    def add_critics(self, critics: "Critics") -> None:
        """Makes critics a part of the team. Their adapters are on its bases already."""
        self.critics = critics
        self._adapters.find_layers()
        self._choose_adapter()

    # The active agent

    @property
    def base_models(self) -> list[PreTrainedModel]:
        """The distinct models, without their adapters."""
        return [self.agents[role] for role in self.models]

    @property
    def active(self) -> str:
        """The role of the active agent."""
        return self._now.role

    @contextmanager
    def activate(
        self, role: str, critic: str | None = None, group: Stacked | None = None
    ) -> Iterator[PreTrainedModel]:
        """
        Makes one agent the active one within the block. Its model computes for the agent, for a critic, or for the
        agents of a group.
        """
        adapter = self._adapter_name(role)
        if critic is not None:  # layers without its adapter compute as in the base
            adapter = cast("Critics", self.critics).backbones[critic].adapter or adapter
        autocast = torch.is_autocast_enabled(self.agents[role].device.type)
        with self._computing(Computing(role, adapter, group, autocast)):
            yield self.active_agent

    @contextmanager
    def _computing(self, computing: "Computing", part: nn.Module | None = None) -> Iterator[None]:
        """Computes for others within the block. `part`: the only part of their model that does."""
        chosen: AbstractContextManager = nullcontext()
        if computing != self._now and computing.role in self.adapted_roles:
            chosen = self._adapters.chosen(self.policies[computing.role] if part is None else part, *computing[1:])
        with temporarily_set(self, _now=computing), chosen:
            yield

    def _choose_adapter(self) -> None:
        if self.active in self.adapted_roles:
            self._adapters.choose(self.policies[self.active], *self._now[1:])

    def _adapter_name(self, role: str) -> str:
        return reference_name(role) if self._is_reference else role

    # Modes

    def train(self, mode: bool = True) -> "AgentTeam":
        """
        Sets the mode of the team. Unless the team `uses_dropout`, the agents stay in evaluation mode in training, too.
        This disables all randomness of a forward: dropout, skipped layers, noise of routers.
        """
        super().train(mode)
        if mode and not self.uses_dropout:
            self.models.eval()
            if self.critics is not None:
                self.critics.eval()
            for layer in self._checkpointed_layers():
                # transformers checkpoints layers in training mode only. They run in evaluation mode, see
                # `_checkpointing`
                layer.training = True
        # In evaluation mode, the CPU kernels of bitsandbytes lose gradients or round differently
        for layer in self._quantized_layers:
            layer.training = True
        return self

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Keeps the whole team in evaluation mode within the block."""
        training = self.training
        self.eval()
        try:
            yield
        finally:
            self.train(training)

    def place(self, devices: Mapping[str, torch.device]) -> None:
        """Moves each agent to a device of its own. The outputs of a forward are on the device of the inputs."""
        for role, device in devices.items():
            self.policies[role].to(device)
        self.devices = dict(devices)
        self.hf_device_map = self.devices  # with this attribute, transformers and accelerate do not move the team

    # Trained parameters

    @property
    def trained_roles(self) -> tuple[str, ...]:
        return tuple(role for role in self.roles if role not in self.frozen)

    def freeze(self, roles: Iterable[str]) -> None:
        """
        Sets the agents that generate but are not trained. All other agents are trained, also those that were frozen
        before.

        Raises:
            ValueError: `roles` are not roles of the team, they are all of its roles, or they share weights with other
                agents.
        """
        roles = frozenset(roles)
        if not roles <= set(self.roles):
            raise ValueError(f"The agents to freeze are {sorted(roles)}, the team has the roles {list(self.roles)}.")
        if roles and self.has_shared_weights:
            raise ValueError("Agents with shared weights are trained together; none of them can be frozen.")
        if roles == set(self.roles):
            raise ValueError("All agents of the team are frozen: there is nothing to train.")
        for role in self.frozen | roles:
            for parameter in self.agent_parameters(role):
                parameter.requires_grad_(role not in roles)
        self.frozen = roles

    def agent_parameters(self, role: str) -> list[nn.Parameter]:
        """Returns the parameters that training an agent changes: its adapter, or its whole model."""
        model = self.policies[role]
        return adapter_parameters(model, role) if isinstance(model, PeftModel) else text_parameters(model)

    # Reference policies. In a LoRA team they are adapters; for any other form, they are a frozen copy of the team

    def frozen_copy(self) -> "AgentTeam":
        """Copies the agents. The weights of the copy are not trained."""
        with temporarily_set(self, critics=None):
            parts: dict[int, Any] = {}
            for model in self.models.values():
                copied(model, parts)
            return copy.deepcopy(self, parts).requires_grad_(False).eval()

    def keep_reference(self) -> None:
        """Makes the current adapters of a LoRA team its reference policies."""
        trained = {id(parameter) for parameter in self.parameters() if parameter.requires_grad}
        self._adapters.keep_references()
        for parameter in self.parameters():  # PEFT leaves only one adapter trainable
            parameter.requires_grad_(id(parameter) in trained)
        self._choose_adapter()
        self.train(self.training)  # sets the mode of modules that were added

    @contextmanager
    def as_reference(self) -> Iterator[None]:
        """Makes the agents of a LoRA team compute with their reference policies within the block."""
        with temporarily_set(self, _is_reference=True), self.activate(self.active):
            yield

    @contextmanager
    def together(self, roles: Sequence[str]) -> Iterator[tuple[PreTrainedModel, Stacked | None]]:
        """
        Makes agents on one model compute together within the block. Yields the model and, for several agents, their
        adapters.
        """
        group = Stacked([*map(self._adapter_name, roles)]) if len(roles) > 1 else None
        with self.activate(roles[0], group=group) as model:
            yield model, group

    # Forward

    def forward(
        self,
        *args: Any,
        team_inputs: dict[str, dict[str, Any]] | None = None,
        critic_inputs: dict[str, dict[str, torch.Tensor]] | None = None,
        **kwargs: Any,
    ) -> Any:
        """
        Runs agents on their own inputs, or the active agent.

        Args:
            team_inputs (`dict[str, dict]`, *optional*): Keyword arguments of each agent's forward. Without it, the
                arguments go to the active agent. Two kinds of arguments change an agent's forward: `places` and others
                of [`~packing.run_scored`]; and `router_weights`, the weights of its tokens in the router loss, see
                [`~router_loss.forward_with_expert_sums`], which exclude packed rows.
            critic_inputs (`dict[str, dict]`, *optional*): For each critic, the arguments of
                [`~team.critics.Critics.values`]. Needs `team_inputs`.

        Returns:
            `dict` of the agents' outputs by role, or the active agent's output. The dict also holds each critic's
            values of shape `(num_rows,)`, under [`critic_key`].
        """
        if team_inputs is None:
            return self.active_agent(*args, **kwargs)
        outputs = {}
        for roles in self._forwards(team_inputs):
            own = [team_inputs[role] for role in roles]
            with self.together(roles) as (agent, group):
                if group is None:
                    outputs[roles[0]] = run_agent(agent, self.devices.get(roles[0]), **own[0])
                else:
                    sizes = [x["input_ids"].new_full((len(x["input_ids"]),), k) for k, x in enumerate(own)]
                    group.set_rows(torch.cat(sizes))
                    outputs |= zip(roles, run_scored(agent, *own), strict=True)
        for name, inputs in (critic_inputs or {}).items():
            critics = cast("Critics", self.critics)
            with self.activate(critics.backbones[name].role, name):
                outputs[critic_key(name)] = critics.values(name, **inputs)
        return outputs

    def _forwards(self, team_inputs: dict[str, dict[str, Any]]) -> list[list[str]]:
        """
        Returns the agents of each forward. Agents on one model share one if launches take time, unless their rows
        differ much in length. Agents with dropout do not, and no agents do under ZeRO-3, which gathers an adapter's
        weights when its own modules compute.
        """
        groups = dict[Any, list[str]]()
        alone = is_deepspeed_zero3_enabled() or (self.training and self.uses_dropout)
        for role, inputs in team_inputs.items():
            joins = role in self.joinable and "places" in inputs and "router_weights" not in inputs and not alone
            # An update takes less time in fewer operations: on a GPU, and on a CPU for a narrow model
            agent = self.agents[role]
            joins = joins and (
                agent.device.type != "cpu" or agent.config.get_text_config().hidden_size <= WIDEST_ON_CPU
            )
            groups.setdefault((self.joinable[role], *inputs) if joins else role, []).append(role)
        forwards = []
        for roles in groups.values():
            shapes = [team_inputs[role]["input_ids"].shape for role in roles]
            lengths = [length for rows, length in shapes for _ in range(rows)]
            forwards += [roles] if is_little_padding(lengths) else [[role] for role in roles]
        if deepspeed_config() is not None and torch.is_grad_enabled() and not alone and len(team_inputs) > 1:
            # DeepSpeed adds the first gradient that comes in one process to the first in the others, whatever its
            # weight. Forwards decide the order in which they come, and the lengths of rows differ among processes
            if any(others != forwards for others in gather_object([forwards])):
                forwards = [[role] for role in team_inputs]
        return forwards

    # What a trainer expects of a single model. These attributes and methods belong to the active agent

    @property
    def active_agent(self) -> PreTrainedModel:
        return self.agents[self.active]

    @property
    def config(self) -> PreTrainedConfig:
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

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        if not all(isinstance(x, torch.Tensor) for x in args):
            raise TypeError("`generate` takes the token ids of one agent; `team.collaborate` answers items and texts.")
        return self.active_agent.generate(*args, **kwargs)

    def get_output_embeddings(self) -> nn.Module:
        return self.active_agent.get_output_embeddings()

    # Methods of a single model, which trainers call: here they act on every agent and critic

    @property
    def _all_base_models(self) -> list[PreTrainedModel]:
        return self.base_models + ([*self.critics.models.values()] if self.critics is not None else [])

    def activation_checkpointing_enable(
        self, activation_checkpointing_kwargs: dict[str, Any] | None = None, **kwargs: Any
    ) -> None:
        for model in self._all_base_models:
            model.activation_checkpointing_enable(activation_checkpointing_kwargs, **kwargs)
        for layer in self._checkpointed_layers():
            layer._gradient_checkpointing_func = self._checkpointing(layer, layer._gradient_checkpointing_func)
        self.train(self.training)

    def _checkpointed_layers(self) -> list[Any]:
        """Returns the modules that checkpoint their own forward, or the forward of their layers, in training mode."""
        # transformers gives this attribute to the modules for which it enables checkpointing
        modules = [
            m for m in self.modules() if hasattr(m, "_gradient_checkpointing_func") and m.gradient_checkpointing
        ]
        # In newer models, each layer checkpoints itself; in older models, the module that contains the layers does
        return [m for m in modules if isinstance(m, GradientCheckpointingLayer)] or modules

    def _checkpointing(self, layer: nn.Module, checkpoint: Callable[..., Any]) -> Callable[..., Any]:
        """
        Wraps the function that checkpoints a layer. The layer runs in evaluation mode unless the team uses dropout. In
        the backward pass, it is recomputed for the agents or the critic of the forward.
        """

        def checkpoint_for_agent(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            computing = self._now

            def run(*inputs: Any) -> Any:
                # torch raises an exception to end a recomputation early
                with temporarily_set(layer, training=self.uses_dropout), self._computing(computing, layer):
                    return function(*inputs)

            return checkpoint(run, *args, **kwargs)

        return checkpoint_for_agent

    def activation_checkpointing_disable(self) -> None:
        for model in self._all_base_models:
            model.activation_checkpointing_disable()
        self.train(self.training)

    # TRL calls these two by their older names

    def gradient_checkpointing_enable(self, gradient_checkpointing_kwargs: dict[str, Any] | None = None) -> None:
        self.activation_checkpointing_enable(gradient_checkpointing_kwargs)

    gradient_checkpointing_disable = activation_checkpointing_disable

    def enable_input_require_grads(self) -> None:
        """
        Makes the inputs of the layers require gradients. Otherwise no gradients reach adapters through checkpointed
        layers.
        """
        for model in self._all_base_models:
            model.enable_input_require_grads()

    def add_model_tags(self, tags: list[str] | str) -> None:
        for model in self.policies.values():
            model.add_model_tags(tags)


def run_agent(agent: PreTrainedModel, device: torch.device | None, **inputs: Any) -> ModelOutput:
    """
    Runs one agent, on `device` if given, on its entry of `team_inputs`, see [`AgentTeam.forward`]. The output is on
    the inputs' device.
    """
    if device is not None:
        return send_to_device(run_agent(agent, None, **send_to_device(inputs, device)), inputs["input_ids"].device)
    router_weights = inputs.pop("router_weights", None)
    if router_weights is not None:
        from trl_multiagent.models.router_loss import forward_with_expert_sums

        return forward_with_expert_sums(agent, router_weights, **inputs)
    return run_scored(agent, inputs)[0] if "places" in inputs else agent(**inputs)


def critic_key(critic: str) -> str:
    """Returns the key of a critic in the team's outputs. Names of agents contain no slash."""
    return f"critics/{critic}"


def rows_of(item: dict | str | Iterable[dict | str], num_turns: int | None) -> tuple[list[dict], bool]:
    """
    Returns the rows that [`AgentTeam.collaborate`] plays, and whether they were given as texts, which have one turn.
    """
    items = [item] if isinstance(item, str | Mapping) else list(item)
    are_texts = bool(items) and all(isinstance(x, str) for x in items)
    if not are_texts and not all(isinstance(x, Mapping) for x in items):
        raise TypeError("`item` must be a row of the dataset, which is a dict, or a text, or a list of either.")
    if are_texts and num_turns not in (None, 1):
        raise ValueError("Several turns need feedback, and that needs a whole item: give a row of the dataset.")
    return [{"prompt": x} if isinstance(x, str) else dict(x) for x in items], are_texts


def check_loading(peft_config: Any, reasoning: Any, chat_template_kwargs: Any, others: dict[str, Any]) -> None:
    """Raises an error for arguments of [`~AgentTeam.from_pretrained`] that are wrong whatever is loaded."""
    for argument, advice in ADVICE.items():
        if argument in others:
            raise TypeError(f"`from_pretrained` takes no `{argument}`: {advice}.")
    for config in peft_config.values() if isinstance(peft_config, Mapping) else [peft_config]:
        if config is not None:
            check_adapter_config("an agent", config)
    if reasoning is not None:
        check_reasoning("`reasoning`", reasoning)
    if chat_template_kwargs is not None:
        check_template_kwargs("`chat_template_kwargs`", chat_template_kwargs)


def check_agent_names(roles: Sequence[str]) -> tuple[str, ...]:
    """Raises `ValueError` if roles cannot name agents, see [`~environments.base.check_roles`], or modules of torch."""
    roles = check_roles(roles)
    for role in roles:
        if role in dir(nn.ModuleDict()):  # torch also refuses such names, but does not explain why
            raise ValueError(f"The role {role!r} is a method or an attribute of torch modules: choose another name.")
        if reference_name(role) in roles:
            raise ValueError(
                f"The role {reference_name(role)!r} names the reference policy of {role!r}: choose another."
            )
    return roles
