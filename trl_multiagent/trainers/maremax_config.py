from dataclasses import dataclass, field

from trl_multiagent.trainers.magrpo_config import MAGRPOConfig


@dataclass
class MAReMaxConfig(MAGRPOConfig):
    r"""
    Configuration class for the [`MAReMaxTrainer`].

    It is [`MAGRPOConfig`] with `advantage_mode="max"`.
    """

    advantage_mode: str = field(default="max", metadata={"help": "Baseline over the sibling set, 'max' here."})

    def __post_init__(self) -> None:
        if self.advantage_mode != "max":
            raise ValueError(f"MAReMax is `advantage_mode='max'`; for {self.advantage_mode!r} use another trainer.")
        super().__post_init__()
