"""Metrics of a training: of its rollout trees and of its optimizer steps."""

import contextlib
import functools
import hashlib
import itertools
import math
import re
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from accelerate.utils import gather_object
from transformers.integrations.integration_utils import rewrite_logs

from trl_multiagent.environments.base import scoring_metrics
from trl_multiagent.environments.task_errors import TaskError
from trl_multiagent.jobs.distributed import fail_together
from trl_multiagent.rollout.tree import Node, Trees, acting, groups_of, known
from trl_multiagent.trainers.base.batch import Advantages


# Metrics that a trainer logs, which are not computed here
TRAINER_METRICS = "loss reward_std env_step num_tokens epoch step grad_norm learning_rate".split()

LONG = 16  # tokens; shorter completions are not checked for repetition
PHRASE = 8  # tokens of a repeated phrase

OF_AGENT = re.compile(r"((?:train|eval|test)/.*?)agents/([^/]+)/")


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
    """The metrics of a batch of trees, before the totals become means. Those of several processes add up."""

    totals: dict[str, Total] = field(default_factory=dict)  # of each metric, by its name
    # The environment's metrics of scoring, `reward/{name}`; `num_tokens`, of all prompts and completions, and
    # `generated_tokens`, of the completions alone; `items/{role}`, the number of items at which a role acted
    sums: Counter[str] = field(default_factory=Counter)
    # For each role, how often each completion occurs, by a digest of its text
    texts: dict[str, Counter[bytes]] = field(default_factory=dict)

    def __add__(self, other: "RolloutTotals") -> "RolloutTotals":
        totals = {x: self.totals.get(x, Total()) + other.totals.get(x, Total()) for x in self.totals | other.totals}
        sums = Counter(self.sums)
        sums.update(other.sums)  # an addition would drop zeros
        texts = {role: self.texts.get(role, Counter()) + other.texts[role] for role in other.texts}
        return RolloutTotals(totals, sums, texts)

    def metrics(self) -> dict[str, float]:
        """Returns the value of each metric, by its name."""
        values = {name: total.mean for name, total in self.totals.items()}
        for role, texts in self.texts.items():
            if self.sums[f"items/{role}"] > 1:  # only different items need different answers
                values[f"agents/{role}/completions/most_common_ratio"] = max(texts.values()) / texts.total()
        return {**values, "reward_std": self.totals.get("reward", Total()).std}


def rollout_totals(
    turns: Trees,
    end_tokens: Mapping[str, Sequence[int]],
    scoring: dict[str, float],
    training: bool,
    logged: dict[str, list[float]] | None = None,
    num_turns: int = 2,
) -> RolloutTotals:
    """
    Computes the metrics of the trees of one process, given by the nodes of each turn. `end_tokens`: for each role, the
    tokens that end a completion. `scoring`: the environment's metrics of scoring. `training`: whether to include the
    metrics of groups and of early termination. `logged`: numbers that reward functions logged, by name. `num_turns`:
    the most turns of an episode; those of one turn have no metrics of episodes.

    Raises:
        TaskError: A reward function logged a metric under a name that the trainer uses.
    """
    values: defaultdict[str, list[float]] = defaultdict(list)
    for turn, nodes in enumerate(turns, start=1):
        for node in nodes:
            add_rewards(values, turn, node)
            for action in node.last_actions if num_turns > 1 else ():
                metrics: dict[str, float] = {}
                for past in (*node.history, node.turn(action)):
                    metrics |= past.outcome.metrics
                metrics["length"] = float(turn)
                for name, value in metrics.items():  # the last that the episode has
                    values[f"episode/{name}"].append(value)
            if training:
                values[f"turn_{turn}/early_terminated"].append(float(node.ended_early))
            for outcome in node.outcomes:
                for name, value in outcome.metrics.items():
                    values[f"turn_{turn}/{name}"].append(value)
        if training:
            values["frac_reward_zero_std"] += map(float, map(are_equal, groups_of(nodes)))
    sums = Counter({f"reward/{name}": value for name, value in scoring.items()})
    texts: dict[str, Counter[bytes]] = {role: Counter() for role in end_tokens}
    for role, ends in end_tokens.items():
        own = acting(role, [*itertools.chain(*turns)])
        sums[f"items/{role}"] = len({node.tree for node in own})
        for node in own:
            samples = node.samples[role]
            lengths = [len(ids) for ids in samples.completion_ids]
            clipped = [float(not samples.is_finished(g, ends)) for g in range(len(lengths))]
            values[f"agents/{role}/completions/mean_length"] += lengths
            values[f"agents/{role}/completions/clipped_ratio"] += clipped
            long = [ids for ids in samples.completion_ids if len(ids) >= LONG]
            values[f"agents/{role}/completions/repetition"] += map(repetition, long)
            if samples.dropped_turns is not None and node.history:
                values[f"agents/{role}/history/dropped_turns"].append(float(samples.dropped_turns))
            sums["num_tokens"] += len(lengths) * len(samples.prompt_ids) + sum(lengths)
            sums["generated_tokens"] += sum(lengths)
            texts[role].update(map(digest, samples.texts))
    for name, numbers in (logged or {}).items():
        if name in values or name in TRAINER_METRICS:
            raise TaskError(
                f"A reward function logged the metric {name!r}, a name that the trainer uses: choose another."
            )
        values[name] += numbers
    return RolloutTotals({name: Total.of(x) for name, x in values.items() if x}, sums, texts)


def add_rewards(values: dict[str, list[float]], turn: int, node: Node) -> None:
    """
    Adds the known rewards and returns of a node, of the team and of each role. A turn of an episode that was left out
    has a reward, but no return.
    """
    returns = known(node.returns)
    rewards = known([x + 0 * y for x, y in zip(node.rewards, node.returns, strict=True)])
    values["reward"] += rewards
    values[f"turn_{turn}/reward_mean"] += rewards
    values[f"turn_{turn}/expected_return"] += returns
    if turn == 1:
        values["return"] += returns
    values["final_turn/reward"] += known([node.rewards[j] for j in node.last_actions])
    for role, own in node.role_returns.items():
        values[f"agents/{role}/reward"] += known([x + 0 * y for x, y in zip(node.rewards_of(role), own, strict=True)])
        if turn == 1:
            values[f"agents/{role}/return"] += known(own)
    for role, others in node.counterfactuals.items():
        values[f"agents/{role}/credit"] += known([x - y for x, y in zip(node.rewards, others, strict=True)])


def are_equal(group: Sequence[Node]) -> bool:
    """Returns whether all joint actions of a group have the same returns, for the team and for every role."""
    returns = {x for node in group for x in zip(node.returns, *node.role_returns.values(), strict=True)}
    return sum(not any(map(math.isnan, x)) for x in returns) <= 1


def repetition(ids: Sequence[int]) -> float:
    """Returns the share of a completion's phrases of 8 tokens that it has written before."""
    phrases = [*zip(*(ids[k:] for k in range(PHRASE)), strict=False)]
    return 1 - len(set(phrases)) / len(phrases)


def digest(text: str) -> bytes:
    """Returns a short digest of a text, the same in all processes."""
    return hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=8).digest()


def tracker_names(logs: dict[str, Any]) -> dict[str, Any]:
    """
    Returns logs with their names for trackers. Trackers group metrics by the first part of their names. In
    transformers, it is `train`, `eval` or `test`. Here, it is the role for the metrics of an agent: `agents/aux/loss`
    becomes `aux/train/loss`.
    """
    return {OF_AGENT.sub(r"\2/\1", name): value for name, value in rewrite_logs(logs).items()}


class Observer:
    """Observes a trainer that learns from rollout trees, a [`RolloutTrainer`]."""

    def __init__(self, trainer: Any):
        self.trainer = trainer
        self.reset()
        self.reported: dict[str, list[float]] = {}  # metrics of the reward functions on the current batch

    def reset(self) -> None:
        """Starts the sums of the next optimizer step, over this process's micro-batches."""
        self.seconds: dict[str, float] = defaultdict(float)  # by phase
        # By agent or critic and metric. `loss`, `aux_loss` and `value_loss` are sums over micro-batches. `ratios` are
        # the numbers of `loss.sampling_correction`. The others are sums over the trained tokens; `tokens` counts these
        self.sums: dict[tuple[str, str], torch.Tensor] = defaultdict(float)

    @contextlib.contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """
        Adds the duration of the block to a phase. Evaluations are not timed, because they belong to no step.
        """
        start = time.perf_counter()
        yield
        if self.trainer.model.training:
            self.seconds[phase] += time.perf_counter() - start

    # Rollouts

    def rollout(self, mode: str, turns: Trees, advantages: Advantages | None = None) -> None:
        """Adds this process's trees to the next metrics, and to the callbacks. `mode`: `"train"` or `"eval"`."""
        trainer = self.trainer
        totals, metrics = add_task_metrics(trainer, mode, turns, self.reported), trainer._metrics[mode]
        training = mode == "train"
        if training:
            trainer.state.num_input_tokens_seen += totals.sums["num_tokens"]
            trainer.env_step += totals.totals.get("reward", Total()).count
            trainer.generated_tokens += totals.sums["generated_tokens"]
            metrics["env_step"] = [trainer.env_step]
        metrics["num_tokens"] = [trainer.state.num_input_tokens_seen]
        split = "train" if training else trainer._eval_prefix
        step = trainer.state.global_step + training + (trainer._ahead is not None and trainer._ahead.is_making)

        @functools.cache
        def rows() -> list[dict[str, Any]]:
            from trl_multiagent.rollout.trace import trace_rows

            process = trainer.accelerator.process_index
            return trace_rows(turns, trainer.environment.roles, advantages, step=step, split=split, process=process)

        for callback in trainer.rollout_callbacks:
            callback.on_rollout(trainer.args, trainer.state, split, turns, rows)

    # Optimizer steps

    def end_step(self) -> None:
        """Adds the metrics of one optimizer step to the next log entry."""
        trainer, seconds = self.trainer, self.seconds
        metrics = trainer._metrics["train"]
        # In one reduction, and one copy to the CPU
        tensors = [x.detach().float().flatten() for x in self.sums.values()]
        totals = trainer.accelerator.reduce(torch.cat(tensors), "sum").cpu().split([*map(len, tensors)])
        sums = dict(zip(self.sums, totals, strict=True))
        for (name, metric), total in sums.items():
            prefix = f"agents/{name}" if name in trainer.team.roles else name
            if metric == "loss":
                total = total / trainer.accelerator.num_processes
            elif metric == "ratios":
                numbers = total.tolist()
                metrics[f"{prefix}/sampling_ratio"].append(numbers[5] / max(1, numbers[1]))
                metric, total = "sampling_logp_difference", total[2] / total[3].clamp(min=1.0)
                if trainer.args.use_vllm:
                    trainer.generator.check(name, numbers)
            elif metric not in ("tokens", "aux_loss", "value_loss"):
                total = total / sums[name, "tokens"].clamp(min=1.0)
            if metric != "tokens":
                metrics[f"{prefix}/{metric}"].append(float(total))
        seconds["update"] = seconds.pop("step") - seconds["generate"] - seconds["reward"]
        for phase, duration in seconds.items():
            metrics[f"time/{phase}"].append(duration)
        self.reset()


def add_task_metrics(trainer: Any, mode: str, turns: Trees, reported: dict[str, list[float]]) -> RolloutTotals:
    """
    Adds the results of the agents in the trainer's environment to its next log entry, and returns the totals of all
    processes. `turns`: the nodes of each turn that this process played. `reported`: the metrics that reward functions
    logged about these nodes.
    """
    team, metrics = trainer.team, trainer._metrics[mode]
    with fail_together(trainer.accelerator):
        scoring = scoring_metrics(trainer.environment)
        end_tokens = {role: team.end_tokens(role) for role in team.roles}
        own = rollout_totals(turns, end_tokens, scoring, mode == "train", reported, trainer.args.num_turns)
    totals = shown = sum(gather_object([own]), RolloutTotals())
    for name, value in totals.sums.items():
        if name.startswith("reward/"):
            metrics[name].append(value)
    if mode == "eval":  # every item counts the same, however they were split into batches
        trainer._evaluated = shown = trainer._evaluated + totals
    for name, value in shown.metrics().items():
        metrics[name] = [value] if mode == "eval" else [*metrics[name], value]
    return totals
