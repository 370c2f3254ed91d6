"""
The exact prompts of both agents, in `tests/golden/`: per mode of feedback, and per option of the history.

After a change that is meant to change prompts, write the files again and read the difference:

    UPDATE_GOLDEN=1 python -m pytest tests/tasks/code_generation/test_golden_prompts.py && git diff tests/golden
"""

import json
import os
from pathlib import Path

import pytest

from trl_multiagent.code.sandbox import Check, Verdict
from trl_multiagent.environments.base import Outcome, Turn
from trl_multiagent.rollout.history import whole_prompt
from trl_multiagent.rollout.options import HistoryOptions
from trl_multiagent.tasks.code_generation import CodeGenerationEnvironment
from trl_multiagent.tasks.code_generation.reward import CodeResult, analyze


GOLDEN = Path(__file__).parents[2] / "golden"
ITEM = {
    "task_id": "Golden/0",
    "prompt": (
        'def solve(xs: list[int]) -> int:\n    """Sum of the even numbers in xs.\n    >>> solve([1, 2])\n   '
        ' 2\n    """\n'
    ),
    "entry_point": "solve",
    "test": (
        "def check(candidate):\n    assert candidate([2]) == 2\n    assert candidate([1, 2]) == 2\n    assert "
        "candidate([]) == 0\n"
    ),
}
ASSERTS = ["assert candidate([2]) == 2", "assert candidate([1, 2]) == 2", "assert candidate([]) == 0"]
LOADED = Check("passed", "")
AUX = "def aux(xs):\n    return [x for x in xs if x % 2 == 0]\n"
MAIN = "def solve(xs):\n    evens = aux(xs)\n    return sum(evens)\n"
FIRST = "def solve(xs):\n    aux(xs)\n    return xs[0]\n"
# Both agents' answers, the status of each assert, and the error of those that raise
TEAMS = {
    "failing": ("def aux(xs):\n    return xs xs\n", MAIN, None, ""),
    "partly failing": (AUX, FIRST, ("passed", "failed", "error"), "IndexError: list index out of range"),
    "passing": (AUX, MAIN, ("passed", "passed", "passed"), ""),
}
MODES = ("plain", "passed", "level_passed", "level_feedback")


class WrittenEdits:
    """Stands for an expert. It has edits for aux only."""

    def propose(self, items, turns):
        return [{"aux": "Return a list.\nKeep the even numbers."} for _ in items]


SETTINGS = {
    "expert_edits": {"mode": "expert_edits", "expert": WrittenEdits()},
    **{mode: {"mode": mode, "sandbox_slice": "all"} for mode in MODES},
    "level_feedback_first_assert": {},
    "level_feedback_hidden_tests": {"hidden_tests": 2, "sandbox_slice": "all"},
    "level_feedback_all_hidden": {"hidden_tests": 3, "sandbox_slice": "all"},
    "level_feedback_not_passed_through": {"external_prompt_passthrough": False},
    "single_agent": {"num_agents": 1, "sandbox_slice": "all"},
}
HISTORIES = {
    "full": {},
    "last": {"memory_mode": "last"},
    "last_with_original_prompt": {"memory_mode": "last", "original_prompt": True},
    "without_original_prompt": {"original_prompt": False},
    "without_previous_response": {"previous_response": False},
    "neither": {"original_prompt": False, "previous_response": False},
    "full_responses_only": {"memory_mode": "full", "previous_prompts": False},
}


def play(environment, teams):
    """The history of these teams' turns, and the prompts of the next turn."""
    history = []
    for aux, main, statuses, error in teams:
        analysis = analyze(ITEM["prompt"], "solve", aux if "aux" in environment.roles else None, main)
        checks = [
            Check(status, assertion, error if status == "error" else "")
            for status, assertion in zip(statuses or (), ASSERTS, strict=bool(statuses))
        ]
        result = CodeResult(analysis, Verdict(LOADED, tuple(checks)) if statuses else None)
        answers = {role: text for role, text in (("aux", aux), ("main", main)) if role in environment.roles}
        history.append(Turn(environment.prompts(ITEM, history), answers, Outcome(0.0, info=result)))
    return history, environment.prompts(ITEM, history)


def as_text(sections):
    return "".join(f"======== {title} ========\n{text}\n" for title, text in sections.items())


def compare(name, text):
    path = GOLDEN / f"{name}.txt"
    if "UPDATE_GOLDEN" in os.environ:
        path.write_text(text)
    assert text == path.read_text(), (
        f"The prompts differ from {path}. If they are meant to, see the top of {__file__}."
    )


@pytest.mark.parametrize("name", SETTINGS)
def test_prompts_of_each_mode(name):
    environment = CodeGenerationEnvironment(**SETTINGS[name])
    sections = {f"first turn, {role}": prompt for role, prompt in environment.prompts(ITEM, ()).items()}
    for team, answers in TEAMS.items():
        _, prompts = play(environment, [answers])
        sections |= {f"after a {team} team, {role}": prompt for role, prompt in prompts.items()}
    compare(name, as_text(sections))


@pytest.mark.parametrize("name", HISTORIES)
def test_prompts_of_each_history(name):
    environment, options = CodeGenerationEnvironment(sandbox_slice="all"), HistoryOptions(**HISTORIES[name])
    history, prompts = play(environment, [TEAMS["failing"], TEAMS["partly failing"]])
    sections = {}
    for role in environment.roles:
        sections[f"third turn as text, {role}"] = whole_prompt(role, history, prompts[role], False, options)
        messages = whole_prompt(role, history, prompts[role], True, options)
        sections[f"third turn as chat messages, {role}"] = "\n".join(map(json.dumps, messages))
    compare(f"history_{name}", as_text(sections))


def test_every_golden_file_is_compared():
    expected = {*SETTINGS, *(f"history_{name}" for name in HISTORIES)}
    assert {path.stem for path in GOLDEN.glob("*.txt")} == expected
