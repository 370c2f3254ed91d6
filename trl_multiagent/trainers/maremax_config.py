from dataclasses import dataclass

from trl_multiagent.limits import setting
from trl_multiagent.trainers.magrpo_config import MAGRPOConfig


@dataclass
class MAReMaxConfig(MAGRPOConfig):
    """Configuration class for the [`MAReMaxTrainer`]: [`MAGRPOConfig`] with `advantage_mode="max"`."""

    advantage_mode: str = setting("Baseline over the sibling set, 'max' here.", "max", choices=("max",))
