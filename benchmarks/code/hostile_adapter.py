"""
Gives the runner of a corpus of hostile programs its `score`, on top of the sandbox's public API.

A team's answer becomes one program: what stands before the entry point in the prompt, then the agents' code.
Environment variables of the runner's choice: `SBX_TIER` (tier to use at most), `SBX_TIMEOUT` (seconds a check, 2 by
default).
"""

import ast
import os
import re
import sys
import textwrap
from pathlib import Path


sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the sandbox needs no installation
from trl_multiagent.code.sandbox import Program, Sandbox


FENCE = re.compile(r"^[ \t]*(?:```|~~~).*$", re.MULTILINE)

_TIER = os.environ.get("SBX_TIER", "namespaces")
_sandbox = Sandbox(
    workers=1,
    check_timeout=float(os.environ.get("SBX_TIMEOUT", "2")),
    min_tier="rlimits" if _TIER == "rlimits" else "seccomp",
    max_tier=_TIER,
)


def parses(text: str) -> bool:
    """Whether a text that is not too long is Python."""
    if len(text) > 32_000:
        return False
    try:
        ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return True


def extract(completion: str) -> str:
    """
    The code of a completion: all of it if that is Python, else its fenced blocks that are, else the longest block.
    """
    if parses(completion):
        return completion
    blocks = [textwrap.dedent(block) for block in FENCE.split(completion)[1::2]]
    return "\n\n".join(filter(parses, blocks)) or max(blocks or [completion], key=len)


def build(prompt, aux_completion, main_completion, tests, entry_point) -> Program:
    """The program of a team's answer."""
    checks = tests if isinstance(tests, str) else "\n".join(tests)
    prompt, checks, aux, main = [
        text.replace("\ufeff", "") for text in (prompt, checks, aux_completion, main_completion)
    ]
    start = re.search(rf"^(@.*\n)*(async )?def {re.escape(entry_point)}\b", prompt, re.MULTILINE)
    if start:
        before = prompt[: start.start()]
    else:
        before = "\n".join(
            line for line in prompt.splitlines() if re.match(r"(import|from) \w", line) and parses(line)
        )
    source = "\n\n".join((before, extract(aux), extract(main)))
    future = re.compile(r"^from __future__ .*\n?", re.MULTILINE)  # must come first
    source = "".join(future.findall(source)) + future.sub("", source)
    folder = "sqlite3" in checks and _sandbox.has_folders()
    return Program(source, entry_point, checks, setup=before, unittest="unittest.TestCase" in checks, folder=folder)


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
