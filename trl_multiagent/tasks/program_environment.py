"""What the environments that run programs have in common."""

import hashlib
import json
from pathlib import Path
from typing import Any, ClassVar

from trl_multiagent.code.program_runner import ProgramRunner
from trl_multiagent.code.sandbox import Sandbox
from trl_multiagent.environments.base import Environment


class ProgramEnvironment(Environment):
    """An environment that runs programs in a `sandbox`, with its `runner`. For the arguments see [`ProgramRunner`]."""

    example: ClassVar[dict]  # an item; to compare the prompts of two runs, their prompts for it are compared

    def __init__(self, sandbox: Sandbox | None, keep_suspicious: str | Path | None):
        self.sandbox = sandbox or Sandbox()
        self.runner = ProgramRunner(self.sandbox, keep_suspicious)

    def resume_settings(self) -> dict[str, Any]:
        """
        Returns the settings on which rewards and prompts depend. The number of workers and the protection tier may
        differ.
        """
        prompts = json.dumps(self.prompts(self.example, ()), sort_keys=True)
        return {
            "prompts": hashlib.sha256(prompts.encode()).hexdigest()[:12],
            "max_timeouts": self.sandbox.max_timeouts,
            "memory_mb": self.sandbox.memory_mb,
        }

    def metrics(self) -> dict[str, float]:
        return {f"sandbox/{name}": value for name, value in self.runner.metrics().items()}
