"""The sections of a recipe's YAML file: their keys, and the names of other releases that are understood too."""

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from trl_multiagent.sandbox import Sandbox


def key(help: str, default: Any = None) -> Any:
    return field(default=default, metadata={"help": help})


@dataclass
class AgentModel:
    name: str | None = key("Model id or folder that every agent starts from, the folder of a saved team, or 'demo'.")
    torch_dtype: Literal["auto", "float32", "float16", "bfloat16"] | None = key(
        "Data type of the weights; float32 where there is no GPU."
    )
    share_weights: bool = key("Whether all agents are one model, told apart by their prompts.", False)
    load_in_4bit: bool = key("Whether the base of a LoRA team is quantized to 4 bits, with bitsandbytes.", False)
    load_in_8bit: bool = key("The same with 8 bits.", False)


@dataclass
class DatasetSource:
    name: str | None = key("Hub id, path of a .jsonl, .json or .parquet file, or 'demo'.")
    type: str | None = key("'humaneval', 'coophumaneval', 'mbpp' or 'demo'; by default taken from the name.")
    train_split: str | None = key("Rows to train on, such as 'test[33:163]'.")
    eval_split: str | None = key("Rows to evaluate on; without it there is no evaluation.")


@dataclass
class Output:
    base_dir: str = key(
        "Each run gets a folder of its own in it: job_<id>, or mt_job_<id> with several turns.", "outputs"
    )
    save_final_model: bool = key("Whether to save the team after training.", False)
    save_path: str | None = key("Where to save it; by default final_model in the run's folder.")
    verbose: bool = key("Whether to show prompts and completions; the same as `log_completions`.", False)


@dataclass
class External:
    mode: Literal["level_feedback", "level_passed", "passed", "plain", "expert_edits"] = key(
        "What agents are told between turns: 'level_feedback', 'level_passed', 'passed' or 'plain'.", "level_feedback"
    )
    sandbox_slice: int | Literal["all"] | None = key(
        "Tests behind that: the first n, the last n if negative, 0 or 'all'.", 1
    )


@dataclass
class RewardProcessor:
    enabled: bool = key("Whether scale_factor and shift apply.", True)
    scale_factor: float | None = key("Factor applied to every reward.")
    shift: float | None = key("Added to every reward, after the factor.")


@dataclass
class Reward:
    type: Literal["function"] | None = key("Where rewards come from; only 'function', the task's own reward.")
    kind: Literal["paper", "earned"] = key(
        "'paper' is the published table; 'earned' has the same scale and pays for the task only.", "paper"
    )
    collaboration: Literal["executed", "static"] = key(
        "For 'paper', what shows that main uses aux and its value: 'static' its code, 'executed' also the tests that pass.",
        "executed",
    )


@dataclass
class SandboxSettings:
    workers: int | None = key("Programs that run at once, on each process; by default its share of the node's cores.")
    check_timeout: float = key("Seconds for each test, at most.", 10.0)
    adaptive_timeout: bool = key(
        "Whether a test's seconds are 20 times those of the item's reference solution, at least 1, where it has one.",
        True,
    )
    max_timeouts: int = key("Timed-out tests after which the rest of a program's tests is not run.", 3)
    memory_mb: int = key("Memory of one program, in MiB.", 512)
    min_tier: Literal["rlimits", "seccomp", "landlock", "namespaces"] = key(
        "Weakest protection to run with: 'rlimits', 'seccomp', 'landlock' or 'namespaces'.", "seccomp"
    )

    def make_sandbox(self) -> Sandbox:
        settings = asdict(self)
        del settings["adaptive_timeout"]  # the environment's: it knows the reference solutions
        return Sandbox(**settings)


@dataclass
class Wandb:
    project: str | None = key("Weights & Biases project; without it nothing is reported there.")
    entity: str | None = key("Its owner.")
    name: str | None = key("Name of the run.")
    dir: str | None = key("Folder of its local files.")
    tags: list[str] | None = key("Tags of the run.")  # noqa: RUF009
    id: str | None = key("Id of a run to continue.")
    resume: str | bool | None = key("Whether to continue it: 'allow', 'must', 'never'.")


@dataclass
class AlgorithmExtras:
    """What an algorithm's section takes besides the fields of its configuration class."""

    rollout_buffer_size: int | None = key("Nodes per update; sets `items_per_device` to the whole trees in it.")
    train_batch_size: int | None = key("Accepted; all that a batch holds goes into one optimizer step.")
    eval_interval: int | None = key("Items between evaluations, 0 for none; sets `eval_strategy` and `eval_steps`.")
    eval_num_samples: int | None = key("Evaluate on the first n items of the evaluation set.")
    reference_kl_enabled: bool | None = key("Whether `reference_kl_coef` is the `beta` of the KL penalty.")
    reference_kl_coef: float | None = key("The `beta` of the KL penalty, 0.1 by default, if `reference_kl_enabled`.")
    resume_from_checkpoint: str | bool | None = key(
        "Checkpoint folder to continue from; true: the last one in the folder that RUN_ID or `output_dir` names."
    )


# The section `peft` takes what a user chooses in a `LoraConfig`; PEFT itself fills in the rest
NOT_IN_PEFT = ("task_type", "peft_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision")
NOT_IN_PEFT += ("inference_mode", "runtime_config", "megatron_config", "megatron_core")
PEFT_DEFAULTS = {"target_modules": "all-linear"}

SECTIONS = {
    "agent_model": AgentModel,
    "dataset": DatasetSource,
    "output": Output,
    "external": External,
    "reward_processor": RewardProcessor,
    "reward": Reward,
    "sandbox": SandboxSettings,
    "wandb": Wandb,
}
VALUES = {"agents": list[str] | None, "seed": int | None}  # top-level keys that are no sections

ALGORITHMS = ("grpo", "magrpo", "marloo", "maremax", "mareinforce", "madpo", "marlhf", "iac", "maac", "ac")

# Sections that exist, but not in this release
UNAVAILABLE = {
    "critic_model": "critics are not available in this release",
    "critics": "critics are not available in this release",
    "reward_model": "reward models are not available in this release",
    "preference": "preference training is not available in this release",
}

# Other names, in the order in which they are replaced. {algorithm} stands for the algorithm's section
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

# Known keys that change nothing here; a recipe that has some says so in one line
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

# What an agent sees of the past: always its own prompts and responses, all of them. Other settings are refused if there
# is a past, that is with several turns
HISTORY = {
    "external.original_prompt": (True,),
    "external.previous_response": (True,),
    "external.previous_prompts": (True,),
    "external.previous_responses": (True,),
    "external.memory_mode": ("full", "memoryful"),
}
