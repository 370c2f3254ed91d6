"""LoRA adapters of agents: loading, checks, reference policies, saving."""

import contextlib
import copy
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from peft import (
    LoraConfig,
    PeftModel,
    get_peft_model,
    get_peft_model_state_dict,
    load_peft_weights,
    set_peft_model_state_dict,
)
from peft.tuners.lora.layer import LoraLayer
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import AuxiliaryTrainingWrapper, ModulesToSaveWrapper, TrainableTokensWrapper
from torch import nn
from transformers.integrations import is_deepspeed_zero3_enabled
from trl.trainer.utils import get_config_model_id

from trl_multiagent.folders import CARD_FILE
from trl_multiagent.limits import short
from trl_multiagent.models.adapter_config import check_adapter_config, read_adapter_config
from trl_multiagent.models.grouped_lora import Stacked
from trl_multiagent.models.pretrained import (
    adapter_parameters,
    base_of,
    hub_arguments,
    keep_adapter_in_float32,
    outside_of_text,
    seeded,
)
from trl_multiagent.team.files import SHARED_FOLDER


# Parts of the names of modules that PEFT adds, which contain the names of adapters
ADAPTER_PARTS = ("lora_", "modules_to_save.", "trainable_tokens_", "token_adapter.")


class AgentAdapters:
    """
    The adapters of a team's LoRA agents and their reference policies.

    The reference policy of an agent is a copy of its adapter at the time of [`~AgentAdapters.keep_references`]. The
    model of each role has an adapter with the role's name, see [`check_adapter`].
    """

    def __init__(self, models: dict[str, PeftModel]):
        for role, model in models.items():
            check_adapter(role, model)
        self.models = models
        self.group: Stacked | None = None  # the rows of several agents that compute together
        self.find_layers()
        for model in models.values():  # PEFT leaves one adapter of a model trainable, possibly nobody's
            model.requires_grad_(False)
        for role, model in models.items():
            for parameter in adapter_parameters(model, role):
                parameter.requires_grad_(True)

    def find_layers(self) -> None:
        """Finds the layers that have adapters. Critics may have adapters on layers where no agent has one."""
        self._layers: dict[nn.Module, list[Any]] = {}  # by the module that contains them
        for layer in {layer for model in self.models.values() for layer in self.layers_in(model)}:
            if isinstance(layer, LoraLayer) and self._add_group not in layer._forward_hooks.values():
                layer.register_forward_hook(self._add_group)

    def layers_in(self, module: nn.Module) -> list[Any]:
        """Returns the layers in a module that have adapters."""
        if module not in self._layers:
            kinds = (BaseTunerLayer, AuxiliaryTrainingWrapper)
            self._layers[module] = [layer for layer in module.modules() if isinstance(layer, kinds)]
        return self._layers[module]

    def _add_group(self, layer: LoraLayer, args: tuple[torch.Tensor, ...], result: torch.Tensor) -> torch.Tensor:
        """Adds the outputs of a group's adapters to the result of a layer. This is the forward hook of all layers."""
        return result if self.group is None else self.group.add(layer, args[0], result)

    def choose(
        self, module: nn.Module, adapter: str, group: Stacked | None = None, casts_products: bool = False
    ) -> None:
        """
        Makes the layers in a module compute with an adapter, or with the adapters of a `group`. `casts_products`:
        whether autocast casts the inputs of products. Then PEFT need not cast them to the type of the adapter before.
        """
        self.group = group
        # PEFT's own `set_adapter` would also freeze the adapters of all other agents
        for layer in self.layers_in(module):
            layer._active_adapter, layer._disable_adapters = [adapter], group is not None
            if isinstance(layer, LoraLayer):  # DoRA computes norms in the type of its input
                layer.cast_input_dtype_enabled = not casts_products or adapter in layer.lora_variant

    @contextlib.contextmanager
    def chosen(self, module: nn.Module, *choice: Any) -> Iterator[None]:
        """Makes a choice within the block, see [`~AgentAdapters.choose`]."""
        names = ("_active_adapter", "_disable_adapters", "cast_input_dtype_enabled")
        group, layers = self.group, self.layers_in(module)
        previous = [{name: getattr(layer, name) for name in names if hasattr(layer, name)} for layer in layers]
        self.choose(module, *choice)
        try:
            yield
        finally:
            self.group = group
            for layer, values in zip(layers, previous, strict=True):
                vars(layer).update(values)

    def keep_references(self) -> None:
        """
        Makes the current adapters the reference policies. PEFT changes which parameters are trainable and which
        adapter is active, so the caller sets both afterwards.
        """
        for role, model in self.models.items():
            reference = reference_name(role)
            if reference in model.peft_config:  # of an earlier trainer
                model.delete_adapter(reference)
            weights = get_peft_model_state_dict(model, adapter_name=role, save_embedding_layers=False)
            model.add_adapter(reference, model.peft_config[role])
            keep_adapter_in_float32(model, reference)
            set_peft_model_state_dict(model, weights, adapter_name=reference)


def reference_name(role: str) -> str:
    """Returns the name of the adapter that is an agent's reference policy."""
    return f"{role}_reference"


# Loading and saving


def load_adapters(
    sources: dict[str, str],
    peft_configs: Mapping[str, LoraConfig],
    seed: int,
    model_init_kwargs: dict[str, Any],
) -> dict[str, PeftModel]:
    """
    Loads LoRA agents. Agents with the same base share it, and are the same object in the result. The source of an
    agent in `peft_configs` is its base, and it gets a fresh adapter; any other source is an adapter. The seed decides
    the weights that no file contains.
    """
    from trl_multiagent.models.packaged import load_as_published, packaged

    hub = hub_arguments(model_init_kwargs)
    # ZeRO-3 gathers parameters together, so all must have the same data type
    dtype = {"autocast_adapter_dtype": not is_deepspeed_zero3_enabled()}
    models = {}
    # The bases so far, by name and revision, with their adapters
    bases = {}
    for role, source in sources.items():
        is_saved = role not in peft_configs
        config = read_adapter_config(source, **hub) if is_saved else copy.deepcopy(peft_configs[role])
        # The revision in the adapter's files is the base's; the adapter's own revision is in `hub`
        saved_base = packaged(str(config.base_model_name_or_path))
        key = (saved_base, config.revision) if is_saved else (source, hub["revision"])
        if key not in bases:
            with seeded(seed, SHARED_FOLDER):
                bases[key] = load_as_published(key[0], **{**model_init_kwargs, "revision": key[1]})
        model = bases[key]
        if is_saved:
            config.inference_mode = False
        else:
            config.revision = hub["revision"]  # so that the saved adapter loads this base again
            config.exclude_modules = config.exclude_modules or outside_of_text(base_of(model))
        with seeded(seed, role):
            if isinstance(model, PeftModel):
                model.add_adapter(role, config, **dtype)
            else:
                model = bases[key] = get_peft_model(model, config, adapter_name=role, **dtype)
        models[role] = model
        if is_saved and model_init_kwargs.get("device_map") != "meta":
            load_adapter_weights(model, role, source, **hub)
        keep_adapter_in_float32(model, role)
    return models


def save_adapter(model: PeftModel, role: str, folder: Path, state_dict: dict[str, torch.Tensor] | None) -> None:
    """Saves an agent's adapter into a folder with the role's name."""
    model.save_pretrained(
        str(folder.parent), selected_adapters=[role], state_dict=state_dict, save_embedding_layers=False
    )
    (folder.parent / CARD_FILE).unlink()  # PEFT's card describes a repository with a single adapter
    for file in folder.glob("model*.safetensors*"):  # of a full agent that was saved here
        file.unlink()


def load_adapter_weights(model: PeftModel, adapter: str, source: str | Path, **hub: Any) -> None:
    """
    Replaces the weights of an adapter by those in a folder or a repository. `hub`: arguments for reading files.

    Raises:
        ValueError: The adapter does not fit the model: it has a weight that the model lacks, or the reverse, or
            another one of the base.
    """
    weights, of_base = load_peft_weights(str(source), device="cpu", **hub), base_of(model).state_dict()
    for key, x in weights.items():
        y = of_base.get(key.removeprefix("base_model.model."), x)
        if y.numel() and (x.shape != y.shape or not torch.equal(x.to(y.dtype), y.cpu())):  # ZeRO-3 has no numbers
            raise ValueError(f"The adapter in {source} replaces {key!r} of its base, which agents share.")
    try:
        result = set_peft_model_state_dict(model, weights, adapter_name=adapter)
        missing = [key for key in result.missing_keys if "lora_" in key and adapter in key.split(".")]
        unfit = [*missing, *(key for key in result.unexpected_keys if "lora_" in key)]
    except KeyError as error:  # a module of `modules_to_save`, or the trained tokens, are missing
        unfit = [error.args[0]]
    if unfit:
        base = base_of(model)
        raise ValueError(
            f"The adapter in {source} does not fit its base {get_config_model_id(base.config)}, which is loaded as "
            f"{type(base).__name__}: one of the two has no {unfit[0]!r}. If it was trained on the text model of a "
            "composite checkpoint, save that with `AutoModelForCausalLM`, and name the new folder as "
            "`base_model_name_or_path` in its adapter_config.json."
        )


# Checks


def check_adapter(role: str, model: PeftModel) -> None:
    """
    Raises a `ValueError` if a model has no adapter with the name of a role, or if an agent cannot have this adapter.
    """
    if role not in model.peft_config:
        raise ValueError(
            f"The PeftModel of the role {role!r} has the adapters {list(model.peft_config)}; name one as the role."
        )
    config = model.peft_config[role]
    base = base_of(model)
    parameters = model.named_parameters(remove_duplicate=False)
    names = [f".{name}" for name, _ in parameters if not any(part in name for part in ADAPTER_PARTS)]
    if role in "lora_" or f"{role}.".startswith(ADAPTER_PARTS) or any(f".{role}" in name for name in names):
        raise ValueError(  # PEFT finds the parameters of an adapter by its name
            f"The role {role!r} is part of the names of the model's parameters; a LoRA agent needs another name."
        )
    check_adapter_config(f"agent {role!r}", config)
    for name in config.modules_to_save or ():
        if not any(module.endswith(name) for module, _ in base.named_modules()):
            raise ValueError(f"`modules_to_save` names {name!r}, but no module of the model has a name that ends so.")
    head = base.get_output_embeddings()
    if isinstance(head, (BaseTunerLayer, AuxiliaryTrainingWrapper)):
        wrappers = {ModulesToSaveWrapper: "modules_to_save", TrainableTokensWrapper: "trainable_token_indices"}
        option = wrappers.get(type(head), "target_modules")
        tied = ", which are tied to the input embeddings" * bool(base.config.get_text_config().tie_word_embeddings)
        raise ValueError(
            f"`{option}` of a LoRA adapter is {short(getattr(config, option))}, which covers the output embeddings"
            f"{tied}. Log-probabilities are computed from their weights directly: train other parts."
        )


def check_adapter_names(config: LoraConfig, model: PeftModel) -> None:
    """
    Checks that each name in `target_modules` belongs to a module with an adapter. PEFT ignores wrong names if at least
    one is right.

    Raises:
        ValueError: there is no such module.
    """
    adapted = [f".{name}" for name in model.base_model.targeted_module_names]
    for name in () if isinstance(config.target_modules, str | None) else sorted(config.target_modules):
        if not any(other.endswith(f".{name}") for other in adapted):
            raise ValueError(f"`target_modules` has {name!r}, which would have no effect: there is none in the model.")
