import importlib
from typing import TYPE_CHECKING


if TYPE_CHECKING:
    from trl_multiagent.environments import Environment, FunctionEnvironment, JointAction, Outcome, Prompt, Turn
    from trl_multiagent.team.agent_team import AgentTeam
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

# Modules are imported when a name of theirs is asked for, so that whoever needs the sandbox or the command line alone does
# not wait for torch
_MODULES = {
    "environments": ("Environment", "FunctionEnvironment", "JointAction", "Outcome", "Prompt", "Turn"),
    "team": ("AgentTeam",),
    "trainers.magrpo_config": ("MAGRPOConfig",),
    "trainers.magrpo_trainer": ("MAGRPOTrainer",),
    "trainers.mareinforce_config": ("MAREINFORCEConfig",),
    "trainers.mareinforce_trainer": ("MAREINFORCETrainer",),
    "trainers.maremax_config": ("MAReMaxConfig",),
    "trainers.maremax_trainer": ("MAReMaxTrainer",),
    "trainers.marloo_config": ("MARLOOConfig",),
    "trainers.marloo_trainer": ("MARLOOTrainer",),
}


def __getattr__(name: str):
    for module, names in _MODULES.items():
        if name in names:
            return getattr(importlib.import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
