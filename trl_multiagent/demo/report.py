"""The demo's output: one progress bar per phase, and a comparison of the team before and after its training."""

import textwrap
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from time import perf_counter
from typing import Any

from accelerate import PartialState
from matplotlib.figure import Figure
from tqdm.auto import tqdm
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from trl_multiagent.demo.conventions import conventions
from trl_multiagent.demo.problems import demo_problems
from trl_multiagent.environments.base import JointAction, Turn
from trl_multiagent.environments.code_generation.roles import AUX, MAIN
from trl_multiagent.processes import fail_together
from trl_multiagent.terminal import printable
from trl_multiagent.trainers.base.progress import show_one_bar
from trl_multiagent.trainers.base.rollout_trainer import RolloutTrainer


WIDTH = 98
CHUNK = 16  # held-out problems that are played at once; the progress bar advances by this number
SMOOTHING = 10  # width of the moving average in the learning curve, in steps


@dataclass
class Evaluation:
    """The team's results on held-out problems. Each list has one entry per episode, from its last turn."""

    items: list[dict]
    joint_actions: list[JointAction]
    rewards: list[float]  # of the kind that the team is trained on
    paper_rewards: list[float]
    earned_rewards: list[float]
    test_pass_rates: list[float]
    conventions: list[dict[str, str | None]]
    first_rewards: list[float]  # paper rewards of the first turn
    num_turns: int

    @property
    def reward(self) -> float:
        """Mean joint reward of the kind that the team is trained on, 0 to 4."""
        return mean(self.rewards)

    @property
    def test_pass_rate(self) -> float:
        """Mean share of a problem's tests that pass."""
        return mean(self.test_pass_rates)

    def agreed(self, *names: str) -> float:
        """Share of the answers in which both agents follow the same one of the conventions named."""
        return mean([c[AUX] == c[MAIN] and c[AUX] in names for c in self.conventions])


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

    def print(self, text: str = "") -> None:
        if self.is_main_process:
            print(text, flush=True)

    def before(self, trainer: RolloutTrainer) -> None:
        """
        Evaluates the untrained team, and replaces the trainer's log lines by one progress bar.

        Every process of a distributed run has to call this.
        """
        self.trainer = trainer
        self.start = self.evaluate(trainer, "Held-out problems, before")
        show_one_bar(trainer)
        self.started_at = perf_counter()

    def after(self, trainer: RolloutTrainer) -> None:
        """
        Evaluates the trained team.

        Every process of a distributed run has to call this.
        """
        self.seconds = perf_counter() - self.started_at
        self.end = self.evaluate(trainer, "Held-out problems, after")

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.after(self.trainer)
        with fail_together(self.trainer.accelerator):
            self.show(self.trainer)

    def show(self, trainer: RolloutTrainer, team_folder: str | Path | None = None) -> None:
        """
        Prints the comparison and draws the learning curve. Only the main process does so.

        Args:
            trainer ([`RolloutTrainer`]): The trainer of the team.
            team_folder (`str` or `Path`, *optional*): Folder in which the team was saved, if it was.
        """
        if not self.is_main_process:
            return
        self.print(comparison(self.start, self.end, len(self.items), self.num_episodes))
        for k in sample_episodes(self.items, self.num_episodes):
            self.print(sample(self.start, self.end, k))
        self.print(f"\nTraining         {trainer.state.global_step} steps in {self.seconds:.0f} s")
        if team_folder is not None:
            self.print(f"Saved team       {team_folder}")
        picture = Path(trainer.args.output_dir) / "learning_curve.png"
        if any("reward" in entry for entry in trainer.state.log_history):  # not if the training samples nothing
            draw_learning_curve(trainer.state.log_history, self.start, self.end, picture)
            self.print(f"Learning curve   {picture}")

    def evaluate(self, trainer: RolloutTrainer, description: str) -> Evaluation:
        """Evaluates the team's current state on the held-out problems, with sampled episodes."""
        problems = {problem.name: problem for split in ("train", "test") for problem in demo_problems(split)}
        turns: list[Turn] = []
        answers: list[JointAction] = []
        first_rewards: list[float] = []
        followed = []
        with tqdm(
            total=len(self.items),
            desc=description,
            unit="problem",
            dynamic_ncols=True,
            disable=not self.is_main_process,
        ) as bar:
            for start in range(0, len(self.items), CHUNK):
                chunk = self.items[start : start + CHUNK]
                episodes = trainer.collaborate(chunk, num_episodes=self.num_episodes)
                last_turns = [episode[-1] for episode in episodes]
                asked = [problems[item["entry_point"]] for item in chunk for _ in range(self.num_episodes)]
                joint_actions = [trainer.environment.answers(turn.joint_action) for turn in last_turns]
                answers += joint_actions
                followed += conventions(asked, joint_actions, trainer.environment.unwrapped.sandbox)
                turns += last_turns
                first_rewards += [episode[0].outcome.metrics["paper_reward"] for episode in episodes]
                bar.update(len(chunk))
        return Evaluation(
            items=[item for item in self.items for _ in range(self.num_episodes)],
            joint_actions=answers,
            rewards=[turn.outcome.reward for turn in turns],
            paper_rewards=[turn.outcome.metrics["paper_reward"] for turn in turns],
            earned_rewards=[turn.outcome.metrics["earned_reward"] for turn in turns],
            test_pass_rates=[turn.outcome.metrics["test_pass_rate"] for turn in turns],
            conventions=followed,
            first_rewards=first_rewards,
            num_turns=max(map(len, episodes)),
        )


def mean(values: list) -> float:
    return sum(values) / len(values)


def comparison(start: Evaluation, end: Evaluation, problems: int, num_episodes: int) -> str:
    """The table of numbers before and after."""
    title = f"{problems} held-out problems, {num_episodes} sampled answers each"
    rewards = [[f"{mean(side.paper_rewards):.2f}", f"{mean(side.earned_rewards):.2f}"] for side in (start, end)]
    rows = [
        ("joint reward (0 to 4)", rewards[0][0], rewards[1][0]),
        ("joint reward, kind `earned` (0 to 4)", rewards[0][1], rewards[1][1]),
        ("tests passed", f"{start.test_pass_rate:.0%}", f"{end.test_pass_rate:.0%}"),
        ("both agents follow the same convention", f"{start.agreed('A', 'B'):.0%}", f"{end.agreed('A', 'B'):.0%}"),
        ("    A: aux keeps, main maps", f"{start.agreed('A'):.0%}", f"{end.agreed('A'):.0%}"),
        ("    B: aux keeps and maps", f"{start.agreed('B'):.0%}", f"{end.agreed('B'):.0%}"),
    ]
    if start.num_turns > 1:
        before, after = (f"{mean(side.first_rewards):.2f}" for side in (start, end))
        rows.insert(0, ("joint reward of the first answers (0 to 4)", before, after))
    lines = [f"\n{title:<50} {'before':>8} {'after':>8}", "-" * 68]
    lines += [f"{name:<50} {first:>8} {second:>8}" for name, first, second in rows]
    return "\n".join(lines)


def sample_episodes(items: list[dict], num_episodes: int) -> list[int]:
    """The first episodes of the first problem about lists and of the first problem about strings."""
    starts = ("xs", "s")
    first = {
        start: k for start in starts for k, item in reversed(list(enumerate(items))) if f"({start}):" in item["prompt"]
    }
    return [k * num_episodes for k in first.values()]


def sample(start: Evaluation, end: Evaluation, episode: int) -> str:
    """One problem and the team's answers to it, before and after side by side."""
    column = WIDTH // 2 - 2
    signature, docstring = start.items[episode]["prompt"].splitlines()[:2]
    lines = [f"\nSample answer: {signature[4:-1]}", f"  {docstring.strip().strip(chr(34))}"]
    headings = [
        f"{name}: reward {side.paper_rewards[episode]:.2f}, {side.test_pass_rates[episode]:.0%} of the tests"
        for name, side in (("before", start), ("after", end))
    ]
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
    """Draws joint reward and share of tests passed in the last turn against the optimizer step, with the held-out values as dots."""
    logs = [entry for entry in log_history if "reward" in entry]
    turn = f"turn_{start.num_turns}"
    reward = "reward" if start.num_turns == 1 else f"{turn}/reward_mean"
    if f"{turn}/rewards/task" in logs[0]:  # the reward in training is that of a model, which has another scale
        reward = f"{turn}/rewards/task"
    steps = [entry["step"] for entry in logs]
    panels = (
        ("Joint reward", reward, 4.0, (start.reward, end.reward)),
        ("Share of tests passed", f"{turn}/test_pass_rate", 1.0, (start.test_pass_rate, end.test_pass_rate)),
    )
    figure = Figure(figsize=(10, 4), layout="constrained")
    for axes, (title, key, maximum, held_out) in zip(figure.subplots(1, 2), panels, strict=True):
        values = [entry[key] for entry in logs]
        smooth = [mean(values[max(0, k - SMOOTHING // 2) : k + SMOOTHING // 2]) for k in range(len(values))]
        axes.axhline(maximum, color="0.6", linestyle=":", label="maximum")
        axes.plot(steps, values, color="tab:blue", alpha=0.3, label="training batch")
        axes.plot(steps, smooth, color="tab:blue", linewidth=2, label=f"training, mean of {SMOOTHING} steps")
        axes.plot([0, steps[-1]], held_out, "o", color="tab:orange", markersize=8, label="held-out problems")
        axes.set(title=title, xlabel="optimizer step", ylim=(0, maximum * 1.05))
        axes.grid(alpha=0.2)
        axes.spines[["top", "right"]].set_visible(False)
    figure.axes[0].legend(loc="lower right", frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
