"""What the task families that run programs share: the section `sandbox`, and their environment's base class."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from trl_multiagent.code.program_runner import ProgramRunner
from trl_multiagent.code.sandbox import TIERS, Sandbox, SandboxError
from trl_multiagent.environments.base import Environment, prompts_of_one
from trl_multiagent.environments.task import setting
from trl_multiagent.environments.task_errors import UnavailableError


@dataclass
class SandboxSettings:
    """
    The section `sandbox`: settings of a [`~trl_multiagent.code.sandbox.Sandbox`], and `adaptive_timeout`, which the
    reward uses.
    """

    workers: int | None = setting(
        "Programs that run at the same time, per process; by default the process's share of the node's cores.",
        Sandbox.workers,
    )
    check_timeout: float = setting("Longest time for each test, in seconds.", Sandbox.check_timeout)
    adaptive_timeout: bool = setting(
        "Whether a test may take 20 times as long as the item's reference solution, at least 1 s, if the item has "
        "one.",
        True,
    )
    max_timeouts: int = setting("Timed-out tests after which a program's others do not run.", Sandbox.max_timeouts)
    memory_mb: int = setting("Memory of one program, in MiB.", Sandbox.memory_mb)
    min_tier: str = setting(
        f"Weakest protection that is accepted: {', '.join(map(repr, TIERS))}.", Sandbox.min_tier, choices=tuple(TIERS)
    )

    def __post_init__(self) -> None:
        try:
            self.make_sandbox()  # checks the values; no process starts before a program runs
        except ValueError as error:
            raise ValueError(f"{error}.") from error

    def make_sandbox(self) -> Sandbox:
        """Builds the sandbox with these settings. Raises `ValueError` if a value is out of range."""
        settings = asdict(self)
        del settings["adaptive_timeout"]
        return Sandbox(**settings)

    def make_checked_sandbox(self) -> Sandbox:
        """
        Builds the sandbox before anything is loaded. Raises `UnavailableError` if the machine does not offer the
        protection `min_tier`.
        """
        sandbox = self.make_sandbox()
        try:
            sandbox.run([])
        except SandboxError as error:
            raise UnavailableError(str(error)) from error
        return sandbox


class ProgramEnvironment(Environment):
    """An environment that runs programs in a `sandbox`, with its `runner`. For the arguments see [`ProgramRunner`]."""

    def __init__(self, sandbox: Sandbox | None, keep_suspicious: str | Path | None):
        self.sandbox = sandbox or Sandbox()
        self.runner = ProgramRunner(self.sandbox, keep_suspicious)

    prompts = prompts_of_one

    def resume_settings(self) -> dict[str, Any]:
        """
        Returns the settings of the sandbox on which rewards depend. The number of workers and the protection tier may
        differ.
        """
        return {name: getattr(self.sandbox, name) for name in ("check_timeout", "max_timeouts", "memory_mb")}

    def metrics(self) -> dict[str, float]:
        return {f"sandbox/{name}": value for name, value in self.runner.metrics().items()}
