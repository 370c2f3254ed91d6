"""The values that `peft.LoraConfig` may have in a team; see [`~limits.Limits`]."""

from typing import Any


BASE_CHANGES = "it changes the base, which all agents share"
NOT_FOR_TEAMS = "a team takes plain LoRA, rsLoRA and DoRA"
LORA_LIMITS: dict[str, dict[str, Any]] = {
    "r": {"ge": 1, "le": 1000000},
    "lora_alpha": {"ge": 1},
    "lora_dropout": {"ge": 0, "lt": 1},
    "layers_to_transform": {"ge": 0},
    "trainable_token_indices": {"ge": 0},
    "rank_pattern": {"ge": 1},
    "alpha_pattern": {"gt": 0},
    "bias": {"refused": BASE_CHANGES},
    "layer_replication": {"refused": BASE_CHANGES},
    "loftq_config": {"refused": BASE_CHANGES},
    "eva_config": {"refused": BASE_CHANGES},
    "corda_config": {"refused": BASE_CHANGES},
    "lora_ga_config": {"refused": BASE_CHANGES},
    "init_lora_weights": {"choices": (True, False, "gaussian", "orthogonal", "mica")},
    "alora_invocation_tokens": {"refused": NOT_FOR_TEAMS},
    "arrow_config": {"refused": NOT_FOR_TEAMS},
    "velora_config": {"refused": NOT_FOR_TEAMS},
    "monteclora_config": {"refused": NOT_FOR_TEAMS},
    "kasa_config": {"refused": NOT_FOR_TEAMS},
    "use_bdlora": {"refused": NOT_FOR_TEAMS},
    "use_qalora": {"refused": NOT_FOR_TEAMS},
    "qalora_group_size": {"refused": NOT_FOR_TEAMS},
}
