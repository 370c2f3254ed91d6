"""Rollout metrics: from rollout trees to numbers and to the table of completions. Nothing here needs a trainer."""

import contextlib
import math
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from trl_multiagent.rollout.tree import Node


@dataclass
class Total:
    """Enough of a list of numbers to get its mean and standard deviation once the processes' totals are added up."""

    count: int = 0
    sum: float = 0.0
    sum_of_squares: float = 0.0

    @classmethod
    def of(cls, values: Sequence[float]) -> "Total":
        return cls(len(values), sum(values), sum(value * value for value in values))

    def __add__(self, other: "Total") -> "Total":
        return Total(self.count + other.count, self.sum + other.sum, self.sum_of_squares + other.sum_of_squares)

    @property
    def mean(self) -> float:
        return self.sum / self.count

    @property
    def std(self) -> float:
        """The sample standard deviation; 0 for a single value."""
        variance = (self.sum_of_squares - self.sum * self.sum / self.count) / max(1, self.count - 1)
        return math.sqrt(max(0.0, variance))


@dataclass
class RolloutTotals:
    """
    One process's share of the metrics of a batch of trees.

    Args:
        totals (`dict[str, Total]`): By name of the metric.
        num_tokens (`int`): Prompt and completion tokens that the agents read and wrote.
        scoring (`dict[str, float]`): The environment's own numbers about its scoring.
    """

    totals: dict[str, Total]
    num_tokens: int
    scoring: dict[str, float]


def rollout_totals(
    levels: list[list[Node]], eos_token_ids: dict[str, Sequence[int]], scoring: dict[str, float], training: bool
) -> RolloutTotals:
    """
    The metrics of this process's trees.

    Args:
        levels (`list[list[Node]]`): The nodes of each turn.
        eos_token_ids (`dict[str, Sequence[int]]`): By role, the tokens that end a completion.
        scoring (`dict[str, float]`): The environment's own numbers about its scoring.
        training (`bool`): Whether to include what only sibling sets have.
    """
    values = defaultdict(list)
    for turn, nodes in enumerate(levels, start=1):
        for node in nodes:
            values["reward"] += node.rewards
            values[f"turn_{turn}/reward_mean"] += node.rewards
            values[f"turn_{turn}/expected_return"] += node.returns
            if training:
                values["frac_reward_zero_std"].append(float(min(node.returns) == max(node.returns)))
                values[f"turn_{turn}/early_terminated"].append(float(node.ended_early))
            for outcome in node.outcomes:
                for name, value in outcome.metrics.items():
                    values[f"turn_{turn}/{name}"].append(value)
    num_tokens = 0
    for role, ends in eos_token_ids.items():
        for node in (node for nodes in levels for node in nodes):
            samples = node.samples[role]
            lengths = [len(ids) for ids in samples.completion_ids]
            values[f"agents/{role}/completions/mean_length"] += lengths
            values[f"agents/{role}/completions/clipped_ratio"] += [
                float(ids[-1] not in ends) for ids in samples.completion_ids
            ]
            num_tokens += len(lengths) * len(samples.prompt_ids) + sum(lengths)
    return RolloutTotals({name: Total.of(x) for name, x in values.items()}, num_tokens, scoring)


def add_up(parts: Iterable[RolloutTotals]) -> RolloutTotals:
    """The metrics of all processes, which may have different turns, nodes and metrics."""
    whole = RolloutTotals({}, 0, {})
    for part in parts:
        for name, total in part.totals.items():
            whole.totals[name] = whole.totals.get(name, Total()) + total
        for name, value in part.scoring.items():
            whole.scoring[name] = whole.scoring.get(name, 0.0) + value
        whole.num_tokens += part.num_tokens
    return whole


@dataclass
class CompletionLine:
    """One joint action in the table of completions."""

    turn: int
    prompt: str
    completion: str
    reward: float
    value: float  # its return
    advantage: float


def completion_lines(levels: list[list[Node]]) -> list[CompletionLine]:
    """The table of completions: one line per joint action."""
    lines = []
    for turn, nodes in enumerate(levels, start=1):
        for node in nodes:
            baseline = sum(node.returns) / len(node.returns)
            prompts = {
                role: prompt if isinstance(prompt, str) else prompt[-1]["content"]
                for role, prompt in node.prompts.items()
            }
            for joint_action, reward, value in zip(node.joint_actions, node.rewards, node.returns, strict=True):
                lines.append(
                    CompletionLine(turn, by_role(prompts), by_role(joint_action), reward, value, value - baseline)
                )
    return lines


def by_role(texts: dict[str, str]) -> str:
    return "\n".join(f"[{role}] {text}" for role, text in texts.items())


@dataclass
class StepTotals:
    """
    What one optimizer step adds up over its micro-batches.

    Args:
        seconds (`dict[str, float]`): Of each phase.
        losses, router_losses, tokens (`dict[str, float]`): By role.
        token_sums (`dict[tuple[str, str], float]`): By role and name of the metric, the sum over tokens.
    """

    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    losses: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    router_losses: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    tokens: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    token_sums: dict[tuple[str, str], float] = field(default_factory=lambda: defaultdict(float))

    @contextlib.contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """Adds the time that the block takes to a phase."""
        start = time.perf_counter()
        yield
        self.seconds[phase] += time.perf_counter() - start
