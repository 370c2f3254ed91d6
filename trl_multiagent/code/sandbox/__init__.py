"""Runs untrusted Python: `Sandbox.run(programs) -> verdicts`. It knows nothing about rewards or agents."""

from .program import EXPERIMENTS, Check, Program, SandboxError, Verdict, read_asserts
from .sandbox import TIERS, Sandbox


__all__ = ["EXPERIMENTS", "TIERS", "Check", "Program", "Sandbox", "SandboxError", "Verdict", "read_asserts"]
