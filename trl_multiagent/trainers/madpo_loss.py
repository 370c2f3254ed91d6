"""
The loss of MADPO, as a function of the joint log-ratios of a pair.

With the joint log-ratios c of the chosen and r of the rejected answer, which are sums over the agents and over the
tokens of log pi - log ref, the losses are functions of D = f'(c) - f'(r), or of c and r. f' is the identity for the
reverse KL divergence. Tests compare them with TRL's `DPOTrainer`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch.nn.functional import logsigmoid
from trl.trainer.utils import FusedCausalLMOutput

from trl_multiagent.trainers.madpo_config import MADPOConfig


@dataclass
class Answers:
    """
    The answers of an agent, or the joint answers of a team, in a micro-batch of B pairs: first all chosen answers,
    then all rejected ones. The fields are sums over the tokens of an answer, of shape `(2B,)`. For joint answers, they
    are also sums over the agents.
    """

    logps: torch.Tensor  # log-probabilities under the policy, in nats
    ref_logps: torch.Tensor  # under the reference policy
    lengths: torch.Tensor  # numbers of tokens
    entropy: torch.Tensor  # this and the next two fields are for TRL's metrics
    mean_logits: torch.Tensor
    is_top1: torch.Tensor
    alignment: torch.Tensor  # for `use_weighting`, log p(t) - log sum_v p(v)^2; else zero

    @classmethod
    def of_agent(cls, output: FusedCausalLMOutput, ref_logps: torch.Tensor) -> Answers:
        """Sums an agent's outputs, which are zero outside of the answers."""
        per_token = (output.log_probs, output.label_mask, output.entropy, output.mean_logits, output.is_top1)
        logps, lengths, entropy, mean_logits, is_top1 = (x.sum(dim=1) for x in per_token)
        alignment = torch.zeros_like(logps)
        if output.log_sum_sq_probs is not None:
            alignment = (output.log_probs - output.log_sum_sq_probs).sum(dim=1)
        statistics = (x.detach() for x in (entropy, mean_logits, is_top1, alignment))
        return cls(logps, ref_logps, lengths, *statistics)

    @classmethod
    def joint(cls, answers: Iterable[Answers]) -> Answers:
        """Joins the answers of all agents."""
        return cls(*map(sum, zip(*(vars(agent).values() for agent in answers), strict=True)))

    @property
    def log_ratios(self) -> torch.Tensor:
        return self.logps - self.ref_logps

    def metrics(self, weights: torch.Tensor, beta: float) -> dict[str, tuple[float, float]]:
        """
        Computes the metrics of TRL's `DPOTrainer`: mean and weight of each. `weights`, of shape `(B,)`, has 0 for
        repeated pairs.
        """
        both, pairs = weights.repeat(2), torch.ones_like(weights)

        def sums(values: torch.Tensor, counts: torch.Tensor, weights: torch.Tensor = weights) -> torch.Tensor:
            return torch.stack([(values.detach() * weights).sum(), (counts * weights).sum()])

        logps, lengths, mean_logits = self.logps.chunk(2), self.lengths.chunk(2), self.mean_logits.chunk(2)
        chosen, rejected = (beta * self.log_ratios).chunk(2)
        change = self.log_ratios.chunk(2)[0] / lengths[0].clamp(min=1)
        metrics = {
            "entropy": sums(self.entropy, self.lengths, both),
            "mean_token_accuracy": sums(self.is_top1.chunk(2)[0], lengths[0]),
            "logits/chosen": sums(mean_logits[0], lengths[0]),
            "logits/rejected": sums(mean_logits[1], lengths[1]),
            "logps/chosen": sums(logps[0], pairs),
            "logps/rejected": sums(logps[1], pairs),
            "logps/chosen_change": sums(change, pairs),
            "rewards/chosen": sums(chosen, pairs),
            "rewards/rejected": sums(rejected, pairs),
            "rewards/margins": sums(chosen - rejected, pairs),
            "rewards/accuracies": sums((chosen > rejected).float(), pairs),
        }
        totals = torch.stack([*metrics.values()]).tolist()
        return {name: (x / count if count else 0.0, count) for name, (x, count) in zip(metrics, totals, strict=True)}


def preference_losses(answers: Answers, args: MADPOConfig) -> torch.Tensor:
    """
    Computes the loss of each pair, of shape `(B,)`: the weighted sum over `loss_type`, without `"sft"`.
    `use_weighting` weighs a pair by the likelihood of its answers ([WPO](https://huggingface.co/papers/2406.11827)).
    """
    losses = torch.zeros_like(answers.logps.chunk(2)[0])
    for loss_type, weight in args.weighted_losses:
        if loss_type != "sft":
            losses = losses + weight * pair_losses(loss_type, answers, args)
    if args.use_weighting:
        chosen, rejected = torch.exp(answers.alignment / answers.lengths.clamp(min=1)).chunk(2)
        losses = losses * chosen * rejected
    return losses


def pair_losses(loss_type: str, answers: Answers, args: MADPOConfig) -> torch.Tensor:
    """
    Computes one of the losses for each pair, of shape `(B,)`. `label_smoothing` is the share of wrongly labelled
    pairs.
    """
    beta, smoothing = args.beta, args.label_smoothing
    scores = divergence_scores(answers.log_ratios, args)
    if loss_type in ("ipo", "sigmoid_norm"):
        scores = scores / answers.lengths.clamp(min=1)
    delta = torch.sub(*scores.chunk(2))
    logits = beta * delta
    chosen, rejected = answers.log_ratios.chunk(2)
    match loss_type:
        case "sigmoid" | "sigmoid_norm":  # DPO, https://huggingface.co/papers/2305.18290
            return -logsigmoid(logits)
        case "hinge":  # SLiC, https://huggingface.co/papers/2309.06657
            return torch.relu(1 - logits)
        case "ipo":  # https://huggingface.co/papers/2310.12036
            return (delta - 1 / (2 * beta)) ** 2
        case "exo_pair":  # https://huggingface.co/papers/2402.00856, Eq. 16
            first = torch.sigmoid(logits) * (logsigmoid(logits) - math.log1p(-smoothing))
            return first + torch.sigmoid(-logits) * (logsigmoid(-logits) - math.log(smoothing))
        case "robust":  # https://huggingface.co/papers/2403.00409
            clean, flipped = (1 - smoothing) * logsigmoid(logits), smoothing * logsigmoid(-logits)
            return (flipped - clean) / (1 - 2 * smoothing)
        case "discopop":  # https://huggingface.co/papers/2406.08414, Eq. 5
            share = torch.sigmoid(logits / args.discopop_tau)
            return -logsigmoid(logits) * (1 - share) + torch.exp(-logits) * share
        case "nca_pair":  # https://huggingface.co/papers/2402.05369
            pushed_down = logsigmoid(-beta * chosen) + logsigmoid(-beta * rejected)
            return -logsigmoid(beta * chosen) - 0.5 * pushed_down
        case "bco_pair":  # https://huggingface.co/papers/2404.04656
            return -logsigmoid(beta * chosen) - logsigmoid(-beta * rejected)
        case "sppo_hard":  # https://huggingface.co/papers/2405.00675, Eq. 4.7 with the probabilities 1 and 0
            return (chosen - 0.5 / beta) ** 2 + (rejected + 0.5 / beta) ** 2
        case "apo_zero":  # https://huggingface.co/papers/2408.06266, Eq. 7
            return 1 - torch.sigmoid(beta * chosen) + torch.sigmoid(beta * rejected)
        case "apo_down":  # Eq. 8 of the same paper
            return torch.sigmoid(beta * chosen) + 1 - torch.sigmoid(beta * (chosen - rejected))
    raise ValueError(f"Unknown loss type {loss_type!r}.")


def divergence_scores(log_ratios: torch.Tensor, args: MADPOConfig) -> torch.Tensor:
    """
    Computes f'(t) for the f-divergence of `args` ([f-DPO](https://huggingface.co/papers/2309.16240)), where log t is
    `log_ratios`.
    """
    if args.f_divergence_type == "forward_kl":
        return 1 - torch.exp(-log_ratios)
    if args.f_divergence_type == "js_divergence":
        return math.log(2) + logsigmoid(log_ratios)
    power = args.f_alpha_divergence_coef - 1
    if args.f_divergence_type == "reverse_kl" or abs(power) < 1e-6:  # the limit of the alpha-divergence
        return log_ratios
    return (torch.exp((power * log_ratios).float().clamp(max=80)) - 1) / power  # the exponential of 80 is still finite
