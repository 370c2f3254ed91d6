"""
The names in configurations that were written for CoMLRL, and their meaning here. `{algorithm}` is the algorithm's
section.
"""

# Sections that must be empty, and the reason
UNAVAILABLE = {"preference": "`madpo` and `madpo_iter` learn from preferences, and have these settings themselves"}

# Settings of the algorithm that select the visible past turns of an agent. They have no effect with one turn
HISTORY = ("memory_mode", "original_prompt", "previous_prompts", "previous_response")

# Alternative names of our settings. They are replaced in this order
RENAMED = {
    "model": "agent_model",
    "model_name": "agent_model.name",
    "agent_model.dtype": "agent_model.torch_dtype",
    "agent_model.model_kwargs.dtype": "agent_model.torch_dtype",
    "agent_model.model_kwargs.torch_dtype": "agent_model.torch_dtype",
    "agent_model.model_kwargs.revision": "agent_model.revision",
    "agent_model.model_kwargs.attn_implementation": "agent_model.attn_implementation",
    "agent_model.model_kwargs.trust_remote_code": "agent_model.trust_remote_code",
    "agent_model.tokenizer_kwargs.trust_remote_code": "agent_model.trust_remote_code",
    "agent_model.model_kwargs": "agent_model.model_init_kwargs",
    "critic_model.model_name_or_path": "critic_model.name",
    "agent_model.temperature": "{algorithm}.temperature",
    "agent_model.top_p": "{algorithm}.top_p",
    "agent_model.top_k": "{algorithm}.top_k",
    "peft.lora_r": "peft.r",
    "peft.lora_target_modules": "peft.target_modules",
    "wandb.run_name": "wandb.name",
    "{algorithm}.seed": "seed",
    "{algorithm}.agent_learning_rate": "{algorithm}.learning_rate",
    "{algorithm}.num_epochs": "{algorithm}.num_train_epochs",
    "madpo.dpo_beta": "madpo.beta",
    "madpo_iter.dpo_beta": "madpo_iter.beta",
    "{algorithm}.max_new_tokens": "{algorithm}.max_completion_length",
    "{algorithm}.eval_batch_size": "{algorithm}.per_device_eval_batch_size",
    "{algorithm}.normalize_advantage": "{algorithm}.advantage_normalization",
    "{algorithm}.termination_threshold": "{algorithm}.early_termination_threshold",
    **{f"{{algorithm}}.external_{name}": f"{{algorithm}}.{name}" for name in HISTORY},
    **{f"external.{name}": f"{{algorithm}}.{name}" for name in HISTORY},
    "{algorithm}.previous_responses": "{algorithm}.previous_response",
    "{algorithm}.external_previous_responses": "{algorithm}.previous_response",
    "external.previous_responses": "{algorithm}.previous_response",
    "{algorithm}.external_prompt_passthrough": "external.external_prompt_passthrough",
    "{algorithm}.expert_model": "external.expert_model",
    "dataset.split": "dataset.train_split",
    "marlhf.critic_model_name": "marlhf.critic_models",
    "marlhf_iter.critic_model_name": "marlhf_iter.critic_models",
    "block_building.block_agent1": "block_building.palettes.builder_1",
    "block_building.block_agent2": "block_building.palettes.builder_2",
    "prompt.provide_graph": "block_building.provide_graph",
    "prompt.use_chat_template": "{algorithm}.use_chat_template",
    # Short forms of our own
    "prompts": "functions.prompts",
    "reward_funcs": "functions.reward_funcs",
    "reward_weights": "functions.reward_weights",
    "transition": "functions.transition",
    "order": "functions.order",
}

# The section whose settings CoMLRL has in a mapping `task`. Here, `task` is a name
TASK_MAPPING = "block_building"

# Other spellings of values
VALUES = {"agent_model.torch_dtype": {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}}

# If one file sets one of these names and the name that replaces it to different values, the latter is used, and a note
# says so. For other names in `RENAMED`, this is an error
NOT_USED = ["agent_model.temperature", "agent_model.top_p", "agent_model.top_k", "agent_model.dtype", "wandb.run_name"]
NOT_USED += ["{algorithm}.seed", "{algorithm}.external_prompt_passthrough", "dataset.split"]
NOT_USED += [f"external.{name}" for name in (*HISTORY, "previous_responses")]

# Arguments of the trainer for which null means the default
NULL_IS_DEFAULT = (
    "temperature top_p top_k reward_scale reward_shift beta discount advantage_normalization preference_replay_k"
).split()

# Settings that may be blank if another one is given
BLANK_IS_NULL = {"agent_model.name": "agents", "critic_model.name": "critics"}

# Sections of tasks whose settings have other names in `RENAMED`
TASK_SECTIONS = ("functions", TASK_MAPPING)

# Settings without an effect, by section, unless the algorithm or the task has them. They are accepted, and a run
# prints one note that lists them
NO_EFFECT_KEYS = {
    "agent_model": "type max_length special_tokens",
    "critic_model": "type max_length special_tokens torch_dtype dtype temperature top_p top_k",
    "dataset": "private csv_path json_path",
    "external": "external_prompt_passthrough",
    "wandb": "config_sections output_dir",
    "marlhf": "dpo_beta reward_model_device use_separate_critic value_head_hidden_dim",
    "marlhf_iter": "dpo_beta reward_model_device use_separate_critic value_head_hidden_dim",
    "{algorithm}": "memory_mode original_prompt previous_prompts previous_response discount advantage_mode "
    "advantage_normalization "
    "early_termination_threshold early_termination_weight epsilon_clip save_epochs parallel_training "
    "agent_devices critic_devices "
    "reference_devices reference_kl_devices preference_replay_dir comparator_devices "
    "comparator_centralized_agent_index "
    "comparator_api_max_n_per_request comparator_api_key_header comparator_api_key_prefix "
    "comparator_api_response_field",
}
NO_EFFECT = [
    "tokenizer",
    *(f"{section}.{name}" for section, names in NO_EFFECT_KEYS.items() for name in names.split()),
]

# Settings that would hold a key. They must be empty, because settings are saved with the run; the value is never shown
SECRETS = {
    "{algorithm}.comparator_api_key": "{algorithm}.comparator_api_key_env",
    "{algorithm}.comparator_api_headers": "{algorithm}.comparator_api_key_env",
    "external.expert_api_key": "external.expert_api_key_env",
}
