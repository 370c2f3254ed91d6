from trl_multiagent.tasks.class_completion.data import load_class_dataset
from trl_multiagent.tasks.class_completion.environment import ClassCompletionEnvironment


__all__ = ["ClassCompletionEnvironment", "load_class_dataset"]
