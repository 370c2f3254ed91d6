"""The joint reward of a team's code, 0 to 4.0, or 2.1 for a single agent."""

from dataclasses import dataclass, replace

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
        altered (`Verdict`, *optional*): What running it showed with other values in place of those of `aux`.
    """

    analysis: Analysis
    verdict: Verdict | None = None
    altered: Verdict | None = None

    @property
    def called(self) -> bool:
        """Whether `aux` was called in a test that passed; by its text alone where the program was not watched."""
        return self.analysis.calls_aux and self.verdict.passed > 0 and self.verdict.calls.get(AUX, 1) > 0

    @property
    def ignored(self) -> bool:
        """Whether nothing depends on what `aux` returns: by the program's text, or in the tests that passed."""
        if self.altered is None:
            return bool(self.analysis.ignored_values)
        before, after = [[check.status for check in verdict.checks] for verdict in (self.verdict, self.altered)]
        return not any(old == "passed" != new for old, new in zip(before, after, strict=True))


def score_code(
    log: ExecutionLog, items: list[dict], joint_actions: list[JointAction], collaboration: str = "executed"
) -> list[Outcome]:
    """
    Scores joint actions. All programs of the batch go through the sandbox in one call, and in another those whose `aux`
    was called, with its values altered.

    Args:
        log (`ExecutionLog`): What runs the programs; the altered ones it does not count.
        items (`list[dict]`): Rows of a code dataset, one per joint action.
        joint_actions (`list[JointAction]`): `{"aux": ..., "main": ...}`, or `{"main": ...}` for a single agent.
        collaboration (`str`, *optional*, defaults to `"executed"`):
            `"static"`: the syntax tree decides whether `aux` is used and its value ignored. `"executed"`: besides, it
            is used only if it is called during a test that passes, and ignored also if no such test needs its value,
            which is tried with other values in its place.

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
    verdicts = dict(zip(runnable, log.run(programs), strict=True)) if programs else {}
    results = [CodeResult(analysis, verdicts.get(k)) for k, analysis in enumerate(analyses)]
    for k, verdict in _run_altered(log.sandbox, dict(zip(runnable, programs, strict=True)), results).items():
        results[k] = replace(results[k], altered=verdict)
    return [_outcome(result, count_asserts(item["test"])) for result, item in zip(results, items, strict=True)]


def _run_altered(sandbox: Sandbox, programs: dict[int, Program], results: list[CodeResult]):
    """Verdicts of the programs in which it is open whether the values of `aux` matter, by index."""
    altered = {}
    for k, program in programs.items():
        result = results[k]
        if program.watch and result.called and not result.ignored:
            passed = [index for index, check in enumerate(result.verdict.checks) if check.status == "passed"]
            altered[k] = replace(
                program,
                source=result.analysis.altered,
                watch=(),
                needed=tuple(passed),
                check_timeout=1.0 + 10 * result.verdict.seconds,  # other values may make it loop
            )
    return dict(zip(altered, sandbox.run([*altered.values()]), strict=True)) if altered else {}


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
        if result.called:
            used = AUX_USED
            own_work = 0.0 if analysis.thin_wrapper else NOT_A_WRAPPER
            ignored = VALUE_IGNORED if result.ignored else 0.0
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
