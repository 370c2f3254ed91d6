"""Reports a training: metrics, the trace, completions in the terminal and in the tables of trackers, and the cost."""

import contextlib
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from transformers.utils import logging

from trl_multiagent.environments.base import scoring_metrics
from trl_multiagent.folders import write_json
from trl_multiagent.jobs.distributed import fail_together
from trl_multiagent.report.trees import choose_trees, trees_of
from trl_multiagent.rollout.trace import TraceRow, trace_rows
from trl_multiagent.rollout.tree import Node
from trl_multiagent.trainers.base.rollout_metrics import RolloutTotals, StepTotals, Total, rollout_totals, sum_totals
from trl_multiagent.trainers.base.run_report import TRACE_FOLDER, TREES_FOLDER, RunReport, harmless
from trl_multiagent.trainers.base.team_trainer import TeamTrainerMixin
from trl_multiagent.trainers.base.trace_files import TraceFiles, remove_after
from trl_multiagent.trainers.base.trackers import log_completion_tables, print_completions
from trl_multiagent.trainers.base.vllm import LARGEST_DIFFERENCE, LARGEST_SHARE_OUTSIDE, EngineError


logger = logging.get_logger(__name__)

COST_FILE = "training_cost.json"  # in the output folder
KEPT_STEPS, KEPT_TREES = 20, 3  # a run without a trace keeps some trees of some steps for its report


class Observer:
    """Observes a trainer that learns from rollout trees, a [`RolloutTrainer`]."""

    def __init__(self, trainer: TeamTrainerMixin):
        self.trainer = trainer
        args = trainer.args
        self.totals = StepTotals()  # of the current optimizer step
        self.reported: dict[str, list[float]] = {}  # metrics of the reward functions on the current batch
        # Rows of this process's latest batch, if completions are logged; `None` once they were shown
        self.shown_rows: list[TraceRow] | None = None
        self.trace: TraceFiles | None = None
        self.next_kept = 0.0  # the next step whose trees are kept for the report
        folder, options = Path(args.output_dir), (args.trace_format, args.trace_max_files)
        if args.trace_steps is not None:
            self.trace = TraceFiles(folder / TRACE_FOLDER, args.process_index, args.trace_steps, *options)
        # Without a trace, a few trees of the first process are kept
        self.trees = TraceFiles(folder / TREES_FOLDER, 0, 1, *options)

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
        is_due = trainer.state.global_step + 1 >= self.next_kept
        keeps_trees = training and is_due and self.trace is None and trainer.args.process_index == 0
        if self.trace is None and not trainer.log_completions and not keeps_trees:
            return
        rows = trace_rows(
            levels,
            trainer.environment.roles,
            advantages,
            step=trainer.state.global_step + training,
            split="train" if training else trainer._eval_prefix,
            process=trainer.accelerator.process_index,
        )
        if self.trace is not None:
            self.trace.add(rows)
        if trainer.log_completions:
            self.shown_rows = rows
        if keeps_trees and rows:
            self.next_kept = rows[0]["step"] + -(-trainer.state.max_steps // KEPT_STEPS)
            with harmless(Path(trainer.args.output_dir)):
                for _, tree in choose_trees(trees_of(rows), KEPT_TREES, rows[0]["step"]):
                    self.trees.add(tree)
                self.trees.flush()

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
        if self.trace is not None:
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
            f"Step {trainer.state.global_step + 1}: the log-probabilities with which vLLM sampled for agent "
            f"{role!r} differ from the "
            f"policy's by {difference:.2f} nats per token, and {share:.0%} of the ratios are outside of the "
            "bounds of the "
            f"sampling correction (at most {LARGEST_DIFFERENCE} nats, less than {LARGEST_SHARE_OUTSIDE:.0%}). "
            "vLLM has other weights "
            "than the trainer: restart it with the agent's own model, without another run that uses it, and "
            "resume. If it has "
            "the right ones, and only its precision differs, long completions need `vllm_importance_sampling_mode: "
            "token_truncate`. `top_p`, `top_k` and `min_p` make a difference, too: weaken them."
        )
        one_process = trainer.accelerator.num_processes == 1
        raise EngineError(problem if one_process else f"{problem} {trainer._last_complete()}")

    # The run

    def begin(self) -> None:
        """Removes the files of an earlier run from after the step at which this run resumes."""
        trainer = self.trainer
        has_report = any(isinstance(callback, RunReport) for callback in trainer.callback_handler.callbacks)
        self.next_kept = 0 if has_report else math.inf
        if not trainer.args.should_save:
            return
        remove_after(self.trees.folder, trainer.state.global_step)
        if self.trace is None:
            return
        removed = remove_after(self.trace.folder, trainer.state.global_step)
        if removed:
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

    def flush(self) -> None:
        """Writes the rows of the trace that are not written yet."""
        if self.trace is not None:
            self.trace.flush()

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
    trainer: TeamTrainerMixin, mode: str, levels: list[list[Node]], reported: dict[str, list[float]] | None = None
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
