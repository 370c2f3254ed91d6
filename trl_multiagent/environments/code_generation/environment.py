"""Code generation: two agents solve HumanEval-shaped problems together, one writes a helper and one the main function."""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from trl_multiagent.environments.base import Environment, JointAction, Outcome, Prompt, Turn
from trl_multiagent.environments.code_generation import feedback
from trl_multiagent.environments.code_generation.expert import Expert
from trl_multiagent.environments.code_generation.prompts import aux_prompt, main_prompt, single_prompt
from trl_multiagent.environments.code_generation.reward import KINDS, REWARD_VERSION, CodeReward
from trl_multiagent.environments.code_generation.roles import AUX, MAIN
from trl_multiagent.environments.python_code.program_runner import ProgramRunner
from trl_multiagent.sandbox import Sandbox


# To compare the prompts of two runs, their prompts for this item are compared
EXAMPLE = {
    "task_id": "example",
    "prompt": 'def double(x):\n    """Twice x."""\n',
    "entry_point": "double",
    "test": "def check(candidate):\n    assert candidate(1) == 2\n",
}


class CodeGenerationEnvironment(Environment):
    """
    Two agents write one program: `aux` a helper function, `main` the entry point that may call it. With one agent, `main`
    writes everything.

    Items are rows of [`load_code_dataset`]. The reward is the joint reward of `reward.py`, at most 4.0, or 2.1 for one agent.

    Args:
        num_agents (`int`, *optional*, defaults to `2`):
            2 or 1.
        mode (`str`, *optional*, defaults to `"level_feedback"`):
            Feedback that the agents get between turns: `"level_feedback"`, `"level_passed"`, `"passed"`, `"plain"` or
            `"expert_edits"`.
        sandbox_slice (`int` or `str`, *optional*, defaults to `1`):
            Asserts whose results the feedback contains: the first n, the last n if negative, all for 0, `"all"` or `None`.
        reward_kind (`str`, *optional*, defaults to `"paper"`):
            `"paper"`, the published table, or `"earned"`, which only rewards solving the task. See [`CodeReward`].
        collaboration (`str`, *optional*, defaults to `"executed"`):
            For the kind `paper`: whether the code alone (`"static"`), or the code and the run of the tests (`"executed"`), decides
            if `aux` is used and if its value is ignored.
        adaptive_timeout (`bool`, *optional*, defaults to `True`):
            Whether the deadline of a check is 20 times the processor time of the item's reference solution, at least 1 s and at
            most the sandbox's `check_timeout`. Items without a reference solution have the deadline `check_timeout`.
        sandbox (`Sandbox`, *optional*):
            The sandbox that runs the programs; by default one with default settings.
        keep_suspicious (`str` or `Path`, *optional*):
            Folder for the programs whose verdict is suspicious, one JSON file each. By default they are not stored.
        first_prompts (`Callable[[dict], Mapping[str, Prompt]]`, *optional*):
            Function that makes each role's prompt of the first turn from the item. It replaces the default prompts.
        warn_about_items (`bool`, *optional*, defaults to `True`):
            Whether a warning is logged for each item whose tests are of little use, because a trivial answer passes all of
            them or the reference solution fails some.
        expert ([`Expert`], *optional*):
            For the mode `"expert_edits"`, the model that proposes edits.
    """

    watched_metrics: ClassVar[dict[str, str]] = {"collab_aux_usage": "main does not use what aux writes"}

    def __init__(
        self,
        num_agents: int = 2,
        mode: str = "level_feedback",
        sandbox_slice: int | str | None = 1,
        reward_kind: str = "paper",
        collaboration: str = "executed",
        adaptive_timeout: bool = True,
        sandbox: Sandbox | None = None,
        keep_suspicious: str | Path | None = None,
        first_prompts: Callable[[dict], Mapping[str, Prompt]] | None = None,
        warn_about_items: bool = True,
        expert: Expert | None = None,
    ):
        if num_agents not in (1, 2):
            raise ValueError(f"`num_agents`: code generation takes 1 or 2 agents, not {num_agents}.")
        mode = feedback.OTHER_NAMES.get(mode, mode)
        if mode not in feedback.MODES:
            raise ValueError(f"Unknown mode {mode!r}: choose {', '.join(feedback.MODES)}.")
        if mode == feedback.EXPERT_EDITS and expert is None:
            raise ValueError("The mode 'expert_edits' needs `expert`, the model that proposes edits.")
        self.roles = (AUX, MAIN) if num_agents == 2 else (MAIN,)
        self.mode = mode
        self.expert = expert if mode == feedback.EXPERT_EDITS else None
        self.sandbox_slice = _slice(sandbox_slice)
        self.sandbox = sandbox or Sandbox()
        self.runner = ProgramRunner(self.sandbox, keep_suspicious)
        self.reward = CodeReward(self.runner, reward_kind, collaboration, adaptive_timeout, warn_about_items)
        self.first_prompts = first_prompts

    def __repr__(self) -> str:
        settings = f"roles={self.roles}, mode={self.mode!r}, sandbox_slice={self.sandbox_slice}"
        return (
            f"CodeGenerationEnvironment({settings}, reward_kind={self.reward.kind!r}, reward_version={REWARD_VERSION})"
        )

    def resume_settings(self) -> dict[str, Any]:
        """The settings on which rewards and prompts depend. The number of workers and the protection tier may differ."""
        prompts = json.dumps(self.prompts(EXAMPLE, ()), sort_keys=True)
        expert = {} if self.expert is None else {"expert": self.expert.source.describe()}
        return expert | {
            "mode": self.mode,
            "sandbox_slice": self.sandbox_slice,
            "reward_kind": self.reward.kind,
            "collaboration": self.reward.collaboration,
            "adaptive_timeout": self.reward.adaptive_timeout,
            "reward_version": REWARD_VERSION,
            "prompts": hashlib.sha256(prompts.encode()).hexdigest()[:12],
            "check_timeout": self.sandbox.check_timeout,
            "max_timeouts": self.sandbox.max_timeouts,
            "memory_mb": self.sandbox.memory_mb,
        }

    def prompts(self, item: dict, history: Sequence[Turn]) -> dict[str, Prompt]:
        if history:
            return self.next_prompts([item], [history])[0]
        return self._first_prompts(item)

    def next_prompts(self, items: list[dict], histories: list[Sequence[Turn]]) -> list[dict[str, Prompt]]:
        """Makes the prompts of a whole turn. An expert is asked about all branches at the same time."""
        later = [k for k, history in enumerate(histories) if history]
        edits: dict[int, dict[str, str]] = {}
        if self.expert is not None and later:
            proposed = self.expert.propose([items[k] for k in later], [histories[k][-1] for k in later])
            edits = dict(zip(later, proposed, strict=True))
        return [
            feedback.next_prompts(item, history[-1], self.roles, self.mode, self.sandbox_slice, edits.get(k))
            if history
            else self._first_prompts(item)
            for k, (item, history) in enumerate(zip(items, histories, strict=True))
        ]

    def _first_prompts(self, item: dict) -> dict[str, Prompt]:
        if self.first_prompts is not None:
            prompts = self.first_prompts(item)
            return {role: prompts[role] for role in self.roles}
        if self.roles == (MAIN,):
            return {MAIN: single_prompt(item)}
        return {AUX: aux_prompt(item), MAIN: main_prompt(item)}

    def score(
        self, items: list[dict], joint_actions: list[JointAction], histories: list[Sequence[Turn]]
    ) -> list[Outcome]:
        return self.reward.score(items, joint_actions)

    def evaluate(
        self, items: list[dict], joint_actions: list[JointAction], histories: list[Sequence[Turn]]
    ) -> list[Outcome]:
        """Scores joint actions with both kinds of the reward, which the metrics `paper_reward` and `earned_reward` report."""
        return self.reward.score(items, joint_actions, kinds=KINDS)

    def metrics(self) -> dict[str, float]:
        expert = {} if self.expert is None else self.expert.metrics()
        return {f"sandbox/{name}": value for name, value in self.runner.metrics().items()} | expert

    def prepare(self, num_turns: int) -> None:
        if self.expert is not None and num_turns > 1:
            self.expert.source.prepare()

    def plan(self, items: Sequence[dict], num_later_prompts: int, answer_tokens: int) -> dict[str, str]:
        if self.expert is None or num_later_prompts == 0:
            return {}
        return {"expert": self.expert.plan(items, num_later_prompts, answer_tokens)}


def _slice(sandbox_slice: int | str | None) -> int:
    if sandbox_slice is None or sandbox_slice == "all":
        return 0
    try:
        if isinstance(sandbox_slice, bool):
            raise ValueError
        return int(str(sandbox_slice))
    except ValueError:
        raise ValueError(
            f"`sandbox_slice` must be a whole number, 'all' or None, not {sandbox_slice!r}: the first n asserts, the last n "
            "if negative, all of them for 0."
        ) from None
