from trl_multiagent.tasks.needed.data import TASK
from trl_multiagent.tasks.needed.environment import NeededEnvironment, Rule, Walk


__all__ = ["TASK", "NeededEnvironment", "Rule", "Walk"]
