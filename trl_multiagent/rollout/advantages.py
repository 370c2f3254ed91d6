"""Advantages over the sibling set of a node."""

import torch


def sibling_advantages(returns: torch.Tensor, mode: str, normalize: bool = False) -> torch.Tensor:
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

    Returns:
        `torch.Tensor` of the shape of `returns`.
    """
    if returns.isnan().any():
        advantages = returns.clone()
        for row in advantages.view(-1, returns.size(-1)):
            is_known = ~row.isnan()
            if is_known.sum() > 1 or mode == "raw":
                row[is_known] = sibling_advantages(row[is_known], mode, normalize)
            else:  # the only one has nothing to be compared with
                row[is_known] = 0.0
        return advantages
    equal = (returns == returns[..., :1]).all(-1, keepdim=True)
    mean = torch.where(equal, returns, returns.mean(-1, keepdim=True))  # exact for equal siblings, without rounding
    if mode == "mean":
        advantages = returns - mean
    elif mode == "rloo":
        num_siblings = returns.size(-1)
        advantages = (returns - mean) * num_siblings / (num_siblings - 1)
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
