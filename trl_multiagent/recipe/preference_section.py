"""The keys of the sections `madpo` and `madpo_iter`: those of the collection of preferences, and those of the trainer."""

from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from trl_multiagent.preferences.config import PreferenceConfig
from trl_multiagent.preferences.replay import ReplayConfig
from trl_multiagent.trainers.madpo_config import MADPOConfig


NO_ADVANTAGES = "the loss compares pairs"


@dataclass
class MADPOSection(PreferenceConfig, MADPOConfig):  # type: ignore[misc]
    """
    The section `madpo`. Only its fields are read, from its source; it has no instances.
    """

    limits: ClassVar[dict[str, dict[str, Any]]] = {
        "advantage_mode": {"no_effect": NO_ADVANTAGES},
        "advantage_normalization": {"no_effect": NO_ADVANTAGES},
        "early_termination_threshold": {"no_effect": "there is one turn"},
    }

    preference_dataset: str | None = field(
        default=None,
        metadata={
            "help": "Folder of collected preferences, a file, or a dataset on the Hub. `collect` writes to this folder; "
            "by default, to `preferences` in `output_dir` or `output.base_dir`."
        },
    )
    num_agents: int | None = field(default=None, metadata={"help": "Number of agents."})
    num_turns: Literal[1] = field(default=1, metadata={"help": "Preferences are about one turn."})
    joint_mode: Literal["align", "aligned"] = field(
        default="align", metadata={"help": "The c-th completions of all agents are a joint answer."}
    )
    # Keys of CoMLRL's MADPO that change nothing there either
    discount: float | None = field(default=None, metadata={"help": "Has no effect."})
    advantage_mode: str | None = field(default=None, metadata={"help": "Has no effect."})
    advantage_normalization: bool | None = field(default=None, metadata={"help": "Has no effect."})
    early_termination_threshold: float | None = field(default=None, metadata={"help": "Has no effect."})


@dataclass
class MADPOIterSection(ReplayConfig, MADPOSection):  # type: ignore[misc]
    """
    The section `madpo_iter`. Only its fields are read, from its source; it has no instances.

    The defaults of the fields that are repeated here are those of CoMLRL's iterative MADPO.
    """

    num_iterations: int = field(default=6, metadata={"help": "Rounds, each of which collects preferences and trains."})
    num_train_epochs: float = field(default=1, metadata={"help": "Passes over the preferences of a round."})
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
