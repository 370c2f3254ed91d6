"""A team as a single model, which is what trainers expect: the model of the agent that is active."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
from accelerate.utils import send_to_device
from peft import PeftModel
from torch import nn
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils import ModelOutput

from trl_multiagent.models.packing import run_packed
from trl_multiagent.models.router_loss import forward_with_expert_sums
from trl_multiagent.team.adapters import AgentAdapters, base_of
from trl_multiagent.team.critics import Critics


class SingleModel(nn.Module):
    """
    Several models, of which only that of the *active* agent computes. Attributes and methods that a trainer expects of
    a single model are the active agent's, or act on all agents and critics. [`AgentTeam`] sets the attributes that are
    declared here.
    """

    active: str  # the role that computes
    models: nn.ModuleDict
    critics: Critics | None
    uses_dropout: bool
    _model_names: dict[str, str]
    _adapters: AgentAdapters
    _active_critic: str | None
    _computes_as_reference: bool

    # The active agent

    @property
    def agents(self) -> dict[str, PreTrainedModel]:
        return {role: base_of(model) for role, model in self.policies.items()}

    @property
    def policies(self) -> dict[str, PreTrainedModel | PeftModel]:
        """The model of each role; for a LoRA agent, the model with the adapters."""
        return {
            role: cast("PreTrainedModel | PeftModel", self.models[name]) for role, name in self._model_names.items()
        }

    @property
    def base_models(self) -> list[PreTrainedModel]:
        """The distinct models, without their adapters."""
        return [base_of(cast("PreTrainedModel | PeftModel", model)) for model in self.models.values()]

    @contextlib.contextmanager
    def activate(self, role: str) -> Iterator[PreTrainedModel]:
        """Makes one agent the active one within the block."""
        with self._computing(role, None):
            yield self.active_agent

    @contextlib.contextmanager
    def _computing(self, role: str, critic: str | None) -> Iterator[None]:
        """Makes one agent and, if given, one critic the active ones within the block."""
        previous = self.active, self._active_critic
        self._select(role, critic)
        try:
            yield
        finally:
            self._select(*previous)

    def _select(self, role: str, critic: str | None = None) -> None:
        self.active, self._active_critic = role, critic
        self._adapters.activate(role, self._computes_as_reference)
        if critic is not None:
            cast(Critics, self.critics).activate(critic)

    def model_name(self, role: str) -> str:
        """Returns the name of the entry of `models` that an agent uses."""
        return self._model_names[role]

    # Attributes and methods of a single model, which trainers use: those of the active agent

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
        if args and not isinstance(args[0], torch.Tensor):
            raise TypeError(f"`generate` takes token ids of the active agent, not {args[0]!r}; see `collaborate`.")
        return cast(Any, self.active_agent).generate(*args, **kwargs)

    def get_output_embeddings(self) -> nn.Module:
        return self.active_agent.get_output_embeddings()

    # Methods of a single model, which trainers call: here they act on every agent and critic

    @property
    def _all_base_models(self) -> list[PreTrainedModel]:
        return self.base_models + (self.critics.base_models if self.critics is not None else [])

    def activation_checkpointing_enable(
        self, activation_checkpointing_kwargs: dict[str, Any] | None = None, **kwargs: Any
    ) -> None:
        for model in self._all_base_models:
            model.activation_checkpointing_enable(activation_checkpointing_kwargs, **kwargs)
        for layer in self._checkpointed_layers():
            layer._gradient_checkpointing_func = self._checkpointing(layer, layer._gradient_checkpointing_func)
        self.train(self.training)

    def _checkpointed_layers(self) -> list[Any]:
        """Returns the modules that checkpoint their own forward, or that of layers in them, in training mode."""
        # transformers gives this attribute to the modules for which it enables checkpointing
        modules = [
            m for m in self.modules() if hasattr(m, "_gradient_checkpointing_func") and m.gradient_checkpointing
        ]
        # In newer models, each layer checkpoints itself; in older models, the module that contains the layers does
        return [m for m in modules if isinstance(m, GradientCheckpointingLayer)] or modules

    def _checkpointing(self, layer: nn.Module, checkpoint: Callable[..., Any]) -> Callable[..., Any]:
        """
        Wraps the function that checkpoints a layer. The layer runs in evaluation mode unless the team uses dropout. In
        the backward pass, it is recomputed with the agent and the critic that were active in the forward.
        """

        def checkpoint_for_agent(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            computing = self.active, self._active_critic

            def run(*inputs: Any) -> Any:
                training = layer.training
                layer.training = self.uses_dropout
                try:
                    with self._computing(*computing):
                        return function(*inputs)
                finally:  # torch raises an exception to end a recomputation early
                    layer.training = training

            return checkpoint(run, *args, **kwargs)

        return checkpoint_for_agent

    def activation_checkpointing_disable(self) -> None:
        for model in self._all_base_models:
            model.activation_checkpointing_disable()
        self.train(self.training)

    # TRL calls these two by their older names

    def gradient_checkpointing_enable(self, gradient_checkpointing_kwargs: dict[str, Any] | None = None) -> None:
        self.activation_checkpointing_enable(gradient_checkpointing_kwargs)

    def gradient_checkpointing_disable(self) -> None:
        self.activation_checkpointing_disable()

    def enable_input_require_grads(self) -> None:
        """
        Makes the inputs of the layers require gradients. Otherwise no gradients reach adapters through checkpointed
        layers.
        """
        for model in self._all_base_models:
            cast(Any, model).enable_input_require_grads()

    def add_model_tags(self, tags: list[str] | str) -> None:
        for model in self.policies.values():
            model.add_model_tags(tags)


def run_agent(agent: PreTrainedModel, device: torch.device | None, **inputs: Any) -> ModelOutput:
    """
    Runs one agent, on `device` if given, on its entry of `team_inputs`, see [`AgentTeam.forward`]. The output is on
    the inputs' device.
    """
    if device is None:
        return run(agent, **inputs)
    return send_to_device(run(agent, **send_to_device(inputs, device)), inputs["input_ids"].device)


def run(agent: PreTrainedModel, router_weights: torch.Tensor | None = None, **inputs: Any) -> ModelOutput:
    """Runs one agent on inputs that are on its device."""
    if router_weights is not None:
        return forward_with_expert_sums(agent, router_weights, **inputs)
    return run_packed(agent, **inputs) if "places" in inputs else agent(**inputs)
