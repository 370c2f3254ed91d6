"""Computes the metrics of rollout trees."""

import contextlib
import hashlib
import itertools
import math
import re
import time
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from accelerate.utils import gather_object

from trl_multiagent.environments.task_errors import TaskError
from trl_multiagent.rollout.contributions import contributions
from trl_multiagent.rollout.tree import Node, acting, known, sibling_sets


# Metrics of an evaluation whose names contain no turn, no role, and no name of the environment
EVAL_METRICS = ("reward", "return", "final_turn/reward", "reward_std", "num_tokens", "runtime", "samples_per_second")
# Further metrics that a trainer logs, which are not computed here
TRAINER_METRICS = ("loss", "reward_std", "env_step", "num_tokens", "epoch", "step", "grad_norm", "learning_rate")

LONG = 16  # tokens of a completion whose repetition is measured
PHRASE = 8  # tokens of a repeated phrase


@dataclass
class Total:
    """Count, sum and sum of squares of some numbers. The totals of several processes add up."""

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
        """The sample standard deviation; 0.0 for a single number."""
        variance = (self.sum_of_squares - self.sum * self.sum / max(1, self.count)) / max(1, self.count - 1)
        return math.sqrt(max(0.0, variance))

    @property
    def population_std(self) -> float:
        return math.sqrt(max(0.0, self.sum_of_squares / self.count - self.mean**2))

    def standardize(self, values: torch.Tensor) -> torch.Tensor:
        """Subtracts the mean and divides by the standard deviation. Returns zeros if the latter is nearly 0."""
        std = self.population_std if self.count > 1 else 0.0
        return (values - self.mean) / std if std > 1e-6 else torch.zeros_like(values)


def totals_of_all(values: Mapping[Any, Sequence[float]]) -> dict[Any, Total]:
    """Returns the total of each group of numbers over all processes, which have the same groups."""
    gathered = gather_object([{group: Total.of(numbers) for group, numbers in values.items()}])
    return {group: sum((part[group] for part in gathered), Total()) for group in values}


@dataclass
class RolloutTotals:
    """The metrics of a batch of trees, before the totals become means."""

    totals: dict[str, Total]  # of each metric, by its name
    num_tokens: int  # of the prompts and completions of all agents
    generated_tokens: int  # of the completions alone
    scoring: dict[str, float]  # the environment's metrics of scoring, which are summed over processes
    num_items: Counter[str]  # for each role, the number of items at which it acted
    texts: dict[str, Counter[bytes]]  # for each role, how often each completion occurs, by a digest of its text

    def metrics(self) -> dict[str, float]:
        """Returns the value of each metric, by its name."""
        values = {name: total.mean for name, total in self.totals.items()}
        for role, ratio in self.most_common_ratios().items():
            values[f"agents/{role}/completions/most_common_ratio"] = ratio
        return {**values, "reward_std": self.totals.get("reward", Total()).std}

    def most_common_ratios(self) -> dict[str, float]:
        """
        Returns the share of each role's completions that are the most common text, for roles that acted at several
        items.
        """
        # Only different items need different answers
        several = [role for role in self.texts if self.num_items[role] > 1]
        return {role: max(self.texts[role].values()) / self.texts[role].total() for role in several}


def rollout_totals(
    levels: list[list[Node]],
    end_tokens: Mapping[str, Sequence[int]],
    scoring: dict[str, float],
    training: bool,
    logged: dict[str, list[float]] | None = None,
) -> RolloutTotals:
    """
    Computes the metrics of the trees of one process, given by the nodes of each turn. `end_tokens`: for each role, the
    tokens that end a completion. `scoring`: the environment's metrics of scoring. `training`: whether to include the
    metrics of sibling sets and of early termination. `logged`: numbers that reward functions logged, by name.

    Raises:
        TaskError: A reward function logged a metric under a name that the trainer uses.
    """
    values: defaultdict[str, list[float]] = defaultdict(list)
    for turn, nodes in enumerate(levels, start=1):
        for node in nodes:
            add_rewards(values, turn, node)
            if training:
                values[f"turn_{turn}/early_terminated"].append(float(node.ended_early))
                add_contributions(values, node)
            for outcome in node.outcomes:
                for name, value in outcome.metrics.items():
                    values[f"turn_{turn}/{name}"].append(value)
        if training:
            values["frac_reward_zero_std"] += map(float, map(are_equal, sibling_sets(nodes)))
    texts: dict[str, Counter[bytes]] = {role: Counter() for role in end_tokens}
    num_tokens = generated_tokens = 0
    for role, node in itertools.product(end_tokens, itertools.chain(*levels)):
        if role not in node.samples:
            continue
        samples = node.samples[role]
        lengths = [len(ids) for ids in samples.completion_ids]
        clipped = [float(not samples.is_finished(g, end_tokens[role])) for g in range(len(lengths))]
        values[f"agents/{role}/completions/mean_length"] += lengths
        values[f"agents/{role}/completions/clipped_ratio"] += clipped
        long = [ids for ids in samples.completion_ids if len(ids) >= LONG]
        values[f"agents/{role}/completions/repetition"] += map(repetition, long)
        if samples.dropped_turns is not None and node.history:
            values[f"agents/{role}/history/dropped_turns"].append(float(samples.dropped_turns))
        num_tokens += len(lengths) * len(samples.prompt_ids) + sum(lengths)
        generated_tokens += sum(lengths)
        texts[role].update(map(digest, samples.texts))
    for name, numbers in (logged or {}).items():
        if name in values or name in TRAINER_METRICS:
            raise TaskError(
                f"A reward function logged the metric {name!r}, a name that the trainer uses: choose another."
            )
        values[name] += numbers
    totals = {name: Total.of(x) for name, x in values.items() if x}
    num_items = {role: len({node.tree for nodes in levels for node in acting(role, nodes)}) for role in end_tokens}
    return RolloutTotals(totals, num_tokens, generated_tokens, scoring, Counter(num_items), texts)


def add_rewards(values: dict[str, list[float]], turn: int, node: Node) -> None:
    """Adds the known rewards and returns of a node, of the team and of each role."""
    rewards, returns = known(node.rewards), known(node.returns)
    values["reward"] += rewards
    values[f"turn_{turn}/reward_mean"] += rewards
    values[f"turn_{turn}/expected_return"] += returns
    if turn == 1:
        values["return"] += returns
    values["final_turn/reward"] += known([node.rewards[j] for j in node.ended]) if node.children else rewards
    for role, own in node.role_rewards.items():
        values[f"agents/{role}/reward"] += known(own)
    if turn == 1:
        for role, own in node.role_returns.items():
            values[f"agents/{role}/return"] += known(own)
    for role, others in node.counterfactuals.items():
        values[f"agents/{role}/credit"] += [x - y for x, y in zip(node.rewards, others, strict=True)]


def are_equal(siblings: Sequence[Node]) -> bool:
    """Returns whether all joint actions at some nodes have the same returns, for the team and for every role."""
    returns = [x for node in siblings for x in zip(node.returns, *node.role_returns.values(), strict=True)]
    returns = [x for x in returns if not any(map(math.isnan, x))]
    return all(x == returns[0] for x in returns)


def repetition(ids: Sequence[int]) -> float:
    """Returns the share of a completion's phrases of 8 tokens that it has written before."""
    phrases = [*zip(*(ids[k:] for k in range(PHRASE)), strict=False)]
    return 1 - len(set(phrases)) / len(phrases)


def digest(text: str) -> bytes:
    """Returns a short digest of a text, the same in all processes."""
    return hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=8).digest()


def add_contributions(values: dict[str, list[float]], node: Node) -> None:
    """Adds the contribution of each agent to the variance of a node's rewards."""
    parts = contributions(node)
    if parts is None or math.isnan(parts.variance):  # the joint actions are not all combinations, or one has no reward
        return
    values["team/reward_variance"].append(parts.variance)
    values["team/interaction"].append(parts.interaction)
    for role, main, total in zip(node.samples, parts.main, parts.total, strict=True):
        values[f"agents/{role}/contribution"].append(main)
        values[f"agents/{role}/total_contribution"].append(total)


def is_eval_metric(name: str, roles: Collection[str], num_turns: int) -> bool:
    """Returns whether an evaluation may have a metric with this name, given without the prefix `eval_`."""
    turn, agent = re.match(r"turn_(\d+)/.", name), re.match(r"agents/(.+?)/.", name)
    if turn is not None:
        return 1 <= int(turn[1]) <= num_turns
    if agent is not None:
        return agent[1] in roles
    return name in (*EVAL_METRICS, "steps_per_second") or name.startswith("reward/")


def sum_totals(parts: Iterable[RolloutTotals]) -> RolloutTotals:
    """Adds up the metrics of several processes, whose trees may have different turns, nodes and metrics."""
    whole = RolloutTotals({}, 0, 0, {}, Counter(), {})
    for part in parts:
        for name, total in part.totals.items():
            whole.totals[name] = whole.totals.get(name, Total()) + total
        for name, value in part.scoring.items():
            whole.scoring[name] = whole.scoring.get(name, 0.0) + value
        whole.num_tokens += part.num_tokens
        whole.generated_tokens += part.generated_tokens
        whole.num_items += part.num_items
        for role, texts in part.texts.items():
            whole.texts[role] = whole.texts.get(role, Counter()) + texts
    return whole


class StepTotals:
    """Sums over this process's micro-batches of one optimizer step. All sums begin with 0."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)  # by phase
        self.losses: dict[str, torch.Tensor] = defaultdict(float)  # by role
        self.router_losses: dict[str, torch.Tensor] = defaultdict(float)  # by role, without their coefficients
        self.tokens: dict[str, torch.Tensor] = defaultdict(float)  # by role, those that are trained
        self.token_sums: dict[tuple[str, str], torch.Tensor] = defaultdict(float)  # over these, by role and metric
        self.ratios: dict[str, torch.Tensor] = defaultdict(float)  # by role, the numbers of `loss.sampling_correction`

    @contextlib.contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """Adds the duration of the block to that of a phase."""
        start = time.perf_counter()
        yield
        self.seconds[phase] += time.perf_counter() - start
