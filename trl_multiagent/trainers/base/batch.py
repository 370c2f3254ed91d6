"""
Converts rollout trees to rows, and rows to a batch of tensors.

A row is one sibling of one node, that is, one completion of every agent that acts there. The tensors of an agent have
the rows in which it acts. A batch is split into equally many parts for every agent, so that one forward pass of the
team computes a micro-batch for all agents.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from transformers import PreTrainedModel
from trl.trainer.utils import pad

from trl_multiagent.models.packing import can_pack, pack
from trl_multiagent.models.router_loss import without_router_logits
from trl_multiagent.models.shared_prompts import takes_positions, token_positions
from trl_multiagent.rollout.tree import Node, Samples


T = TypeVar("T", bound="RowTensors")
A = TypeVar("A", bound="AgentTensors")


@dataclass
class RowTensors:
    """Tensors that have the same rows, and numbers that belong to all rows. Unused fields are `None`."""

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
    completion_mask: torch.Tensor  # 1 for tokens that are trained
    advantages: torch.Tensor  # of shape `(num_rows,)` or that of `completion_ids`
    turns: torch.Tensor  # of shape `(num_rows,)`, counted from 0
    # Log-probabilities of the completions' tokens, in nats, of the shape of `completion_ids`:
    ref_logps: torch.Tensor | None = None  # under the reference policy
    old_logps: torch.Tensor | None = None  # under the policy when the batch was sampled
    sampling_logps: torch.Tensor | None = None  # reported by the engine that sampled, NaN if it reported none
    other_log_ratios: torch.Tensor | None = None  # of shape `(num_rows,)`, see `loss.add_other_log_ratios`
    router_weights: torch.Tensor | None = None  # for a router loss, of shape `(num_rows,)`: 0 for padding rows, else 1
    # Factor that turns the mean over the rows of a micro-batch into its part of the mean over the rows of all trees of
    # all processes. The latter include rows that the update leaves out
    weight: float = 1.0
    num_tokens: float = 1.0  # of the completions in the trees, per process

    def trimmed(self: A) -> A:
        """
        Removes columns that are padding in every row: on the left of the prompts and on the right of the completions.
        A tensor with two or more dimensions has one column per token: of the prompts if its name begins with
        `prompt_`, else of the completions.
        """
        prompt = slice(self.prompt_mask.any(dim=0).int().argmax().item(), None)
        completion = slice(None, max(1, int(self.completion_mask.any(dim=0).sum())))
        columns = {
            name: x[:, prompt if name.startswith("prompt_") else completion]
            for name, x in vars(self).items()
            if isinstance(x, torch.Tensor) and x.dim() > 1
        }
        return dataclasses.replace(self, **columns)

    def sequences(self) -> tuple[list[list[int]], list[int]]:
        """
        Returns the token ids of each row without padding (empty if its completion is masked), and its number of prompt
        tokens.
        """
        num_prompt_tokens, num_tokens = self.prompt_mask.sum(dim=1).tolist(), self.completion_mask.sum(dim=1).tolist()
        start = self.prompt_ids.size(1)
        ids = torch.cat([self.prompt_ids, self.completion_ids], dim=1).tolist()
        rows = zip(ids, num_prompt_tokens, num_tokens, strict=True)
        return [row[start - p : start + c] if c else [] for row, p, c in rows], num_prompt_tokens

    def of_turn(self: A, turn: int) -> A:
        """Masks the completions of all other turns."""
        mask = self.completion_mask * (self.turns == turn).unsqueeze(1)
        return dataclasses.replace(self, completion_mask=mask)


@dataclass
class CriticTensors(RowTensors):
    """
    The sequences that a critic reads, padded on the left, and the targets of their values: one for each joint action
    of a row.
    """

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
    """The data of one optimizer step, or a part of it."""

    agents: dict[str, AgentTensors]  # the rows of each trained agent
    critics: dict[str, CriticTensors] = field(default_factory=dict)  # the rows of each critic

    def micro_batches(self, number: int) -> list["Batch"]:
        """
        Splits the batch into parts with equally many rows of each agent and critic. The numbers of rows are multiples
        of `number`.
        """
        agents = {role: [*rows.chunks(len(rows) // number)] for role, rows in self.agents.items()}
        critics = {name: [*rows.chunks(len(rows) // number)] for name, rows in self.critics.items()}
        parts = range(number)
        return [Batch({x: agents[x][k] for x in agents}, {x: critics[x][k] for x in critics}) for k in parts]


@dataclass
class Row:
    """One completion of every agent that acts at one node."""

    turn: int  # counted from 0
    samples: dict[str, Samples]  # all samples of each agent at the node whose completion has a reward
    sibling: int  # index of this row's completion in each agent's samples
    advantages: dict[str, float]  # of the completions of the trained agents

    def num_tokens(self, role: str) -> int:
        """Returns the number of tokens in one agent's completion; 0 if it does not act."""
        return len(self.samples[role].completion_ids[self.sibling]) if role in self.samples else 0


def collect_rows(levels: list[list[Node]], advantages: list[list[dict[str, torch.Tensor]]]) -> list[Row]:
    """
    Collects the rows of a batch of trees, one per sibling of each node. Trees are sorted by length, so that a
    micro-batch needs little padding. Siblings are adjacent, and a node precedes the nodes that continue its prompt, so
    that rows of a micro-batch share many tokens. `levels` and `advantages` have an entry per turn and node; the
    advantages of a trained agent at a node have the shape `(G,)`.
    """
    nodes = [
        (turn, node, by_role)
        for turn, (level, level_advantages) in enumerate(zip(levels, advantages, strict=True))
        for node, by_role in zip(level, level_advantages, strict=True)
    ]
    longest: dict[int, int] = {}  # by tree
    for _, node, _ in nodes:
        longest[node.tree] = max(longest.get(node.tree, 0), longest_sequence_length(node))

    def place(entry: tuple[int, Node, dict[str, torch.Tensor]]) -> Any:
        node = entry[1]
        return longest[node.tree], node.tree, [samples.prompt_ids for samples in node.samples.values()]

    nodes.sort(key=place)
    rows = []
    for turn, node, by_role in nodes:
        for sibling in range(max(len(samples.completion_ids) for samples in node.samples.values())):
            own = {role: values[sibling].item() for role, values in by_role.items()}
            dropped = [role for role, advantage in own.items() if math.isnan(advantage)]  # without a reward
            for role in dropped:
                del own[role]
            samples = {role: x for role, x in node.samples.items() if role not in dropped}
            rows.append(Row(turn, samples, sibling, own))
    return rows


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
    Builds the tensors of one agent. Padding rows follow the given rows, up to `num_rows`. `mask_truncated` masks
    completions that end neither with one of `eos_token_ids` nor with a stop string. `sampling_logps` adds the
    log-probabilities of the engine.
    """
    padding_rows = num_rows - len(rows)
    padding = torch.tensor([pad_token_id])
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
        logps += [torch.zeros(1)] * padding_rows
        tensors.sampling_logps = pad(logps, 0.0, "right")
    return tensors


def forward_inputs(agent: PreTrainedModel, rows: AgentTensors) -> dict[str, Any]:
    """
    Builds the arguments of an agent's forward that returns log-probabilities. Their last columns belong to the
    completions.

    If the agent supports it, the common tokens of rows are computed only once. This does not apply to rows with
    `router_weights`, because a router loss counts every token of every row.
    """
    common = {"fused_lm_head": True, **without_router_logits(agent)}
    prompt_length, length = rows.prompt_ids.size(1), rows.completion_ids.size(1)
    if rows.router_weights is None and can_pack(agent, prompt_length + length):
        packed = pack(*rows.sequences(), length, agent.config.get_text_config().hidden_size)
        if packed is not None:
            return common | {name: x.to(rows.prompt_ids.device) for name, x in packed.items()}
    input_ids = torch.cat([rows.prompt_ids, rows.completion_ids], dim=1)
    attention_mask = torch.cat([rows.prompt_mask, rows.completion_mask], dim=1)
    labels = input_ids.masked_fill(attention_mask == 0, -100)
    labels[:, :prompt_length] = -100
    inputs = {"input_ids": input_ids, "attention_mask": attention_mask, "labels": labels, **common}
    if rows.router_weights is not None:
        inputs["router_weights"] = attention_mask * rows.router_weights.unsqueeze(1)
    return inputs | {"position_ids": token_positions(attention_mask)} if takes_positions(agent) else inputs
