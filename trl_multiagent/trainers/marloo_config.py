from dataclasses import dataclass

from trl_multiagent.limits import setting
from trl_multiagent.trainers.magrpo_config import MAGRPOConfig


@dataclass
class MARLOOConfig(MAGRPOConfig):
    """Configuration class for the [`MARLOOTrainer`]: [`MAGRPOConfig`] with `advantage_mode="rloo"`."""

    advantage_mode: str = setting("Baseline over the sibling set, 'rloo' here.", "rloo", choices=("rloo",))
