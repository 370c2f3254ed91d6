"""
Code generation: two agents solve HumanEval-shaped problems together, one writes a helper and one the main function.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from trl_multiagent.code.sandbox import Check, Sandbox
from trl_multiagent.code.sandbox.program import read_asserts
from trl_multiagent.environments.base import PASSED_HIDDEN, History, JointAction, Outcome, Prompt
from trl_multiagent.tasks.code_generation import feedback
from trl_multiagent.tasks.code_generation.expert import Expert
from trl_multiagent.tasks.code_generation.prompts import (
    AUX,
    MAIN,
    SEEN,
    UNSEEN,
    CodePrompts,
    aux_prompt,
    main_prompt,
    signature,
    single_prompt,
)
from trl_multiagent.tasks.code_generation.reward import KINDS, REWARD_VERSION, CodeReward, metric_ranges
from trl_multiagent.tasks.programs import ProgramEnvironment


class CodeGenerationEnvironment(ProgramEnvironment):
    """
    Two agents write one program: `aux` a helper function, `main` the entry point that may call it. With one agent,
    `main` writes everything.

    Items are rows of [`load_code_dataset`]. The reward is the joint reward of `reward.py`, at most 4.0, or 2.1 for one
    agent.

    Args:
        num_agents (`int`, *optional*, defaults to `2`): 2 or 1.
        mode (`str`, *optional*, defaults to `"level_feedback"`): Feedback that the agents get between turns:
            `"level_feedback"`, `"level_passed"`, `"passed"`, `"plain"` or `"expert_edits"`.
        sandbox_slice (`int` or `str`, *optional*, defaults to `1`): Asserts whose results the feedback contains: the
            first n, the last n if negative, all for 0, `"all"` or `None`.
        hidden_tests (`int`, *optional*, defaults to `0`): Number of an item's last asserts that feedback never
            contains, whatever the `sandbox_slice`, which counts the others. The reward uses all asserts. If an item
            has no more asserts than this, its feedback contains none.
        external_prompt_passthrough (`bool`, *optional*, defaults to `True`): Whether the prompt of a later turn is the
            feedback as it is. If not, it is the prompt of the first turn, with the feedback in the place of the
            problem.
        prompt_files ([`CodePrompts`], *optional*): Templates or functions that replace prompts.
        reward_kind (`str`, *optional*, defaults to `"paper"`): `"paper"`, the published table, or `"earned"`, which
            only rewards solving the task.
        collaboration (`str`, *optional*, defaults to `"executed"`): For the kind `paper`. With `"static"`, the syntax
            tree decides whether `aux` is used and whether its value is ignored. With `"executed"`, `aux` must also be
            called in a test that passes, and it counts as ignored if these tests still pass when main gets nothing of
            it, and when main gets its first value each time.
        adaptive_timeout (`bool`, *optional*, defaults to `True`): Whether the deadline of a check is 20 times the
            processor time of the item's reference solution, at least 1 s and at most the sandbox's `check_timeout`.
            Items without a reference solution have the deadline `check_timeout`.
        sandbox (`Sandbox`, *optional*): The sandbox that runs the programs; by default one with default settings.
        keep_suspicious (`str` or `Path`, *optional*): Folder for the programs whose verdict is suspicious, one JSON
            file each. By default they are not stored.
        first_prompts (`Callable[[dict], Mapping[str, Prompt]]`, *optional*): Function that makes each role's prompt of
            the first turn from the item. It replaces the default prompts.
        warn_about_items (`bool`, *optional*, defaults to `True`): Whether a warning is logged for each item whose
            tests are of little use, because a trivial answer passes all of them or the reference solution fails some.
        expert ([`Expert`], *optional*): For the mode `"expert_edits"`, the model that proposes edits.
    """

    watched_metrics = {"collab_aux_usage": "main does not use what aux writes"}
    unseen = UNSEEN, SEEN

    def __init__(
        self,
        num_agents: int = 2,
        mode: str = "level_feedback",
        sandbox_slice: int | str | None = 1,
        hidden_tests: int = 0,
        external_prompt_passthrough: bool = True,
        prompt_files: CodePrompts | None = None,
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
        if hidden_tests < 0:
            raise ValueError(f"`hidden_tests` is {hidden_tests!r}; it must be a whole number of at least 0.")
        self.hidden_tests = hidden_tests
        self.external_prompt_passthrough = external_prompt_passthrough
        self.prompt_files = prompt_files or CodePrompts()
        super().__init__(sandbox, keep_suspicious)
        self.reward = CodeReward(self.runner, reward_kind, collaboration, adaptive_timeout, warn_about_items)
        self.first_prompts = first_prompts
        self.metric_ranges = metric_ranges(num_agents)

    def __repr__(self) -> str:
        hidden = f", hidden_tests={self.hidden_tests}" if self.hidden_tests else ""
        files = f", prompt_files={list(self.prompt_files.prompts)}" if self.prompt_files.prompts else ""
        return (
            f"CodeGenerationEnvironment(roles={self.roles}, mode={self.mode!r}, "
            f"sandbox_slice={self.sandbox_slice}{hidden}{files}, "
            f"reward_kind={self.reward.kind!r}, reward_version={REWARD_VERSION})"
        )

    def resume_settings(self) -> dict[str, Any]:
        return {
            "expert": None if self.expert is None else self.expert.client.endpoint.parameters,
            "hidden_tests": self.hidden_tests,
            "external_prompt_passthrough": self.external_prompt_passthrough,
            "prompt_files": self.prompt_files.saved(),
            "mode": self.mode,
            "sandbox_slice": self.sandbox_slice,
            "reward_kind": self.reward.kind,
            "collaboration": self.reward.collaboration,
            "adaptive_timeout": self.reward.adaptive_timeout,
            "reward_version": REWARD_VERSION,
            "check_timeout": self.sandbox.check_timeout,
            **super().resume_settings(),
        }

    def prompts(self, item: dict, history: History) -> dict[str, Prompt]:
        if history:
            return self.next_prompts([item], [history])[0]
        return {role: self._first_prompt(role, item, item["prompt"]) for role in self.roles}

    def next_prompts(self, items: list[dict], histories: list[History]) -> list[dict[str, Prompt]]:
        """
        Makes the prompts of a whole turn. The requests to an expert, for all branches, are sent at the same time.
        """
        later = [k for k, history in enumerate(histories) if history]
        edits: dict[int, dict[str, str]] = {}
        if self.expert is not None and later:
            proposed = self.expert.propose([items[k] for k in later], [histories[k][-1] for k in later])
            edits = dict(zip(later, proposed, strict=True))
        return [
            self._later_prompts(item, history, edits.get(k)) if history else self.prompts(item, ())
            for k, (item, history) in enumerate(zip(items, histories, strict=True))
        ]

    def _later_prompts(self, item: dict, history: History, edits: Mapping[str, str] | None) -> dict[str, Prompt]:
        """Returns the prompts of a later turn, with what an expert proposes."""
        result = history[-1].outcome.info  # a `CodeResult`
        checks: Sequence[Check] = ()
        if result.verdict is not None:
            shown = feedback.shown_checks(result.verdict.checks, self.hidden_tests)
            checks = feedback.slice_checks(shown, self.sandbox_slice)
        prompts: dict[str, Prompt] = {}
        for role in self.roles:
            last = feedback.LastAnswer(item, result, checks, role, self.roles, (edits or {}).get(role))
            lines = feedback.MODES[self.mode](last)
            own_prompt = self.prompt_files.feedback_of(role)
            if own_prompt is not None:
                text = "\n".join(lines)
                answer = {"function": last.function, "response": history[-1].joint_action[role]}
                prompt = own_prompt.make({**_fields(item), "feedback": text, **answer}, item, text, history)
            else:
                need = " if needed" if self.mode == feedback.PASSED else ""
                lines += [
                    f"Revise your function `{last.function}`{need}. Answer with the Python code of the function alone."
                ]
                prompt = "\n".join(lines) + "\n"
            if isinstance(prompt, str) and not self.external_prompt_passthrough:
                prompt = self._first_prompt(role, item, prompt)
            prompts[role] = prompt
        return prompts

    def _first_prompt(self, role: str, item: dict, problem: str) -> Prompt:
        """Returns the prompt of a role at the first turn, with `problem` in the place of the item's problem."""
        own_prompt = self.prompt_files.prompts.get(role)
        if own_prompt is not None:
            return own_prompt.make({**_fields(item), "prompt": problem}, {**item, "prompt": problem})
        if self.first_prompts is not None:
            return self.first_prompts({**item, "prompt": problem})[role]
        if self.roles == (MAIN,):
            return single_prompt(item, problem)
        return aux_prompt(item, problem) if role == AUX else main_prompt(item, problem)

    def score(self, items: list[dict], joint_actions: list[JointAction], histories: list[History]) -> list[Outcome]:
        return self.reward.score(items, joint_actions)

    def evaluate(self, items: list[dict], joint_actions: list[JointAction], histories: list[History]) -> list[Outcome]:
        """
        Scores joint actions with both kinds of the reward, which the metrics `paper_reward` and `earned_reward`
        report. The metric `passed_hidden` says whether all tests pass that feedback does not show; an item whose
        feedback shows all tests does not have it.
        """
        outcomes = self.reward.score(items, joint_actions, kinds=KINDS)
        for item, outcome in zip(items, outcomes, strict=True):
            # A name of CoMLRL. Scoring stops at the first level that fails, so both totals are the same
            outcome.metrics["gated_total_reward"] = outcome.metrics["total_reward"]
            hidden = self._hidden_tests_pass(item, outcome)
            if hidden is not None:
                outcome.metrics[PASSED_HIDDEN] = float(hidden)
        return outcomes

    def _hidden_tests_pass(self, item: dict, outcome: Outcome) -> bool | None:
        """Returns whether an answer passes all tests that feedback does not show; `None` if it shows all of them."""
        verdict = outcome.info.verdict
        # Without a verdict, the program was not run
        checks = verdict.checks if verdict else [Check("not_run", one) for one in read_asserts(item["test"]).sources]
        hidden = feedback.hidden_checks(checks, self.mode, self.sandbox_slice, self.hidden_tests)
        return all(check.status == "passed" for check in hidden) if hidden else None

    def metrics(self) -> dict[str, float]:
        expert = {} if self.expert is None else self.expert.metrics()
        return super().metrics() | expert

    def prepare(self, num_turns: int) -> None:
        if self.expert is not None and num_turns > 1:
            self.expert.prepare()

    def plan(self, items: Sequence[dict], num_later_prompts: int, answer_tokens: int) -> dict[str, str]:
        if self.expert is None or num_later_prompts == 0:
            return {}
        return {"expert": self.expert.plan(items, num_later_prompts, answer_tokens)}


def _fields(item: dict) -> dict[str, str]:
    """Returns the fields of an item that templates may have."""
    return {**{name: item[name] for name in ("prompt", "entry_point", "task_id")}, "signature": signature(item)}


def _slice(sandbox_slice: int | str | None) -> int:
    try:
        return 0 if sandbox_slice in (None, "all") else int(str(sandbox_slice))
    except ValueError:
        raise ValueError(
            f"`sandbox_slice` must be a whole number, 'all' or None, not {sandbox_slice!r}: the first n asserts, "
            "the last n "
            "if negative, all of them for 0."
        ) from None
