"""
Gives the runner of a corpus of hostile programs its `score`, on top of the sandbox's public API.

A team's answer becomes one program: what stands before the entry point in the prompt, then the agents' code. Environment
variables of the runner's choice: `SBX_TIER` (tier to use at most), `SBX_TIMEOUT` (seconds a check, 2 by default).
"""

import os
import re
import sys
import types
from pathlib import Path


# the sandbox alone is measured: importing its package by the usual way would load torch
_package = types.ModuleType("trl_multiagent")
_package.__path__ = [str(Path(__file__).parent.parent / "trl_multiagent")]
sys.modules.setdefault("trl_multiagent", _package)
from trl_multiagent.sandbox import Program, Sandbox  # noqa: E402


_TIER = os.environ.get("SBX_TIER", "namespaces")
_sandbox = Sandbox(
    workers=1,
    check_timeout=float(os.environ.get("SBX_TIMEOUT", "2")),
    min_tier="rlimits" if _TIER == "rlimits" else "seccomp",
    max_tier=_TIER,
)


def extract(completion: str) -> str:
    """The longest fenced block of a completion, Python's before others, or all of it where there is none."""
    blocks = completion.split("```")[1::2]
    python = [block.partition("\n")[2] for block in blocks if block.startswith(("python", "py\n"))]
    plain = [block.partition("\n")[2] for block in blocks if block.startswith("\n")]
    return max(python or plain or [completion], key=len)


def build(prompt, aux_completion, main_completion, tests, entry_point) -> Program:
    """The program of a team's answer."""
    start = re.search(rf"^(async )?def {re.escape(entry_point)}\b", prompt, re.MULTILINE)
    before = prompt[: start.start()] if start else ""
    if not start:
        imports = [line for line in prompt.splitlines() if re.match(r"(import|from) \w", line)]
        before = "\n".join(imports)
    checks = tests if isinstance(tests, str) else "\n".join(tests)
    source = "\n\n".join((before, extract(aux_completion), extract(main_completion)))
    return Program(source, entry_point, checks, setup=before)


def score(prompt, aux_completion, main_completion, tests, entry_point) -> dict:
    """What the runner asks for: passed and total checks, and whether all passed."""
    (verdict,) = _sandbox.run([build(prompt, aux_completion, main_completion, tests, entry_point)])
    return {
        "passed": verdict.passed,
        "total": verdict.total,
        "complete": verdict.passed == verdict.total > 0,
        "detail": f"{verdict.definitions.status} {[check.status for check in verdict.checks]} {verdict.suspicious}",
    }


def close():
    _sandbox.close()
