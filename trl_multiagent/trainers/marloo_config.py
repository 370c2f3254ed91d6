from dataclasses import dataclass, field

from trl_multiagent.trainers.magrpo_config import MAGRPOConfig


@dataclass
class MARLOOConfig(MAGRPOConfig):
    r"""
    Configuration class for the [`MARLOOTrainer`].

    It is [`MAGRPOConfig`] with `advantage_mode="rloo"`.
    """

    advantage_mode: str = field(default="rloo", metadata={"help": "Baseline over the sibling set, 'rloo' here."})

    def __post_init__(self) -> None:
        if self.advantage_mode != "rloo":
            raise ValueError(f"MARLOO is `advantage_mode='rloo'`; for {self.advantage_mode!r} use another trainer.")
        super().__post_init__()
