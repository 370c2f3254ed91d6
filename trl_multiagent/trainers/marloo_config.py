from dataclasses import dataclass, field
from typing import Any, ClassVar

from trl_multiagent.trainers.magrpo_config import MAGRPOConfig


@dataclass
class MARLOOConfig(MAGRPOConfig):
    r"""
    Configuration class for the [`MARLOOTrainer`].

    It is [`MAGRPOConfig`] with `advantage_mode="rloo"`.
    """

    limits: ClassVar[dict[str, dict[str, Any]]] = {"advantage_mode": {"choices": ("rloo",)}}

    advantage_mode: str = field(default="rloo", metadata={"help": "Baseline over the sibling set, 'rloo' here."})
