"""
GRPOTrainer's loss, computed for one agent of a team at a time.

TRL's `GRPOTrainer._compute_loss` provides the probability ratio, the clipping, the KL penalty and the normalizers. It
expects a single model. This file holds all the adaptations that a team needs:

1. `GRPOTrainer.__init__` would load a reference model, start vLLM and disable dropout for a single model. Some
   arguments therefore have other values while it runs ([`GRPOLossMixin._init_grpo`]).
2. `_compute_loss` calls a model. Instead, it receives the outputs of one forward pass of the whole team
   ([`GRPOLossMixin.policy_loss`]).
3. `_compute_loss` averages over the rows of a micro-batch. A factor corrects for rows that were left out and for
   padding rows ([`GRPOLossMixin._set_loss_scale`]).
4. GRPOTrainer computes the importance sampling ratios of vLLM's completions for a single model. Here they are
   computed per agent and added to the rows ([`GRPOLossMixin._correct_sampling`]).
5. GRPOTrainer's metrics are means over one micro-batch. Here they are weighted by the number of tokens. The clipping
   metrics are dropped if a batch is used once, because an on-policy update never clips
   ([`GRPOLossMixin._add_token_means`]).
"""

from typing import TYPE_CHECKING, Any

import torch
from trl import GRPOConfig
from trl.trainer.utils import FusedCausalLMOutput

from trl_multiagent.models.vllm_generation import (
    LARGEST_DIFFERENCE,
    LARGEST_SHARE_OUTSIDE,
    EngineError,
    sampling_correction,
)
from trl_multiagent.trainers.base.rollout_metrics import StepTotals
from trl_multiagent.trainers.base.team_config import temporarily_set


if TYPE_CHECKING:
    from trl import GRPOTrainer as Base
else:
    Base = object  # the trainer itself follows in the bases of the class that mixes this in


class GRPOLossMixin(Base):
    """Part of [`RolloutTrainer`]. It precedes GRPOTrainer in the bases."""

    _loss_scale = 1.0
    _corrects_sampling = False
    _totals: StepTotals

    def _init_grpo(self, args: GRPOConfig, **kwargs: Any) -> None:
        """Initializes GRPOTrainer without what it would do to a single model."""
        changes: dict[str, Any] = {"beta": 0.0, "sync_ref_model": False, "use_vllm": False, "disable_dropout": False}
        changes["router_aux_loss_coef"] = None
        if (
            args.loss_type == "luspo"
        ):  # with it, TRL warns about token-level ratios. On-policy ratios are 1 at any level
            changes["importance_sampling_level"] = "sequence"
        with temporarily_set(args, **changes):
            super().__init__(args=args, **kwargs)
        self.beta = args.beta
        self.use_vllm = args.use_vllm
        self.importance_sampling_level = args.importance_sampling_level
        self.aux_loss_enabled = False  # GRPOTrainer's is computed per micro-batch; see `models.router_loss`
        self._corrects_sampling = args.use_vllm and args.vllm_importance_sampling_correction
        # GRPOTrainer patched the team's forward to return log-probabilities. The forwards of the agents do that
        del self.team.__dict__["forward"]

    def _set_loss_scale(self, num_rows: int, num_tree_rows: int) -> None:
        """
        Sets the factor that turns a mean over the rows of the micro-batches into a mean over the rows of the trees.

        Args:
            num_rows (`int`): Rows in all micro-batches of all processes, including padding rows.
            num_tree_rows (`int`): Rows in the trees of all processes, including rows that the update leaves out.
        """
        if self.loss_type != "dapo":  # it divides by the number of tokens of the whole batch
            self._loss_scale = num_rows / num_tree_rows

    def policy_loss(self, role: str, outputs: FusedCausalLMOutput, rows: dict[str, torch.Tensor]) -> torch.Tensor:
        """
        GRPOTrainer's loss on the rows of one agent. With `loss_type="luspo"`, the default, it is the mean over rows of

            sum over the completion's tokens t of  -A * r_t  +  beta * KL_t,    r_t = pi(t) / pi_old(t)

        In the first optimizer step on a batch, pi_old is the current policy and r_t is 1. The gradient of r_t is therefore
        that of log pi(t). With `num_iterations` above 1, r_t changes in the following steps, and -A * r_t becomes
        -min(A * r_t, A * clip(r_t)). `importance_ratio="joint"` multiplies r_t by the ratios of the other agents.

        Only tokens in `completion_mask` count. The loss is additive: the losses of complementary parts of the mask add
        up to the loss of the whole mask, if each part contains entire rows.

        Args:
            role (`str`): The agent.
            outputs ([`~trl.trainer.utils.FusedCausalLMOutput`]): The agent's output for the rows: `log_probs` and
                `entropy`.
            rows (`dict[str, torch.Tensor]`): The agent's rows, see [`~trainers.base.rows.agent_tensors`].

        Returns:
            `torch.Tensor`: A scalar. The loss of the batch is its sum over micro-batches, averaged over processes.
        """
        if self._corrects_sampling:
            rows = self._correct_sampling(role, rows.get("old_per_token_logps", outputs.log_probs), rows)
        if "other_log_ratios" in rows:  # TRL's ratio is exp(current - old)
            old = rows["old_per_token_logps"] - rows["other_log_ratios"].unsqueeze(1)
            rows = {**rows, "old_per_token_logps": old}
        with self.agent_scope(role):
            loss = self._compute_loss(lambda **_: outputs, rows) * self._loss_scale
            self._add_token_means(role, rows)
        return loss

    def _correct_sampling(
        self, role: str, logps: torch.Tensor, rows: dict[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """Adds the ratios that correct for the difference between vLLM's log-probabilities and those of the policy."""
        logps, mask = logps[:, -rows["completion_ids"].size(1) :], rows["completion_mask"]
        difference = ((logps.detach() - rows["sampling_per_token_logps"]).abs() * mask).nan_to_num(nan=0.0).sum()
        factors, counts = sampling_correction(logps, rows, self.args)
        total, outside, ratios = self.accelerator.reduce(
            torch.stack([difference, *counts.to(difference)]), "sum"
        ).tolist()
        self._totals.token_sums[role, "sampling_logp_difference"] += total
        self._totals.ratios_outside[role] += outside
        self._totals.ratios[role] += ratios
        return {**rows, "importance_sampling_ratio": factors}

    def _check_engines(self, step: StepTotals) -> None:
        """
        Ends the run before an update with completions of other weights than those that are trained.

        Raises:
            EngineError: The engine of an agent is too far from the trainer.
        """
        for role in step.ratios:
            difference = step.token_sums[role, "sampling_logp_difference"] / max(1.0, step.tokens[role])
            share = step.ratios_outside[role] / max(1.0, step.ratios[role])
            if difference <= LARGEST_DIFFERENCE and share < LARGEST_SHARE_OUTSIDE:
                continue
            problem = (
                f"Step {self.state.global_step + 1}: the log-probabilities with which vLLM sampled for agent {role!r} differ from the "
                f"policy's by {difference:.2f} nats per token, and {share:.0%} of the ratios are outside of the bounds of the "
                f"sampling correction (at most {LARGEST_DIFFERENCE} nats, less than {LARGEST_SHARE_OUTSIDE:.0%}). vLLM has other weights "
                "than the trainer: restart it with the agent's own model, without another run that uses it, and resume. If it has "
                "the right ones, and only its precision differs, long completions need `vllm_importance_sampling_mode: "
                "token_truncate`."
            )
            raise EngineError(problem if self.accelerator.num_processes == 1 else f"{problem} {self._last_complete()}")

    def _add_token_means(self, role: str, rows: dict[str, torch.Tensor]) -> None:
        """
        Adds GRPOTrainer's token means of a micro-batch to the totals, weighted by the number of tokens (possibly 0).
        """
        metrics = self._metrics["train"]
        tokens = self.accelerator.reduce(rows["completion_mask"].sum().float(), "sum").item()
        self._totals.tokens[role] += tokens
        names = ["entropy"]
        if self.beta != 0.0:
            names.append("kl")
        if self.num_iterations > 1:
            names += ["clip_ratio/low_mean", "clip_ratio/high_mean", "clip_ratio/region_mean"]
        for name in names:
            self._totals.token_sums[role, name] += metrics.pop(name)[0] * tokens
        for name in [name for name in metrics if name.startswith("clip_ratio/")]:
            del metrics[name]
