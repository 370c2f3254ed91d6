"""
Computes the common tokens of several sequences only once: of an update, and of the prompts before sampling.

A packed row holds sequences as a tree: siblings share their prompt, and the prompts of later turns share earlier
turns, as far as the token ids agree. A 4-dimensional attention mask limits a token to the tokens of its own sequence,
and positions count from the start of that sequence. This needs no cache of keys and values, so it works with
activation checkpointing.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import torch
from torch.nn.functional import pad
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer
from transformers.utils import ModelOutput
from trl.data_utils import common_prefix_length
from trl.trainer.utils import pad as pad_left

from trl_multiagent.models.grouped_lora import Stacked
from trl_multiagent.models.shared_prompts import can_continue_cache, product_dtype, takes_masks


MOST_PADDING = 1.25  # several agents share a call or a forward if padding makes it at most this many times as large
MAX_ROW_LENGTH = 4096  # the mask of a row has the square of its length
MOST_LEFT = 0.95  # packing pays if it leaves at most this share of the positions of padded sequences
# Attention in a row of this many times the hidden size takes as long as the rest of a layer
ATTENTION_FACTOR = 4
MASK_ALIGNMENT = 8  # if a mask's rows lie at other distances in memory, attention kernels copy it in every layer
# What fills the rows of agents that share a forward with longer ones. Padding belongs to no sequence
PADDING = {"input_ids": 0, "attention_mask": 0, "position_ids": 0, "readers": -1}


def is_little_padding(lengths: Sequence[int]) -> bool:
    """Returns whether rows of these lengths, padded to the longest, are at most `MOST_PADDING` times as large."""
    return len(lengths) * max(lengths, default=0) <= MOST_PADDING * sum(lengths)


@dataclass
class PackedRow:
    """Lists with an entry per token. The sequences that contain a token have consecutive numbers."""

    input_ids: list[int] = field(default_factory=list)
    position_ids: list[int] = field(default_factory=list)
    shift_labels: list[int] = field(default_factory=list)  # the next token, if it belongs to a completion
    first: list[int] = field(default_factory=list)  # number of the first sequence that contains the token
    last: list[int] = field(default_factory=list)  # number of the last sequence that contains the token

    def add(self, number: int, ids: list[int], num_prompt_tokens: int, shared: list[int]) -> list[int]:
        """
        Adds a sequence that begins with the tokens at the `shared` places of the row, without its last token, which
        predicts nothing. Returns the places of its tokens.
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
        """Returns the lists, padded to a length. Padding belongs to no sequence."""
        missing = length - len(self.input_ids)
        return [x + [value] * missing for x, value in zip(vars(self).values(), (0, 0, -100, -1, -1), strict=True)]


def can_pack(model: PreTrainedModel, longest: int) -> bool:
    """
    Returns whether a model accepts positions and 4-dimensional masks, a token sees no later one, and its attention
    spans sequences of up to `longest` tokens.
    """
    if longest > MAX_ROW_LENGTH or not (takes_masks(model) and can_continue_cache(model)):
        return False
    config = model.config.get_text_config(decoder=True)
    if getattr(config, "use_bidirectional_attention", None) in (True, "all"):  # some Gemma models that embed texts
        return False
    layers = DynamicCache(config=config).layers
    return all(layer.sliding_window >= longest for layer in layers if type(layer) is DynamicSlidingWindowLayer)


def pack(
    sequences: Sequence[list[int]], num_prompt_tokens: Sequence[int], completion_length: int, hidden_size: int
) -> dict[str, torch.Tensor] | None:
    """
    Packs sequences of prompt and completion. An empty sequence stands for a completion that is not needed.

    Args:
        sequences (`Sequence[list[int]]`): The token ids.
        num_prompt_tokens (`Sequence[int]`): Number of prompt tokens of each sequence.
        completion_length (`int`): Number of columns for the tokens of a completion.
        hidden_size (`int`): Hidden size of the model. Rows are longer for wider models.

    Returns:
        `dict[str, torch.Tensor]`: The arguments of [`run_scored`]; `None` if packing saves hardly any positions.
    """
    order = sorted(range(len(sequences)), key=sequences.__getitem__)  # sequences that begin alike follow each other
    shared = [0, *(num_shared(sequences[k], sequences[m]) for k, m in pairwise(order))]
    firsts = set(divide([max(0, len(sequences[k]) - 1) for k in order], shared, hidden_size))
    rows = []
    places: list[int] = []  # of the tokens of the last sequence
    found = {}  # by sequence: its row, and the places that predict its completion
    for number, k in enumerate(order):
        if number in firsts:
            rows.append(PackedRow())
            places = []
        places = rows[-1].add(number, sequences[k], num_prompt_tokens[k], places[: shared[number]])
        found[k] = len(rows) - 1, places[num_prompt_tokens[k] - 1 :]
    length = max(1, *(len(row.input_ids) for row in rows))
    if len(rows) * length > MOST_LEFT * len(sequences) * max(1, *(len(ids) - 1 for ids in sequences)):
        return None
    ids, positions, labels, *readers = torch.tensor([row.padded(length) for row in rows]).unbind(dim=1)
    flat_places = []
    for row, predicting in (found[k] for k in range(len(sequences))):
        padding = [-1] * (completion_length - len(predicting))
        flat_places.append([row * length + place for place in predicting] + padding)
    packed = {"input_ids": ids, "position_ids": positions, "readers": torch.stack(readers, dim=-1)}
    return packed | scored(labels, torch.tensor(flat_places))


def pack_ends(model: PreTrainedModel, sequences: Sequence[list[int]]) -> dict[str, torch.Tensor] | None:
    """
    Packs sequences, of which a head of the model reads the last tokens.

    Returns:
        `dict[str, torch.Tensor]`: `input_ids`, `position_ids` and `readers` of the packed rows, and `ends`, of shape
        `(num_sequences,)`: the place of each last token in the flattened rows. `None` if the model cannot read them,
        or if packing saves hardly any positions.
    """
    if not can_pack(model, max(map(len, sequences))):
        return None
    hidden_size = model.config.get_text_config().hidden_size
    # Each last token predicts another one, of which only the place is used
    packed = pack([[*ids, 0] for ids in sequences], [len(ids) for ids in sequences], 1, hidden_size)
    if packed is None:
        return None
    ends = packed["predicting"][packed["places"][:, 0]]
    return {name: packed[name] for name in ("input_ids", "position_ids", "readers")} | {"ends": ends}


def scored(labels: torch.Tensor, places: torch.Tensor) -> dict[str, torch.Tensor]:
    """
    Returns the arguments of [`run_scored`] that say what the head sees. `labels`: the next token at each place.
    `places`: those that predict the tokens of completions, of shape `(num_sequences, completion_length)`; -1 for
    padding.
    """
    predicting, numbers = places.clamp(min=0).unique(return_inverse=True)
    numbers = numbers.masked_fill(places < 0, -1)
    return {"predicting": predicting, "shift_labels": labels.flatten()[predicting][None], "places": numbers}


def num_shared(one: list[int], other: list[int]) -> int:
    """
    Returns how many tokens two sequences share. Their last common token is not shared, because it predicts different
    tokens.
    """
    return max(0, common_prefix_length(one, other) - 1)


def divide(lengths: list[int], shared: list[int], hidden_size: int) -> list[int]:
    """
    Divides sequences among packed rows and returns the first sequence of each row. A sequence shares `shared` tokens
    with the sequence before it in its row. Longer rows share more tokens, but cost more attention and padding.
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


def mask_of(readers: torch.Tensor, positions: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Returns the mask of packed rows, which attention adds to its scores. `dtype`: the model's."""
    first, last = readers.unbind(dim=-1)
    # A token sees the tokens up to its position that are in the first sequence that contains it
    query, key = first.unsqueeze(2), first.unsqueeze(1)
    visible = (key <= query) & (query <= last.unsqueeze(1)) & (positions.unsqueeze(1) <= positions.unsqueeze(2))
    length = visible.size(-1)
    room = -(-length // MASK_ALIGNMENT) * MASK_ALIGNMENT
    dtype = product_dtype(visible, dtype)
    mask = torch.zeros(*visible.shape[:-1], room, dtype=dtype, device=visible.device)[..., :length]
    return mask.masked_fill_(~visible, -torch.inf)[:, None]


def run_scored(model: PreTrainedModel, *agents: dict[str, Any]) -> list[ModelOutput]:
    """
    Runs one forward of the rows of one or several agents. Its head sees only the places that predict a completion's
    token, each once.

    Args:
        model ([`~transformers.PreTrainedModel`]): The model, with TRL's fused head.
        *agents (`dict[str, Any]`): The arguments of each agent, which all have the same names:

            - `places` (`torch.Tensor` of shape `(num_sequences, completion_length)`): For each token of a completion,
              the number of the place that predicts it; -1 for padding.
            - `predicting` (`torch.Tensor`): These places in the flattened rows.
            - `readers` (`torch.Tensor` of shape `(num_packed_rows, length, 2)`, *optional*): For packed rows, see
              [`can_pack`]: the numbers of the first and the last sequence that contain a token.
            - further arguments of the forward, such as `input_ids` and `position_ids`, and the `shift_labels` of the
              places.

    Returns:
        `list[ModelOutput]`: For each agent, an output in which `log_probs` and the head's other fields have the shape
        of its `places`, and are 0 at padding.
    """
    inputs, predicting = joined(agents) if len(agents) > 1 else ({**agents[0]}, agents[0]["predicting"])
    del inputs["places"], inputs["predicting"]
    readers = inputs.pop("readers", None)
    if readers is not None:
        inputs["attention_mask"] = mask_of(readers, inputs["position_ids"], model.dtype)

    def choose(backbone: torch.nn.Module, args: Any, outputs: Any) -> None:
        outputs.last_hidden_state = outputs.last_hidden_state.flatten(0, 1)[predicting][None]

    with model.base_model.register_forward_hook(choose):
        outputs = model(**inputs)
    numbers = [len(x["predicting"]) for x in agents]
    split = {
        name: outputs[name][0].split(numbers)
        for name in ("log_probs", "entropy", "mean_logits", "is_top1")
        if name in outputs
    }
    return [
        replace(
            outputs,
            **{name: x[k][own["places"]].masked_fill(own["places"] < 0, 0.0) for name, x in split.items()},
        )
        for k, own in enumerate(agents)
    ]


def joined(agents: Sequence[dict[str, Any]]) -> tuple[dict[str, Any], torch.Tensor]:
    """Returns the arguments of one forward of several agents' rows, padded on the right, and all places that count."""
    inputs, places, start = {**agents[0]}, [], 0
    width = max(x["input_ids"].size(1) for x in agents)
    for x in agents:
        rows, length = x["input_ids"].shape
        own = x["predicting"]
        places.append(start * width + own + own // length * (width - length))
        start += rows
    for name, value in PADDING.items():
        if name in inputs:
            inner = (0, 0) * (inputs[name].dim() - 2)  # not padded: `readers` has two numbers per token
            padded = [pad(x[name], (*inner, 0, width - x[name].size(1)), value=value) for x in agents]
            inputs[name] = torch.cat(padded)
    inputs["shift_labels"] = torch.cat([x["shift_labels"] for x in agents], dim=1)
    return inputs, torch.cat(places)


def read_packed(
    model: PreTrainedModel, prompts: Sequence[list[int]], agents: torch.Tensor, group: Stacked | None
) -> DynamicCache | None:
    """
    Reads prompts for sampling, each common token of an agent's prompts once.

    Args:
        model ([`~transformers.PreTrainedModel`]): The model.
        prompts (`Sequence[list[int]]`): The token ids.
        agents (`torch.Tensor` of shape `(num_prompts,)`): The number of each prompt's agent.
        group ([`~models.grouped_lora.Stacked`] or `None`): The adapters of the agents, if there are several.

    Returns:
        [`~transformers.DynamicCache`]: As [`~models.shared_prompts.read_padded`]. `None` if the model cannot read
        packed rows, or if packing saves hardly any positions.
    """
    longest, config = max(map(len, prompts)), model.config.get_text_config(decoder=True)
    cache = DynamicCache(config=config)
    layers = cache.layers
    if longest == 1 or not can_pack(model, longest) or any(type(layer) is not DynamicLayer for layer in layers):
        return None
    of_agents = {number: (agents == number).nonzero().flatten().tolist() for number in agents.unique().tolist()}
    packed: list[Any] = [
        pack([prompts[k] for k in ks], [1] * len(ks), longest - 1, config.hidden_size) for ks in of_agents.values()
    ]
    if None in packed:
        return None
    if group is not None:
        rows = [number for number, x in zip(of_agents, packed, strict=True) for _ in x["input_ids"]]
        group.set_rows(torch.tensor(rows, device=model.device))
    inputs, places = joined(packed)
    ids, positions, readers = (inputs[name].to(model.device) for name in ("input_ids", "position_ids", "readers"))
    mask = mask_of(readers, positions, model.dtype)
    model.base_model(input_ids=ids, position_ids=positions, attention_mask=mask, past_key_values=cache, use_cache=True)
    tokens: dict[int, torch.Tensor] = {}  # the places of each prompt's tokens
    for ks, x in zip(of_agents.values(), packed, strict=True):
        own_places, places = places.tensor_split([len(x["predicting"])])
        tokens |= {k: own_places[numbers[numbers >= 0]] for k, numbers in zip(ks, x["places"], strict=True)}
    # What stands in the padding is not seen
    table = pad_left([tokens[k] for k in range(len(prompts))], padding_value=0, padding_side="left")
    for layer in layers:
        stored = (layer.keys, layer.values)
        layer.keys, layer.values = (x.transpose(1, 2).flatten(0, 1)[table].transpose(1, 2) for x in stored)
    return cache
