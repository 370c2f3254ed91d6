from trl_multiagent.environments.base import Environment, History, JointAction, Outcome, Prompt, Turn
from trl_multiagent.environments.function_environment import FunctionEnvironment
from trl_multiagent.environments.reward_functions import role_reward
from trl_multiagent.environments.task_errors import TaskError
from trl_multiagent.environments.workflow import OutOfTurns, WorkflowEnvironment, workflow


__all__ = [
    "Environment",
    "FunctionEnvironment",
    "History",
    "JointAction",
    "OutOfTurns",
    "Outcome",
    "Prompt",
    "TaskError",
    "Turn",
    "WorkflowEnvironment",
    "role_reward",
    "workflow",
]
