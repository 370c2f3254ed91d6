from typing import TYPE_CHECKING, Any

from trl_multiagent.console import quiet_libraries
from trl_multiagent.settings.algorithms import ALGORITHMS, import_class


if TYPE_CHECKING:  # what `__getattr__` gives at run time
    # ruff: noqa: F401
    from trl_multiagent.environments import (
        Environment,
        FunctionEnvironment,
        JointAction,
        Outcome,
        OutOfTurns,
        Prompt,
        Turn,
        WorkflowEnvironment,
        role_reward,
        workflow,
    )
    from trl_multiagent.environments.task import Task, TaskSettings
    from trl_multiagent.rollout.seats import EndpointSeat, FunctionSeat, Population, Seat, SeatedEnvironment
    from trl_multiagent.team.agent_team import AgentTeam
    from trl_multiagent.team.seat import TeamSeat
    from trl_multiagent.trainers.base.actor_critic_config import IACConfig, MAACConfig
    from trl_multiagent.trainers.iac_trainer import IACTrainer
    from trl_multiagent.trainers.joint_reward_config import JointRewardConfig
    from trl_multiagent.trainers.joint_reward_trainer import JointRewardTrainer
    from trl_multiagent.trainers.maac_trainer import MAACTrainer
    from trl_multiagent.trainers.madpo_config import MADPOConfig
    from trl_multiagent.trainers.madpo_trainer import MADPOTrainer
    from trl_multiagent.trainers.magrpo_config import MAGRPOConfig, MAREINFORCEConfig, MAReMaxConfig, MARLOOConfig
    from trl_multiagent.trainers.magrpo_trainer import MAGRPOTrainer, MAREINFORCETrainer, MAReMaxTrainer, MARLOOTrainer


__version__ = "0.1.0"

quiet_libraries()

# Modules are imported when one of their names is used, so that the sandbox and the command line do not wait for torch
_MODULES = {
    "environments": "Environment FunctionEnvironment JointAction OutOfTurns Outcome Prompt Turn WorkflowEnvironment "
    "role_reward workflow",
    "environments.task": "Task TaskSettings",
    "rollout.seats": "EndpointSeat FunctionSeat Population Seat SeatedEnvironment",
    "team.agent_team": "AgentTeam",
    "team.seat": "TeamSeat",
}
_PATHS = {name: f"trl_multiagent.{module}.{name}" for module, names in _MODULES.items() for name in names.split()}
_PATHS |= {path.rpartition(".")[2]: path for algorithm in ALGORITHMS.values() for path in algorithm[:2]}

__all__ = sorted(_PATHS)


def __getattr__(name: str) -> Any:
    if name not in _PATHS:
        from trl_multiagent.limits import similar_name

        advice = f"; did you mean {similar}?" if (similar := similar_name(name, _PATHS)) else ""
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}{advice}")
    return import_class(_PATHS[name])


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
