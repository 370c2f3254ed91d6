"""Runs untrusted Python: `Sandbox.run(programs) -> verdicts`. It knows nothing about rewards or agents."""

from .program import Check, Program, SandboxError, Verdict
from .sandbox import Sandbox


__all__ = ["Check", "Program", "Sandbox", "SandboxError", "Verdict"]
