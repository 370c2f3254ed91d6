"""The joint reward of a team's code, 0 to 4.0, or 2.1 for a single agent."""

from dataclasses import dataclass

from trl_multiagent.environments.base import JointAction, Outcome
from trl_multiagent.environments.execution_log import ExecutionLog
from trl_multiagent.sandbox import Program, Sandbox, Verdict

from .data import count_asserts
from .extraction import AUX, Analysis, analyze


REWARD_VERSION = 1  # stands in model cards; raised when the same code gets another reward
AUX_DEFINED = 0.4
MAIN_DEFINED = 0.6
SYNTAX = 0.5
TESTS = 1.0  # times the share of asserts that passed
AUX_USED = 0.5
NOT_A_WRAPPER = 1.0
VALUE_IGNORED = 0.5  # taken off

COLLABORATION = ("executed", "static")


@dataclass(frozen=True)
class CodeResult:
    """
    What scoring a joint action showed; the next turn's feedback is made of it.

    Args:
        analysis (`Analysis`): What the syntax trees say.
        verdict (`Verdict`, *optional*): What running the program showed; None if scoring stopped before that.
    """

    analysis: Analysis
    verdict: Verdict | None = None


def score_code(
    sandbox: Sandbox | ExecutionLog,
    items: list[dict],
    joint_actions: list[JointAction],
    collaboration: str = "executed",
) -> list[Outcome]:
    """
    Scores joint actions. All programs of the batch go through the sandbox in one call.

    Args:
        sandbox (`Sandbox` or `ExecutionLog`): What runs the programs.
        items (`list[dict]`): Rows of a code dataset, one per joint action.
        joint_actions (`list[JointAction]`): `{"aux": ..., "main": ...}`, or `{"main": ...}` for a single agent.
        collaboration (`str`, *optional*, defaults to `"executed"`):
            `"static"`: the syntax tree decides whether `aux` is used and its value ignored. `"executed"`: besides, it
            is used only if it is called during a test that passes, and ignored also if no such test needs its value.

    Returns:
        `list[Outcome]`: Reward, its parts as metrics, and the `CodeResult` as `info`.
    """
    analyses = [
        analyze(item["prompt"], item["entry_point"], joint_action.get("aux"), joint_action["main"])
        for item, joint_action in zip(items, joint_actions, strict=True)
    ]
    runnable = [k for k, analysis in enumerate(analyses) if not analysis.main_problem and not analysis.syntax_problem]
    programs = [
        Program(
            source=analyses[k].source,
            entry_point=items[k]["entry_point"],
            checks=items[k]["test"],
            setup=analyses[k].setup,
            watch=(AUX,) if collaboration == "executed" and analyses[k].calls_aux else (),
        )
        for k in runnable
    ]
    verdicts = dict(zip(runnable, sandbox.run(programs), strict=True)) if programs else {}
    return [
        _outcome(CodeResult(analysis, verdicts.get(k)), count_asserts(items[k]["test"]))
        for k, analysis in enumerate(analyses)
    ]


def _outcome(result: CodeResult, tests_total: int) -> Outcome:
    analysis, verdict = result.analysis, result.verdict
    definition = AUX_DEFINED * (not analysis.aux_problem) + MAIN_DEFINED * (not analysis.main_problem)
    syntax = pass_rate = used = own_work = ignored = 0.0
    passed = timeouts = 0
    if verdict is not None:
        syntax = SYNTAX
        passed = verdict.passed
        timeouts = verdict.timeouts
        pass_rate = passed / tests_total
        # a program that is not watched has no entries: then its text alone decides
        called, mattered = verdict.calls.get(AUX, 1) > 0, verdict.mattered.get(AUX, True)
        if analysis.calls_aux and passed and called:
            used = AUX_USED
            own_work = 0.0 if analysis.thin_wrapper else NOT_A_WRAPPER
            ignored = VALUE_IGNORED if analysis.ignored_values or not mattered else 0.0
    reward = definition + syntax + TESTS * pass_rate + used + own_work - ignored
    return Outcome(
        reward=reward,
        metrics={
            "syntax_valid_rate": float(not analysis.syntax_problem),
            "definition_reward": definition,
            "syntax_reward": syntax,
            "execution_reward": TESTS * pass_rate,
            "tests_passed": float(passed),
            "tests_total": float(tests_total),
            "test_pass_rate": pass_rate,
            "timeouts": float(timeouts),
            "collab_aux_usage": used,
            "collab_non_wrapper": own_work,
            "collab_ignored_aux_call_penalty": ignored,
            "total_reward": reward,
        },
        info=result,
    )
