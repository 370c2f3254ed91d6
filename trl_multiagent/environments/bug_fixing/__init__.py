from trl_multiagent.environments.bug_fixing.data import load_bug_dataset
from trl_multiagent.environments.bug_fixing.environment import BugFixingEnvironment


__all__ = ["BugFixingEnvironment", "load_bug_dataset"]
