"""The sections of a recipe's YAML file that every task has."""

from dataclasses import dataclass
from typing import Literal

from trl_multiagent.environments.task import DatasetSource, Task, setting


@dataclass
class AgentModel:
    """The section `agent_model`."""

    name: str | None = setting("Model id or folder that every agent starts from, or the folder of a saved team.")
    torch_dtype: Literal["auto", "float32", "float16", "bfloat16"] | None = setting(
        "Data type of the weights; always float32 where there is no GPU."
    )
    share_weights: bool = setting("Whether all agents are one model, told apart by their prompts.", False)
    load_in_4bit: bool = setting("Whether the base of a LoRA team is quantized to 4 bits, with bitsandbytes.", False)
    load_in_8bit: bool = setting("The same with 8 bits.", False)


@dataclass
class Output:
    """The section `output`."""

    base_dir: str = setting(
        "Folder for the folders of the runs: job_<id>, or mt_job_<id> with several turns.", "outputs"
    )
    save_final_model: bool = setting("Whether to save the team and its model card after training.", True)
    save_path: str | None = setting("Where to save them; by default in the run's folder.")
    verbose: bool = setting("Whether to show prompts and completions; the same as `log_completions`.", False)


@dataclass
class RewardProcessor:
    """The section `reward_processor`: a linear function that is applied to every reward."""

    enabled: bool = setting("Whether scale_factor and shift apply.", True)
    scale_factor: float | None = setting("Factor for every reward.")
    shift: float | None = setting("Value added to every reward after the multiplication.")


@dataclass
class Wandb:
    """The section `wandb`: settings of Weights & Biases."""

    project: str | None = setting("Weights & Biases project; without it nothing is reported there.")
    entity: str | None = setting("User or team that owns the project.")
    name: str | None = setting("Name of the run.")
    dir: str | None = setting("Folder of the run's local files.")
    tags: list[str] | None = setting("Tags of the run.")  # noqa: RUF009
    id: str | None = setting("Id of a run to continue.")
    resume: str | bool | None = setting("Whether to continue it: 'allow', 'must', 'never'.")


@dataclass
class AlgorithmExtras:
    """The settings in an algorithm's section that are not fields of its configuration class."""

    rollout_buffer_size: int | None = setting(
        "Nodes per update; sets `items_per_device` to the number of whole trees that fit."
    )
    train_batch_size: int | None = setting("Has no effect: every optimizer step uses the whole batch.")
    eval_interval: int | None = setting(
        "Items between evaluations, 0 for none; sets `eval_strategy` and `eval_steps`."
    )
    eval_num_samples: int | None = setting("Evaluate on the first n items of the evaluation set.")
    reference_kl_enabled: bool | None = setting("Whether `reference_kl_coef` is the `beta` of the KL penalty.")
    reference_kl_coef: float | None = setting(
        "The `beta` of the KL penalty, 0.1 by default, if `reference_kl_enabled`."
    )
    resume_from_checkpoint: str | bool | None = setting(
        "Checkpoint folder to continue from; true: the last one in the folder that RUN_ID or `output_dir` names."
    )


# The section `peft` has the fields of `LoraConfig`, except for those that PEFT itself sets
LORA_CONFIG = "peft.tuners.lora.config.LoraConfig"
NOT_IN_PEFT = (
    "task_type",
    "peft_type",
    "auto_mapping",
    "peft_version",
    "base_model_name_or_path",
    "revision",
    "inference_mode",
    "runtime_config",
    "megatron_config",
    "megatron_core",
)
PEFT_DEFAULTS = {"target_modules": "all-linear"}

VALUES = {"task": str | None, "agents": list[str] | None, "seed": int | None}  # top-level keys that are not sections
SHARED_SECTIONS: dict[str, type] = {
    "agent_model": AgentModel,
    "dataset": DatasetSource,
    "output": Output,
    "reward_processor": RewardProcessor,
    "wandb": Wandb,
}


def sections_of(task: Task) -> dict[str, type]:
    """The dataclass of each section, by name: the sections that every task has, and the task's own."""
    return SHARED_SECTIONS | task.settings
