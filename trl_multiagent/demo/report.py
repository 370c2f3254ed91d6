"""The demo's output: one progress bar per phase, and a comparison of the team before and after its training."""

import random
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from statistics import fmean
from time import perf_counter
from typing import Any

from accelerate import PartialState
from tqdm.auto import tqdm
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from trl_multiagent.code.extraction import extract_code
from trl_multiagent.code.sandbox import Program, Sandbox, Verdict
from trl_multiagent.console import printable, text_table
from trl_multiagent.demo.model import CONVENTIONS, write_aux
from trl_multiagent.demo.problems import Problem, problem_of
from trl_multiagent.environments.base import JointAction, Turn
from trl_multiagent.jobs.distributed import fail_together
from trl_multiagent.report.pictures import COLORS, GREY, draw_curve, picture
from trl_multiagent.tasks.code_generation.reward import AUX, MAIN
from trl_multiagent.trainers.base.rollout_trainer import RolloutTrainer
from trl_multiagent.trainers.base.trackers import show_one_bar


WIDTH = 98
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
        Evaluates the untrained team, and replaces the trainer's log lines by one progress bar. All processes have to
        call this.
        """
        self.trainer = trainer
        self.start = self.evaluate(trainer, "Held-out problems, before")
        show_one_bar(trainer)
        self.started_at = perf_counter()

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.seconds = perf_counter() - self.started_at
        self.end = self.evaluate(self.trainer, "Held-out problems, after")
        with fail_together(self.trainer.accelerator):
            if self.is_main_process:
                self.show(state.global_step, state.log_history)

    def show(self, num_steps: int, log_history: list[dict]) -> None:
        """Prints the comparison and draws the learning curve."""
        print(comparison(self.start, self.end, len(self.items), self.num_episodes))
        for k in sample_episodes(self.items, self.num_episodes):
            print(sample(self.start, self.end, k))
        print(f"\nTraining         {num_steps} steps in {self.seconds:.0f} s", flush=True)
        path = Path(self.trainer.args.output_dir) / "learning_curve.png"
        if any("reward" in entry for entry in log_history):  # a training without sampling logs no reward
            draw_learning_curve(log_history, self.start, self.end, path)
            print(f"Learning curve   {path}", flush=True)

    def evaluate(self, trainer: RolloutTrainer, description: str) -> Evaluation:
        """Evaluates the team's current state on the held-out problems, with sampled episodes."""
        results = Evaluation([item for item in self.items for _ in range(self.num_episodes)], [], [], [])
        silent = not self.is_main_process
        with tqdm(total=len(self.items), desc=description, unit="problem", dynamic_ncols=True, disable=silent) as bar:
            for start in range(0, len(self.items), CHUNK):
                chunk = self.items[start : start + CHUNK]
                episodes = trainer.collaborate(chunk, num_episodes=self.num_episodes)
                asked = [problem_of(item) for item in chunk for _ in range(self.num_episodes)]
                answers = [trainer.environment.answers(episode[-1].joint_action) for episode in episodes]
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


def sample_episodes(items: list[dict], num_episodes: int) -> list[int]:
    """Returns the first episodes of the first problem about lists and of the first problem about strings."""
    positions = ([k for k, item in enumerate(items) if f"({name}):" in item["prompt"]] for name in ("xs", "s"))
    return [same_argument[0] * num_episodes for same_argument in positions if same_argument]


def sample(start: Evaluation, end: Evaluation, episode: int) -> str:
    """Returns one problem and the team's answers to it, before and after side by side."""
    column = WIDTH // 2 - 2
    signature, docstring = start.items[episode]["prompt"].splitlines()[:2]
    lines = [f"\nSample answer: {signature[4:-1]}", f"  {docstring.strip().strip(chr(34))}"]
    headings = []
    for name, side in (("before", start), ("after", end)):
        metrics = side.episodes[episode][-1].outcome.metrics
        headings.append(f"{name}: reward {metrics['paper_reward']:.2f}, {metrics['test_pass_rate']:.0%} of the tests")
    lines += [f"  {headings[0]:<{column}}  {headings[1]}", f"  {'-' * column}  {'-' * column}"]
    for role in (AUX, MAIN):
        sides = [printable(side.joint_actions[episode][role].expandtabs(4)).split("\n") for side in (start, end)]
        sides = [[line for code in lines for line in wrap(code, column)] for lines in sides]
        lines += [f"  {left:<{column}}  {right}".rstrip() for left, right in zip_longest(*sides, fillvalue="")]
        lines.append("")
    return "\n".join(lines[:-1])


def wrap(line: str, width: int) -> list[str]:
    """Splits a line of code into pieces that fit into a column."""
    return textwrap.wrap(line, width, drop_whitespace=False, break_on_hyphens=False) or [""]


def draw_learning_curve(log_history: list[dict], start: Evaluation, end: Evaluation, path: Path) -> None:
    """
    Draws joint reward and share of tests passed in the last turn against the optimizer step, with the held-out values
    as dots.
    """
    logs = [entry for entry in log_history if "reward" in entry]
    turn = f"turn_{start.num_turns}"
    reward = "reward" if start.num_turns == 1 else f"{turn}/reward_mean"
    if f"{turn}/rewards/task" in logs[0]:  # the training uses a reward model, whose scale differs
        reward = f"{turn}/rewards/task"
    steps = [entry["step"] for entry in logs]
    panels = (
        ("Joint reward", reward, 4.0, [fmean(x[-1].outcome.reward for x in side.episodes) for side in (start, end)]),
        ("Share of tests passed", f"{turn}/test_pass_rate", 1.0, [x.mean("test_pass_rate") for x in (start, end)]),
    )
    with picture(path, panels=2) as all_axes:
        for axes, (title, key, maximum, held_out) in zip(all_axes, panels, strict=True):
            draw_curve(axes, steps, [entry[key] for entry in logs], "training")
            axes.axhline(maximum, color=GREY, linestyle=":", label="maximum")
            axes.plot([0, steps[-1]], held_out, "o", color=COLORS[1], markersize=8, label="held-out problems")
            axes.set(title=title, xlabel="optimizer step", ylim=(-0.03 * maximum, maximum * 1.05))


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
        aux = extract_code(answers[AUX], AUX)  # as the reward does
        main = extract_code(answers[MAIN], problem.name)
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
    """Returns the convention whose tests all passed; `None` if neither or both of them passed."""
    passed = [name for name, verdict in zip(CONVENTIONS, verdicts, strict=True) if verdict.passed == INPUTS]
    return passed[0] if len(passed) == 1 else None
