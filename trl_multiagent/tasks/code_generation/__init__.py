"""Two agents write code together: data, prompts, extraction, reward, feedback."""

from trl_multiagent.tasks.code_generation.data import load_code_dataset
from trl_multiagent.tasks.code_generation.environment import CodeGenerationEnvironment


__all__ = ["CodeGenerationEnvironment", "load_code_dataset"]
