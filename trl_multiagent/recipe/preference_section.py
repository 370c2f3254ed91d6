"""The keys of the section `madpo`: those of the collection of preferences, and those of the trainer."""

from dataclasses import dataclass, field
from typing import Literal

from trl_multiagent.preferences.config import PreferenceConfig
from trl_multiagent.trainers.madpo_config import MADPOConfig


@dataclass
class MADPOSection(PreferenceConfig, MADPOConfig):  # type: ignore[misc]
    """
    The section `madpo`. Only its fields are read, from its source; it has no instances.
    """

    preference_dataset: str | None = field(
        default=None,
        metadata={
            "help": "Folder of collected preferences, a file, or a dataset on the Hub. `collect` writes to this folder; "
            "by default, to `preferences` in `output_dir` or `output.base_dir`."
        },
    )
    num_agents: int | None = field(default=None, metadata={"help": "Number of agents."})
    num_turns: Literal[1] = field(default=1, metadata={"help": "Preferences are about one turn."})
    collaboration_mode: Literal["decentralized"] = field(
        default="decentralized", metadata={"help": "Every role has an agent of its own."}
    )
    joint_mode: Literal["align", "aligned"] = field(
        default="align", metadata={"help": "The c-th completions of all agents are a joint answer."}
    )
    # Keys of CoMLRL's MADPO that change nothing there either
    discount: float | None = field(default=None, metadata={"help": "Has no effect."})
    advantage_mode: str | None = field(default=None, metadata={"help": "Has no effect."})
    advantage_normalization: bool | None = field(default=None, metadata={"help": "Has no effect."})
    early_termination_threshold: float | None = field(default=None, metadata={"help": "Has no effect."})
