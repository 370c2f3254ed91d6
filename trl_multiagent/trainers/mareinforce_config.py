from dataclasses import dataclass, field
from typing import Any, ClassVar

from trl_multiagent.trainers.magrpo_config import MAGRPOConfig


@dataclass
class MAREINFORCEConfig(MAGRPOConfig):
    r"""
    Configuration class for the [`MAREINFORCETrainer`].

    It is [`MAGRPOConfig`] with `advantage_mode="raw"`.
    """

    limits: ClassVar[dict[str, dict[str, Any]]] = {"advantage_mode": {"choices": ("raw",)}}

    advantage_mode: str = field(default="raw", metadata={"help": "Baseline over the sibling set, 'raw' here."})
