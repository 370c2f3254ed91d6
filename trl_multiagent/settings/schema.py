"""
The sections of a recipe's YAML file, one dataclass each. The section of an algorithm also has the fields of its
configuration class.
"""

import functools
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from trl_multiagent.environments.task import DatasetSource, Task
from trl_multiagent.evaluation.config import EvaluationConfig
from trl_multiagent.folders import read_json
from trl_multiagent.limits import Key, keys_of, setting
from trl_multiagent.settings.algorithms import ACTOR_CRITICS, ALGORITHMS, RL_ALGORITHMS, import_class


AUTO = "auto"  # value of `resume_from_checkpoint`: the last checkpoint in the folder of the run, if there is one
INHERITED = Path(__file__).with_name("inherited.json")
Keys = dict[str, Key]  # the settings of a section by name


@dataclass
class AgentModel:
    """
    The section `agent_model`: fields of TRL's `ModelConfig`, some by other names, see `RENAMED`. Unset fields have
    TRL's defaults.
    """

    name: str | None = setting(
        "Model id, folder or GGUF file that every agent starts from, or the folder of a saved team."
    )
    torch_dtype: Literal["auto", "float32", "float16", "bfloat16"] | None = setting(
        "Data type to compute in, and of the base of a LoRA team; 'bfloat16' sets `bf16`. Trained weights are float32."
    )
    revision: str | None = setting("Branch, tag or commit of the model's repository.")
    trust_remote_code: bool = setting("Whether code in the model's repository may run.", False)
    gguf_file: str | None = setting("File in that folder or repository, of a model in the format GGUF.")
    attn_implementation: str | None = setting("Implementation of attention, such as 'sdpa' or 'flash_attention_2'.")
    model_init_kwargs: dict[str, Any] | None = setting("More arguments for `AutoModelForCausalLM.from_pretrained`.")
    tokenizer_kwargs: dict[str, Any] | None = setting(
        "More arguments for `AutoTokenizer.from_pretrained`.",
        keys=("use_fast", "legacy", "add_bos_token", "add_eos_token", "add_prefix_space", "model_max_length"),
    )
    reasoning: Literal["auto", "keep", "none"] | None = setting(
        "What others see of a completion: the answer after the reasoning ('auto'), or with 'keep' all of it. With "
        "'none', chat templates also get `enable_thinking=False`. By default as saved with a team, or 'auto'."
    )
    chat_template_kwargs: dict[str, Any] | None = setting(
        "More arguments of chat templates, such as `enable_thinking`. By default as saved with a team, or none."
    )
    share_weights: bool = setting("Whether all agents are one model, told apart by their prompts.", False)
    adapter_roles: list[str] | None = setting(
        "The agents that have a LoRA adapter, by default all; the rest are full."
    )
    use_peft: bool = setting("Whether every agent is a LoRA adapter with the settings lora_*; see also `peft`.", False)
    lora_r: int | None = setting("Rank of the adapters; 16 by default.", ge=1)
    lora_alpha: int | None = setting("The scale of the adapters is lora_alpha / lora_r; 32 by default.", ge=1)
    lora_dropout: float | None = setting("Dropout of the adapters; 0.05 by default.", ge=0, lt=1)
    lora_target_modules: list[str] | None = setting("Modules with adapters; by default PEFT's for the model.")
    lora_target_parameters: list[str] | None = setting("Parameters with adapters.")
    lora_modules_to_save: list[str] | None = setting("Modules that are trained in full, once per agent.")
    lora_task_type: Literal["CAUSAL_LM"] | None = setting("Only 'CAUSAL_LM'.")
    use_rslora: bool | None = setting("Whether the scale is lora_alpha / sqrt(lora_r).")
    use_dora: bool | None = setting("Whether the adapters are DoRA, which trains magnitudes too.")
    load_in_4bit: bool = setting("Whether the base of a LoRA team is quantized to 4 bits, with bitsandbytes.", False)
    load_in_8bit: bool = setting("Whether it is quantized to 8 bits.", False)
    bnb_4bit_quant_type: Literal["fp4", "nf4"] | None = setting("Type of 4-bit numbers; 'nf4' by default.")
    use_bnb_nested_quant: bool | None = setting("Whether the constants of the quantization are quantized too.")
    bnb_4bit_quant_storage: str | None = setting("Data type in which 4-bit weights are stored, such as 'bfloat16'.")

    @property
    def lora_arguments(self) -> dict[str, Any]:
        """The arguments of TRL's `ModelConfig` about adapters that are set."""
        return self.given("lora_", "use_rslora", "use_dora")

    @property
    def quantization_arguments(self) -> dict[str, Any]:
        """The arguments of TRL's `ModelConfig` about quantized weights that are set."""
        return self.given("load_in_", "bnb_", "use_bnb_")

    def given(self, *prefixes: str) -> dict[str, Any]:
        """Returns the settings that are given and not off, and whose names begin with one of these."""
        return {
            name: value
            for name, value in vars(self).items()
            if name.startswith(prefixes) and value is not None and value is not False
        }

    @property
    def is_quantized(self) -> bool:
        return self.load_in_4bit or self.load_in_8bit


@dataclass
class CriticModel:
    """The section `critic_model`, of algorithms with critics."""

    name: str | None = setting("Model id or folder that the critics start from; by default the agents' models.")


# Flags of TRL's scripts for our settings
TRL_FLAGS = {
    "task": "task",
    "model_name": "agent_model.name",
    "output_base_dir": "output.base_dir",
    "model_name_or_path": "agent_model.name",
    "model_revision": "agent_model.revision",
    "dtype": "agent_model.torch_dtype",
    "dataset_name": "dataset.name",
    "dataset_train_split": "dataset.train_split",
    "dataset_test_split": "dataset.eval_split",
}


@dataclass
class Output:
    """The section `output`."""

    base_dir: str = setting("Folder of the runs' folders: job_<id>, or mt_job_<id> with several turns.", "outputs")
    save_final_model: bool = setting("Whether to save the team and its model card after training.", True)
    save_path: str | None = setting("Folder of the team and its card; by default the run's folder.")
    verbose: bool = setting("Whether to show prompts and completions; the same as `log_completions`.", False)


@dataclass
class RewardProcessor:
    """The section `reward_processor`: a linear function that is applied to every reward."""

    enabled: bool = setting("Whether scale_factor and shift apply.", True)
    scale_factor: float | None = setting("Factor for every reward.", ne=0)
    shift: float | None = setting("Value added to every reward after the multiplication.")


@dataclass
class Wandb:
    """The section `wandb`: settings of Weights & Biases."""

    project: str | None = setting("Weights & Biases project; without it nothing is reported there.")
    entity: str | None = setting("User or team that owns the project.")
    name: str | None = setting("Name of the run.")
    dir: str | None = setting("Folder of the run's local files.")
    tags: list[str] | None = setting("Tags of the run.")
    id: str | None = setting("Id of a run to resume.")
    resume: Literal["allow", "must", "never", "auto"] | bool | None = setting("Whether to resume the run.")


@dataclass
class AlgorithmExtras:
    """The settings in an algorithm's section that are not fields of its configuration class."""

    rollout_buffer_size: int | None = setting("Nodes (or pairs) per update; sets `items_per_device`.", ge=1)
    train_batch_size: int | None = setting("Pairs per update, of preferences; by default `rollout_buffer_size`.", ge=1)
    eval_interval: int | None = setting("Items (of preferences: updates) between evaluations, 0 for none.", ge=0)
    eval_num_samples: int | None = setting("Evaluate on the first n items of the evaluation set.", ge=1)
    reference_kl_enabled: bool | None = setting("Whether `reference_kl_coef` is the `beta` of the KL penalty.")
    reference_kl_coef: float | None = setting("KL coefficient if `reference_kl_enabled`; 0.1 by default.", ge=0)
    collaboration_mode: Literal["decentralized", "centralized"] = setting(
        "One agent per role, or one agent that answers for all roles, in tagged blocks, in one turn.", "decentralized"
    )
    resume_from_checkpoint: str | bool | None = setting(
        "Checkpoint folder to resume from; true: the last one in the folder that RUN_ID or `output_dir` names; auto: "
        "the same, or step 0 if there is none."
    )


@dataclass
class CriticExtras(AlgorithmExtras):
    """The additional settings of an algorithm with critics."""

    use_separate_critic: bool | None = setting("False: the critic is a value head on the agent's own model.")
    value_head_hidden_dim: int | None = setting("The `critic_value_head_hidden_dim` of such a value head.", ge=1)


@dataclass
class PreferenceSource:
    """The settings that all algorithms on preferences share."""

    preference_dataset: str | None = setting(
        "Preferences to learn from: a folder, a file, or a dataset on the Hub. `collect` writes to this folder."
    )
    num_agents: int | None = setting("Number of agents.", ge=1, le=1000)


@dataclass
class PairSettings(PreferenceSource):
    """The keys of the section `madpo` that are not about the collection or the trainer."""

    num_turns: Literal[1] = setting("Preferences are about one turn.", 1)
    joint_mode: Literal["align", "aligned"] = setting("The c-th answers of all agents are a joint answer.", "align")


@dataclass
class RoundSettings:
    """The keys of the section `madpo_iter` about its rounds."""

    num_iterations: int = setting("Rounds, each of which collects preferences and trains.", 6, ge=1)


@dataclass
class RewardSettings(PairSettings):
    """The keys of the section `marlhf` that are not about the collection or the training of the team."""

    rl_algorithm: str = setting("Algorithm that trains the team.", "magrpo", choices=RL_ALGORITHMS)
    preference_num_items: int | None = setting("Collect preferences for the first n of the items only.", ge=1)
    reward_model_name: str | None = setting("Model that the reward model starts from; by default the first agent's.")
    reward_learning_rate: float = setting("Learning rate of the reward model.", 1e-5, gt=0)
    reward_num_train_epochs: float = setting("Passes over the preferences.", 1.0, gt=0)
    reward_train_batch_size: int = setting("Pairs per device and optimizer step.", 1, ge=1)
    reward_max_length: int | None = setting("Maximum number of tokens of a joint text; prompts are cut.", 2048, ge=1)
    reward_freeze_backbone: bool = setting("Whether only the head of the reward model is trained.", False)
    reward_eval_fraction: float = setting("Share of the items that are held out.", 0.1, ge=0, lt=1)
    reward_peft: dict[str, Any] | None = setting("Fields of `LoraConfig`: trains an adapter, and merges it.")
    reward_training: dict[str, Any] | None = setting("More arguments of `JointRewardConfig`, e.g. `warmup_steps`.")
    process_model_reward: bool = setting("Whether `reward_processor` applies to the model's reward, too.", False)
    score_task_reward: bool = setting("Whether to compute the task's reward in training, to compare both.", True)


@dataclass
class RewardRoundSettings(RoundSettings):
    """The keys of the section `marlhf_iter` about its rounds."""

    preference_scoring_reward: Literal["task", "reward_model"] = setting(
        "Reward of the answers that are compared: the task's, or the last round's reward model's.", "task"
    )


def extras_of(algorithm: str) -> type[AlgorithmExtras]:
    """
    Returns the dataclass of the settings in an algorithm's section that are not fields of its configuration class.
    """
    return CriticExtras if algorithm in ACTOR_CRITICS else AlgorithmExtras


# The section `peft` has the fields of `LoraConfig`, except for those that PEFT itself sets
NOT_IN_PEFT = """
    task_type peft_type auto_mapping peft_version base_model_name_or_path revision inference_mode runtime_config
    megatron_config megatron_core
""".split()
PEFT_DEFAULTS = {"target_modules": "all-linear"}


@dataclass
class TopLevel:
    """The top-level keys that are not sections."""

    task: str | None = setting("The task, as `--task`.")
    agents: list[str] | None = setting("Model ids, one per agent, instead of agent_model.name.")
    critics: list[str] | None = setting("Model ids, one per critic, instead of critic_model.name.")
    seed: int | None = setting("Random seed.", ge=0, le=4294967295)  # numpy takes no other
    seats: dict[str, Any] | None = setting(
        "Players of the roles that are not trained, a section per role; see docs/partners.md."
    )


@dataclass
class SeatSettings:
    """An entry of the section `seats`, the player of one role. Exactly one of the first four settings is given."""

    function: str | None = setting("A function (item, prompt, history) -> str, as package.module.function.")
    team: str | None = setting("A saved team, or a model id or folder.")
    population: list[str] | str | None = setting(
        "Saved teams, one of which is drawn for each item; 'self': the checkpoints of this run so far."
    )
    endpoint: dict[str, Any] | None = setting(
        "A model behind an endpoint: its name as `model`, and fields of `EndpointSettings`."
    )
    agent: str | None = setting("The role of the agent in these teams; by default the seat's.")
    max_completion_length: int = setting("Maximum number of tokens of an answer.", 256, ge=1)
    temperature: float = setting("Sampling temperature of a team.", 1.0, ge=0)
    use_chat_template: bool | None = setting("Whether prompts are chat messages; by default if there is a template.")

    def __post_init__(self) -> None:
        given = [x for x in (self.function, self.team, self.population, self.endpoint) if x]
        if len(given) != 1:
            raise ValueError("give exactly one of function, team, population and endpoint.")
        if isinstance(self.population, str) and self.population != "self":
            raise ValueError(f"population is {self.population!r}; it must be a list of saved teams, or 'self'.")


SHARED_SECTIONS: dict[str, type] = {
    "agent_model": AgentModel,
    "critic_model": CriticModel,
    "dataset": DatasetSource,
    "evaluation": EvaluationConfig,
    "output": Output,
    "reward_processor": RewardProcessor,
    "wandb": Wandb,
}


def sections_of(task: Task) -> dict[str, type]:
    """Returns the dataclass of each section, by name: the sections that every task has, and the task's own."""
    return SHARED_SECTIONS | task.settings


@functools.cache
def inherited() -> dict[str, Keys]:
    """
    Returns the fields of the configuration classes by the classes' import paths, without their help, from a file, so
    that settings are checked before TRL is imported. `scripts/data/write_inherited.py` writes the file.
    """
    saved = read_json(INHERITED)
    keys = [
        (name, Key(eval(hint, {"Any": Any, "Literal": Literal}), default, limits, "", is_supported))
        for name, hint, default, limits, is_supported in saved["fields"]
    ]
    return {path: dict(keys[number] for number in numbers) for path, numbers in saved["classes"].items()}


def algorithm_keys(algorithm: str, documented: bool = False) -> Keys:
    """Returns the keys of an algorithm's section. Only if they are `documented`, all have a help: this imports TRL."""
    entry = ALGORITHMS[algorithm]
    keys = keys_of(extras_of(algorithm))
    for path in (*entry.parts, entry.config):
        keys = (keys_of(import_class(path)) if documented else inherited()[path]) | keys
    return {name: replace(key, default=entry.defaults.get(name, key.default)) for name, key in keys.items()}


def known_settings(algorithm: str, task: Task) -> dict[str, Keys]:
    """Returns the keys of all sections, with top-level settings under `""`."""
    peft = {name: key for name, key in inherited()["peft.LoraConfig"].items() if name not in NOT_IN_PEFT}
    sections = {"": keys_of(TopLevel), algorithm: algorithm_keys(algorithm), "peft": peft}
    return sections | {name: keys_of(cls) for name, cls in sections_of(task).items()}
