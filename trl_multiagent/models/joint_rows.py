"""Joins the inputs of several agents on one base, so that one forward computes them, and splits its output."""

from typing import Any

import torch
from torch.nn.functional import pad
from transformers.integrations import is_deepspeed_zero3_enabled
from transformers.utils import ModelOutput


PADDING = {"labels": -100, "shift_labels": -100, "readers": -1, "places": -1}  # the values of other inputs are 0
MOST_PADDING = 1.25  # tokens with the padding of joint rows, per token without it


def is_little_padding(padded: int, tokens: int) -> bool:
    """
    Returns whether agents share a forward that computes `padded` tokens where they have `tokens`. Under ZeRO-3 they always do: it gathers the
    base for each forward, and the processes must agree on the number of forwards.
    """
    return padded <= MOST_PADDING * tokens or is_deepspeed_zero3_enabled()


def group_inputs(names: dict[str, str], team_inputs: dict[str, dict[str, Any]]) -> list[list[str]]:
    """
    Groups roles whose rows one forward can compute: those with the same entry of `names`, the same kinds of inputs, and log-probabilities as
    output. An agent with a router loss stays alone, because it sums over the tokens of a forward.

    Rows of different lengths need padding. If that adds more than a quarter of the tokens, the agents stay alone, see [`is_little_padding`].
    """
    groups: dict[Any, list[str]] = {}
    for role, inputs in team_inputs.items():
        joins = role in names and inputs.get("fused_lm_head") and "router_weights" not in inputs
        groups.setdefault((names[role], *sorted(inputs)) if joins else role, []).append(role)
    result = []
    for roles in groups.values():
        shapes = [team_inputs[role]["input_ids"].shape for role in roles]
        longest = max(length for _, length in shapes)
        padded, tokens = sum(rows * longest for rows, _ in shapes), sum(rows * length for rows, length in shapes)
        result += [roles] if is_little_padding(padded, tokens) else [[role] for role in roles]
    return result


def join_inputs(inputs: list[dict[str, Any]]) -> dict[str, Any]:
    """Concatenates the rows of several agents, padded on the right. What is not a tensor is the same for all."""
    longest, joined, start = max(x["input_ids"].size(1) for x in inputs), dict(inputs[0]), 0
    if "places" in joined:  # of tokens in flattened packed rows
        moved = []
        for x in inputs:
            places, (rows, length) = x["places"], x["input_ids"].shape
            moved.append({**x, "places": (places // length + start) * longest + places % length})
            moved[-1]["places"][places < 0] = -1
            start += rows
        inputs = moved
    for name, value in joined.items():
        if isinstance(value, torch.Tensor):
            tensors = [x[name] for x in inputs]
            width, others = max(x.size(1) for x in tensors), [0, 0] * (value.dim() - 2)
            padded = [pad(x, [*others, 0, width - x.size(1)], value=PADDING.get(name, 0)) for x in tensors]
            joined[name] = torch.cat(padded)
    return joined


def split_output(output: ModelOutput, inputs: list[dict[str, Any]]) -> list[ModelOutput]:
    """
    Returns the part of each agent in the output for joined inputs. Values that are no table of rows and tokens are left out; of packed rows,
    there are only the log-probabilities and entropies of their sequences.
    """
    is_packed = "places" in inputs[0]
    shapes = [x["places" if is_packed else "input_ids"].shape for x in inputs]
    longest = max(length for _, length in shapes)
    tables = {name: x for name, x in output.items() if isinstance(x, torch.Tensor) and x.dim() > 1}
    if is_packed:
        tables = {name: x for name, x in tables.items() if name in ("log_probs", "entropy")}
    outputs, start = [], 0
    for rows, length in shapes:
        own = {name: x[start : start + rows, : x.size(1) - (longest - length)] for name, x in tables.items()}
        outputs.append(type(output)(**own))
        start += rows
    return outputs
