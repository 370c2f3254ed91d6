"""The configuration of an adapter: what adapters teams have, and how a saved one is read."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from peft import LoraConfig, PeftConfig

from trl_multiagent.folders import ADAPTER_CONFIG, read_json
from trl_multiagent.limits import short
from trl_multiagent.models.pretrained import find_file


# Other initialisations of LoRA change the base, which the agents share
INITIALISATIONS = (True, False, "gaussian", "orthogonal", "mica")
# What an adapter may set. Other options change the base, import modules, or are kinds of LoRA other than plain LoRA,
# rsLoRA and DoRA
OPTIONS = """
task_type base_model_name_or_path revision inference_mode r lora_alpha lora_dropout lora_bias target_modules
exclude_modules target_parameters layers_to_transform layers_pattern rank_pattern alpha_pattern fan_in_fan_out
modules_to_save trainable_token_indices ensure_weight_tying init_lora_weights use_rslora use_dora
""".split()
ABOUT = ("auto_mapping", "peft_version")  # PEFT writes these itself


def read_adapter_config(source: str, **hub: Any) -> LoraConfig:
    """
    Reads the configuration of a saved adapter, which a stranger may have written: it is checked before PEFT sees it.
    `hub`: arguments for reading files.

    Raises:
        ValueError: The file is damaged, or teams do not have such an adapter.
        OSError: The file cannot be read.
    """
    path = Path(find_file(source, ADAPTER_CONFIG, **hub) or Path(source, ADAPTER_CONFIG))
    values = read_json(path)
    if not isinstance(values, dict):
        raise ValueError(f"{path} is damaged: it holds no object.")
    if not isinstance(values.get("base_model_name_or_path"), str):
        raise ValueError(f"{path} is damaged: `base_model_name_or_path` names no base.")
    check_options(f"the adapter in {source}", values)
    return LoraConfig(**{name: values[name] for name in OPTIONS if name in values})


def check_saved_adapter(source: str, **hub: Any) -> None:
    """Checks an adapter, if `source` is one, before transformers loads it on its base; see [`read_adapter_config`]."""
    if find_file(source, ADAPTER_CONFIG, **hub) is not None:
        read_adapter_config(source, **hub)


def check_adapter_config(whose: str, config: PeftConfig) -> None:
    """Raises a `ValueError` if the adapter of `whose` agents is not LoRA, or would change the shared base."""
    if not isinstance(config, LoraConfig):
        raise ValueError(
            f"The adapter of {whose} is {short(config)}; it must be a `LoraConfig`, such as `LoraConfig(r=8)`. A dict "
            "has one for each of its roles."
        )
    check_options(f"the adapter of {whose}", vars(config))


def check_options(what: str, values: Mapping[str, Any]) -> None:
    """Raises a `ValueError` if the options of an adapter have a value that teams do not support."""
    defaults = vars(LoraConfig())
    for name, value in values.items():
        default = defaults.get(name)
        if name not in (*OPTIONS, *ABOUT) and value != default and (value or default):
            raise ValueError(
                f"`{name}` of {what} is {short(value)}, which is not supported: agents share their base, and have "
                "plain LoRA, rsLoRA or DoRA."
            )
    if values.get("init_lora_weights", True) not in INITIALISATIONS:
        raise ValueError(
            f"`init_lora_weights` of {what} is {short(values['init_lora_weights'])}, which changes the base, which "
            f"all agents share, or does not exist; it must be one of {', '.join(map(repr, INITIALISATIONS))}."
        )
    if isinstance(values.get("modules_to_save"), str):
        raise ValueError(f"`modules_to_save` must be a list of names, such as [{values['modules_to_save']!r}].")
