"""The section `sandbox` of the families that run programs."""

from dataclasses import asdict, dataclass

from trl_multiagent.environments.task import setting
from trl_multiagent.sandbox import Sandbox
from trl_multiagent.sandbox.sandbox import TIERS


@dataclass
class SandboxSettings:
    """The settings of a [`~trl_multiagent.sandbox.Sandbox`] that a user chooses, and `adaptive_timeout`, which is the reward's."""

    workers: int | None = setting(
        "Programs that run at once, on each process; by default its share of the node's cores.", Sandbox.workers
    )
    check_timeout: float = setting("Seconds for each test, at most.", Sandbox.check_timeout)
    adaptive_timeout: bool = setting(
        "Whether a test's seconds are 20 times those of the item's reference solution, at least 1, where it has one.",
        True,
    )
    max_timeouts: int = setting(
        "Timed-out tests after which the rest of a program's tests is not run.", Sandbox.max_timeouts
    )
    memory_mb: int = setting("Memory of one program, in MiB.", Sandbox.memory_mb)
    min_tier: str = setting(
        f"Weakest protection to run with: {', '.join(map(repr, TIERS))}.", Sandbox.min_tier, choices=tuple(TIERS)
    )

    def __post_init__(self):
        try:
            self.make_sandbox()  # checks the values; no process starts before a program runs
        except ValueError as error:
            raise ValueError(f"{error}.") from error

    def make_sandbox(self) -> Sandbox:
        settings = asdict(self)
        del settings["adaptive_timeout"]
        return Sandbox(**settings)
