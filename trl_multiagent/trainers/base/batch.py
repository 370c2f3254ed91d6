"""
Converts rollout trees to rows, and rows to a batch of tensors.

A row is one sibling of one node, that is, one completion of every agent that acts there. The tensors of an agent have the rows in which it
acts. A batch is split into equally many parts for every agent, so that one forward pass of the team computes a micro-batch for all agents.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

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

T = TypeVar("T", bound="RowTensors")
A = TypeVar("A", bound="AgentTensors")


@dataclass
class RowTensors:
    """Tensors that have the same rows, and numbers that belong to all rows. Fields that are not used are `None`."""

    def _map(self: T, function: Callable[[torch.Tensor], torch.Tensor]) -> T:
        tensors = {name: x for name, x in vars(self).items() if isinstance(x, torch.Tensor)}
        return dataclasses.replace(self, **{name: function(x) for name, x in tensors.items()})

    def __len__(self) -> int:
        return next(len(x) for x in vars(self).values() if isinstance(x, torch.Tensor))

    def __getitem__(self: T, rows: slice) -> T:
        return self._map(lambda x: x[rows])

    def to(self: T, device: torch.device) -> T:
        return self._map(lambda x: x.to(device))

    def chunks(self: T, size: int) -> Iterator[T]:
        """Yields consecutive parts of at most `size` rows."""
        for start in range(0, len(self), size):
            yield self[start : start + size]


@dataclass
class AgentTensors(RowTensors):
    """The rows of one agent in a batch. An algorithm adds tensors in a subclass."""

    prompt_ids: torch.Tensor  # of shape `(num_rows, prompt_length)`, padded on the left
    prompt_mask: torch.Tensor
    completion_ids: torch.Tensor  # of shape `(num_rows, completion_length)`, padded on the right
    completion_mask: torch.Tensor  # of the tokens that are trained
    advantages: torch.Tensor  # of shape `(num_rows,)` or that of `completion_ids`
    turns: torch.Tensor  # of shape `(num_rows,)`, counted from 0
    # Log-probabilities of the completions' tokens, in nats, of the shape of `completion_ids`:
    ref_logps: torch.Tensor | None = None  # under the reference policy
    old_logps: torch.Tensor | None = None  # under the policy when the batch was sampled
    sampling_logps: torch.Tensor | None = None  # as the engine that sampled reported them, NaN where it reported none
    other_log_ratios: torch.Tensor | None = None  # of shape `(num_rows,)`, see `loss.add_other_log_ratios`
    router_weights: torch.Tensor | None = None  # for a router loss, of shape `(num_rows,)`: 0 for padding rows, else 1
    # The factor that turns the mean over the rows of a micro-batch into its part of the mean over the rows of the trees of all processes,
    # which include rows that the update leaves out
    weight: float = 1.0
    num_tokens: float = 1.0  # of the completions in the trees, per process

    def trimmed(self: A) -> A:
        """
        Removes the columns that are padding in every row: on the left of the prompts and on the right of the completions. A tensor with
        two or more dimensions has one column per token: of the prompts if its name begins with `prompt_`, else of the completions.
        """
        prompt = slice(self.prompt_mask.any(dim=0).int().argmax().item(), None)
        completion = slice(None, max(1, int(self.completion_mask.any(dim=0).sum())))
        columns = {
            name: x[:, prompt if name.startswith("prompt_") else completion]
            for name, x in vars(self).items()
            if isinstance(x, torch.Tensor) and x.dim() > 1
        }
        return dataclasses.replace(self, **columns)

    def of_turn(self: A, turn: int) -> A:
        """Masks the completions of all other turns."""
        mask = self.completion_mask * (self.turns == turn).unsqueeze(1)
        return dataclasses.replace(self, completion_mask=mask)


@dataclass
class CriticTensors(RowTensors):
    """The sequences that a critic reads, padded on the left, and the targets of their values: one for each joint action of a row."""

    input_ids: torch.Tensor  # of shape `(num_rows, length)`
    attention_mask: torch.Tensor
    targets: torch.Tensor  # of shape `(num_rows, most joint actions of a row)`
    target_mask: torch.Tensor  # which targets exist
    old_values: torch.Tensor  # when the batch was sampled

    def inputs(self) -> dict[str, torch.Tensor]:
        """Returns the arguments of the critic's forward, without columns that are padding in every row."""
        start = int(self.attention_mask.any(dim=0).int().argmax())
        return {"input_ids": self.input_ids[:, start:], "attention_mask": self.attention_mask[:, start:]}


@dataclass
class Batch:
    """What one optimizer step trains on, or a part of it."""

    agents: dict[str, AgentTensors]  # the rows of each trained agent
    critics: dict[str, CriticTensors] = field(default_factory=dict)  # the rows of each critic

    def micro_batches(self, number: int) -> list["Batch"]:
        """Splits the batch into parts with equally many rows of each agent and critic. The numbers of rows are multiples of `number`."""
        agents = {role: [*rows.chunks(len(rows) // number)] for role, rows in self.agents.items()}
        critics = {name: [*rows.chunks(len(rows) // number)] for name, rows in self.critics.items()}
        parts = range(number)
        return [Batch({x: agents[x][k] for x in agents}, {x: critics[x][k] for x in critics}) for k in parts]


@dataclass
class Row:
    """One completion of every agent that acts at one node."""

    turn: int  # counted from 0
    samples: dict[str, Samples]  # all that each agent sampled at the node
    sibling: int  # index of this row's completion in each agent's samples
    advantages: dict[str, float]  # of the completions of the trained agents

    def num_tokens(self, role: str) -> int:
        """Returns the number of tokens in one agent's completion; 0 if it does not act."""
        return len(self.samples[role].completion_ids[self.sibling]) if role in self.samples else 0


def collect_rows(levels: list[list[Node]], advantages: list[list[dict[str, torch.Tensor]]]) -> list[Row]:
    """
    Collects the rows of a batch of trees, one per sibling of each node. Siblings are adjacent, so that they can share their prompt. Nodes
    are sorted by length, so that a micro-batch needs little padding. `levels` and `advantages` have an entry per turn and node; the
    advantages of a trained agent at a node have the shape `(G,)`.
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
    """Returns the number of tokens in the longest prompt and completion of any agent at a node."""
    return max(len(samples.prompt_ids) + max(map(len, samples.completion_ids)) for samples in node.samples.values())


def agent_tensors(
    rows: list[Row],
    role: str,
    num_rows: int,
    pad_token_id: int,
    eos_token_ids: Sequence[int],
    mask_truncated: bool = False,
    sampling_logps: bool = False,
) -> AgentTensors:
    """
    Builds the tensors of one agent. Padding rows follow the given rows, up to `num_rows`. With `mask_truncated`, completions are masked that end
    neither with one of `eos_token_ids` nor with a stop string. With `sampling_logps`, the tensors have the log-probabilities of the engine.
    """
    padding_rows = num_rows - len(rows)
    padding = torch.tensor([pad_token_id] * PADDING_LENGTH)
    prompts = [torch.tensor(row.samples[role].prompt_ids) for row in rows]
    completions = [torch.tensor(row.samples[role].completion_ids[row.sibling]) for row in rows]
    masks = [torch.ones_like(ids) for ids in completions]
    if mask_truncated:
        finished = [row.samples[role].is_finished(row.sibling, eos_token_ids) for row in rows]
        masks = [mask * is_finished for mask, is_finished in zip(masks, finished, strict=True)]
    prompts += [padding] * padding_rows
    completions += [padding] * padding_rows
    masks += [torch.zeros_like(padding)] * padding_rows
    tensors = AgentTensors(
        prompt_ids=pad(prompts, pad_token_id, "left"),
        prompt_mask=pad([torch.ones_like(ids) for ids in prompts], 0, "left"),
        completion_ids=pad(completions, pad_token_id, "right"),
        completion_mask=pad(masks, 0, "right"),
        advantages=torch.tensor([row.advantages.get(role, 0.0) for row in rows] + [0.0] * padding_rows),
        turns=torch.tensor([row.turn for row in rows] + [0] * padding_rows),
    )
    if sampling_logps:
        logps = [torch.tensor(row.samples[role].logps[row.sibling]) for row in rows]  # type: ignore[index]
        logps += [torch.zeros(PADDING_LENGTH)] * padding_rows
        tensors.sampling_logps = pad(logps, 0.0, "right")
    return tensors


def forward_inputs(agent: PreTrainedModel, rows: AgentTensors) -> dict[str, Any]:
    """
    Builds the arguments of an agent's forward that returns the log-probabilities of its completions.

    If the agent supports it, adjacent siblings share their prompt except its last token. Nothing is shared if the rows have
    `router_weights`, because a router loss counts every token of every row.
    """
    prompt_ids, prompt_mask = rows.prompt_ids, rows.prompt_mask
    sharing = can_share_prompts(agent) and rows.router_weights is None
    if sharing and prompt_ids.size(1) == 1:
        # Prepend padding to share: under ZeRO-3, all processes must run the same forward passes
        prompt_ids, prompt_mask = F.pad(prompt_ids, (1, 0)), F.pad(prompt_mask, (1, 0))
    input_ids = torch.cat([prompt_ids, rows.completion_ids], dim=1)
    attention_mask = torch.cat([prompt_mask, rows.completion_mask], dim=1)
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
    if rows.router_weights is not None:
        inputs["router_weights"] = attention_mask * rows.router_weights.unsqueeze(1)
    return inputs | {"position_ids": positions} if takes_positions(agent) else inputs
