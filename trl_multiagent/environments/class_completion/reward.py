"""The joint reward of class completion. `recipes/class_completion/README.md` has it as a table."""

from collections.abc import Sequence
from dataclasses import dataclass

from trl_multiagent.environments.base import PASSED, JointAction, Outcome
from trl_multiagent.environments.class_completion.data import passed_by, program_of
from trl_multiagent.environments.class_completion.merging import merge, missing, overlap, read_answer
from trl_multiagent.environments.python_code.program_runner import ProgramRunner
from trl_multiagent.sandbox import Verdict


REWARD_VERSION = 1
EARNED, COMPAT = "earned", "compat"
KINDS = (EARNED, COMPAT)
METHODS, TESTS, OVERLAP = 2.0, 4.0, -1.0  # the parts of `compat`
RANGES = {EARNED: (0.0, 1.0), COMPAT: (OVERLAP, METHODS + TESTS)}


@dataclass(frozen=True)
class ClassResult:
    """
    What an answer showed.

    Args:
        verdict (`Verdict`): The results of the tests.
        missing (`list[str]`): The methods that their agents did not write.
    """

    verdict: Verdict
    missing: list[str]


class ClassReward:
    """
    The joint reward of agents that each write some methods of a class.

    - earned: mean, over the test classes of single methods, of the share of their counting test methods that pass; see the column
      `counting` of [`load_class_dataset`].
    - compat: 2 · methods written by their own agent / methods + 4 · test methods passed / test methods - methods written by more than one
      agent / methods, or 0 if the merged class does not compile. The table of CoMLRL.

    Args:
        runner ([`ProgramRunner`]): Runs the programs.
        kind (`str`): `"earned"` or `"compat"`. The other one is reported as a metric.
    """

    def __init__(self, runner: ProgramRunner, kind: str):
        self.runner = runner
        self.kind = kind

    def score(
        self, items: list[dict], joint_actions: list[JointAction], divisions: list[list[list[str]]]
    ) -> list[Outcome]:
        """
        Scores joint actions, and returns one outcome for each, whose `info` is a [`ClassResult`].

        Args:
            items (`list[dict]`): Rows of [`load_class_dataset`].
            joint_actions (`list[JointAction]`): The answers.
            divisions (`list[list[list[str]]]`): The names of each agent's methods, in the order of the roles.
        """
        answers = [
            [read_answer(text, item["class_name"]) for text in action.values()]
            for item, action in zip(items, joint_actions, strict=True)
        ]
        absent = [missing(own, division) for own, division in zip(answers, divisions, strict=True)]
        programs = [
            program_of(item, merge(item, own, division))
            for item, own, division in zip(items, answers, divisions, strict=True)
        ]
        outcomes = []
        for item, own, lacking, verdict in zip(items, answers, absent, self.runner.run(programs), strict=True):
            metrics = class_metrics(item, verdict, lacking, overlap(own, item["methods"]))
            metrics["total_reward"] = metrics[f"{self.kind}_reward"]
            outcomes.append(
                Outcome(metrics["total_reward"], metrics, ClassResult(verdict, lacking), verdict.columns())
            )
        return outcomes


def class_metrics(item: dict, verdict: Verdict, missing: Sequence[str], overlap: float) -> dict[str, float]:
    """
    Returns the metrics of a class, with both rewards.

    Args:
        item (`dict`): The item.
        verdict (`Verdict`): The results of its tests.
        missing (`Sequence[str]`): Methods that their own agents did not write.
        overlap (`float`): Share of methods that more than one agent wrote.
    """
    passed = passed_by(verdict)
    cases: dict[str, list[bool]] = {}
    for test in item["counting"]:
        cases.setdefault(test.split(".")[0], []).append(test in passed)
    earned = sum(sum(results) / len(results) for results in cases.values()) / len(cases)
    written = 1 - len(missing) / len(item["methods"])
    tests = sum(test in passed for test in item["tests"]) / len(item["tests"])
    compiles = not verdict.definitions.error.startswith(("SyntaxError", "IndentationError"))
    return {
        PASSED: float(earned == 1.0),
        "methods_written": written,
        "tests_passed": tests,
        "overlap": overlap,
        f"{EARNED}_reward": earned,
        f"{COMPAT}_reward": (METHODS * written + TESTS * tests + OVERLAP * overlap) * compiles,
    }
