from dataclasses import dataclass

from trl_multiagent.limits import setting
from trl_multiagent.trainers.magrpo_config import MAGRPOConfig


@dataclass
class MAREINFORCEConfig(MAGRPOConfig):
    """Configuration class for the [`MAREINFORCETrainer`]: [`MAGRPOConfig`] with `advantage_mode="raw"`."""

    advantage_mode: str = setting("Baseline over the sibling set, 'raw' here.", "raw", choices=("raw",))
