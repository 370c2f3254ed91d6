"""The demo's output: one progress bar per phase, and a comparison of the team before and after its training."""

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean
from time import perf_counter
from typing import Any

from accelerate import PartialState
from tqdm.auto import tqdm
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from trl_multiagent.code.extraction import read_function
from trl_multiagent.code.sandbox import Program, Sandbox, Verdict
from trl_multiagent.configs.recipes.demo.model import CONVENTIONS, write_aux
from trl_multiagent.configs.recipes.demo.problems import Problem, problem_of
from trl_multiagent.console import printable, text_table
from trl_multiagent.environments.base import JointAction, Turn
from trl_multiagent.environments.centralized import CENTRAL_ROLE, split_blocks
from trl_multiagent.tasks.code_generation.reward import AUX, MAIN
from trl_multiagent.trainers.base.rollout_trainer import RolloutTrainer


INPUTS = 3  # on which a function is tried
CHUNK = 16  # held-out problems that are played at once; the progress bar advances by this number


@dataclass
class Evaluation:
    """The team's results on held-out problems. Each list has one entry per episode."""

    items: list[dict]
    episodes: list[list[Turn]]
    joint_actions: list[JointAction]  # of the last turn
    conventions: list[dict[str, str | None]]

    @property
    def num_turns(self) -> int:
        return max(map(len, self.episodes))

    def mean(self, metric: str, turn: int = -1) -> float:
        """Returns the mean of a metric in one turn, by default the last one."""
        return fmean(episode[turn].outcome.metrics[metric] for episode in self.episodes)

    def agreed(self, *names: str) -> float:
        """Returns the share of the answers in which both agents follow the same one of the conventions named."""
        return fmean(c[AUX] == c[MAIN] and c[AUX] in names for c in self.conventions)


class DemoReport(TrainerCallback):
    """
    Compares the team before and after its training, on held-out problems of the demo.

    Args:
        items (`Iterable[dict]`): The held-out problems.
        num_episodes (`int`, *optional*, defaults to `4`): Sampled answers per problem.

    Example:

    ```python
    trainer = MAGRPOTrainer(...)
    report = DemoReport(demo_dataset("test"))
    report.before(trainer)
    trainer.add_callback(report)
    trainer.train()  # prints the comparison when it ends
    ```
    """

    def __init__(self, items: Iterable[dict], num_episodes: int = 4):
        self.items = list(items)
        self.num_episodes = num_episodes
        self.is_main_process = PartialState().is_main_process

    def before(self, trainer: RolloutTrainer) -> None:
        """
        Evaluates the untrained team. All processes have to call this.
        """
        self.trainer = trainer
        self.start = self.evaluate(trainer, "Held-out problems, before")
        self.started_at = perf_counter()

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.seconds = perf_counter() - self.started_at
        self.end = self.evaluate(self.trainer, "Held-out problems, after")
        if self.is_main_process:
            print(comparison(self.start, self.end, len(self.items), self.num_episodes))
            print(sample(self.start, self.end))
            print(f"\nTraining         {state.global_step} steps in {self.seconds:.0f} s", flush=True)

    def evaluate(self, trainer: RolloutTrainer, description: str) -> Evaluation:
        """Evaluates the team's current state on the held-out problems, with sampled episodes."""
        results = Evaluation([item for item in self.items for _ in range(self.num_episodes)], [], [], [])
        silent = not self.is_main_process
        with tqdm(total=len(self.items), desc=description, unit="problem", dynamic_ncols=True, disable=silent) as bar:
            for start in range(0, len(self.items), CHUNK):
                chunk = self.items[start : start + CHUNK]
                episodes = trainer.collaborate(chunk, num_episodes=self.num_episodes)
                asked = [problem_of(item) for item in chunk for _ in range(self.num_episodes)]
                joint_actions = [episode[-1].joint_action for episode in episodes]
                answers = [
                    split_blocks(joint_action[CENTRAL_ROLE], (AUX, MAIN)).answers
                    if CENTRAL_ROLE in joint_action  # one agent answers for both
                    else joint_action
                    for joint_action in joint_actions
                ]
                results.episodes += episodes
                results.joint_actions += answers
                results.conventions += conventions(asked, answers, trainer.environment.unwrapped.sandbox)
                bar.update(len(chunk))
        return results


def comparison(start: Evaluation, end: Evaluation, problems: int, num_episodes: int) -> str:
    """Returns the table of numbers before and after."""
    before, after = numbers(start), numbers(end)
    heading = [f"{problems} held-out problems, {num_episodes} sampled answers each", "before", "after"]
    return "\n".join(["", *text_table([heading, *([name, before[name], after[name]] for name in before)])])


def numbers(side: Evaluation) -> dict[str, str]:
    """Returns the numbers of one side of the comparison by name."""
    first = f"{side.mean('paper_reward', turn=0):.2f}"
    return {
        **({"joint reward of the first answers (0 to 4)": first} if side.num_turns > 1 else {}),
        "joint reward (0 to 4)": f"{side.mean('paper_reward'):.2f}",
        "joint reward, kind `earned` (0 to 4)": f"{side.mean('earned_reward'):.2f}",
        "tests passed": f"{side.mean('test_pass_rate'):.0%}",
        "size share of the smaller part (0 to 0.5)": f"{side.mean('size_share'):.2f}",
        "both agents follow the same convention": f"{side.agreed('A', 'B'):.0%}",
        "    A: aux keeps, main maps": f"{side.agreed('A'):.0%}",
        "    B: aux keeps and maps": f"{side.agreed('B'):.0%}",
    }


def sample(start: Evaluation, end: Evaluation) -> str:
    """Returns the first problem and the first answer of the team to it, before and after."""
    signature, docstring = start.items[0]["prompt"].splitlines()[:2]
    lines = [f"\nSample answer: {signature[4:-1]}", f"  {docstring.strip().strip(chr(34))}"]
    for name, side in (("before", start), ("after", end)):
        metrics = side.episodes[0][-1].outcome.metrics
        lines.append(f"  {name}: reward {metrics['paper_reward']:.2f}, {metrics['test_pass_rate']:.0%} of the tests")
        answers = printable("\n".join(side.joint_actions[0].values()).expandtabs(4))
        lines += [f"      {line[:90]}".rstrip() for line in answers.splitlines()]
    return "\n".join(lines)


# Which convention an agent follows


def conventions(
    problems: Sequence[Problem], joint_actions: Sequence[JointAction], sandbox: Sandbox
) -> list[dict[str, str | None]]:
    """
    Finds the convention of every agent's answer: `"A"` (aux keeps elements, main maps them), `"B"` (aux keeps and maps
    them), or `None` for an answer that fits neither, for example because it is wrong or because main does not use
    `aux`.

    Each function runs without the partner's function: aux alone, and main with a correct aux of each convention.
    `problems`: the problem of each joint action.
    """
    programs = []
    for problem, answers in zip(problems, joint_actions, strict=True):
        rng = random.Random(problem.name)
        inputs = [problem.inputs(rng, length=6) for _ in range(INPUTS)]
        kept = [problem.kept(values) for values in inputs]
        outputs = {"A": kept, "B": [problem.mapped(values) for values in kept]}
        aux = read_function(answers[AUX], AUX).source  # as the reward does
        main = read_function(answers[MAIN], problem.name).source
        for convention in CONVENTIONS:
            programs.append(Program(aux, AUX, check(inputs, outputs[convention])))
        solutions = [problem.solve(values) for values in inputs]
        for convention in CONVENTIONS:
            source = write_aux(problem, convention) + main
            programs.append(Program(source, problem.name, check(inputs, solutions)))
    verdicts = sandbox.run(programs)
    return [
        {AUX: followed(verdicts[k : k + 2]), MAIN: followed(verdicts[k + 2 : k + 4])}
        for k in range(0, len(verdicts), 4)
    ]


def check(inputs: list, outputs: list) -> str:
    """Writes the source of a test that a function returns the right output for each input."""
    pairs = zip(inputs, outputs, strict=True)
    return "def check(candidate):\n" + "".join(f"    assert candidate({x!r}) == {y!r}\n" for x, y in pairs)


def followed(verdicts: Sequence[Verdict]) -> str | None:
    """Returns the convention that passed all of its tests; `None` if neither or both of them did."""
    passed = [name for name, verdict in zip(CONVENTIONS, verdicts, strict=True) if verdict.passed == INPUTS]
    return passed[0] if len(passed) == 1 else None
