from trl_multiagent.tasks.writing.data import load_writing_dataset
from trl_multiagent.tasks.writing.environment import WritingEnvironment


__all__ = ["WritingEnvironment", "load_writing_dataset"]
