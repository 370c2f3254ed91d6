"""Bug fixing: one agent writes tests that find the fault of a function, the other repairs the function."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from trl_multiagent.environments.base import Environment, JointAction, Outcome, Prompt, Turn
from trl_multiagent.environments.bug_fixing.prompts import (
    FIXER,
    TESTER,
    UNSEEN,
    fixer_feedback,
    fixer_prompt,
    tester_feedback,
    tester_prompt,
)
from trl_multiagent.environments.bug_fixing.reward import FIX, REWARD_VERSION, REWRITE, TESTS, WRONG_TESTS, BugReward
from trl_multiagent.environments.python_code.program_runner import ProgramRunner
from trl_multiagent.sandbox import Sandbox


EXAMPLE = {"entry_point": "double", "faulty": 'def double(x):\n    """Twice x."""\n    return x + 2'}


class BugFixingEnvironment(Environment):
    """
    A `tester` writes tests that find the fault of a function, a `fixer` repairs it. With one agent, the `fixer` works alone.

    In the first turn, neither sees what the other writes. In later turns, the fixer learns which of the tester's last tests its function fails,
    and the tester what its tests say of the faulty function. No prompt contains anything about the hidden tests or the reference.

    Items are rows of [`load_bug_dataset`]. The reward is that of [`BugReward`], at most 4, or 2 for one agent.

    Args:
        num_agents (`int`, *optional*, defaults to `2`): 2 or 1.
        sandbox ([`Sandbox`], *optional*): Runs the programs; by default one with default settings.
        keep_suspicious (`str` or `Path`, *optional*): Folder for the programs whose verdict is suspicious. By default they are not stored.
    """

    watched_metrics: ClassVar[dict[str, str]] = {"fix": "no repair passes more hidden tests than the faulty function"}

    def __init__(self, num_agents: int = 2, sandbox: Sandbox | None = None, keep_suspicious: str | Path | None = None):
        if num_agents not in (1, 2):
            raise ValueError(f"`num_agents`: bug fixing takes 1 or 2 agents, not {num_agents}.")
        self.roles = (TESTER, FIXER) if num_agents == 2 else (FIXER,)
        self.sandbox = sandbox or Sandbox()
        self.runner = ProgramRunner(self.sandbox, keep_suspicious)
        self.reward = BugReward(self.runner)
        team = num_agents == 2
        smallest, largest = REWRITE + team * WRONG_TESTS, FIX + team * TESTS
        shares = dict.fromkeys(("passed", "fix", "rewritten", "tests", "wrong_tests", "finds_fault"), (0.0, 1.0))
        self.metric_ranges = {"reward": (smallest, largest), "total_reward": (smallest, largest), **shares}

    def __repr__(self) -> str:
        return f"BugFixingEnvironment(roles={self.roles}, reward_version={REWARD_VERSION})"

    def resume_settings(self) -> dict[str, Any]:
        prompts = json.dumps(self.prompts(EXAMPLE, ()), sort_keys=True)
        return {
            "reward_version": REWARD_VERSION,
            "prompts": hashlib.sha256(prompts.encode()).hexdigest()[:12],
            "max_timeouts": self.sandbox.max_timeouts,
            "memory_mb": self.sandbox.memory_mb,
        }

    def prompts(self, item: dict, history: Sequence[Turn]) -> dict[str, Prompt]:
        if history:
            return self.next_prompts([item], [history])[0]
        first = {TESTER: tester_prompt(item), FIXER: fixer_prompt(item, alone=TESTER not in self.roles)}
        return {role: first[role] for role in self.roles}

    def next_prompts(self, items: list[dict], histories: list[Sequence[Turn]]) -> list[dict[str, Prompt]]:
        """Makes the prompts of a whole turn. The tester's tests run on all repairs at the same time."""
        last = [history[-1].outcome.info if history else None for history in histories]
        programs = {
            k: self.reward.run_tests(item, result.source, result.tests)
            for k, (item, result) in enumerate(zip(items, last, strict=True))
            if result is not None and result.tests
        }
        verdicts = dict(zip(programs, self.runner.run_references([*programs.values()]), strict=True))
        prompts: list[dict[str, Prompt]] = []
        for k, (item, result) in enumerate(zip(items, last, strict=True)):
            if result is None:
                prompts.append(self.prompts(item, ()))
                continue
            on_fix = verdicts[k].checks if k in verdicts else ()
            on_faulty = result.on_faulty.checks if result.on_faulty else ()
            later = {
                TESTER: tester_feedback(result.tests, on_faulty),
                FIXER: fixer_feedback(result.tests, on_fix, alone=TESTER not in self.roles),
            }
            prompts.append({role: later[role] for role in self.roles})
        return prompts

    def score(
        self, items: list[dict], joint_actions: list[JointAction], histories: list[Sequence[Turn]]
    ) -> list[Outcome]:
        return self.reward.score(items, joint_actions)

    def show_answers(self, role: str, prompt: Prompt, answers: Mapping[str, str]) -> Prompt:
        if isinstance(prompt, str):
            prompt = prompt.replace(UNSEEN, "Your partner's answer is above.")
        return super().show_answers(role, prompt, answers)

    def metrics(self) -> dict[str, float]:
        return {f"sandbox/{name}": value for name, value in self.runner.metrics().items()}
