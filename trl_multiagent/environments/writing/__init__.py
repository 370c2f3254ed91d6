from trl_multiagent.environments.writing.data import load_writing_dataset
from trl_multiagent.environments.writing.environment import WritingEnvironment


__all__ = ["WritingEnvironment", "load_writing_dataset"]
