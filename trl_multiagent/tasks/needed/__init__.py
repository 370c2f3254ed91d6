from trl_multiagent.tasks.needed.environment import NeededEnvironment
from trl_multiagent.tasks.needed.games import Rule, Walk


__all__ = ["NeededEnvironment", "Rule", "Walk"]
