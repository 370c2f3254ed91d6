from dataclasses import dataclass, field
from typing import Any, ClassVar

from trl_multiagent.trainers.magrpo_config import MAGRPOConfig


@dataclass
class MAReMaxConfig(MAGRPOConfig):
    r"""
    Configuration class for the [`MAReMaxTrainer`].

    It is [`MAGRPOConfig`] with `advantage_mode="max"`.
    """

    limits: ClassVar[dict[str, dict[str, Any]]] = {"advantage_mode": {"choices": ("max",)}}

    advantage_mode: str = field(default="max", metadata={"help": "Baseline over the sibling set, 'max' here."})
