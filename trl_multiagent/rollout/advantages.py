"""Advantages over the sibling set of a node."""

import torch


def sibling_advantages(
    returns: torch.Tensor, mode: str, normalize: bool = False, num_generations: int | None = None
) -> torch.Tensor:
    """
    Computes the advantage of each sibling over the baseline of its sibling set.

    | `mode` | algorithm | A_g |
    | --- | --- | --- |
    | `"mean"` | MAGRPO ([Dr. GRPO](https://huggingface.co/papers/2503.20783)) | R_g - mean(R) |
    | `"rloo"` | MARLOO ([RLOO](https://huggingface.co/papers/2402.14740)) | R_g - mean of the other siblings |
    | `"max"` | MAReMax ([ReMax](https://huggingface.co/papers/2310.10505)) | R_g - max(R) |
    | `"raw"` | MAREINFORCE | R_g |

    Args:
        returns (`torch.Tensor`):
            Returns R of shape `(..., G)`, siblings in the last dimension. Equal siblings have advantages of exactly
            zero, except in mode `"raw"`. Siblings that are NaN have no reward: they count in no baseline, and their
            advantages are NaN.
        mode (`str`): One of the modes above.
        normalize (`bool`, *optional*, defaults to `False`):
            Whether to subtract the mean of the advantages and divide by their (population) standard deviation. A
            sibling set whose members are all equal gets zeros.
        num_generations (`int`, *optional*): Size G of a complete sibling set, by default that of `returns`. A sibling
            without others has an advantage of zero, except in mode `"raw"`. The baseline of `"mean"` contains the
            sibling's own return, which scales the expected update by (G - 1) / G. A smaller set gets the same scale.

    Returns:
        `torch.Tensor` of the shape of `returns`.
    """
    if returns.isnan().any():
        advantages = returns.clone()
        for row in advantages.view(-1, returns.size(-1)):
            is_known = ~row.isnan()
            if is_known.any():
                row[is_known] = sibling_advantages(row[is_known], mode, normalize, num_generations or len(row))
        return advantages
    equal = (returns == returns[..., :1]).all(-1, keepdim=True)
    mean = torch.where(equal, returns, returns.mean(-1, keepdim=True))  # exact for equal siblings, without rounding
    size = returns.size(-1)
    if mode == "mean":
        full = num_generations or size
        advantages = (returns - mean) * (size * (full - 1) / max(1, full * (size - 1)))
    elif mode == "rloo":
        advantages = (returns - mean) * size / max(1, size - 1)
    elif mode == "max":
        advantages = returns - returns.max(-1, keepdim=True).values
    elif mode == "raw":
        advantages = returns.clone()
    else:
        raise ValueError(f"Unknown advantage mode {mode!r}; it must be 'mean', 'rloo', 'max' or 'raw'.")
    if normalize:
        centered = advantages - advantages.mean(-1, keepdim=True)
        std = centered.pow(2).mean(-1, keepdim=True).sqrt()
        advantages = torch.where(std > 1e-6, centered / std.clamp(min=1e-6), 0.0)
    return advantages
