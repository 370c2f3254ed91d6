"""The models of a run: checks of their names, the adapters of the agents, and the loader of the team."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from huggingface_hub.utils import validate_repo_id
from peft import LoraConfig
from trl import ModelConfig, get_peft_config

from trl_multiagent.environments.task import Task
from trl_multiagent.folders import MODEL_FILES, holds_model
from trl_multiagent.settings.derive import Settings, check_names
from trl_multiagent.settings.read import ConfigError, config_errors
from trl_multiagent.settings.schema import PEFT_DEFAULTS, AgentModel
from trl_multiagent.team.adapters import check_adapter_config
from trl_multiagent.team.load import TeamLoader


def check_repo_id(setting: str, repo_id: str) -> None:
    """Raises `ConfigError` if a text cannot be the name of a repository on the Hub."""
    with config_errors(f"`{setting}`: {repo_id!r} is not a valid name of a repository. "):
        validate_repo_id(repo_id)


def check_models(setting: str, names: Sequence[str], task: Task, gguf_file: str | None = None) -> None:
    """
    Raises `ConfigError` if a name is neither a model of the task, nor a folder with a model (or `gguf_file`), nor a
    possible Hub id.
    """
    for name in names:
        if name in task.models:
            continue
        check_names(name, setting)
        if Path(name).is_file() or name.endswith(".gguf"):
            raise ConfigError(f"`{setting}` is '{name}', a file: give its folder, and a GGUF file as `gguf_file`.")
        if not Path(name).is_dir():
            check_repo_id(setting, name)
        elif gguf_file is not None and not (Path(name) / gguf_file).is_file():
            raise ConfigError(f"`agent_model.gguf_file` is '{gguf_file}', but there is no such file in {name}.")
        elif gguf_file is None and not holds_model(Path(name)):
            raise ConfigError(f"`{setting}` is '{name}', a folder with none of {', '.join(MODEL_FILES)}.")


def make_peft_config(settings: Settings) -> LoraConfig | None:
    """
    Makes the adapter of every agent from the section `peft` or, with TRL, from `agent_model`. Raises `ConfigError` if
    a value is wrong.
    """
    model = settings.agent_model
    where = "peft" if settings.has_peft_section else "agent_model"
    with config_errors(f"section `{where}`: ", (ValueError, TypeError)):
        if settings.has_peft_section:
            config = LoraConfig(**{**PEFT_DEFAULTS, **settings.values["peft"]})
        else:
            config = get_peft_config(ModelConfig(use_peft=model.use_peft, **model.lora_arguments))
            names = model.lora_target_modules or []
            if config is not None and len(names) == 1 and names[0].isidentifier():
                # TRL passes a single name as text, which PEFT would compare with whole paths of modules
                config.target_modules = {*names}
        if config is not None:
            check_adapter_config("every agent", config)
    return config


def loading_arguments(model: AgentModel) -> dict[str, Any]:
    """Returns the arguments of `AutoModelForCausalLM.from_pretrained` that the user gave."""
    given = {name: getattr(model, name) for name in ("revision", "gguf_file", "attn_implementation")}
    given["trust_remote_code"] = model.trust_remote_code or None
    return {name: value for name, value in given.items() if value is not None} | (model.model_init_kwargs or {})


def make_loader(settings: Settings, peft_config: LoraConfig | None = None) -> TeamLoader:
    """Makes the loader of the teams of a run. `peft_config`: the adapter of every agent, from [`make_peft_config`]."""
    model = settings.agent_model
    kwargs = {"tokenizer_kwargs": model.tokenizer_kwargs} if model.tokenizer_kwargs else {}
    return TeamLoader(
        models=settings.model_names,
        builders=settings.builders,
        peft_config=peft_config,
        adapter_roles=model.adapter_roles,
        share_weights=model.share_weights,
        torch_dtype=model.torch_dtype,
        quantization=model.quantization_arguments if model.is_quantized else {},
        arguments=loading_arguments(model) | kwargs,
    )
