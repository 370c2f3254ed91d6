"""Reward functions for TRL's trainers of a single model."""

from dataclasses import dataclass
from typing import Any

from trl_multiagent.code.extraction import read_completion
from trl_multiagent.code.sandbox import Sandbox
from trl_multiagent.models.joint_text import Text, plain
from trl_multiagent.tasks.code_generation.data import mbpp_row
from trl_multiagent.tasks.code_generation.environment import CodeGenerationEnvironment
from trl_multiagent.tasks.code_generation.item_facts import read_problem
from trl_multiagent.tasks.code_generation.reward import MAIN


@dataclass
class CodeRewardFunction:
    """
    A reward function of TRL for code: it runs the problem's tests in the sandbox. An answer earns 0 to 2.1, see
    docs/reward.md.

    It reads the columns of HumanEval (`entry_point`, `test` and, if present, `canonical_solution`) or of MBPP (`code`,
    `test_list` and `test_imports`), and reads the function to write from the prompt. If the model's prompt is not
    HumanEval's `prompt`, the column `problem` has to contain the latter.

    Args:
        kind (`str`, *optional*, defaults to `"earned"`): The kind of the reward, `"earned"` or `"paper"`.
        min_tier (`str`, *optional*, defaults to `"seccomp"`): Weakest protection of the sandbox to run with, see
            docs/sandbox.md.

    Raises:
        ValueError: there is no such kind or tier.

    Example:

    ```python
    trainer = GRPOTrainer(model, reward_funcs=CodeRewardFunction(kind="paper"), train_dataset=humaneval)
    ```
    """

    kind: str = "earned"
    min_tier: str = Sandbox.min_tier

    __name__ = "code_reward"  # TRL logs the reward under this name

    def __post_init__(self) -> None:
        self._environment = CodeGenerationEnvironment(  # no process starts before a program runs
            num_agents=1, reward_kind=self.kind, sandbox=Sandbox(min_tier=self.min_tier), warn_about_items=False
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return CodeRewardFunction, (self.kind, self.min_tier)

    def __call__(self, prompts: list[Text], completions: list[Text], **columns: Any) -> list[float]:
        """
        Scores completions, which are texts or chat messages. Each contains the whole function, or continues the
        problem's prompt.

        Args:
            prompts (`list`): The prompts, texts or chat messages.
            completions (`list`): The completions.
            **columns: The columns of the problems, one value per completion.

        Raises:
            ValueError: a column is missing or malformed.
            SandboxError: the machine does not offer `min_tier`.
        """
        items = []
        for k, prompt in enumerate(prompts):
            row = {name: values[k] for name, values in columns.items() if isinstance(values, list)}
            items.append(read_item(row, plain(prompt), f"`code_reward`, row {k + 1}"))
        answers = [{MAIN: complete(item, plain(text))} for item, text in zip(items, completions, strict=True)]
        return [outcome.reward for outcome in self._environment.score(items, answers, [()] * len(items))]


def complete(item: dict[str, Any], answer: str) -> str:
    """Returns an answer, behind the problem's prompt if only both together define the function."""
    together = item["prompt"] + answer
    alone, joined = (read_completion(text, item["entry_point"]).problem for text in (answer, together))
    return together if alone and not joined else answer


def read_item(row: dict[str, Any], prompt: str, where: str) -> dict[str, Any]:
    """
    Makes an item of code generation from the columns of HumanEval or MBPP. Raises a `ValueError` with `where` if one
    is missing or wrong.
    """
    if "test_list" in row:
        return mbpp_row({"test_imports": [], **row, "prompt": prompt}, where)
    missing = [name for name in ("entry_point", "test") if name not in row]
    if missing:
        raise ValueError(f"{where}: there is no column `{missing[0]}`; it needs those of HumanEval or MBPP.")
    problem = row.get("problem") or prompt
    try:
        read_problem(problem, row["entry_point"])
    except ValueError as error:
        advice = "Put HumanEval's into the column `problem`"
        raise ValueError(f"{where}: the prompt is not that of HumanEval: {error}. {advice}.") from error
    return {**row, "task_id": str(row.get("task_id", where)), "prompt": problem}


code_reward = CodeRewardFunction()
