"""The loader of teams: training, sampling, evaluation and comparisons load their teams here."""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from accelerate import PartialState
from peft import LoraConfig
from transformers.utils import is_torch_bf16_gpu_available
from trl import ModelConfig, get_quantization_config

from trl_multiagent.environments.task_errors import describe
from trl_multiagent.folders import ADAPTER_CONFIG, TEAM_FILE
from trl_multiagent.models.packaged import packaged
from trl_multiagent.models.pretrained import find_file, hub_arguments
from trl_multiagent.team.agent_team import AgentTeam


class LoadError(ValueError):
    """A team cannot be loaded. The message, of one line, names its models."""


@dataclass(frozen=True)
class TeamLoader:
    """Loads the teams of a run."""

    models: str | list[str]  # the model of all agents, or one per agent: an id, a folder, or a key of `builders`
    # Functions that build a base model and return its folder
    builders: Mapping[str, Callable[[], str]] = field(default_factory=dict)
    peft_config: LoraConfig | None = None  # the adapter of each LoRA agent
    adapter_roles: Sequence[str] | None = None  # the agents that get it; all by default
    share_weights: bool = False  # whether all agents are one model
    torch_dtype: str | None = None  # data type of the base of a LoRA team, and of a team that is not trained
    # Arguments of TRL's `ModelConfig` about quantized weights; empty without any
    quantization: Mapping[str, Any] = field(default_factory=dict)
    # More arguments of `AgentTeam.from_pretrained`, such as `tokenizer_kwargs`
    arguments: Mapping[str, Any] = field(default_factory=dict)

    def base_dtype(self, compute_dtype: str) -> str:
        """
        Data type of the base of a LoRA team to train. Autocast would cast a base in float32 again at every token.
        """
        return self.torch_dtype or ("bfloat16" if compute_dtype == "bfloat16" else "float32")

    @property
    def sampling_dtype(self) -> str:
        """Data type of a team that only samples: bfloat16 on a GPU that has it."""
        has_bf16 = PartialState().device.type != "cpu" and is_torch_bf16_gpu_available()
        return self.torch_dtype or ("bfloat16" if has_bf16 else "float32")

    def load(self, roles: Sequence[str], dtype: str, compute_dtype: str, seed: int) -> AgentTeam:
        """
        Loads the team to train, on the CPU: full models, one model for all agents, or LoRA adapters. `dtype` is the
        type of the trained weights, `compute_dtype` the type of matrix products. The seed decides the weights that no
        file contains. Raises [`LoadError`] if the team cannot be loaded.
        """
        arguments = {"dtype": dtype, **self._quantization(compute_dtype), **self.arguments}
        with one_line(f"the team cannot be loaded from {self.models!r}"):
            return self._make(roles, seed=seed, base_dtype=self.base_dtype(compute_dtype), **arguments)

    def saved(self, folder: str) -> "TeamLoader":
        """Returns the loader of a saved team, which keeps its form."""
        return replace(self, models=folder, peft_config=None, share_weights=False)

    def load_to_sample(self, roles: Sequence[str], seed: int) -> AgentTeam:
        """Loads the same team on the device of this process, to sample with; see [`~TeamLoader.load`]."""
        dtype = self.sampling_dtype
        return self._place(replace(self, torch_dtype=dtype).load(roles, dtype, dtype, seed))

    def load_player(self, names: str | list[str], roles: Sequence[str]) -> AgentTeam:
        """
        Loads another team on the device of this process, see [`load_player`]. That team decides on adapters and shared
        weights.
        """
        dtype = self.sampling_dtype
        with one_line(f"the team cannot be loaded from {names!r}"):
            models = build(names, self.builders)
            return self._place(load_player(models, roles, dtype=dtype, **self._quantization(dtype), **self.arguments))

    def outline(self, roles: Sequence[str], dtype: str) -> AgentTeam:
        """Builds the team to train without its weights. Raises the errors of transformers and PEFT unchanged."""
        return self._make(roles, **{"device_map": "meta", "dtype": dtype, **self.arguments})

    def _make(self, roles: Sequence[str], **arguments: Any) -> AgentTeam:
        models = build(self.models, self.builders)
        adapters = dict.fromkeys(self.adapter_roles or roles, self.peft_config) if self.peft_config else None
        return AgentTeam.from_pretrained(models, roles, adapters, self.share_weights, **arguments)

    def _quantization(self, compute_dtype: str) -> dict[str, Any]:
        if not self.quantization:
            return {}
        config = ModelConfig(dtype="bfloat16" if compute_dtype == "auto" else compute_dtype, **self.quantization)
        return {"quantization_config": get_quantization_config(config)}

    def _place(self, team: AgentTeam) -> AgentTeam:
        if any(parameter.numel() == 0 for parameter in team.parameters()):
            raise LoadError(
                "The weights of the team are sharded over several processes (ZeRO-3), so they cannot sample: choose "
                "the accelerate configuration single or ddp."
            )
        return team if self.quantization else team.to(PartialState().device)


def load_player(
    names: str | list[str], roles: Sequence[str], like: AgentTeam | None = None, **model_init_kwargs: Any
) -> AgentTeam:
    """
    Loads a team that only answers: a saved team, a model for all roles, or one model per role. A saved team has its
    own roles and form. A model that answers for several roles is loaded once. `like`: a team that lends models its
    reasoning and its arguments of chat templates, by role; a role that it lacks gets the first role's.
    `model_init_kwargs`: arguments of [`AgentTeam.from_pretrained`].
    """
    names = packaged(names) if isinstance(names, str) else names
    is_saved = isinstance(names, str) and find_file(names, TEAM_FILE, token=model_init_kwargs.get("token")) is not None
    if is_saved:
        for name in ("revision", "reasoning", "chat_template_kwargs"):  # these are for the run's models
            model_init_kwargs.pop(name, None)
    shares = (
        isinstance(names, str)
        and not is_saved
        and len(roles) > 1
        and not find_file(names, ADAPTER_CONFIG, **hub_arguments(model_init_kwargs))
    )
    team = AgentTeam.from_pretrained(names, None if is_saved else roles, share_weights=shares, **model_init_kwargs)
    if like is not None and not is_saved:
        same = {role: role if role in like.roles else like.roles[0] for role in team.roles}
        team.reasoning = {role: like.reasoning[other] for role, other in same.items()}
        team.chat_template_kwargs = {role: {**like.chat_template_kwargs[other]} for role, other in same.items()}
    return team


def build(names: Any, builders: Mapping[str, Callable[[], str]]) -> Any:
    """
    Builds the models of a task that do not exist yet. Returns the names with these models' folders instead.
    """
    if isinstance(names, list):
        built = {name: build(name, builders) for name in dict.fromkeys(names)}
        return [built[name] for name in names]
    return builders[names]() if names in builders else names


@contextlib.contextmanager
def one_line(problem: str) -> Iterator[None]:
    """Turns an error of loading within the block into a [`LoadError`] that begins with `problem`."""
    try:
        yield
    except LoadError:
        raise
    except Exception as error:  # the files may be a stranger's, and transformers and PEFT fail in many ways
        raise LoadError(f"{problem}: {describe(error)}") from error
