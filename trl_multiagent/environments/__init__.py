from trl_multiagent.environments.base import Environment, FunctionEnvironment, JointAction, Outcome, Prompt, Turn
from trl_multiagent.environments.task import Task, TaskSettings
from trl_multiagent.environments.task_errors import TaskError


__all__ = [
    "Environment",
    "FunctionEnvironment",
    "JointAction",
    "Outcome",
    "Prompt",
    "Task",
    "TaskError",
    "TaskSettings",
    "Turn",
]
