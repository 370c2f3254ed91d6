"""
Computes the tokens that several sequences of an update have in common only once.

A packed row holds sequences as a tree: siblings share their prompt, and the prompts of later turns continue what was sampled before, as far as
the token ids agree. A 4-dimensional attention mask lets a token see the tokens of its own sequence alone, and positions count from the start of
that sequence. This needs no cache of keys and values, so it works with activation checkpointing.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicSlidingWindowLayer
from transformers.utils import ModelOutput

from trl_multiagent.models.shared_prompts import can_continue_cache, takes_masks


MAX_ROW_LENGTH = 4096  # its mask has the square of this many numbers
MOST_LEFT = 0.95  # of the positions of padded sequences; a mask costs more than it saves above
# Attention in a row of this many times the hidden size takes as long as the rest of a layer
ATTENTION_FACTOR = 4


@dataclass
class PackedRow:
    """Lists with an entry per token. Sequences have numbers, and those that contain a token have consecutive ones."""

    input_ids: list[int] = field(default_factory=list)
    position_ids: list[int] = field(default_factory=list)
    shift_labels: list[int] = field(default_factory=list)  # the next token, if it is one of a completion
    first: list[int] = field(default_factory=list)  # of the sequences that contain the token
    last: list[int] = field(default_factory=list)

    def add(self, number: int, ids: list[int], num_prompt_tokens: int, shared: list[int]) -> list[int]:
        """
        Adds a sequence that begins with the tokens at the `shared` places of the row. Its last token, which predicts nothing, is left out.
        Returns the places of the others.
        """
        new = range(len(shared), len(ids) - 1)
        places = [*shared, *range(len(self.input_ids), len(self.input_ids) + len(new))]
        self.input_ids += ids[new.start : new.stop]
        self.position_ids += new
        self.shift_labels += [-100] * len(new)
        self.first += [number] * len(new)
        self.last += [number] * len(new)
        for place in shared:
            self.last[place] = number
        for place, token in zip(places[num_prompt_tokens - 1 :], ids[num_prompt_tokens:], strict=True):
            self.shift_labels[place] = token
        return places

    def padded(self, length: int) -> list[list[int]]:
        """Returns the lists, as long as those of the longest row. Padding belongs to no sequence."""
        missing = length - len(self.input_ids)
        return [x + [value] * missing for x, value in zip(vars(self).values(), (0, 0, -100, -1, -1), strict=True)]


def can_pack(model: PreTrainedModel, longest: int) -> bool:
    """Returns whether a model accepts positions and 4-dimensional masks, and its layers see the whole of sequences of up to `longest` tokens."""
    if longest > MAX_ROW_LENGTH:
        return False
    if not (takes_masks(model) and can_continue_cache(model)):
        return False
    layers = DynamicCache(config=model.config.get_text_config(decoder=True)).layers
    return all(layer.sliding_window >= longest for layer in layers if type(layer) is DynamicSlidingWindowLayer)


def pack(
    sequences: Sequence[list[int]], num_prompt_tokens: Sequence[int], completion_length: int, hidden_size: int
) -> dict[str, torch.Tensor] | None:
    """
    Packs sequences of prompt and completion. An empty one stands for a completion that is not needed.

    Args:
        sequences (`Sequence[list[int]]`): The token ids.
        num_prompt_tokens (`Sequence[int]`): How many tokens of each sequence are its prompt.
        completion_length (`int`): Number of columns for the tokens of a completion.
        hidden_size (`int`): Of the model. Wider models read longer rows.

    Returns:
        `dict[str, torch.Tensor]`: The arguments of [`run_packed`]; `None` if that saves hardly a position.
    """
    order = sorted(range(len(sequences)), key=sequences.__getitem__)  # sequences that begin alike follow each other
    shared = [0, *(num_shared(sequences[k], sequences[m]) for k, m in pairwise(order))]
    firsts = set(divide([max(0, len(sequences[k]) - 1) for k in order], shared, hidden_size))
    rows: list[PackedRow] = []
    places: list[int] = []  # of the tokens of the last sequence
    found: dict[int, tuple[int, list[int]]] = {}  # by sequence, its row and what predicts its completion
    for number, k in enumerate(order):
        if number in firsts:
            rows.append(PackedRow())
            places = []
        places = rows[-1].add(number, sequences[k], num_prompt_tokens[k], places[: shared[number]])
        found[k] = len(rows) - 1, places[num_prompt_tokens[k] - 1 :]
    length = max(1, *(len(row.input_ids) for row in rows))
    if len(rows) * length > MOST_LEFT * len(sequences) * max(1, *(len(ids) - 1 for ids in sequences)):
        return None
    tensors = torch.tensor([row.padded(length) for row in rows]).unbind(dim=1)
    of_completions = [
        [row * length + place for place in of_completion] + [-1] * (completion_length - len(of_completion))
        for row, of_completion in (found[k] for k in range(len(sequences)))
    ]
    packed = dict(zip(("input_ids", "position_ids", "shift_labels"), tensors, strict=False))
    return packed | {"readers": torch.stack(tensors[3:], dim=-1), "places": torch.tensor(of_completions)}


def num_shared(one: list[int], other: list[int]) -> int:
    """Returns how many tokens two sequences share. The last one of those in common predicts another token in each, and is not shared."""
    pairs = enumerate(zip(one, other, strict=False))
    return max(0, next((k for k, (x, y) in pairs if x != y), min(len(one), len(other))) - 1)


def divide(lengths: list[int], shared: list[int], hidden_size: int) -> list[int]:
    """
    Divides sequences among packed rows and returns the first sequence of each row. A sequence shares some tokens with the sequence before
    it. In longer rows, more is shared, but attention takes longer, and so does padding.
    """
    best, least, capacity = [0], float("inf"), max(lengths)
    while True:
        firsts: list[int] = []
        sizes: list[int] = []
        for k, (length, common) in enumerate(zip(lengths, shared, strict=True)):
            if firsts and sizes[-1] + length - common <= capacity:
                sizes[-1] += length - common
            else:
                firsts.append(k)
                sizes.append(length)
        cost = len(sizes) * max(sizes) * (1 + max(sizes) / (ATTENTION_FACTOR * hidden_size))
        if cost < least:
            best, least = firsts, cost
        if len(firsts) == 1 or capacity >= MAX_ROW_LENGTH:
            return best
        capacity = min(int(1.2 * capacity) + 1, MAX_ROW_LENGTH)


def run_packed(
    model: PreTrainedModel, readers: torch.Tensor, places: torch.Tensor, **inputs: torch.Tensor
) -> ModelOutput:
    """
    Runs a forward on packed rows.

    Args:
        model ([`~transformers.PreTrainedModel`]): The model, see [`can_pack`], with TRL's fused head.
        readers (`torch.Tensor` of shape `(num_packed_rows, length, 2)`): The numbers of the first and the last sequence that contain a token.
        places (`torch.Tensor` of shape `(num_sequences, completion_length)`): Where each token of a completion is predicted in the flattened
            rows; -1 if it is not.
        **inputs: Further arguments of the forward, such as `input_ids`, `position_ids` and `shift_labels` of the packed rows.

    Returns:
        `ModelOutput`: `log_probs` and `entropy` have the shape of `places`, and are 0 where that is -1.
    """
    (first, last), positions = readers.unbind(dim=-1), inputs["position_ids"]
    # A token sees those that its own sequence, the first one that contains it, has at smaller positions
    query, key = first.unsqueeze(2), first.unsqueeze(1)
    visible = (key <= query) & (query <= last.unsqueeze(1)) & (positions.unsqueeze(1) <= positions.unsqueeze(2))
    mask = torch.zeros(visible.shape, dtype=model.dtype, device=visible.device).masked_fill(~visible, -torch.inf)
    outputs = model(attention_mask=mask.unsqueeze(1), **inputs)
    for name in ("log_probs", "entropy"):
        if name in outputs:
            outputs[name] = outputs[name].flatten()[places].masked_fill(places < 0, 0.0)
    return outputs
