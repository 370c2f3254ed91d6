"""
Functions for several processes: rejects settings that cannot work, drops the rows that accelerate repeats, and resets
DeepSpeed.
"""

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType
from transformers import TrainingArguments
from transformers.integrations import unset_hf_deepspeed_config


def without_repeated(accelerator: Accelerator, rows: list[Any], copies: int = 1) -> list[Any]:
    """
    Drops the rows that accelerate has repeated, possibly all, see [`num_own_rows`]. The sampler returns each row
    `copies` times.
    """
    number = copies * len(accelerator.gradient_state.active_dataloader.dataset)
    return rows[: num_own_rows(accelerator, len(rows), number)]


def num_own_rows(accelerator: Accelerator, num_rows: int, length: int) -> int:
    """
    Returns how many rows of this process's latest batch are not repeated. These are the first of its `num_rows` rows.
    accelerate repeats rows to fill the last batches of all processes. `length`: the number of rows of the dataset,
    with the copies that the sampler makes.
    """
    remainder = length % (num_rows * accelerator.num_processes)
    if accelerator.num_processes == 1 or not accelerator.gradient_state.end_of_dataloader or remainder == 0:
        return num_rows
    # In the last batches, the first rows count, one process after the other
    return min(num_rows, max(0, remainder - accelerator.process_index * num_rows))


def forget_engine() -> None:
    """
    Resets accelerate, so that the next trainer can configure DeepSpeed. accelerate keeps its first configuration, and
    refuses others.
    """
    AcceleratorState._reset_state()


@contextlib.contextmanager
def without_sharding(args: TrainingArguments) -> Iterator[None]:
    """
    Makes models load whole within the block, even if the trainer shards them (ZeRO-3), because a collection samples on
    each process alone.
    """
    plugin = args.deepspeed_plugin
    if plugin is not None:  # while it is registered, transformers shards the models that it loads
        unset_hf_deepspeed_config()
    try:
        yield
    finally:
        if plugin is not None:
            plugin.set_deepspeed_weakref()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def check_distribution(accelerator: Accelerator) -> None:
    """
    Raises `ValueError` if the run is distributed in a way that cannot work, or that accelerate has silently replaced.
    """
    # The environment variables name the requested engine. On the CPU, accelerate may silently use another one
    if os.environ.get("ACCELERATE_USE_FSDP") == "true":
        raise ValueError(
            "FSDP cannot train a team: it gathers weights at every forward pass, also during generation, so processes "
            "whose rollout trees differ would wait for each other forever. Use ZeRO-3, which shards the same state: "
            "accelerate_configs/zero3.yaml."
        )
    uses_deepspeed = accelerator.distributed_type == DistributedType.DEEPSPEED
    if os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true" and not uses_deepspeed:
        raise ValueError(
            f"DeepSpeed was requested, but accelerate runs {accelerator.distributed_type.value} instead. If "
            "ACCELERATE_USE_CPU is set, unset it: DeepSpeed detects the CPU by itself."
        )
    if uses_deepspeed:
        zero = accelerator.state.deepspeed_plugin.deepspeed_config["zero_optimization"]
        if zero["stage"] == 3 and not zero.get("stage3_gather_16bit_weights_on_model_save", False):
            raise ValueError(
                "DeepSpeed's `stage3_gather_16bit_weights_on_model_save` (accelerate: `zero3_save_16bit_model`) is "
                "not true. Set it to true: without it, a saved team would have no weights."
            )
