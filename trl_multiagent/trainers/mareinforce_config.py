from dataclasses import dataclass, field

from trl_multiagent.trainers.magrpo_config import MAGRPOConfig


@dataclass
class MAREINFORCEConfig(MAGRPOConfig):
    r"""
    Configuration class for the [`MAREINFORCETrainer`].

    It is [`MAGRPOConfig`] with `advantage_mode="raw"`.
    """

    advantage_mode: str = field(default="raw", metadata={"help": "Baseline over the sibling set, 'raw' here."})

    def __post_init__(self) -> None:
        if self.advantage_mode != "raw":
            raise ValueError(
                f"MAREINFORCE is `advantage_mode='raw'`; for {self.advantage_mode!r} use another trainer."
            )
        super().__post_init__()
