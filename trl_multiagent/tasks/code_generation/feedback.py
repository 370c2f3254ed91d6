"""The prompts of the second and later turns, made from the verdict on the last answers."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from trl_multiagent.code.sandbox import Check
from trl_multiagent.tasks.code_generation.prompts import AUX, MAIN
from trl_multiagent.tasks.code_generation.reward import CodeResult


EXPERT_EDITS = "expert_edits"
PASSED = "passed"
# CoMLRL's
OTHER_NAMES = {"expert": EXPERT_EDITS, "edits": EXPERT_EDITS, "feedback": "level_feedback", "signals": "level_passed"}
MAX_TEXT = 300  # characters of an assert or of an error message, which may have names that an agent wrote


@dataclass(frozen=True)
class LastAnswer:
    """What the feedback for one agent is made from."""

    item: dict  # the dataset row
    result: CodeResult  # how the joint answer of the last turn was judged
    checks: Sequence[Check]  # the results of the asserts that the feedback may be about; empty if no assert was run
    role: str  # the agent's
    roles: Sequence[str]  # `("aux", "main")` or `("main",)`
    edits: str | None = None  # what the expert proposes for the agent's function

    @property
    def function(self) -> str:
        """The name of the agent's function."""
        return AUX if self.role == AUX else self.item["entry_point"]


# The functions of the modes return the lines of feedback for one agent


def plain(last: LastAnswer) -> list[str]:
    """No feedback."""
    return []


def all_passed(last: LastAnswer) -> list[str]:
    """Returns whether all tests passed."""
    passed = bool(last.checks) and all(check.status == "passed" for check in last.checks)
    return ["All levels passed" if passed else "Not all levels passed"]


def level_passed(last: LastAnswer) -> list[str]:
    """Returns the result of each level of the reward."""
    return _levels(last, detailed=False)


def level_feedback(last: LastAnswer) -> list[str]:
    """Returns the result of each level of the reward, with the reasons."""
    return _levels(last, detailed=True)


def expert_edits(last: LastAnswer) -> list[str]:
    """Returns the expert's edits. There are no lines if it proposes none for the agent."""
    if not last.edits:
        return []
    return [f"An expert has read the whole program and proposes for `{last.function}`:", last.edits]


MODES: dict[str, Callable[[LastAnswer], list[str]]] = {
    "level_feedback": level_feedback,
    "level_passed": level_passed,
    PASSED: all_passed,
    "plain": plain,
    EXPERT_EDITS: expert_edits,
}
MODES_WITH_TESTS = ("level_feedback", "level_passed", PASSED)  # whose feedback depends on asserts


def shown_checks(checks: Sequence[Check], hidden_tests: int) -> Sequence[Check]:
    """
    Returns the checks that feedback may be about: all but the last `hidden_tests`, and those with the same source as
    one of them.
    """
    if hidden_tests == 0:
        return checks
    hidden = {check.source for check in checks[-hidden_tests:]}
    return [check for check in checks[:-hidden_tests] if check.source not in hidden]


def hidden_checks(checks: Sequence[Check], mode: str, sandbox_slice: int, hidden_tests: int) -> list[Check]:
    """Returns the checks that the feedback of a mode is not about."""
    if mode not in MODES_WITH_TESTS:
        return list(checks)
    shown = {check.source for check in slice_checks(shown_checks(checks, hidden_tests), sandbox_slice)}
    return [check for check in checks if check.source not in shown]


def slice_checks(checks: Sequence[Check], sandbox_slice: int) -> Sequence[Check]:
    """Returns the first n checks, the last n if n is negative, all of them if it is 0."""
    return checks[sandbox_slice:] if sandbox_slice < 0 else checks[: sandbox_slice or None]


def _levels(last: LastAnswer, detailed: bool) -> list[str]:
    """Returns the result of each level. The detailed form also has the reasons."""
    lines = ["Result of your last answer:", *_definitions(last, detailed)]
    lines += [*_syntax(last.result, detailed), *_tests(last.result, last.checks, detailed)]
    if last.role == MAIN and AUX in last.roles:
        lines += _aux_usage(last.result, detailed)
    return lines


def _definitions(last: LastAnswer, detailed: bool) -> list[str]:
    """Returns whether the functions were found: the agent's own first, then, in the detailed form, its partner's."""
    problems = {AUX: last.result.analysis.aux_problem, MAIN: last.result.analysis.main_problem}
    if not detailed:
        return [f"- Implementation: {'not found' if problems[last.role] else 'OK'}"]
    lines = []
    for role in sorted(last.roles, key=lambda role: role != last.role):
        whose = "Your function" if role == last.role else "Your partner's function"
        state = f"MISSING, {_short(problems[role])}" if problems[role] else "FOUND"
        lines.append(f"- {whose} `{AUX if role == AUX else last.item['entry_point']}`: {state}")
    return lines


def _syntax(result: CodeResult, detailed: bool) -> list[str]:
    missing = [f"there is no code for `{name}`" for name in result.analysis.without_code]
    problem = _short("; ".join(filter(None, [result.analysis.syntax_problem, *missing])))
    if detailed:
        return [f"- Syntax: {f'ERROR, {problem}' if problem else 'OK'}"]
    return [f"- Syntax: {'not correct' if problem else 'correct'}"]


def _tests(result: CodeResult, checks: Sequence[Check], detailed: bool) -> list[str]:
    if result.verdict is None:
        return ["- Tests: not run"]
    passed = sum(check.status == "passed" for check in checks)
    if not detailed:
        share = {len(checks): "all passed", 0: "none passed"}.get(passed, f"{passed} of {len(checks)} passed")
        return [f"- Tests: {share if checks else 'none shown'}"]
    lines = [f"- Tests: {f'{passed}/{len(checks)} passed' if checks else 'none shown'}"]
    if result.verdict.definitions.status != "passed":
        lines.append(f"  - The code does not load: {_reason(result.verdict.definitions)}")
        return lines
    return lines + [f"  - {_cut(check.source)}: {_reason(check)}" for check in checks if check.status != "passed"]


def _reason(check: Check) -> str:
    if check.status == "failed":
        return "the assertion is false"
    if check.status == "not_run":
        return f"not run, {_short(check.error)}" if check.error else "not run"
    return _short(check.error) or check.status


def _aux_usage(result: CodeResult, detailed: bool) -> list[str]:
    analysis = result.analysis
    ignored = result.ignored if result.called else analysis.drops_value  # only tests that pass tell more than the text
    if analysis.main_problem:
        usage = "no main function"
    elif analysis.syntax_problem:
        usage = "not known, the code does not parse"
    elif not analysis.names_aux:
        usage = "not called"
    elif ignored:
        usage = "called, but its result is not used"
    else:
        usage = "called, and its result is used"
    lines = [f"- Use of `aux`: {usage}"]
    if detailed and analysis.thin_wrapper:
        lines.append("- Warning: your function only passes on what `aux` returns; do a part of the work yourself")
    return lines


def _short(text: str) -> str:
    """Returns a text on one line, without what is too long."""
    return _cut(" ".join(text.split()))


def _cut(text: str) -> str:
    """Returns the beginning of a text. Spaces stay as they are, because in an assert they may be part of a string."""
    return text if len(text) <= MAX_TEXT else f"{text[:MAX_TEXT]}..."
