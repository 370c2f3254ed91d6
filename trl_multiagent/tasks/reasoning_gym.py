"""The task `reasoning_gym`: a solver answers a puzzle of a generator, a checker reads it, the solver may try again."""

import contextlib
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from trl_multiagent.environments.dataset_rows import Dataset, Datasets
from trl_multiagent.environments.task import Task, TaskSettings, load_datasets, setting
from trl_multiagent.environments.task_errors import describe
from trl_multiagent.environments.workflow import Agents, OutOfTurns, WorkflowEnvironment
from trl_multiagent.tasks.seeded import OwnDraws, Seeds, check_package


ROLES = ("solver", "checker")


@dataclass
class Puzzles(Seeds):
    """The section `dataset`."""

    name: str | None = setting("The generator, as reasoning_gym:NAME.", "reasoning_gym:chain_sum")
    options: dict[str, Any] | None = setting("Settings of the generator, such as {max_terms: 3}.")

    def __post_init__(self) -> None:
        check_package("reasoning_gym", "puzzles")
        try:
            self.puzzle(0)
        except Exception as error:  # generators check their settings in their own ways
            raise ValueError(f"`dataset.name` is {self.name!r}: {describe(error)}") from error

    def puzzle(self, seed: int) -> tuple[Any, dict]:
        """Makes a puzzle, and returns its generator, which verifies answers, with it."""
        from reasoning_gym import create_dataset

        with OwnDraws(seed):  # some generators draw from the global random numbers
            generator = create_dataset(str(self.name).split(":")[-1], size=1, seed=seed, **(self.options or {}))
            return generator, generator[0]

    def row(self, seed: int) -> dict:
        return {"seed": seed, "question": self.puzzle(seed)[1]["question"]}

    def load_splits(self, load: Callable[[str | None], Dataset]) -> Datasets:
        """Leaves puzzles to evaluate on out of those to train on, because small generators repeat themselves."""
        train, held_out = super().load_splits(load)
        known = {} if held_out is None else set(held_out["question"])
        return train.select([k for k, question in enumerate(train["question"]) if question not in known]), held_out


def make_environment(settings: TaskSettings) -> WorkflowEnvironment:
    from reasoning_gym.utils import extract_answer

    puzzle = functools.lru_cache(maxsize=4096)(settings.sections["dataset"].puzzle)

    def verify(item: dict, text: str) -> float:
        generator, entry = puzzle(item["seed"])  # without <answer>, the whole text is the answer
        try:
            return float(generator.score_answer(extract_answer(text) or text.strip(), entry))
        except Exception:  # some verifiers fail on answers that do not have their form: these are wrong
            return 0.0

    async def solve_and_check(item: dict, agents: Agents) -> dict[str, float]:
        answer = await agents.solver(f"{item['question']}\nWrite the answer between <answer> and </answer>.")
        first = score = verify(item, answer)
        verdict = await agents.checker(
            f"{item['question']}\nThe proposed answer:\n{answer}\nIf it is right, write right. Else say what is wrong."
        )
        accepted = verdict.strip().lower().startswith("right")
        with contextlib.suppress(OutOfTurns):  # then the first answer counts
            if not accepted:
                answer = await agents.solver(f"A checker says: {verdict}\nAnswer again, in the same form.")
                score = verify(item, answer)
        agents.log("passed", score == 1)
        return {"solver": score, "checker": float(accepted == (first == 1))}

    ranges = dict.fromkeys(("reward", "return", *(f"reward/{role}" for role in ROLES)), (0.0, 1.0))
    return WorkflowEnvironment(solve_and_check, ROLES, metric_ranges=ranges)


TASK = Task(make_environment, load_datasets, settings={"dataset": Puzzles}, roles=ROLES)
