"""
The policy loss of one agent, as a function of tensors.

With the completion's advantage A, the loss of its token t is

    l_t  = -min(min(r_t, delta) A,  clip(r_t, 1 - epsilon, 1 + epsilon_high) A) c_t  +  beta KL_t
    r_t  = pi(t) / pi_old(t)
    KL_t = pi_ref(t) / pi(t) - log(pi_ref(t) / pi(t)) - 1

- `importance_sampling_level="sequence"`: r_t is the geometric mean of the ratios of the completion's tokens
  ([GSPO](https://huggingface.co/papers/2507.18071)).
- `use_bias_correction_kl`: KL_t is multiplied by r_t.
- c_t is 1, or with vLLM or `rollouts_ahead` the factor of [`sampling_correction`].

In the first optimizer step on a batch, pi_old is the current policy and r_t is 1, so the gradient of r_t equals the
gradient of log pi(t).

The loss of the rows, with T tokens in a completion that count, is

| `loss_type` | loss | paper |
| --- | --- | --- |
| `"luspo"` | mean over rows of sum_t l_t | [LUSPO](https://huggingface.co/papers/2602.05261) |
| `"grpo"` | mean over rows of (1 / T) sum_t l_t | [GRPO](https://huggingface.co/papers/2402.03300) |
| `"dr_grpo"` | mean over rows of sum_t l_t / length limit | [Dr. GRPO](https://huggingface.co/papers/2503.20783) |
| `"dapo"` | mean over the tokens of all rows of l_t | [DAPO](https://huggingface.co/papers/2503.14476) |

Tests compare it with the losses of TRL's `GRPOTrainer` and `RLOOTrainer`.
"""

import math
from dataclasses import dataclass

import torch

from trl_multiagent.trainers.base.batch import AgentTensors
from trl_multiagent.trainers.base.rollout_config import RolloutConfig


@dataclass
class PolicyLoss:
    """The loss of one agent on the rows of a micro-batch, and its metrics."""

    loss: torch.Tensor  # a scalar
    # `tokens`: the number of those that count, and sums of metrics over them. `ratios`: see [`sampling_correction`]
    sums: dict[str, torch.Tensor]


def policy_loss(logps: torch.Tensor, entropy: torch.Tensor, rows: AgentTensors, args: RolloutConfig) -> PolicyLoss:
    """
    Computes the loss of one agent on the rows of a micro-batch. The loss of the batch is the sum over a
    process's micro-batches, averaged over the processes.

    The loss is additive: the losses of complementary parts of `rows.completion_mask` add up to the loss of the whole
    mask, if each part contains entire rows.

    Args:
        logps, entropy (`torch.Tensor` of shape `(num_rows, completion_length)`):
            Log-probability, in nats, and entropy of the policy for every token of the completions.
    """
    mask = rows.completion_mask
    old = logps.detach() if rows.old_logps is None else rows.old_logps
    per_token, ratios, factors = {"entropy": entropy}, {}, None
    if rows.sampling_logps is not None:
        factors, ratios["ratios"] = sampling_correction(old, rows.sampling_logps, mask, args)
        if not args.vllm_importance_sampling_correction:  # the log-probabilities are only compared
            factors, ratios["ratios"][0] = None, 0
    log_ratio = logps - old
    if args.importance_sampling_level == "sequence":  # the mean over the completion's tokens
        log_ratio = ((log_ratio * mask).sum(-1) / mask.sum(-1).clamp(min=1.0)).unsqueeze(-1)
    ratio = torch.exp(log_ratio)
    advantages = rows.advantages if rows.advantages.dim() > 1 else rows.advantages.unsqueeze(1)

    low, high = 1 - args.epsilon, 1 + (args.epsilon if args.epsilon_high is None else args.epsilon_high)
    bounded = ratio if args.delta is None else ratio.clamp(max=args.delta)
    losses = -torch.min(bounded * advantages, ratio.clamp(low, high) * advantages)
    if factors is not None:
        losses = losses * factors
    if args.beta != 0.0:
        assert rows.ref_logps is not None
        kl = torch.exp(rows.ref_logps - logps) - (rows.ref_logps - logps) - 1
        if args.use_bias_correction_kl:
            kl = kl * ratio
        losses = losses + args.beta * kl
        per_token["kl"] = kl
    if args.num_iterations > 1:
        is_low, is_high = (bounded < low) & (advantages < 0), (bounded > high) & (advantages > 0)
        per_token["clip_ratio/low_mean"] = is_low.float()
        per_token["clip_ratio/high_mean"] = is_high.float()
        per_token["clip_ratio/region_mean"] = (is_low | is_high).float()
    sums = {name: (x.detach() * mask).sum() for name, x in per_token.items()}
    return PolicyLoss(normalized(losses, rows, args), {"tokens": mask.sum(), **sums, **ratios})


def normalized(losses: torch.Tensor, rows: AgentTensors, args: RolloutConfig) -> torch.Tensor:
    """
    Normalizes the losses of the tokens, of shape `(num_rows, completion_length)` or `(num_rows, 1)`, by `loss_type`,
    and sums them.
    """
    losses = losses * rows.completion_mask
    if args.loss_type == "dapo":
        return losses.sum() / rows.num_tokens
    if args.loss_type == "grpo":
        losses = losses.sum(-1) / rows.completion_mask.sum(-1).clamp(min=1.0)
    elif args.loss_type == "dr_grpo":
        losses = losses / args.max_completion_length
    return losses.sum() / rows.num_rows


def sampling_correction(
    logps: torch.Tensor, sampling_logps: torch.Tensor, mask: torch.Tensor, args: RolloutConfig
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Computes the bounded importance sampling ratio of the policy over the engine, or the earlier policy, that sampled a
    completion, as TRL's GRPO does.

    Args:
        logps, sampling_logps, mask (`torch.Tensor` of shape `(num_rows, completion_length)`):
            Log-probabilities of the tokens under the policy, and as they were sampled, and the mask of the tokens that
            count. A token with NaN in `sampling_logps` is not corrected.

    Returns:
        `tuple[torch.Tensor, torch.Tensor]`: Factors of the loss, of shape `(num_rows, 1)` in the `"sequence_*"` modes,
        else of the shape of `logps`; and six numbers: the number of ratios outside of the bounds, the number of all
        ratios, the sum of the absolute differences of the log-probabilities, the number of tokens in this sum, the
        number of tokens that count, and the sum of all ratios.
    """
    granularity, constraint = args.vllm_importance_sampling_mode.split("_")
    low, high = args.vllm_importance_sampling_clip_min, args.vllm_importance_sampling_clip_max
    low, high = -math.inf if low is None else low, math.inf if high is None else high
    difference = (logps.detach() - sampling_logps) * mask
    counts = mask.bool() & ~difference.isnan()
    difference = difference.nan_to_num(nan=0.0)
    compared = torch.stack([difference.abs().sum(), counts.sum(), mask.sum()])
    if granularity == "sequence":
        difference, counts = difference.sum(dim=1, keepdim=True), counts.any(dim=1, keepdim=True)
    ratio = difference.exp()
    outside = (ratio < low) | (ratio > high)
    factors = ratio.clamp(low, high) if constraint == "truncate" else ratio.masked_fill(outside, 0.0)
    of_ratios = torch.stack([(outside & counts).sum(), counts.sum()])
    return factors, torch.cat([of_ratios, compared, (ratio * counts).sum()[None]])
