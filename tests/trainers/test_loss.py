"""The policy loss as a function of tensors, against that of TRL's GRPOTrainer on the same tensors."""

from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch
from trl import GRPOTrainer

from trl_multiagent import MAGRPOConfig
from trl_multiagent.trainers.base.batch import AgentTensors
from trl_multiagent.trainers.base.loss import policy_loss


LENGTHS = [5, 1, 3, 0]  # the last row is padding
READ = ("loss_type", "importance_sampling_level", "beta", "max_completion_length")


def random_rows() -> tuple[torch.Tensor, torch.Tensor, AgentTensors]:
    torch.manual_seed(0)
    mask = (torch.arange(5) < torch.tensor(LENGTHS).unsqueeze(1)).long()
    old, reference = -3 * torch.rand(4, 5), -3 * torch.rand(4, 5)
    logps = old + 0.2 * torch.randn(4, 5)  # some ratios are clipped
    sampling = old + 0.3 * torch.randn(4, 5)
    sampling[0, 1] = torch.nan
    ids = torch.ones(4, 5, dtype=torch.long)
    rows = AgentTensors(ids[:, :2], ids[:, :2], ids, mask, torch.tensor([1.5, -0.5, 0.25, 0.0]), torch.zeros(4))
    rows.old_logps, rows.ref_logps, rows.sampling_logps = old, reference, sampling
    rows.num_rows, rows.num_tokens = 4, float(mask.sum())
    return logps.requires_grad_(), torch.rand(4, 5), rows


def loss_of_trl(logps, entropy, rows, args, correction):
    """GRPOTrainer's own method, on an object that has what the method reads."""
    trainer = SimpleNamespace(
        **{name: getattr(args, name) for name in READ},
        args=args,
        epsilon_low=args.epsilon,
        epsilon_high=args.epsilon if args.epsilon_high is None else args.epsilon_high,
        use_vllm=correction is not None,
        vllm_importance_sampling_correction=True,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        aux_loss_enabled=False,
        _entropy_bonus_enabled=False,
        current_gradient_accumulation_steps=1,
        model=SimpleNamespace(training=True),
        accelerator=SimpleNamespace(num_processes=1, reduce=lambda x, reduction: x, gather=lambda x: x),
        _metrics={"train": defaultdict(list)},
        _get_per_token_logps_and_entropies=lambda *_, **__: (logps, entropy, None),
    )
    inputs = {name: getattr(rows, name) for name in ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask")}
    inputs |= {"advantages": rows.advantages, "old_per_token_logps": rows.old_logps}
    inputs |= {"ref_per_token_logps": rows.ref_logps, "importance_sampling_ratio": correction}
    inputs["num_items_in_batch"] = torch.tensor(rows.num_tokens)
    return GRPOTrainer._compute_loss(trainer, None, inputs), trainer._metrics["train"]


CASES = {
    "plain": {},
    "clipped": {"epsilon": 0.1, "epsilon_high": 0.3, "delta": 1.5},
    "reference": {"beta": 0.2},
    "unbiased reference": {"beta": 0.2, "use_bias_correction_kl": True},
    "sampling": {"vllm_importance_sampling_mode": "token_mask"},
    "sampling of sequences": {"vllm_importance_sampling_mode": "sequence_truncate", "beta": 0.2},
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("loss_type", ["luspo", "grpo", "dr_grpo", "dapo"])
def test_the_loss_equals_that_of_trl(tmp_path, loss_type, level, case):
    changes = {"bf16": False, "use_cpu": True, "num_iterations": 2, "report_to": "none", "items_per_device": 1}
    args = MAGRPOConfig(str(tmp_path), loss_type=loss_type, importance_sampling_level=level, **changes)
    for name, value in CASES[case].items():  # some need vLLM as arguments
        setattr(args, name, value)
    logps, entropy, rows = random_rows()
    correction = None
    if "sampling" in case:
        mode = args.vllm_importance_sampling_mode.split("_")
        difference = (rows.old_logps - rows.sampling_logps).nan_to_num(nan=0.0) * rows.completion_mask
        correction = (difference.sum(1, keepdim=True) if mode[0] == "sequence" else difference).exp()
        high = args.vllm_importance_sampling_clip_max
        correction = correction.clamp(max=high) if mode[1] == "truncate" else correction * (correction <= high)
    else:
        rows.sampling_logps = None
    computed = policy_loss(logps, entropy, rows, args)
    loss, sums = computed.loss, computed.sums
    (gradient,) = torch.autograd.grad(loss, logps)
    expected, metrics = loss_of_trl(logps, entropy, rows, args, correction)
    (expected_gradient,) = torch.autograd.grad(expected, logps)
    assert torch.allclose(loss, expected, rtol=1e-6) and torch.allclose(gradient, expected_gradient, atol=1e-7)
    assert gradient.any() and (gradient * (1 - rows.completion_mask) == 0).all()
    names = ["entropy", "kl"] if args.beta else ["entropy"]
    names += [name for name in sums if name.startswith("clip") and level == "token"]
    for name in names:
        assert sums[name] / sum(LENGTHS) == pytest.approx(metrics[name][0], rel=1e-5), name
