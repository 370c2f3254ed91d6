"""Functions for one model or adapter: finding its files, loading and copying it, selecting its parameters."""

import copy
import hashlib
import os
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
import transformers
from huggingface_hub import hf_hub_download, try_to_load_from_cache
from huggingface_hub.errors import (
    EntryNotFoundError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
)
from peft import PeftModel
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.integrations import is_deepspeed_zero3_enabled
from transformers.utils import logging as transformers_logging
from trl.trainer.utils import create_model_from_path

from trl_multiagent.console import tell
from trl_multiagent.folders import ADAPTER_CONFIG, MODEL_CONFIG, PROCESSOR_FILES


HUB_ID = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")
Module = TypeVar("Module", bound=nn.Module)


class TooLongError(ValueError):
    """A text has more tokens than its model has positions. The message names the text, and says what to do."""


def load_model(name: str, device_map: Any = None, architecture: Any = None, **kwargs: Any) -> PreTrainedModel:
    """
    Loads a model, of the class `architecture` or else of the one that [`class_of`] returns. It stays on the CPU,
    because the trainer places the whole team on the accelerator. With the `device_map` `"meta"`, it is built from its
    configuration, without weights. Of a composite checkpoint, only the text model is trained, see [`text_parameters`].
    """
    kwargs = {"trust_remote_code": False, **kwargs}
    hub = hub_arguments(kwargs)
    if find_file(name, ADAPTER_CONFIG, **hub) is not None:  # transformers would build it
        raise ValueError(f"{name} holds an adapter ({ADAPTER_CONFIG}), where a whole model is expected.")
    if device_map == "meta":
        config, options = AutoConfig.from_pretrained(name, return_unused_kwargs=True, **kwargs)
        model = without_weights(config, **options)
    else:
        architecture = architecture or class_of(
            AutoConfig.from_pretrained(name, trust_remote_code=kwargs["trust_remote_code"], **hub)
        )
        model = create_model_from_path(name, architecture, device_map=device_map, **kwargs)
    if is_composite(model):
        model.requires_grad_(False)
        for parameter in text_parameters(model):
            parameter.requires_grad_(parameter.is_floating_point())  # quantized ones are integers
        found = {file: find_file(name, file, **hub) for file in PROCESSOR_FILES}
        model.processor_files = {file: Path(path).read_bytes() for file, path in found.items() if path}
    return model


def class_of(config: PreTrainedConfig) -> Any:
    """
    Returns the class that loads a checkpoint. A composite one, with a text model and others such as a vision tower,
    gets the class that it names, so that it is saved under that class and its keys.
    """
    if config.get_text_config() is config or config.is_encoder_decoder or not config.architectures:
        return AutoModelForCausalLM
    return getattr(transformers, config.architectures[0], AutoModelForCausalLM)


def without_weights(config: PreTrainedConfig, **options: Any) -> PreTrainedModel:
    """Builds the model of a checkpoint on the device `meta`. `options`: arguments of its class."""
    cls = class_of(config)
    is_trusted = type(config).__module__.startswith("transformers_modules")  # a class of the model's repository
    with torch.device("meta"):
        if cls is AutoModelForCausalLM:
            return cls.from_config(config, trust_remote_code=is_trusted, **options)
        return cls._from_config(config, **options)


def is_composite(model: PreTrainedModel) -> bool:
    """Returns whether a model consists of a text model and others."""
    return model.config.get_text_config() is not model.config


def text_model(model: PreTrainedModel) -> PreTrainedModel:
    """Returns the part of a model that computes the hidden states of texts."""
    return model.get_decoder() if is_composite(model) else model.base_model


def text_parameters(model: PreTrainedModel) -> list[nn.Parameter]:
    """Returns the parameters that texts reach: in a composite model, its text model's and its head's."""
    if not is_composite(model):
        return list(model.parameters())
    return list(nn.ModuleList([model.get_decoder(), model.get_output_embeddings()]).parameters())  # each once


def outside_of_text(model: PreTrainedModel) -> str | None:
    """Returns a pattern for the modules of a composite model other than its text model; `None` for any other model."""
    if not is_composite(model):
        return None
    (name,) = (name for name, module in model.named_modules() if module is model.get_decoder())
    return rf"(?!{re.escape(name)}\.).*"


def has_routers(model: PreTrainedModel) -> bool:
    """
    Returns whether a model's class is a mixture of experts that can return its router logits. GRPOTrainer checks the
    same.
    """
    return hasattr(model.config.get_text_config(), "output_router_logits")


def without_router_logits(model: PreTrainedModel) -> dict[str, bool]:
    """Returns arguments that keep a forward from computing a router loss, whatever the model's configuration."""
    return {"output_router_logits": False} if has_routers(model) else {}


@contextmanager
def seeded(seed: int, name: str) -> Iterator[None]:
    """
    Makes torch's random numbers within the block depend on the seed and the name alone, and restores the state of its
    generators afterwards.
    """
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        torch.manual_seed(int.from_bytes(digest[:7], "big"))
        yield


def copied(module: Module, memo: dict[int, Any] | None = None) -> Module:
    """
    Copies a module as `copy.deepcopy` does. Under ZeRO-3, the weights of the copy are divided among the processes at
    once, so that no process holds several whole models.
    """
    if not is_deepspeed_zero3_enabled():
        return copy.deepcopy(module, memo)
    from deepspeed.runtime.zero.partition_parameters import GatheredParameters, is_zero_param

    with GatheredParameters(list(module.parameters())):  # a copy of parameters that are not gathered would be empty
        copy_of_module, weight = copy.deepcopy(module, memo), next(module.parameters())
        if is_zero_param(weight):
            weight.convert_to_zero_parameters(param_list=list(copy_of_module.parameters()))
    return copy_of_module


@contextmanager
def temporarily_set(owner: Any, **values: Any) -> Iterator[None]:
    """Sets attributes of an object to other values within the block."""
    saved = {name: getattr(owner, name) for name in values}
    for name, value in values.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name, value in saved.items():
            setattr(owner, name, value)


@contextmanager
def quiet_loading() -> Iterator[None]:
    """Hides progress bars and warnings of loading within the block."""
    shows_bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        if shows_bars:
            transformers_logging.enable_progress_bar()


def hub_arguments(model_init_kwargs: dict[str, Any]) -> dict[str, Any]:
    """Returns those arguments for loading a model that also apply to the other files of its repository."""
    return {"revision": model_init_kwargs.get("revision"), "token": model_init_kwargs.get("token")}


def base_of(model: PreTrainedModel | PeftModel) -> PreTrainedModel:
    """Returns a model without its adapters."""
    return model.get_base_model() if isinstance(model, PeftModel) else model


def adapter_parameters(model: PeftModel, adapter: str) -> list[nn.Parameter]:
    """Returns the parameters of one of a model's LoRA adapters."""
    return [parameter for name, parameter in model.named_parameters() if adapter in name.split(".")]


def keep_adapter_in_float32(model: PeftModel, adapter: str) -> None:
    """
    Converts the weights of an adapter to float32, with the modules that it copies from a base in bfloat16, which PEFT
    does not convert.

    ZeRO-3 gathers parameters together, so all must have the same data type. There, the optimizer has the weights in
    float32.
    """
    if not is_deepspeed_zero3_enabled():
        for parameter in adapter_parameters(model, adapter):
            parameter.data = parameter.data.float()


def find_file(
    name: str, file: str, revision: str | None = None, token: str | bool | None = None, required: bool = False
) -> str | None:
    """
    Looks for a file in a folder or in a repository on the Hub, and downloads it if necessary. Returns its local path,
    or `None` if it does not exist. If the Hub does not answer and the file is not `required`, a repository with
    its configuration in the local cache counts as having only the cached files.

    Raises:
        OSError: `name` is neither a folder nor a repository that can be read, or the Hub does not answer.
    """
    if Path(name).exists():
        path = Path(name) / file
        return str(path) if path.is_file() else None
    try:
        return hf_hub_download(name, file, revision=revision, token=token)
    except LocalEntryNotFoundError as error:
        cached = [try_to_load_from_cache(name, config, revision=revision) for config in (MODEL_CONFIG, ADAPTER_CONFIG)]
        if not required and any(isinstance(path, str) for path in cached):
            return None
        raise OSError(
            f"{name!r} is no folder here and is not in the local cache, and the Hugging Face Hub did not answer. "
            f"Check the name, the connection, HF_ENDPOINT and HF_HUB_OFFLINE. ({error.__cause__ or error!r})"
        ) from error
    except EntryNotFoundError:
        return None
    except (HFValidationError, RepositoryNotFoundError) as error:
        raise OSError(
            f"{name!r} is neither an existing folder nor a repository on the Hub that can be read. For a private or "
            "gated one, ask for access, and log in with `hf auth login` or pass `token`."
        ) from error


def check_length(text: str, model: PreTrainedModel, length: float) -> None:
    """
    Raises [`TooLongError`] if a text of `length` tokens is too long for a model with learned positions, as in GPT-2
    and OPT. Models that compute positions, such as rotary ones, read longer texts, which is told once. `text`: what it
    is, for the message.
    """
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if limit is None or length <= limit:
        return
    tokens = model.get_input_embeddings()
    tables = [m for m in model.modules() if isinstance(m, nn.Embedding) and m is not tokens]
    # OPT and others keep two more rows, for positions of padding
    if any(limit <= table.num_embeddings <= limit + 2 for table in tables):
        raise TooLongError(
            f"{text} may have {length} tokens, but its model has only {limit} positions, which are learned: shorten "
            "it, or choose a model that reads longer texts."
        )
    tell(
        f"{text} has more tokens than the {limit} positions (`max_position_embeddings`) that its model was trained "
        "with, and may not be understood: shorten it."
    )


def hub_id(name: str) -> str | None:
    """
    Returns the name of a model if it is a Hub id; `None` for a folder, and for the empty name of a model that was not
    loaded.
    """
    return name if HUB_ID.fullmatch(name) and not os.path.exists(name) else None
