"""
Metrics of a training: those of the trees and of the optimizer steps, the trace and the completions that are shown, and
alarms about them.

An alarm is raised when its condition begins to hold. It is a warning, and a line of `alarms.jsonl` in the output
folder, which programs can read. The conditions are functions of the logged metrics, so a resumed run raises the same
alarms as an uninterrupted run.
"""

import contextlib
import hashlib
import itertools
import json
import math
import re
import time
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.utils import logging

from trl_multiagent.environments.base import scoring_metrics
from trl_multiagent.environments.task_errors import TaskError
from trl_multiagent.folders import ALARMS_FILE, naming, write_json, write_text
from trl_multiagent.jobs.distributed import fail_together
from trl_multiagent.report.run_page import choose_trees, trees_of
from trl_multiagent.rollout.trace import TraceRow, trace_rows
from trl_multiagent.rollout.tree import Node, acting, known, sibling_sets
from trl_multiagent.trainers.base.run_report import TRACE_FOLDER, TREES_FOLDER, RunReport, harmless
from trl_multiagent.trainers.base.trace_files import TraceFiles, remove_after
from trl_multiagent.trainers.base.trackers import log_completion_tables, print_completions
from trl_multiagent.trainers.base.vllm import LARGEST_DIFFERENCE, LARGEST_SHARE_OUTSIDE, EngineError


logger = logging.get_logger(__name__)

# Metrics of an evaluation whose names contain no turn, no role, and no name of the environment
EVAL_METRICS = ("reward", "return", "final_turn/reward", "reward_std", "num_tokens", "runtime", "samples_per_second")
# Further metrics that a trainer logs, which are not computed here
TRAINER_METRICS = ("loss", "reward_std", "env_step", "num_tokens", "epoch", "step", "grad_norm", "learning_rate")

LONG = 16  # tokens of a completion whose repetition is measured
PHRASE = 8  # tokens of a repeated phrase

COST_FILE = "training_cost.json"  # in the output folder
KEPT_STEPS, KEPT_TREES = 20, 3  # a run without a trace keeps some trees of some steps for its report

# Alarms
WINDOW = 20  # successive log entries in which a condition must hold
NO_SIGNAL = 0.95  # share of the nodes whose returns are all equal
COLLAPSED = 0.9  # share of the completions that are one text
NO_CONTRIBUTION = 0.01  # of the variance of the rewards
BROKEN_STEPS, BROKEN_ENTRIES = 20, 3  # least steps and log entries in which completions must be broken
REPEATED = 0.8  # share of the phrases that a completion has written before
CUT_OFF = 0.99  # share of the completions that reach the length limit
SHORT = 16  # a length limit below this is meant to cut off
NEARLY_NEVER = 0.02  # below this, a metric in `watched_metrics` counts as near zero
EVALUATION_REWARD = re.compile(r"eval_([^/]*_)?reward")  # eval_reward, or eval_<name>_reward of one of several sets

Log = Mapping[str, Any]


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
                for name, value in contributions(node).items():
                    values[name].append(value)
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


def contributions(node: Node) -> dict[str, float]:
    """
    Splits the variance of a node's rewards, in squared units of the reward. Returns nothing if the joint actions are
    not all combinations of at least two completions of at least two agents, or if not all have one reward for the
    team.

    In a node of kind `cross`, every completion of an agent meets every combination of the others' completions. The
    rewards are then a full factorial design with one factor per agent, and their variance is the sum of the effects of
    all subsets of agents (Sobol 1993; Efron and Stein 1981). All variances are those of the G^N rewards themselves,
    divided by their number. They are not corrected for the finite number of completions, so an interaction also adds a
    share of about 1/G to the main effects.

    An agent's `contribution` is the variance of the mean reward of its completions. Its `total_contribution` is the
    mean variance over its completions while the others' are fixed, which is zero if the reward does not depend on its
    answer. No agent explains the interaction alone.
    """
    num_agents, size = len(node.indices[0]), 1 + max(index[0] for index in node.indices)
    is_whole = sorted(node.indices) == [*itertools.product(range(size), repeat=num_agents)]
    if num_agents < 2 or size < 2 or not is_whole or node.role_rewards or len(known(node.rewards)) < len(node.rewards):
        return {}
    rewards = np.empty([size] * num_agents)
    for index, reward in zip(node.indices, node.rewards, strict=True):
        rewards[index] = reward
    variance = float(variances(rewards.ravel(), 0))
    parts = {"team/reward_variance": variance, "team/interaction": variance}
    for agent, role in enumerate(node.samples):
        others = tuple(other for other in range(num_agents) if other != agent)
        parts[f"agents/{role}/contribution"] = float(variances(rewards.mean(axis=others), 0))
        parts[f"agents/{role}/total_contribution"] = float(variances(rewards, agent).mean())
        parts["team/interaction"] -= parts[f"agents/{role}/contribution"]
    return {name: max(0.0, value) for name, value in parts.items()}


def variances(values: np.ndarray, axis: int) -> np.ndarray:
    """Computes population variances along an axis. They are exactly zero where all values are equal."""
    return np.where(np.ptp(values, axis=axis) == 0.0, 0.0, values.var(axis=axis))


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


class Observer:
    """Observes a trainer that learns from rollout trees, a [`RolloutTrainer`]."""

    def __init__(self, trainer: Any):
        self.trainer = trainer
        args = trainer.args
        self.totals = StepTotals()  # of the current optimizer step
        self.reported: dict[str, list[float]] = {}  # metrics of the reward functions on the current batch
        # Rows of this process's latest batch, if completions are logged; `None` once they were shown
        self.shown_rows: list[TraceRow] | None = None
        # Without a trace, a few trees of the first process are kept for the report, at some steps
        self.has_trace = args.trace_steps is not None
        folder = Path(args.output_dir) / (TRACE_FOLDER if self.has_trace else TREES_FOLDER)
        options = (args.trace_format, args.trace_max_files)
        self.trace = TraceFiles(folder, args.process_index, args.trace_steps or 1, *options)
        self.next_kept = math.inf  # the next step whose trees are kept

    def timed(self, phase: str) -> contextlib.AbstractContextManager[None]:
        """
        Adds the duration of the block to that of a phase. Evaluations are not timed, because they belong to no step.
        """
        return self.totals.timed(phase) if self.trainer.model.training else contextlib.nullcontext()

    # Rollouts

    def rollout(
        self, mode: str, levels: list[list[Node]], advantages: list[list[dict[str, torch.Tensor]]] | None = None
    ) -> None:
        """Adds this process's trees to the next metrics, trace and completions. `mode`: `"train"` or `"eval"`."""
        trainer = self.trainer
        totals, metrics = add_task_metrics(trainer, mode, levels, self.reported), trainer._metrics[mode]
        training = mode == "train"
        if training:
            trainer.state.num_input_tokens_seen += totals.num_tokens
            trainer.env_step += totals.totals.get("reward", Total()).count
            trainer.generated_tokens += totals.generated_tokens
            metrics["env_step"] = [trainer.env_step]
        metrics["num_tokens"] = [trainer.state.num_input_tokens_seen]
        keeps_trees = training and trainer.state.global_step + 1 >= self.next_kept
        if not self.has_trace and not trainer.log_completions and not keeps_trees:
            return
        rows = trace_rows(
            levels,
            trainer.environment.roles,
            advantages,
            step=trainer.state.global_step + training,
            split="train" if training else trainer._eval_prefix,
            process=trainer.accelerator.process_index,
        )
        if trainer.log_completions:
            self.shown_rows = rows
        if self.has_trace:
            self.trace.rows += rows
        elif keeps_trees and rows:
            self.next_kept = rows[0]["step"] + -(-trainer.state.max_steps // KEPT_STEPS)
            with harmless(Path(trainer.args.output_dir)):
                for _, tree in choose_trees(trees_of(rows), KEPT_TREES, rows[0]["step"]):
                    self.trace.rows += tree
                self.trace.flush()

    # Optimizer steps

    def end_step(self) -> dict[str, torch.Tensor]:
        """
        Adds the metrics of one optimizer step to the next log entry. Returns the losses by name, summed over
        processes.
        """
        trainer, step = self.trainer, self.totals
        metrics, num_processes = trainer._metrics["train"], trainer.accelerator.num_processes
        losses, router_losses, tokens, token_sums, ratios = sum_over_processes(
            trainer.accelerator, [step.losses, step.router_losses, step.tokens, step.token_sums, step.ratios]
        )
        means = {}
        for (role, name), total in token_sums.items():
            means[role, name] = (total / tokens[role].clamp(min=1.0)).item()
        for role, numbers in ratios.items():
            outside, number, difference, compared, sampled = numbers.tolist()
            means[role, "sampling_logp_difference"] = difference / max(1, compared)
            missing = (sampled - compared) / max(1, sampled)
            self.check_engine(role, difference / max(1, compared), outside / max(1, number), missing)
        step.seconds["update"] = step.seconds.pop("step") - step.seconds["generate"] - step.seconds["reward"]
        for phase, seconds in step.seconds.items():
            metrics[f"time/{phase}"].append(seconds)
        for role in trainer.team.trained_roles:
            metrics[f"agents/{role}/loss"].append((losses[role] / num_processes).item())
        for (role, name), mean in means.items():
            metrics[f"agents/{role}/{name}"].append(mean)
        for role, value in router_losses.items():
            metrics[f"agents/{role}/aux_loss"].append(value.item())
        self.totals = StepTotals()
        if self.has_trace:
            self.trace.end_step(trainer.state.global_step + 1)
        return losses

    def check_engine(self, role: str, difference: float, share: float, missing: float) -> None:
        """
        Raises [`EngineError`] if the weights of the engine seem to differ from the trained ones: if the mean
        `difference` between its and the policy's log-probabilities, in nats per token, is too large, too large a
        `share` of ratios is out of bounds, or too many are `missing`.
        """
        if missing > 0.5:
            raise EngineError(f"vLLM returned no log-probabilities for {missing:.0%} of the tokens of agent {role!r}.")
        if difference <= LARGEST_DIFFERENCE and share < LARGEST_SHARE_OUTSIDE:
            return
        trainer = self.trainer
        problem = (
            f"Step {trainer.state.global_step + 1}: the log-probabilities with which vLLM sampled for agent {role!r} "
            f"differ from the policy's by {difference:.2f} nats per token, and {share:.0%} of the ratios are "
            "outside of "
            f"the bounds of the sampling correction (limits: {LARGEST_DIFFERENCE} nats, {LARGEST_SHARE_OUTSIDE:.0%}). "
            "vLLM has other weights than the trainer: restart it with the agent's own model, and resume. If only its "
            "precision differs, set `vllm_importance_sampling_mode: token_truncate`, or weaken `top_p` and the like."
        )
        one_process = trainer.accelerator.num_processes == 1
        raise EngineError(problem if one_process else f"{problem} {trainer._last_complete()}")

    # The run

    def begin(self) -> None:
        """Removes the files of an earlier run from after the step at which this run resumes."""
        trainer = self.trainer
        has_report = any(isinstance(callback, RunReport) for callback in trainer.callback_handler.callbacks)
        self.next_kept = 0 if has_report and trainer.args.process_index == 0 and not self.has_trace else math.inf
        removed = remove_after(self.trace.folder, trainer.state.global_step) if trainer.args.should_save else 0
        if removed and self.has_trace:
            logger.warning(
                f"{removed} files of the trace in {self.trace.folder} had steps of an earlier run that this run "
                f"repeats, after step {trainer.state.global_step}. They were deleted."
            )

    def show_completions(self) -> None:
        """
        Shows the latest completions in the terminal and in the tables of trackers. All processes must call this
        function.
        """
        if self.shown_rows is None:
            return
        trainer, rows = self.trainer, gather_object(self.shown_rows)
        self.shown_rows = None
        if rows and trainer.accelerator.is_main_process:
            print_completions(rows, trainer.num_completions_to_print)
            log_completion_tables(rows, trainer.args, trainer.log_unique_prompts)

    def write_cost(self) -> None:
        """Writes the cost of the training, so that another training can have the same cost."""
        trainer = self.trainer
        cost = {"env_steps": trainer.env_step, "generated_tokens": trainer.generated_tokens}
        folder = Path(trainer.args.output_dir)
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / COST_FILE, {**cost, "optimizer_steps": trainer.state.global_step})


def sum_over_processes(
    accelerator: Accelerator, groups: Sequence[Mapping[Any, torch.Tensor]]
) -> list[dict[Any, torch.Tensor]]:
    """
    Sums numbers and vectors over processes in one reduction. Their names are the same in all processes. Returns
    vectors on the CPU.
    """
    tensors = [tensor.flatten().float() for group in groups for tensor in group.values()]
    total = accelerator.reduce(torch.cat(tensors), "sum").cpu()
    parts = iter(total.split([len(tensor) for tensor in tensors]))
    return [{name: next(parts) for name in group} for group in groups]


def add_task_metrics(
    trainer: Any, mode: str, levels: list[list[Node]], reported: dict[str, list[float]] | None = None
) -> RolloutTotals:
    """
    Adds the results of the agents in the trainer's environment to its next log entry, and returns the totals of all
    processes. `levels`: the nodes of each turn that this process played. `reported`: the metrics that reward functions
    logged about these nodes.
    """
    team, metrics = trainer.team, trainer._metrics[mode]
    with fail_together(trainer.accelerator):
        scoring = scoring_metrics(trainer.environment)
        end_tokens = {role: team.end_tokens(role) for role in team.roles}
        own = rollout_totals(levels, end_tokens, scoring, training=mode == "train", logged=reported)
    totals = shown = sum_totals(gather_object([own]))
    for name, value in totals.scoring.items():
        metrics[f"reward/{name}"].append(value)
    if mode == "eval":  # every item counts the same, however they were split into batches
        trainer._evaluated.append(totals)
        shown = sum_totals(trainer._evaluated)
    for name, value in shown.metrics().items():
        metrics[name] = [value] if mode == "eval" else [*metrics[name], value]
    return totals


@dataclass(eq=False)
class Alarms(TrainerCallback):
    """
    Raises alarms. If the reward of an evaluation drops, `on_cliff` ends the training; with `"rollback"`, the best team
    is kept.
    """

    roles: Sequence[str]
    has_siblings: bool  # whether a node has several joint actions
    # Metrics of the environment that are near zero if something is wrong, each with a description of the problem
    watched_metrics: Mapping[str, str] = field(default_factory=dict)
    on_cliff: str | None = None  # or `"stop"` or `"rollback"`
    cliff_drop: float = 0.3  # share of the best reward of an evaluation whose loss is a drop
    is_chain: bool = False  # whether only one joint action of a node is continued

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: Any, **kwargs: Any) -> None:
        path = Path(args.output_dir) / ALARMS_FILE
        if state.is_world_process_zero and path.is_file():  # a resumed run repeats the alarms after its checkpoint
            lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
            # A process that was killed may have left its last line unfinished
            complete = [line for line in lines if line.endswith("\n")]
            kept = [line for line in complete if json.loads(line)["step"] <= state.global_step]
            write_text(path, "".join(kept))

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if state.is_world_process_zero and "reward" in state.log_history[-1]:
            latest_first = (log for log in reversed(state.log_history) if "reward" in log)
            logs = [*itertools.islice(latest_first, WINDOW + 1)][::-1]  # the whole history would be read at every step
            limit = args.max_completion_length
            before = self.conditions(logs[:-1][-WINDOW:], limit)
            found = self.conditions(logs[-WINDOW:], limit)
            raised = {name: text for name, text in found.items() if name not in before}
            self._raise(raised, args, state)

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: Any, **kwargs: Any) -> None:
        # With several evaluation sets, this is called after each of them, and each has its own reward
        name = next((name for name in kwargs["metrics"] if EVALUATION_REWARD.fullmatch(name)), "eval_reward")
        rewards = [log[name] for log in state.log_history if name in log]
        if not is_cliff(rewards, self.cliff_drop):
            return
        text = (
            f"The reward of the evaluation ({name}) fell from {max(rewards[:-1]):.3g}, the best so far, to "
            f"{rewards[-1]:.3g}."
        )
        if self.on_cliff is not None:
            control.should_training_stop = True
            text += " The training ends here (`on_cliff`)."
        elif is_cliff(rewards[:-1], self.cliff_drop):
            return  # the alarm was raised when it began
        if state.is_world_process_zero:
            self._raise({"cliff": text}, args, state)

    def conditions(self, logs: Sequence[Log], limit: int) -> dict[str, str]:
        """
        Returns the alarm conditions that hold in all of 20 successive log entries, with a message for each.
        Completions count as broken after fewer entries. `limit`: the largest number of tokens of a completion.
        """
        found = self.broken(logs, limit)
        if len(logs) < WINDOW:
            return found
        if self.has_siblings and always(logs, "frac_reward_zero_std", at_least=NO_SIGNAL):
            found["no_signal"] = (
                f"In the last {WINDOW} log entries, the joint actions of nearly all nodes had equal returns, so the "
                "agents learn next to nothing. Check the reward, or raise `num_generations` or `temperature`."
            )
        if self.is_chain and always(logs, "turn_2/reward_mean") and always(logs, "turn_1/reward_mean", 0.0, 0.0):
            found["chain"] = (
                f"In the last {WINDOW} log entries, all rewards of turn 1 were 0. In a chain, the return of a turn is "
                "its own reward, so nothing is learned there. Remove `handoff`, or set `branching` to 'episodes'."
            )
        variance = mean_of(logs, "team/reward_variance")
        for role in self.roles:
            if always(logs, f"agents/{role}/completions/most_common_ratio", at_least=COLLAPSED):
                found[f"collapse/{role}"] = (
                    f"In the last {WINDOW} log entries, agent {role!r} almost always gave the same answer, whatever "
                    "the item. Lower `learning_rate`, or set `beta`."
                )
            own = mean_of(logs, f"agents/{role}/total_contribution")
            if variance is not None and own is not None and variance > 0 and own <= NO_CONTRIBUTION * variance:
                found[f"no_contribution/{role}"] = (
                    f"In the last {WINDOW} log entries, the reward hardly depended on the answers of agent {role!r}: "
                    "it contributes nothing, or the others ignore it."
                )
        for name, meaning in self.watched_metrics.items():
            if always(logs, f"turn_1/{name}", at_most=NEARLY_NEVER):
                found[f"low/{name}"] = f"In the last {WINDOW} log entries, turn_1/{name} was nearly zero: {meaning}."
        return found

    def broken(self, logs: Sequence[Log], limit: int) -> dict[str, str]:
        """Returns the agents whose completions repeat themselves or never end, with a message for each."""
        last = logs[-1]["step"] if logs else 0
        recent = [log for log in logs if log["step"] > last - BROKEN_STEPS]
        logs = logs[-max(BROKEN_ENTRIES, len(recent)) :]
        found = {}
        for role in self.roles if len(logs) >= BROKEN_ENTRIES and last >= BROKEN_STEPS else ():
            since = f"Since step {logs[0]['step']} or longer, nearly all completions of agent {role!r}"
            name = f"agents/{role}/completions"
            if always(logs, f"{name}/repetition", at_least=REPEATED):
                found[f"repetition/{role}"] = (
                    f"{since} repeat themselves: its training has probably destroyed it. Lower `learning_rate`, or "
                    "set `beta`."
                )
            if limit >= SHORT and always(logs, f"{name}/clipped_ratio", at_least=CUT_OFF):
                found[f"cut_off/{role}"] = (
                    f"{since} are cut off at `max_completion_length`, {limit} tokens. If it ended its answers before, "
                    "lower `learning_rate`. Otherwise, raise the limit, ask for short answers, or set `stop_strings`."
                )
        return found

    def _raise(self, alarms: Mapping[str, str], args: TrainingArguments, state: TrainerState) -> None:
        path = Path(args.output_dir) / ALARMS_FILE
        for name, text in alarms.items():
            logger.warning("Step %d: %s", state.global_step, text)
            path.parent.mkdir(parents=True, exist_ok=True)
            with naming(path), path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"step": state.global_step, "alarm": name, "message": text}) + "\n")


def always(logs: Iterable[Log], name: str, at_least: float = float("-inf"), at_most: float = float("inf")) -> bool:
    """Returns whether a metric is in all log entries and within bounds in each."""
    return all(name in log and at_least <= log[name] <= at_most for log in logs)


def mean_of(logs: Sequence[Log], name: str) -> float | None:
    """Returns the mean of a metric over log entries; `None` if one of them lacks it."""
    return fmean(log[name] for log in logs) if all(name in log for log in logs) else None


def is_cliff(rewards: Sequence[float], drop: float) -> bool:
    """
    Returns whether the last reward is lower than the best earlier one by more than the share `drop` of the latter.
    """
    if len(rewards) < 2:
        return False
    best = max(rewards[:-1])
    return best - rewards[-1] > drop * abs(best)
