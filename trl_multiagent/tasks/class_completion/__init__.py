from trl_multiagent.tasks.class_completion.data import TASK, load_class_dataset
from trl_multiagent.tasks.class_completion.environment import ClassCompletionEnvironment


__all__ = ["TASK", "ClassCompletionEnvironment", "load_class_dataset"]
