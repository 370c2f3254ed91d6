"""Bug fixing: one agent writes tests that find the fault of a function, the other repairs the function."""

from pathlib import Path
from typing import Any, ClassVar

from trl_multiagent.code.sandbox import Sandbox
from trl_multiagent.environments.base import History, JointAction, Outcome, Prompt
from trl_multiagent.tasks.bug_fixing import prompts, reward
from trl_multiagent.tasks.bug_fixing.data import run_groups
from trl_multiagent.tasks.bug_fixing.prompts import FIXER, TESTER
from trl_multiagent.tasks.program_environment import ProgramEnvironment


class BugFixingEnvironment(ProgramEnvironment):
    """
    A `tester` writes tests that find the fault of a function, a `fixer` repairs it. With one agent, the `fixer` works
    alone.

    In the first turn, neither sees what the other writes. In later turns, the fixer learns which of the tester's last
    tests its function fails, and the tester what its tests say of the faulty function. No prompt contains anything
    about the hidden tests or the reference.

    Items are rows of [`load_bug_dataset`]. The reward is that of [`~reward.score_answers`], at most 4, or 2 for one
    agent.

    Args:
        num_agents (`int`, *optional*, defaults to `2`): 2 or 1.
        sandbox ([`Sandbox`], *optional*): Runs the programs; by default one with default settings.
        keep_suspicious (`str` or `Path`, *optional*): Folder for the programs whose verdict is suspicious. By default
            they are not stored.
    """

    watched_metrics: ClassVar[dict[str, str]] = {"fix": "no repair passes more hidden tests than the faulty function"}
    unseen = prompts.UNSEEN, "Your partner's answer is above."
    example: ClassVar[dict] = {
        "entry_point": "double",
        "faulty": 'def double(x):\n    """Twice x."""\n    return x + 2',
    }

    def __init__(self, num_agents: int = 2, sandbox: Sandbox | None = None, keep_suspicious: str | Path | None = None):
        if num_agents not in (1, 2):
            raise ValueError(f"`num_agents`: bug fixing takes 1 or 2 agents, not {num_agents}.")
        self.roles = (TESTER, FIXER) if num_agents == 2 else (FIXER,)
        super().__init__(sandbox, keep_suspicious)
        team = num_agents == 2
        rewards = reward.REWRITE + team * reward.WRONG_TESTS, reward.FIX + team * reward.TESTS
        shares = dict.fromkeys(("passed", "fix", "rewritten", "tests", "wrong_tests", "finds_fault"), (0.0, 1.0))
        self.metric_ranges = {"reward": rewards, "total_reward": rewards, **shares}

    def __repr__(self) -> str:
        return f"BugFixingEnvironment(roles={self.roles}, reward_version={reward.REWARD_VERSION})"

    def resume_settings(self) -> dict[str, Any]:
        return {"reward_version": reward.REWARD_VERSION, **super().resume_settings()}

    def prompts(self, item: dict, history: History) -> dict[str, Prompt]:
        return self.next_prompts([item], [history])[0]

    def next_prompts(self, items: list[dict], histories: list[History]) -> list[dict[str, Prompt]]:
        """Makes the prompts of a whole turn. The tester's tests run on all repairs at the same time."""
        alone = TESTER not in self.roles
        last = [history[-1].outcome.info if history else None for history in histories]
        programs = [
            [reward.program(item, result.source, *result.tests)] if result and result.tests else []
            for item, result in zip(items, last, strict=True)
        ]
        made: list[dict[str, Prompt]] = []
        for item, result, verdicts in zip(items, last, run_groups(self.runner.run_experiments, programs), strict=True):
            if result is None:
                texts = {TESTER: prompts.tester_prompt(item), FIXER: prompts.fixer_prompt(item, alone)}
            else:
                on_fix = verdicts[0].checks if verdicts else ()
                feedback = prompts.fixer_feedback(result.tests, on_fix, alone)
                texts = {TESTER: prompts.tester_feedback(result.tests, result.on_faulty), FIXER: feedback}
            made.append({role: texts[role] for role in self.roles})
        return made

    def score(self, items: list[dict], joint_actions: list[JointAction], histories: list[History]) -> list[Outcome]:
        return reward.score_answers(self.runner, items, joint_actions)
