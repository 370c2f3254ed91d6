"""Runs untrusted Python: `Sandbox.run(programs) -> verdicts`. It knows nothing about rewards or agents."""

from trl_multiagent.sandbox.program import Check, Program, SandboxError, Verdict


__all__ = ["Check", "Program", "SandboxError", "Verdict"]
