"""Class completion: the methods of a class are divided among the agents, and their answers are merged and tested."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

from trl_multiagent.code.sandbox import Sandbox
from trl_multiagent.environments.base import History, JointAction, Outcome, Prompt
from trl_multiagent.tasks.class_completion.data import program_of
from trl_multiagent.tasks.class_completion.division import DIVISIONS, divide
from trl_multiagent.tasks.class_completion.merging import read_answer
from trl_multiagent.tasks.class_completion.prompts import UNSEEN, describe_result, feedback_prompt, first_prompt
from trl_multiagent.tasks.class_completion.reward import EARNED, KINDS, RANGES, REWARD_VERSION, class_metrics
from trl_multiagent.tasks.program_environment import ProgramEnvironment


CODE_FEEDBACK, PLAIN = MODES = ("code_feedback", "plain")


class ClassCompletionEnvironment(ProgramEnvironment):
    """
    Several agents write the methods of one class. Each has its own methods, and sees the skeleton of the class. One
    agent writes them all.

    In later turns, agents learn which methods are missing, and how the class does in the test classes that test
    several methods together. The reward `earned` does not use these.

    Items are rows of [`load_class_dataset`]. The rewards are described in [`class_metrics`]; the one that `kind` does
    not choose is a metric.

    Args:
        num_agents (`int`, *optional*, defaults to `2`): Number of agents; their roles are `agent_0`, `agent_1` and so
            on.
        division (`str`, *optional*, defaults to `"balanced"`): `"balanced"` or `"parameter_count"`, see [`divide`].
        kind (`str`, *optional*, defaults to `"earned"`): Kind of reward, `"earned"` or `"compat"`.
        mode (`str`, *optional*, defaults to `"code_feedback"`): Feedback in later turns: `"code_feedback"`, or
            `"plain"` for none.
        make_prompt (`Callable`, *optional*): Makes the first prompt from the item, the agent's methods and the number
            of agents.
        sandbox ([`Sandbox`], *optional*): Runs the programs; by default one with default settings.
        keep_suspicious (`str` or `Path`, *optional*): Folder for the programs whose verdict is suspicious. By default
            they are not stored.

    Raises `ValueError` if an argument is none of its choices.
    """

    watched_metrics: ClassVar[dict[str, str]] = {
        "methods_written": "no answer contains a method that the agent was asked for",
        "tests_passed": "no class passes a test",
    }
    unseen = UNSEEN, "The answers of others are above."
    example: ClassVar[dict] = {
        **{"skeleton": "class Pair:", "methods": ["a", "b"]},
        **{"uses": [[], []], "weights": [1, 1], "parameters": [1, 2]},
    }

    def __init__(
        self,
        num_agents: int = 2,
        division: str = DIVISIONS[0],
        kind: str = EARNED,
        mode: str = CODE_FEEDBACK,
        make_prompt: Callable[[dict, Sequence[str], int], str] = first_prompt,
        sandbox: Sandbox | None = None,
        keep_suspicious: str | Path | None = None,
    ):
        for name, value, choices in (("division", division, DIVISIONS), ("kind", kind, KINDS), ("mode", mode, MODES)):
            if value not in choices:
                raise ValueError(f"`{name}` is {value!r}; it must be one of {', '.join(choices)}.")
        self.roles = tuple(f"agent_{k}" for k in range(num_agents))
        self.division, self.kind, self.mode, self.make_prompt = division, kind, mode, make_prompt
        super().__init__(sandbox, keep_suspicious)
        shares = dict.fromkeys(("passed", "methods_written", "tests_passed", "overlap"), (0.0, 1.0))
        rewards = {f"{name}_reward": RANGES[name] for name in KINDS}
        self.metric_ranges = {"reward": RANGES[kind], "total_reward": RANGES[kind], **rewards, **shares}

    def __repr__(self) -> str:
        settings = f"division={self.division!r}, kind={self.kind!r}, mode={self.mode!r}"
        return f"ClassCompletionEnvironment(roles={self.roles}, {settings}, reward_version={REWARD_VERSION})"

    def resume_settings(self) -> dict[str, Any]:
        own = {"division": self.division, "kind": self.kind, "mode": self.mode}
        return {"reward_version": REWARD_VERSION, **own, **super().resume_settings()}

    def methods_of(self, item: dict) -> list[list[str]]:
        """Returns the names of each agent's methods, in the order of the roles."""
        return divide(item, len(self.roles), self.division)

    def prompts(self, item: dict, history: History) -> dict[str, Prompt]:
        division = dict(zip(self.roles, self.methods_of(item), strict=True))
        if not history:
            return {role: self.make_prompt(item, own, len(self.roles)) for role, own in division.items()}
        text = describe_result(item, *history[-1].outcome.info) if self.mode == CODE_FEEDBACK else ""
        return {role: feedback_prompt(text, own) for role, own in division.items()}

    def score(self, items: list[dict], joint_actions: list[JointAction], histories: list[History]) -> list[Outcome]:
        """
        Scores joint actions. The `info` of an outcome is the results of the tests, and the methods that their agents
        did not write.
        """
        divisions = [self.methods_of(item) for item in items]
        answers = [
            [read_answer(action[role], item["class_name"]) for role in self.roles]
            for item, action in zip(items, joint_actions, strict=True)
        ]
        verdicts = self.runner.run([*map(program_of, items, answers, divisions)])
        outcomes = []
        for item, own, division, verdict in zip(items, answers, divisions, verdicts, strict=True):
            asked = [(answer, name) for answer, names in zip(own, division, strict=True) for name in names]
            missing = [name for answer, name in asked if name not in answer.methods]
            metrics = class_metrics(item, verdict, own, missing)
            reward = metrics["total_reward"] = metrics[f"{self.kind}_reward"]
            outcomes.append(Outcome(reward, metrics, (verdict, missing), verdict.columns()))
        return outcomes
