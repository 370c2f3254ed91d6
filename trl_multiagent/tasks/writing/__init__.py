from trl_multiagent.tasks.writing.data import TASK, load_writing_dataset
from trl_multiagent.tasks.writing.environment import WritingEnvironment


__all__ = ["TASK", "WritingEnvironment", "load_writing_dataset"]
