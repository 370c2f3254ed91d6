"""The joint reward of class completion. `recipes/class_completion/README.md` has it as a table."""

from collections.abc import Sequence

from trl_multiagent.code.sandbox import Verdict
from trl_multiagent.environments.base import PASSED
from trl_multiagent.tasks.class_completion.data import passed_by
from trl_multiagent.tasks.class_completion.merging import Answer


REWARD_VERSION = 1
EARNED, COMPAT = KINDS = ("earned", "compat")
METHODS, TESTS, OVERLAP = 2.0, 4.0, -1.0  # the parts of `compat`
RANGES = {EARNED: (0.0, 1.0), COMPAT: (OVERLAP, METHODS + TESTS)}


def class_metrics(item: dict, verdict: Verdict, answers: Sequence[Answer], missing: Sequence[str]) -> dict[str, float]:
    """
    Returns the metrics of a class from the results of its tests, with both rewards. `missing` are the methods that
    their agents did not write.

    - earned: mean, over the test classes of single methods, of the share of their counting test methods that pass; see
      the column `counting` of [`load_class_dataset`].
    - compat: 2 · methods written by their own agent / methods + 4 · test methods passed / test methods - methods
      written by more than one agent / methods, or 0 if the merged class does not compile. The table of CoMLRL.
    """
    methods, passed = item["methods"], passed_by(verdict)
    cases: dict[str, list[bool]] = {}
    for test in item["counting"]:
        cases.setdefault(test.split(".")[0], []).append(test in passed)
    earned = sum(sum(results) / len(results) for results in cases.values()) / len(cases)
    written = 1 - len(missing) / len(methods)
    tests = sum(test in passed for test in item["tests"]) / len(item["tests"])
    overlap = sum(sum(name in answer.methods for answer in answers) > 1 for name in methods) / len(methods)
    compiles = not verdict.definitions.error.startswith(("SyntaxError", "IndentationError"))
    return {
        PASSED: float(earned == 1.0),
        "methods_written": written,
        "tests_passed": tests,
        "overlap": overlap,
        f"{EARNED}_reward": earned,
        f"{COMPAT}_reward": (METHODS * written + TESTS * tests + OVERLAP * overlap) * compiles,
    }
