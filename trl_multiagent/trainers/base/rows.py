"""
Converts rollout trees to rows, and rows to tensors.

A row is one sibling of one node, that is, one completion of every agent. The tensors of all agents have the same rows
in the same order, so one forward pass of the team computes a micro-batch for all agents. No function here needs a
trainer.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from transformers import PreTrainedModel
from trl.trainer.utils import pad

from trl_multiagent.models.router_loss import without_router_logits
from trl_multiagent.models.shared_prompts import can_share_prompts, takes_positions, token_positions
from trl_multiagent.rollout.tree import Node, Samples


# Tokens in the prompt of a padding row: one that can be shared among siblings, and the last one, which is not shared.
# Its completion has as many tokens, all masked
PADDING_LENGTH = 2


@dataclass
class Row:
    """
    One completion of every agent at one node.

    Args:
        turn (`int`): The turn, counted from 0.
        samples (`dict[str, Samples]`): All that each agent sampled at the node.
        sibling (`int`): Index of this row's completion in each agent's samples.
        advantages (`dict[str, float]`): The advantage of each trained agent's completion.
    """

    turn: int
    samples: dict[str, Samples]
    sibling: int
    advantages: dict[str, float]

    def num_tokens(self, role: str) -> int:
        """Number of tokens in one agent's completion."""
        return len(self.samples[role].completion_ids[self.sibling])


def collect_rows(levels: list[list[Node]], advantages: list[list[dict[str, torch.Tensor]]]) -> list[Row]:
    """
    Collects the rows of a batch of trees. Siblings are adjacent, so that they can share their prompt. Nodes are sorted
    by length, so that a micro-batch needs little padding.

    Args:
        levels (`list[list[Node]]`):
            The nodes of each turn.
        advantages (`list[list[dict[str, torch.Tensor]]]`):
            For each node, the advantages of every trained agent's completions, of shape `(G,)`.

    Returns:
        `list[Row]`: One row per sibling of each node.
    """
    nodes = [
        (turn, node, by_role)
        for turn, (level, of_level) in enumerate(zip(levels, advantages, strict=True))
        for node, by_role in zip(level, of_level, strict=True)
    ]
    nodes.sort(key=lambda entry: longest_sequence_length(entry[1]))
    return [
        Row(turn, node.samples, sibling, {role: values[sibling].item() for role, values in by_role.items()})
        for turn, node, by_role in nodes
        for sibling in range(max(len(samples.completion_ids) for samples in node.samples.values()))
    ]


def longest_sequence_length(node: Node) -> int:
    """Number of tokens in the longest prompt and completion of any agent at a node."""
    return max(len(samples.prompt_ids) + max(map(len, samples.completion_ids)) for samples in node.samples.values())


def agent_tensors(
    rows: list[Row],
    role: str,
    num_rows: int,
    pad_token_id: int,
    eos_token_ids: Sequence[int],
    mask_truncated: bool = False,
    sampling_logps: bool = False,
) -> dict[str, torch.Tensor]:
    """
    Builds the tensors of one agent. Padding rows follow the given rows.

    Args:
        rows (`list[Row]`): The rows.
        role (`str`): The agent.
        num_rows (`int`): Number of rows of the tensors, including padding rows.
        pad_token_id (`int`): The padding token.
        eos_token_ids (`Sequence[int]`): Tokens that end a completion.
        mask_truncated (`bool`): Whether to mask completions that do not end with one of `eos_token_ids`.
        sampling_logps (`bool`): Whether to add the log-probabilities that the generation engine reported.

    Returns:
        `dict[str, torch.Tensor]`: `prompt_ids` and `prompt_mask` of shape `(num_rows, prompt_length)`, padded on the
        left; `completion_ids` and `completion_mask` of shape `(num_rows, completion_length)`, padded on the right;
        `advantages` and `turns` (counted from 0) of shape `(num_rows,)`. With `sampling_logps` also
        `sampling_per_token_logps`, which has the shape of `completion_ids`.

    Raises:
        ValueError: `sampling_logps` is set, but the samples have no log-probabilities.
    """
    padding_rows = num_rows - len(rows)
    padding = torch.tensor([pad_token_id] * PADDING_LENGTH)
    prompts = [torch.tensor(row.samples[role].prompt_ids) for row in rows]
    completions = [torch.tensor(row.samples[role].completion_ids[row.sibling]) for row in rows]
    masks = [torch.ones_like(ids) for ids in completions]
    if mask_truncated:
        masks = [mask if ids[-1] in eos_token_ids else 0 * mask for mask, ids in zip(masks, completions, strict=True)]
    prompts += [padding] * padding_rows
    completions += [padding] * padding_rows
    masks += [torch.zeros_like(padding)] * padding_rows
    tensors = {
        "prompt_ids": pad(prompts, pad_token_id, "left"),
        "prompt_mask": pad([torch.ones_like(ids) for ids in prompts], 0, "left"),
        "completion_ids": pad(completions, pad_token_id, "right"),
        "completion_mask": pad(masks, 0, "right"),
        "advantages": torch.tensor([row.advantages[role] for row in rows] + [0.0] * padding_rows),
        "turns": torch.tensor([row.turn for row in rows] + [0] * padding_rows),
    }
    if sampling_logps:
        logps = [torch.tensor(sampling_logps_of(row, role)) for row in rows]
        logps += [torch.zeros(PADDING_LENGTH)] * padding_rows
        tensors["sampling_per_token_logps"] = pad(logps, 0.0, "right")
    return tensors


def sampling_logps_of(row: Row, role: str) -> list[float]:
    """The log-probabilities with which the tokens of one agent's completion were sampled."""
    logps = row.samples[role].logps
    if logps is None:
        raise ValueError(f"The samples of agent {role!r} have no log-probabilities: the generation must return them.")
    return logps[row.sibling]


def join_agents(by_role: dict[str, dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Joins the tensors of all agents in one batch, under the names `"<role>/<name>"`."""
    return {f"{role}/{name}": x for role, tensors in by_role.items() for name, x in tensors.items()}


def tensors_of_agent(batch: dict[str, torch.Tensor], role: str) -> dict[str, torch.Tensor]:
    """Returns the tensors of one agent from a batch that [`join_agents`] made."""
    prefix = f"{role}/"
    return {name.removeprefix(prefix): x for name, x in batch.items() if name.startswith(prefix)}


def trim_padding(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """
    Removes the columns that are padding in every row: on the left of the prompts and on the right of the completions.

    A tensor with two or more dimensions has one column per token: of the prompts if its name begins with `prompt_`,
    else of the completions.
    """
    prompt = slice(tensors["prompt_mask"].any(dim=0).int().argmax().item(), None)
    # At least two columns: GRPOTrainer's metrics interpret a single column as one value per sequence
    completion = slice(None, max(2, int(tensors["completion_mask"].any(dim=0).sum())))
    return {
        name: x if x.dim() < 2 else x[:, prompt if name.startswith("prompt_") else completion]
        for name, x in tensors.items()
    }


def split_rows(tensors: dict[str, torch.Tensor], num_rows: int) -> Iterator[dict[str, torch.Tensor]]:
    """Yields consecutive chunks of at most `num_rows` rows. Scalars, which belong to no row, are left out."""
    for start in range(0, len(tensors["prompt_ids"]), num_rows):
        yield {name: x[start : start + num_rows] for name, x in tensors.items() if x.dim() > 0}


def forward_inputs(agent: PreTrainedModel, tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    """
    Builds the arguments of an agent's forward that returns the log-probabilities of its completions.

    If the agent supports it, adjacent siblings share their prompt except its last token. Nothing is shared if the
    agent has a router loss, because that loss counts every token of every row.

    Args:
        agent ([`~transformers.PreTrainedModel`]): The agent.
        tensors (`dict[str, torch.Tensor]`): Its rows, see [`agent_tensors`]; with a router loss also `router_weights`
            of shape `(num_rows,)`, 0 for padding rows.
    """
    prompt_ids, prompt_mask = tensors["prompt_ids"], tensors["prompt_mask"]
    has_router_loss = "router_weights" in tensors
    sharing = can_share_prompts(agent) and not has_router_loss
    if sharing and prompt_ids.size(1) == 1:
        # Prepend padding to share: under ZeRO-3, all processes must run the same forward passes
        prompt_ids, prompt_mask = F.pad(prompt_ids, (1, 0)), F.pad(prompt_mask, (1, 0))
    input_ids = torch.cat([prompt_ids, tensors["completion_ids"]], dim=1)
    attention_mask = torch.cat([prompt_mask, tensors["completion_mask"]], dim=1)
    positions = token_positions(attention_mask)
    labels = input_ids.masked_fill(attention_mask == 0, -100)
    shared = prompt_ids.size(1) - 1
    common = {"fused_lm_head": True, **without_router_logits(agent)}
    if sharing:
        prompts = torch.stack([prompt_ids, prompt_mask, positions[:, : shared + 1]], dim=-1)
        prompts, owners = torch.unique_consecutive(prompts, return_inverse=True, dim=0)
        input_names = ("input_ids", "attention_mask", "position_ids")
        # A row begins with the last token of the prompt, which predicts the first token of the completion, and ends
        # with the last token but one
        return {
            "shared_prompts": dict(zip(input_names, prompts[:, :shared].unbind(-1), strict=True)) | {"owners": owners},
            "input_ids": input_ids[:, shared:-1],
            "attention_mask": attention_mask[:, :-1],
            "position_ids": positions[:, shared:-1],
            "shift_labels": labels[:, shared + 1 :],
            **common,
        }
    labels[:, : shared + 1] = -100
    inputs = {"input_ids": input_ids, "attention_mask": attention_mask, "labels": labels, **common}
    if has_router_loss:
        inputs["router_weights"] = attention_mask * tensors["router_weights"].unsqueeze(1)
    return inputs | {"position_ids": positions} if takes_positions(agent) else inputs
