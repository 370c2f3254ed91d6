"""The keys of the sections `reward_model` and `marlhf`."""

from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from trl_multiagent.preferences.config import PreferenceConfig
from trl_multiagent.preferences.replay import ReplayConfig
from trl_multiagent.trainers.base.actor_critic_config import ActorCriticConfig
from trl_multiagent.trainers.joint_reward_config import JointRewardConfig
from trl_multiagent.trainers.magrpo_config import MAGRPOConfig


@dataclass
class RewardModelSection(JointRewardConfig):
    """
    The section `reward_model`. Only its fields are read, from its source; it has no instances.
    """

    preference_dataset: str | None = field(
        default=None,
        metadata={
            "help": "Folder of collected preferences, a file, or a dataset on the Hub: what the model learns from."
        },
    )
    num_agents: int | None = field(default=None, metadata={"help": "Number of agents."})


@dataclass
class MARLHFSection(PreferenceConfig, MAGRPOConfig, ActorCriticConfig):
    """
    The section `marlhf`. Only its fields are read, from its source; it has no instances.
    """

    limits: ClassVar[dict[str, dict[str, Any]]] = {
        "rl_algorithm": {"choices": ("magrpo", "marloo", "maremax", "mareinforce", "iac", "maac")},
        "preference_num_items": {"ge": 1},
        "reward_learning_rate": {"gt": 0, "le": 1000},
        "reward_num_train_epochs": {"gt": 0, "le": 1000000},
        "reward_train_batch_size": {"ge": 1},
        "reward_max_length": {"ge": 1},
        "reward_eval_fraction": {"ge": 0, "lt": 1},
    }

    rl_algorithm: str = field(
        default="magrpo",
        metadata={"help": "What trains the team: 'magrpo', 'marloo', 'maremax', 'mareinforce', 'iac' or 'maac'."},
    )
    preference_dataset: str | None = field(
        default=None,
        metadata={"help": "Preferences to use instead of collecting them: a folder, a file, or a dataset on the Hub."},
    )
    preference_num_items: int | None = field(
        default=None,
        metadata={"help": "Collect preferences for the first n of the items to train on; by default all."},
    )
    reward_model_name: str | None = field(
        default=None,
        metadata={"help": "Model that the reward model starts from; by default that of the first agent."},
    )
    reward_learning_rate: float = field(default=1e-5, metadata={"help": "Learning rate of the reward model."})
    reward_num_train_epochs: float = field(default=1.0, metadata={"help": "Passes over the preferences."})
    reward_train_batch_size: int = field(default=1, metadata={"help": "Pairs per device and optimizer step."})
    reward_max_length: int | None = field(
        default=2048,
        metadata={"help": "Tokens of a joint text; longer ones lose a part of the problem. null for no limit."},
    )
    reward_freeze_backbone: bool = field(
        default=False, metadata={"help": "Whether only the head of the reward model is trained."}
    )
    reward_eval_fraction: float = field(
        default=0.1, metadata={"help": "Share of the items whose pairs are held out to measure the reward model."}
    )
    reward_peft: dict[str, Any] | None = field(
        default=None, metadata={"help": "Fields of `LoraConfig`: trains an adapter, which is merged when it is saved."}
    )
    reward_training: dict[str, Any] | None = field(
        default=None, metadata={"help": "More arguments of `JointRewardConfig`, such as `warmup_steps`."}
    )
    process_model_reward: bool = field(
        default=False, metadata={"help": "Whether `reward_processor` applies to the reward of the model, too."}
    )
    score_task_reward: bool = field(
        default=True,
        metadata={"help": "Whether the task's reward is computed in training, too, to compare it with the model's."},
    )
    num_turns: Literal[1] = field(default=1, metadata={"help": "Preferences are about one turn."})
    joint_mode: Literal["align", "aligned"] = field(
        default="align", metadata={"help": "The c-th completions of all agents are a joint answer."}
    )


@dataclass
class MARLHFIterSection(ReplayConfig, MARLHFSection):
    """
    The section `marlhf_iter`. Only its fields are read, from its source; it has no instances.

    The defaults of the fields that are repeated here are those of CoMLRL's iterative MARLHF.
    """

    num_iterations: int = field(
        default=6,
        metadata={"help": "Rounds, each of which collects preferences, trains a reward model, and trains the team."},
    )
    num_train_epochs: float = field(default=2, metadata={"help": "Passes over the items in a round."})
    reward_num_train_epochs: float = field(default=2, metadata={"help": "Passes over the preferences of a round."})
    preference_scoring_reward: Literal["task", "reward_model"] = field(
        default="task",
        metadata={
            "help": "What scores the answers that are compared: the task, or from the second round on the reward model of the round before."
        },
    )
    preference_num_candidates: int = field(default=20, metadata={"help": "Joint answers sampled per item and round."})
    preference_pairs_per_sample: int | None = field(
        default=4, metadata={"help": "Pairs that are kept per item and round; null keeps all."}
    )
    pair_selection: Literal["reward_gap", "random", "all", "comparator_reward"] = field(
        default="comparator_reward", metadata={"help": "Which pairs are kept, see `madpo`."}
    )
    comparator_policy: Literal["current", "current_copy", "history", "model", "api"] | None = field(
        default="current", metadata={"help": "Policy that samples the other answer of each pair, see `madpo`."}
    )
