"""
Converts rollout trees to rows, and rows to a batch of tensors.

A row is one sibling of one node, that is, one completion of every agent that acts there. The tensors of an agent have
the rows in which it acts. A batch is split into equally many parts for every agent, so that one forward of the team
computes a micro-batch for all agents.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, Self

import torch
from torch import Tensor
from transformers import PreTrainedModel

from trl_multiagent.models.packing import can_pack, pack, pack_ends, scored
from trl_multiagent.models.pretrained import without_router_logits
from trl_multiagent.models.shared_prompts import takes_positions, token_positions
from trl_multiagent.rollout.tree import Node, Samples, Trees


Advantages = list[list[dict[str, Tensor]]]  # of each agent's completions at the nodes of each turn


def moved(values: dict[str, Any], device: torch.device) -> dict[str, Tensor]:
    """Copies the tensors among some values from the CPU to a device. The host does not wait for a GPU."""
    on_gpu = device.type == "cuda"
    return {
        name: (x.pin_memory() if on_gpu else x).to(device, non_blocking=on_gpu)
        for name, x in values.items()
        if isinstance(x, Tensor)
    }


@dataclass
class RowTensors:
    """Tensors that have the same rows, and numbers that belong to all rows. Unused fields are `None`."""

    inputs: dict[str, Any] = field(default_factory=dict, kw_only=True)  # of the forward that reads the rows

    def __len__(self) -> int:
        return next(len(x) for x in vars(self).values() if isinstance(x, Tensor))

    def to(self, device: torch.device) -> Self:
        """Copies the tensors from the CPU to a device."""
        inputs = self.inputs | moved(self.inputs, device)
        return replace(self, **moved(vars(self), device), inputs=inputs)


@dataclass
class AgentTensors(RowTensors):
    """The rows of one agent in a batch. An algorithm adds tensors in a subclass."""

    prompt_ids: Tensor  # of shape `(num_rows, prompt_length)`, padded on the left
    prompt_mask: Tensor
    completion_ids: Tensor  # of shape `(num_rows, completion_length)`, padded on the right
    completion_mask: Tensor  # 1 for tokens that are trained
    advantages: Tensor  # of shape `(num_rows,)` or as `completion_ids`
    turns: Tensor  # of shape `(num_rows,)`, counted from 0
    # Log-probabilities of the completions' tokens, in nats, of the shape of `completion_ids`:
    ref_logps: Tensor | None = None  # under the reference policy
    old_logps: Tensor | None = None  # under the policy when the batch was sampled
    sampling_logps: Tensor | None = None  # as they were sampled, NaN if an engine reported none
    router_weights: Tensor | None = None  # for a router loss, of shape `(num_rows,)`: 0 for padding rows, else 1
    # Numbers of rows and of tokens of the agent's completions in all trees, per process. The loss is divided by one of
    # them, so rows that the update leaves out count
    num_rows: float = 1.0
    num_tokens: float = 1.0
    sequences: list[list[int]] = field(default_factory=list)  # of each row, its token ids; empty if it is masked

    def of_turn(self, turn: int) -> Self:
        """Masks the completions of all other turns."""
        return replace(self, completion_mask=self.completion_mask * (self.turns == turn).unsqueeze(1))


@dataclass
class CriticTensors(RowTensors):
    """The targets of a critic's values: one for each joint action of a sequence that the critic reads."""

    targets: Tensor  # of shape `(num_rows, most joint actions of a row)`
    target_mask: Tensor  # which targets exist
    old_values: Tensor  # when the batch was sampled


@dataclass
class Batch:
    """The data of one micro-batch. An empty one needs no forward."""

    agents: dict[str, AgentTensors] = field(default_factory=dict)  # the rows of each trained agent
    critics: dict[str, CriticTensors] = field(default_factory=dict)  # the rows of each critic


@dataclass
class Row:
    """One completion of every agent that acts at one node."""

    turn: int  # counted from 0
    samples: dict[str, Samples]  # all samples at the node, of each agent with a reward for its completion
    sibling: int  # index of this row's completion in each agent's samples
    advantages: dict[str, float]  # of the completions of the trained agents

    def trained_ids(self, role: str, end_tokens: Sequence[int], mask_truncated: bool) -> list[int]:
        """Returns the tokens of one agent's completion that are trained: none if it does not act or is masked."""
        own = self.samples.get(role)
        if own is None or (mask_truncated and not own.is_finished(self.sibling, end_tokens)):
            return []
        return own.completion_ids[self.sibling]


def collect_rows(turns: Trees, advantages: Advantages) -> list[Row]:
    """
    Collects the rows of a batch of trees, one per sibling of each node. Trees are sorted by length, so that a
    micro-batch needs little padding. Siblings are adjacent, and a node precedes the nodes that continue its prompt, so
    that rows of a micro-batch share many tokens. `turns` and `advantages` have an entry per turn and node; the
    advantages of a trained agent at a node have the shape `(G,)`.
    """
    nodes = [*zip(chain(*turns), chain(*advantages), strict=True)]
    longest: dict[int, int] = {}  # prompt and completion of any agent, by tree
    for node, _ in nodes:
        lengths = (len(x.prompt_ids) + max(map(len, x.completion_ids)) for x in node.samples.values())
        longest[node.tree] = max(longest.get(node.tree, 0), *lengths)

    def place(entry: tuple[Node, dict[str, Tensor]]) -> Any:
        node = entry[0]
        return longest[node.tree], node.tree, [samples.prompt_ids for samples in node.samples.values()]

    rows = []
    for node, by_role in sorted(nodes, key=place):
        for sibling in range(max(len(samples.completion_ids) for samples in node.samples.values())):
            own = {role: values[sibling].item() for role, values in by_role.items()}
            dropped = [role for role, advantage in own.items() if math.isnan(advantage)]  # without a reward
            for role in dropped:
                del own[role]
            samples = node.samples  # of all siblings, unless some are dropped
            if dropped:
                samples = {role: x for role, x in node.samples.items() if role not in dropped}
            rows.append(Row(len(node.history), samples, sibling, own))
    return rows


def split_rows(rows: Sequence[Row], number: int, size: int) -> list[Sequence[Row]]:
    """
    Splits rows into `number` parts of at most `size` rows, which are filled in order. The siblings of a node are in
    one part if the parts have room for that.
    """
    parts = []
    for later in reversed(range(number)):
        most, least = min(size, len(rows)), max(0, len(rows) - later * size)
        ends = [k for k in range(least, most + 1) if k in (0, len(rows)) or rows[k].samples is not rows[k - 1].samples]
        end = max(ends, default=most)
        parts.append(rows[:end])
        rows = rows[end:]
    return parts


def agent_tensors(
    rows: Sequence[Row],
    role: str,
    pad_token_id: int,
    eos_token_ids: Sequence[int],
    mask_truncated: bool = False,
    sampling_logps: bool = False,
) -> AgentTensors:
    """
    Builds the tensors of one agent. Without rows, they have one row of padding. `mask_truncated` leaves out
    completions that end neither with one of `eos_token_ids` nor with a stop string. `sampling_logps` adds the
    log-probabilities with which the completions were sampled.
    """
    rows = rows or [Row(0, {role: Samples([pad_token_id], [[]], [""], [[]])}, 0, {})]
    samples = [row.samples[role] for row in rows]
    completions, logps = [], []
    for row, x in zip(rows, samples, strict=True):
        completions.append(row.trained_ids(role, eos_token_ids, mask_truncated))
        logps.append(x.logps[row.sibling] if completions[-1] and x.logps is not None else [])
    return AgentTensors(
        prompt_ids=padded([x.prompt_ids for x in samples], pad_token_id, "left"),
        prompt_mask=padded([[1] * len(x.prompt_ids) for x in samples], 0, "left"),
        completion_ids=padded(completions, pad_token_id),
        completion_mask=padded([[1] * len(ids) for ids in completions], 0),
        advantages=torch.tensor([row.advantages.get(role, 0.0) for row in rows]),
        turns=torch.tensor([row.turn for row in rows]),
        sampling_logps=padded(logps, 0.0) if sampling_logps else None,
        sequences=[x.prompt_ids + ids if ids else [] for x, ids in zip(samples, completions, strict=True)],
    )


def padded(values: Sequence[list[Any]], padding: float, side: str = "right") -> Tensor:
    """Makes a tensor of lists, padded to the length of the longest one and at least to 1."""
    width = max(1, *map(len, values))
    missing = [[padding] * (width - len(x)) for x in values]
    return torch.tensor([y + x if side == "left" else x + y for x, y in zip(values, missing, strict=True)])


def forward_inputs(agent: PreTrainedModel, rows: AgentTensors) -> dict[str, Any]:
    """
    Builds the arguments of an agent's forward that returns log-probabilities of the completions.

    If the agent supports it, the common tokens of rows are computed only once. This does not apply to rows with
    `router_weights`, because a router loss counts every token of every row.
    """
    common = {"fused_lm_head": True, **without_router_logits(agent)}
    prompt_length, length = rows.prompt_ids.size(1), rows.completion_ids.size(1)
    if rows.router_weights is None and can_pack(agent, prompt_length + length):
        packed = pack(
            rows.sequences, rows.prompt_mask.sum(dim=1).tolist(), length, agent.config.get_text_config().hidden_size
        )
        if packed is not None:
            return common | packed
    input_ids = torch.cat([rows.prompt_ids, rows.completion_ids], dim=1)
    attention_mask = torch.cat([rows.prompt_mask, rows.completion_mask], dim=1)
    places = torch.arange(input_ids.numel(), device=input_ids.device).view(input_ids.shape)[:, prompt_length - 1 : -1]
    places = places.masked_fill(rows.completion_mask == 0, -1)
    inputs = {"input_ids": input_ids, "attention_mask": attention_mask, **common}
    inputs |= scored(input_ids.roll(-1, dims=1), places)
    if rows.router_weights is not None:
        inputs["router_weights"] = attention_mask * rows.router_weights.unsqueeze(1)
    return inputs | {"position_ids": token_positions(attention_mask)} if takes_positions(agent) else inputs


def critic_inputs(model: PreTrainedModel, sequences: list[list[int]], pad_token_id: int) -> dict[str, Tensor]:
    """
    Builds the arguments of [`~team.critics.Critics.values`]. If the model supports it, common tokens are read once.
    """
    packed = pack_ends(model, sequences)
    if packed is not None:
        return packed
    mask = [[1] * len(ids) for ids in sequences]
    return {"input_ids": padded(sequences, pad_token_id, "left"), "attention_mask": padded(mask, 0, "left")}
