"""Two agents write code together: data, prompts, extraction, reward, feedback."""

from .data import load_code_dataset
from .environment import CodeGenerationEnvironment


__all__ = ["CodeGenerationEnvironment", "load_code_dataset"]
