"""
Code generation: two agents solve HumanEval-shaped problems together, one writes a helper and one the main function.

No agent is ever shown another agent's code. Prompts of later turns have feedback, made from the verdict on the last
answers. The reward is in `reward.py`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trl_multiagent.code.sandbox import Check, Sandbox, read_asserts
from trl_multiagent.console import MAX_TEXT, shown_line
from trl_multiagent.environments.base import (
    PASSED_HIDDEN,
    History,
    JointAction,
    Outcome,
    Prompt,
    Prompts,
    scoring_context,
)
from trl_multiagent.environments.prompt_files import PromptFiles
from trl_multiagent.environments.task import setting
from trl_multiagent.tasks.code_generation.expert import Expert, function_of, shorten
from trl_multiagent.tasks.code_generation.item_facts import read_problem
from trl_multiagent.tasks.code_generation.reward import (
    AUX,
    KINDS,
    MAIN,
    REWARD_VERSION,
    CodeResult,
    CodeReward,
    metric_ranges,
)
from trl_multiagent.tasks.programs import ProgramEnvironment


EXPERT_EDITS, PASSED, PLAIN = "expert_edits", "passed", "plain"
MODES = ("level_feedback", "level_passed", PASSED, PLAIN, EXPERT_EDITS)
# CoMLRL's
OTHER_NAMES = {"expert": EXPERT_EDITS, "edits": EXPERT_EDITS, "feedback": "level_feedback", "signals": "level_passed"}


# Prompts of the first turn. `problem` is the statement of the problem. It is the item's `prompt`, except where
# feedback takes its place


UNSEEN = "You cannot see each other's code."
SEEN = "Your partner's code is above."  # instead of it, in baselines in which agents see each other's code

FIRST = (("prompt", "entry_point", "task_id", "signature"), ("item",))
LATER = ((*FIRST[0], "feedback", "function", "response"), ("item", "feedback", "history"))


@dataclass
class CodePrompts(PromptFiles):
    """The section `prompt_files`."""

    aux: str | None = setting("Template or function for aux's first prompt: a path, or package.module:name.")
    main: str | None = setting("The same for main.")
    feedback: str | None = setting("Template or function for the prompts of later turns.")
    aux_feedback: str | None = setting("The same for aux alone.")
    main_feedback: str | None = setting("The same for main alone.")

    takes = {"aux": FIRST, "main": FIRST, "feedback": LATER, "aux_feedback": LATER, "main_feedback": LATER}


def signature(item: dict) -> str:
    """Returns the header of the function that the item asks for, on one line."""
    return read_problem(item["prompt"], item["entry_point"]).signature


def aux_prompt(item: dict, problem: str) -> str:
    """Returns the first prompt of the aux agent."""
    return f"""\
Two programmers solve the problem below together. You write a helper function, your partner writes \
`{item["entry_point"]}` and can call your helper. {UNSEEN}

{problem.strip()}

Write the helper:
- It is named `aux`, does a useful part of the work, and returns its result.
- Answer with the Python code of the function alone: no explanation, no code fence, no tests, \
no `{item["entry_point"]}`.

The answer has this form:

def aux(...):
    ...
    return result

Your answer:
"""


def main_prompt(item: dict, problem: str) -> str:
    """Returns the first prompt of the main agent in a team with an aux agent."""
    return f"""\
Two programmers solve the problem below together. You write `{item["entry_point"]}`, your partner writes a \
helper function `aux(...)` that you can call. {UNSEEN}

{problem.strip()}

Write the function:
- It solves the problem with the help of `aux`: use the value that `aux` returns, and do your own part of the work.
- Answer with the Python code of the function alone: no explanation, no code fence, no tests, no definition of `aux`.

The answer has this form:

{signature(item)}
    ...
    return result

Your answer:
"""


def single_prompt(item: dict, problem: str) -> str:
    """Returns the first prompt of an agent that works alone."""
    return f"""\
Solve the problem below.

{problem.strip()}

Write the function:
- It is complete: everything that it needs is in your answer.
- Answer with the Python code alone: no explanation, no code fence, no tests.

The answer has this form:

{signature(item)}
    ...
    return result

Your answer:
"""


# Feedback


def feedback_for(
    role: str,
    roles: Sequence[str],
    mode: str,
    item: dict,
    result: CodeResult,
    checks: Sequence[Check],
    edits: str | None,
) -> list[str]:
    """
    Returns the lines of feedback for one agent.

    Args:
        role (`str`): The agent.
        roles (`Sequence[str]`): `("aux", "main")` or `("main",)`.
        mode (`str`): One of `MODES`.
        item (`dict`): The dataset row.
        result (`CodeResult`): How the joint answer of the last turn was judged.
        checks (`Sequence[Check]`): The results of the asserts that the feedback may be about; empty if none was run.
        edits (`str` or `None`): What the expert proposes for the agent's function.
    """
    if mode == PASSED:
        passed = bool(checks) and all(check.status == "passed" for check in checks)
        return ["All levels passed" if passed else "Not all levels passed"]
    if mode == EXPERT_EDITS and edits:
        return [f"An expert has read the whole program and proposes for `{function_of(role, item)}`:", edits]
    if mode in (PLAIN, EXPERT_EDITS):
        return []
    detailed, analysis = mode == "level_feedback", result.analysis
    lines = ["Result of your last answer:"]
    problems = {AUX: analysis.aux_problem, MAIN: analysis.main_problem}
    if detailed:
        for other in sorted(roles, key=lambda other: other != role):  # the agent's own first
            whose = "Your function" if other == role else "Your partner's function"
            state = f"MISSING, {shown_line(problems[other])}" if problems[other] else "FOUND"
            lines.append(f"- {whose} `{function_of(other, item)}`: {state}")
    else:
        lines.append(f"- Implementation: {'not found' if problems[role] else 'OK'}")
    missing = [f"there is no code for `{name}`" for name in analysis.without_code]
    problem = shown_line("; ".join(filter(None, [analysis.syntax_problem, *missing])))
    if detailed:
        lines.append(f"- Syntax: {f'ERROR, {problem}' if problem else 'OK'}")
    else:
        lines.append(f"- Syntax: {'not correct' if problem else 'correct'}")
    lines += _tests(result, checks, detailed)
    if role == MAIN and AUX in roles:
        lines.append(f"- Use of `aux`: {_aux_usage(result)}")
        if detailed and analysis.thin_wrapper:
            lines.append("- Warning: your function only passes on what `aux` returns; do a part of the work yourself")
    return lines


def _tests(result: CodeResult, checks: Sequence[Check], detailed: bool) -> list[str]:
    if result.verdict is None:
        return ["- Tests: not run"]
    passed = sum(check.status == "passed" for check in checks)
    share = f"{passed}/{len(checks)} passed"
    if not detailed:
        share = {len(checks): "all passed", 0: "none passed"}.get(passed, f"{passed} of {len(checks)} passed")
    lines = [f"- Tests: {share if checks else 'none shown'}"]
    if not detailed:
        return lines
    if result.verdict.definitions.status != "passed":
        lines.append(f"  - The code does not load: {_reason(result.verdict.definitions)}")
        return lines
    # Spaces of an assert stay as they are, because they may be part of a string
    failed = [check for check in checks if check.status != "passed"]
    return lines + [f"  - {shorten(check.source, MAX_TEXT)}: {_reason(check)}" for check in failed]


def _reason(check: Check) -> str:
    if check.status == "failed":
        return "the assertion is false"
    if check.status == "not_run":
        return f"not run, {shown_line(check.error)}" if check.error else "not run"
    return shown_line(check.error) or check.status


def _aux_usage(result: CodeResult) -> str:
    analysis = result.analysis
    if analysis.main_problem:
        return "no main function"
    if analysis.syntax_problem:
        return "not known, the code does not parse"
    if not analysis.names_aux:
        return "not called"
    ignored = result.ignored if result.called else analysis.drops_value  # only tests that pass tell more than the text
    return "called, but its result is not used" if ignored else "called, and its result is used"


# Turns


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
        sandbox_slice (`int` or `str`, *optional*, defaults to `1`): The feedback contains the results of
            the first n asserts, of the last n if negative, of all for 0, `"all"` or `None`.
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
        keep_suspicious (`str` or `Path`, *optional*): Folder for the programs with a suspicious verdict, one JSON
            file each. By default they are not stored.
        first_prompts (`Callable[[dict], Mapping[str, Prompt]]`, *optional*): Function that makes each role's prompt of
            the first turn from the item. It replaces the default prompts.
        warn_about_items (`bool`, *optional*, defaults to `True`): Whether a warning is logged for each item with
            tests of little use, because a trivial answer passes all of them or the reference solution fails some.
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
        mode = OTHER_NAMES.get(mode, mode)
        if mode not in MODES:
            raise ValueError(f"Unknown mode {mode!r}: choose {', '.join(MODES)}.")
        if mode == EXPERT_EDITS and expert is None:
            raise ValueError("The mode 'expert_edits' needs `expert`, the model that proposes edits.")
        self.roles = (AUX, MAIN) if num_agents == 2 else (MAIN,)
        self.mode = mode
        self.expert = expert if mode == EXPERT_EDITS else None
        try:
            self.sandbox_slice = 0 if sandbox_slice in (None, "all") else int(str(sandbox_slice))
        except ValueError:
            raise ValueError(
                f"`sandbox_slice` must be a whole number, 'all' or None, not {sandbox_slice!r}."
            ) from None
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
            **super().resume_settings(),
        }

    def next_prompts(self, items: list[dict], histories: list[History]) -> list[Prompts]:
        """
        Makes the prompts of a whole turn. The requests to an expert, for all branches, are sent at the same time.
        """
        later = [k for k, history in enumerate(histories) if history]
        edits = {}
        if self.expert is not None:
            proposed = self.expert.propose([items[k] for k in later], [histories[k][-1] for k in later])
            edits = dict(zip(later, proposed, strict=True))
        return [
            {
                role: self._later_prompt(role, item, history, edits.get(k, {}).get(role))
                if history
                else self._first_prompt(role, item, item["prompt"])
                for role in self.roles
            }
            for k, (item, history) in enumerate(zip(items, histories, strict=True))
        ]

    def _later_prompt(self, role: str, item: dict, history: History, edits: str | None) -> Prompt:
        """Returns an agent's prompt of a later turn, with what an expert proposes."""
        result, function = history[-1].outcome.info, function_of(role, item)
        checks = self._shown_checks(result.verdict.checks if result.verdict else ())
        lines = feedback_for(role, self.roles, self.mode, item, result, checks, edits)
        text, given = "\n".join(lines), self.prompt_files.prompts
        own_prompt = given.get(f"{role}_feedback", given.get("feedback"))
        if own_prompt is not None:
            response = history[-1].joint_action[role]
            values = {**_fields(item), "feedback": text, "function": function, "response": response}
            prompt = own_prompt.make(values, item, text, history)
        else:
            need = " if needed" if self.mode == PASSED else ""
            ask = f"Revise your function `{function}`{need}. Answer with the Python code of the function alone.\n"
            prompt = "\n".join([*lines, ask])
        if isinstance(prompt, str) and not self.external_prompt_passthrough:
            return self._first_prompt(role, item, prompt)
        return prompt

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
        context = scoring_context()
        # A subclass, too, may do more with the rewards than compare them
        compares = context.compared is self and type(self) is CodeGenerationEnvironment
        return self.reward.score(items, joint_actions, trees=context.trees or () if compares else ())

    def evaluate(self, items: list[dict], joint_actions: list[JointAction], histories: list[History]) -> list[Outcome]:
        """
        Scores joint actions with both kinds of the reward, which the metrics `paper_reward` and `earned_reward`
        report. The metric `passed_hidden` says whether all tests pass that feedback does not show; an item does
        not have it if its feedback shows all tests.
        """
        outcomes = self.reward.score(items, joint_actions, kinds=KINDS)
        for item, outcome in zip(items, outcomes, strict=True):
            # A name of CoMLRL. Scoring stops at the first level that fails, so both totals are the same
            outcome.metrics["gated_total_reward"] = outcome.metrics["total_reward"]
            if hidden := self._hidden_checks(item, outcome):
                outcome.metrics[PASSED_HIDDEN] = float(all(check.status == "passed" for check in hidden))
        return outcomes

    def _shown_checks(self, checks: Sequence[Check]) -> Sequence[Check]:
        """
        Returns the checks that feedback is about: the first n, the last n if the slice is negative, all if it is 0.
        The last `hidden_tests`, and those with the same source as one of them, are left out before.
        """
        end = max(0, len(checks) - self.hidden_tests)
        hidden = {check.source for check in checks[end:]}
        shown = [check for check in checks[:end] if check.source not in hidden]
        return shown[self.sandbox_slice :] if self.sandbox_slice < 0 else shown[: self.sandbox_slice or None]

    def _hidden_checks(self, item: dict, outcome: Outcome) -> list[Check]:
        """Returns the results of the tests that feedback does not show."""
        verdict = outcome.info.verdict
        # Without a verdict, the program was not run
        checks = verdict.checks if verdict else [Check("not_run", one) for one in read_asserts(item["test"]).sources]
        shown = set()
        if self.mode not in (PLAIN, EXPERT_EDITS):
            shown = {check.source for check in self._shown_checks(checks)}
        return [check for check in checks if check.source not in shown]

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
