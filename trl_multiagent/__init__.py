from trl_multiagent.environments import Environment, FunctionEnvironment, JointAction, Outcome, Prompt, Turn
from trl_multiagent.team import AgentTeam
from trl_multiagent.trainers.magrpo_config import MAGRPOConfig
from trl_multiagent.trainers.magrpo_trainer import MAGRPOTrainer
from trl_multiagent.trainers.mareinforce_config import MAREINFORCEConfig
from trl_multiagent.trainers.mareinforce_trainer import MAREINFORCETrainer
from trl_multiagent.trainers.maremax_config import MAReMaxConfig
from trl_multiagent.trainers.maremax_trainer import MAReMaxTrainer
from trl_multiagent.trainers.marloo_config import MARLOOConfig
from trl_multiagent.trainers.marloo_trainer import MARLOOTrainer


__version__ = "0.1.0"

__all__ = [
    "AgentTeam",
    "Environment",
    "FunctionEnvironment",
    "JointAction",
    "MAGRPOConfig",
    "MAGRPOTrainer",
    "MAREINFORCEConfig",
    "MAREINFORCETrainer",
    "MARLOOConfig",
    "MARLOOTrainer",
    "MAReMaxConfig",
    "MAReMaxTrainer",
    "Outcome",
    "Prompt",
    "Turn",
]
