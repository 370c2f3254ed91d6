"""What `peft.LoraConfig` may not have in a team."""

BASE_CHANGES = "it changes the base, which all agents share"
NOT_FOR_TEAMS = "a team takes plain LoRA, rsLoRA and DoRA"
REFUSED = {
    "bias": BASE_CHANGES,
    "layer_replication": BASE_CHANGES,
    "loftq_config": BASE_CHANGES,
    "eva_config": BASE_CHANGES,
    "corda_config": BASE_CHANGES,
    "lora_ga_config": BASE_CHANGES,
    "alora_invocation_tokens": NOT_FOR_TEAMS,
    "arrow_config": NOT_FOR_TEAMS,
    "velora_config": NOT_FOR_TEAMS,
    "monteclora_config": NOT_FOR_TEAMS,
    "kasa_config": NOT_FOR_TEAMS,
    "use_bdlora": NOT_FOR_TEAMS,
    "use_qalora": NOT_FOR_TEAMS,
    "qalora_group_size": NOT_FOR_TEAMS,
}
INITIALISATIONS = (True, False, "gaussian", "orthogonal", "mica")  # others change the base, too
