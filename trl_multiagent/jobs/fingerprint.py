"""Fingerprints of the inputs of a run or stage (weights, rows), and the differences of two of them."""

import hashlib
import json
from collections.abc import Iterable
from typing import Any

import torch
from datasets import Dataset, IterableDataset
from transformers.trainer_pt_utils import get_model_param_count


MAX_VALUE_LENGTH = 200  # in characters, for values in a message

Changes = dict[str, tuple[Any, Any]]  # name -> value in the checkpoint, value in the run


def describe_agent(agent: torch.nn.Module, added: Iterable[torch.nn.Parameter] = ()) -> str:
    """
    Returns the architecture of an agent and its numbers of parameters, without `added` ones: adapters of critics and
    of reference policies.
    """
    others = torch.nn.ParameterList(added)
    total, trained = (get_model_param_count(agent, x) - get_model_param_count(others, x) for x in (False, True))
    return f"{agent.config.model_type}, {total} parameters, {trained} trained"


def checksum_of_weights(parameters: Iterable[torch.nn.Parameter]) -> str:
    """Computes a checksum of every bit of the weights. It does not depend on their device."""
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    total = 0
    for k, parameter in enumerate(parameters, start=1):
        values = parameter.detach().contiguous().view(integers[parameter.element_size()])
        total += k * int(values.sum(dtype=torch.int64))
    return f"{total % 2**64:016x}"


def describe_dataset(dataset: Dataset | IterableDataset) -> str:
    """Returns the columns of a dataset and, unless it is a stream, its size and the digest."""
    columns = ", ".join(sorted(dataset.column_names or ()))
    if isinstance(dataset, IterableDataset):
        return f"a stream with {columns}"
    return f"{len(dataset)} items with {columns}, digest {digest_of_rows(dataset)}"


def digest_of_rows(dataset: Dataset) -> str:
    """
    Computes a digest of all values in a dataset and of their order, which does not depend on their source or storage
    format.
    """
    columns, arrow = sorted(dataset.column_names), dataset.with_format("arrow")
    digest = hashlib.sha256(json.dumps([len(dataset), columns]).encode())
    for start in range(0, len(dataset), 10_000):
        table = arrow[start : start + 10_000]
        for name in columns:
            digest.update(json.dumps(table[name].to_pylist(), sort_keys=True, default=str).encode())
    return digest.hexdigest()[:16]


def differences(saved: dict[str, Any], here: dict[str, Any]) -> Changes:
    """
    Compares the settings of a checkpoint and of a run. Returns both values of each setting that differs.
    Settings that only one of them knows yet, because no model is loaded, are ignored. This does not apply to the
    environment's own settings.
    """
    changes = {name: (saved[name], x) for name, x in here.items() if name in saved and saved[name] != x}
    left, right = changes.pop("environment settings", ({}, {}))
    if "environment" not in changes:
        changes |= {
            f"environment {name}": (left.get(name), right.get(name))
            for name in sorted({*left, *right})
            if left.get(name) != right.get(name)
        }
    return changes


def format_value(value: Any) -> str:
    """Returns the representation of a value, shortened if it is long."""
    text = repr(value)
    return text if len(text) <= MAX_VALUE_LENGTH else f"{text[:MAX_VALUE_LENGTH]}..."
