from trl_multiagent.tasks.bug_fixing.data import TASK, load_bug_dataset
from trl_multiagent.tasks.bug_fixing.environment import BugFixingEnvironment


__all__ = ["TASK", "BugFixingEnvironment", "load_bug_dataset"]
