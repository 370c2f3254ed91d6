from trl_multiagent.tasks.bug_fixing.data import load_bug_dataset
from trl_multiagent.tasks.bug_fixing.environment import BugFixingEnvironment


__all__ = ["BugFixingEnvironment", "load_bug_dataset"]
