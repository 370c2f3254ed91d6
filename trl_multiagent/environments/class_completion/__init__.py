from trl_multiagent.environments.class_completion.data import load_class_dataset
from trl_multiagent.environments.class_completion.environment import ClassCompletionEnvironment


__all__ = ["ClassCompletionEnvironment", "load_class_dataset"]
