"""
The names that configurations written for CoMLRL use, and what becomes of them here.

`{algorithm}` stands for the algorithm's section.
"""

# Sections for algorithms of CoMLRL that this release does not have
OTHER_ALGORITHMS = ("madpo", "marlhf", "iac", "maac", "ac")

# Sections that may only be empty, and why
UNAVAILABLE = {
    "critic_model": "critics are not available in this release",
    "critics": "critics are not available in this release",
    "reward_model": "reward models are not available in this release",
    "preference": "preference training is not available in this release",
}

# Other names of our settings, replaced in this order
RENAMED = {
    "model": "agent_model",
    "model_name": "agent_model.name",
    "agent_model.dtype": "agent_model.torch_dtype",
    "agent_model.temperature": "{algorithm}.temperature",
    "agent_model.top_p": "{algorithm}.top_p",
    "agent_model.top_k": "{algorithm}.top_k",
    "peft.lora_r": "peft.r",
    "peft.lora_target_modules": "peft.target_modules",
    "wandb.run_name": "wandb.name",
    "{algorithm}.seed": "seed",
    "{algorithm}.agent_learning_rate": "{algorithm}.learning_rate",
    "{algorithm}.num_epochs": "{algorithm}.num_train_epochs",
    "{algorithm}.max_new_tokens": "{algorithm}.max_completion_length",
    "{algorithm}.eval_batch_size": "{algorithm}.per_device_eval_batch_size",
    "{algorithm}.normalize_advantage": "{algorithm}.advantage_normalization",
    "{algorithm}.termination_threshold": "{algorithm}.early_termination_threshold",
    "{algorithm}.external_original_prompt": "external.original_prompt",
    "{algorithm}.external_previous_response": "external.previous_response",
}

# Settings that change nothing here. A run that is given some of them lists them in one note
NO_EFFECT = (
    "agent_model.type",
    "agent_model.max_length",
    "agent_model.special_tokens",
    "tokenizer",
    "external.expert_model",
    "external.external_prompt_passthrough",
    "wandb.config_sections",
    "wandb.output_dir",
    "{algorithm}.parallel_training",
    "{algorithm}.agent_devices",
    "{algorithm}.reference_devices",
    "{algorithm}.external_prompt_passthrough",
    "{algorithm}.epsilon_clip",
    "{algorithm}.early_termination_weight",
)

# What an agent sees of earlier turns, with the allowed values: here it always sees all of its own prompts and responses. Other
# values are refused if there are several turns, and change nothing if there is one
HISTORY = {
    "external.original_prompt": (True,),
    "external.previous_response": (True,),
    "external.previous_prompts": (True,),
    "external.previous_responses": (True,),
    "external.memory_mode": ("full", "memoryful"),
}
