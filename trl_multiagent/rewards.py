"""Reward functions for TRL's trainers of a single model."""

import ast
import contextlib
import itertools
import re
from collections.abc import Iterator
from dataclasses import astuple, dataclass
from typing import Any

from trl_multiagent.code.dependencies import PARSE_ERRORS
from trl_multiagent.code.extraction import FENCE, read_function, read_module
from trl_multiagent.code.sandbox import Sandbox
from trl_multiagent.models.joint_text import Text, plain
from trl_multiagent.models.reasoning import BEGIN, END, find_answer
from trl_multiagent.tasks.code_generation.data import mbpp_row, unusable_test
from trl_multiagent.tasks.code_generation.environment import CodeGenerationEnvironment
from trl_multiagent.tasks.code_generation.item_facts import Problem, read_problem
from trl_multiagent.tasks.code_generation.reward import MAIN


MAX_LEVELS = 5  # of the first line of a body that are tried


@dataclass
class CodeRewardFunction:
    """
    A reward function of TRL for code: it runs the problem's tests in the sandbox. An answer earns 0 to 2.1, see
    docs/reward.md.

    It reads the columns of HumanEval (`entry_point`, `test` and, if present, `task_id` and `canonical_solution`) or of
    MBPP (`task_id`, `code`, `test_list` and, if present, `test_imports`), and reads the function to write from the
    prompt. If the model's prompt is not HumanEval's `prompt`, the column `problem` has to contain the latter. The
    reasoning in a completion does not count, see [`~models.reasoning.find_answer`].

    Args:
        kind (`str`, *optional*, defaults to `"earned"`): The kind of the reward, `"earned"` or `"paper"`.
        min_tier (`str`, *optional*, defaults to `"seccomp"`): Weakest protection of the sandbox to run with, see
            docs/sandbox.md.
        tags (`tuple[str, str]`, *optional*): What begins and ends a reasoning, if not the tags in docs/reasoning.md.
        opened (`bool`, *optional*, defaults to `False`): Whether the chat template opens the reasoning, as
            DeepSeek-R1's does. The completion does not show this. One without an end then has no answer.

    Raises:
        ValueError: there is no such kind or tier.

    Example:

    ```python
    trainer = GRPOTrainer(model, reward_funcs=CodeRewardFunction(kind="paper"), train_dataset=humaneval)
    ```
    """

    kind: str = "earned"
    min_tier: str = Sandbox.min_tier
    tags: tuple[str, str] | None = None
    opened: bool = False

    __name__ = "code_reward"  # TRL logs the reward under this name

    def __post_init__(self) -> None:
        self._environment = CodeGenerationEnvironment(  # no process starts before a program runs
            num_agents=1, reward_kind=self.kind, sandbox=Sandbox(min_tier=self.min_tier), warn_about_items=False
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return CodeRewardFunction, astuple(self)

    def __call__(self, prompts: list[Text], completions: list[Text], **columns: Any) -> list[float]:
        """
        Scores completions, which are texts or chat messages. The answer in each contains the whole function, or
        continues the problem's prompt.

        Args:
            prompts (`list`): The prompts, texts or chat messages.
            completions (`list`): The completions.
            **columns: The columns of the problems, one value per completion.

        Raises:
            ValueError: a column is missing or malformed.
            SandboxError: the machine does not offer `min_tier`.
        """
        begin, _ = self.tags or (BEGIN, END)
        items, answers = [], []
        for k, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
            row = {name: values[k] for name, values in columns.items() if isinstance(values, list)}
            items.append(read_item(row, plain(prompt), f"`code_reward`, row {k + 1}"))
            before = begin if self.opened else prompt if isinstance(prompt, str) else ""
            answers.append({MAIN: complete(items[-1], find_answer(plain(completion), before, self.tags))})
        return [outcome.reward for outcome in self._environment.score(items, answers, [()] * len(items))]


def complete(item: dict[str, Any], answer: str) -> str:
    """Returns an answer, with the problem's prompt or signature if it is only the function's body."""
    prompt, name = item["prompt"], item["entry_point"]
    texts = (answer, prompt + answer)
    for text in itertools.chain(texts, with_body(read_problem(prompt, name), answer)):
        code = read_function(text, name)
        if not (code.problem or code.error or code.is_opaque):  # in a body, the name may belong to a variable
            return text
    return next((text for text in texts if not read_function(text, name).problem), answer)


def with_body(problem: Problem, answer: str) -> Iterator[str]:
    """
    Yields functions with an answer as their body, which may be in a block of code. It has a level of its own. The
    first line may not be at this level, because decoders strip texts. At the margin, the body ends with `return`.
    """
    header = f"{problem.prefix}\n\n\n{problem.signature}\n"
    for text in ("\n".join(FENCE.split(answer)[1::2]), FENCE.sub("", answer)):
        yield header + text
        first, *rest = re.sub(r"\A\s*\n", "", text).split("\n")
        levels = {line[: len(line) - len(line.lstrip())] for line in rest if line.strip()} - {""}
        for level in sorted(levels, key=len)[:MAX_LEVELS]:
            yield "\n".join([header + level + first.lstrip(), *rest])
        with contextlib.suppress(*PARSE_ERRORS):  # of `unparse`, for deep trees and long numbers
            tree: Any = ast.parse(header + " ...")
            body = read_module(text)[0].body
            end = next((k for k, node in enumerate(body) if isinstance(node, (ast.Return, ast.Raise))), len(body))
            tree.body[-1].body = body[: end + 1] or tree.body[-1].body
            yield ast.unparse(tree)


def read_item(row: dict[str, Any], prompt: str, where: str) -> dict[str, Any]:
    """
    Makes an item of code generation from the columns of HumanEval or MBPP. Raises a `ValueError` with `where` if one
    is missing or wrong.
    """
    if "test_list" in row:
        item = mbpp_row({"test_imports": [], **row, "prompt": prompt}, where)
    else:
        missing = [name for name in ("entry_point", "test") if name not in row]
        if missing:
            raise ValueError(f"{where}: there is no column `{missing[0]}`; it needs the columns of HumanEval or MBPP.")
        problem = row.get("problem") or prompt
        try:
            read_problem(problem, row["entry_point"])
        except ValueError as error:
            raise ValueError(
                f"{where}: the prompt is not HumanEval's: {error}. Put HumanEval's into the column `problem`."
            ) from error
        item = {**row, "task_id": str(row.get("task_id", where)), "prompt": problem}
    if reason := unusable_test(str(item["test"]), item["entry_point"], "def check(candidate): pass"):
        raise ValueError(f"{where}: the test {reason}.")
    return item


code_reward = CodeRewardFunction()
