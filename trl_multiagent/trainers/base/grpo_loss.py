"""
GRPOTrainer's loss, for one agent of a team at a time.

TRL's `GRPOTrainer._compute_loss` has the ratio, the clipping, the KL penalty and the normalisers that this package wants to
inherit. It was written for one model. Everything that it takes to use it for a team stands in this file:

1. `GRPOTrainer.__init__` would load a reference model, start vLLM and switch dropout off for a single model. It sees other
   arguments while it runs ([`GRPOLossMixin._init_grpo`]).
2. The method calls a model. It is given the outputs of a forward that all agents had together ([`policy_loss`]).
3. It averages over the rows of a micro-batch. Rows that were left out or are padding are made up for by a factor
   ([`GRPOLossMixin._set_loss_scale`]).
4. Its factors for completions that vLLM sampled are computed per model. They are added to the rows ([`_correct_sampling`]).
5. Its metrics are means over one micro-batch. They are weighed with its tokens, and those of the clipping, which never
   happens in an on-policy update, are dropped ([`_add_token_means`]).
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from trl import GRPOConfig
from trl.trainer.utils import FusedCausalLMOutput

from trl_multiagent.models.vllm_generation import sampling_correction
from trl_multiagent.trainers.base.rollout_metrics import StepTotals


class GRPOLossMixin:
    """Part of [`RolloutTrainer`], and before GRPOTrainer in its bases."""

    _loss_scale = 1.0
    _corrects_sampling = False
    _totals: StepTotals

    def _init_grpo(self, args: GRPOConfig, **kwargs: Any) -> None:
        """Initialises GRPOTrainer, without what it would do to a single model."""
        # `luspo` is asked for with sequence-level ratios, because TRL warns of others; they are 1 in an on-policy update
        changes = {"beta": 0.0, "sync_ref_model": False, "use_vllm": False, "disable_dropout": False}
        with _changed(args, router_aux_loss_coef=None, importance_sampling_level="sequence", **changes):
            super().__init__(args=args, **kwargs)
        self.beta = args.beta
        self.use_vllm = args.use_vllm
        self.importance_sampling_level = args.importance_sampling_level
        self.aux_loss_enabled = False  # GRPO's is one of each micro-batch; see `models.router_loss`
        self._corrects_sampling = args.use_vllm and args.vllm_importance_sampling_correction
        # GRPOTrainer patched the forward of the team; the log-probabilities come from the agents' own
        del self.team.__dict__["forward"]

    def _set_loss_scale(self, num_rows: int, num_trained_rows: int) -> None:
        """
        Makes the mean over the micro-batches' rows a mean over the batch's real rows.

        Args:
            num_rows (`int`): Rows of all micro-batches of all processes, padding included.
            num_trained_rows (`int`): Rows that the batch's trees have, those that were left out included.
        """
        if self.loss_type != "dapo":  # which divides by the number of tokens of the whole batch
            self._loss_scale = num_rows / num_trained_rows

    def policy_loss(self, role: str, outputs: FusedCausalLMOutput, rows: dict[str, torch.Tensor]) -> torch.Tensor:
        """
        GRPOTrainer's loss of one agent's rows. With `loss_type="luspo"`, the default, it is the mean over rows of

            sum over the completion's tokens t of  -A * r_t  +  beta * KL_t,    r_t = pi(t) / pi_old(t)

        whose gradient is that of -A * log pi(t), because the update is on-policy: pi_old is pi, and r_t is 1.

        Args:
            role (`str`): The agent.
            outputs ([`~trl.trainer.utils.FusedCausalLMOutput`]): Its `log_probs` and `entropy` of the rows.
            rows (`dict[str, torch.Tensor]`): Its rows, see [`~trainers.base.rows.agent_tensors`].

        Returns:
            `torch.Tensor`: a scalar. The sum over micro-batches, averaged over processes, is the loss of the batch.
        """
        if self._corrects_sampling:
            rows = self._correct_sampling(role, outputs.log_probs, rows)
        with self.agent_scope(role):
            loss = self._compute_loss(lambda **_: outputs, rows) * self._loss_scale
            self._add_token_means(role, rows)
        return loss

    def _correct_sampling(
        self, role: str, logps: torch.Tensor, rows: dict[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """Adds the factors that make up for vLLM's log-probabilities not being the policy's own."""
        logps, mask = logps[:, -rows["completion_ids"].size(1) :], rows["completion_mask"]
        difference = ((logps.detach() - rows["sampling_per_token_logps"]).abs() * mask).nan_to_num(nan=0.0).sum()
        total = self.accelerator.reduce(difference, "sum").item()
        self._totals.token_sums[role, "sampling_logp_difference"] += total
        return {**rows, "importance_sampling_ratio": sampling_correction(logps, rows, self.args)}

    def _add_token_means(self, role: str, rows: dict[str, torch.Tensor]) -> None:
        """Adds up GRPO's means over the tokens of a micro-batch, which may hold few tokens or none."""
        metrics = self._metrics["train"]
        tokens = self.accelerator.reduce(rows["completion_mask"].sum().float(), "sum").item()
        self._totals.tokens[role] += tokens
        for name in ("entropy", "kl") if self.beta != 0.0 else ("entropy",):
            self._totals.token_sums[role, name] += metrics.pop(name)[0] * tokens
        for name in [name for name in metrics if name.startswith("clip_ratio/")]:
            del metrics[name]


@contextlib.contextmanager
def _changed(args: GRPOConfig, **values: Any) -> Iterator[None]:
    """Gives some arguments other values for a while."""
    saved = {name: getattr(args, name) for name in values}
    for name, value in values.items():
        setattr(args, name, value)
    try:
        yield
    finally:
        for name, value in saved.items():
            setattr(args, name, value)
