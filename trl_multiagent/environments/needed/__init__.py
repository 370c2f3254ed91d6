from trl_multiagent.environments.needed.environment import NeededEnvironment
from trl_multiagent.environments.needed.games import Rule, Walk


__all__ = ["NeededEnvironment", "Rule", "Walk"]
