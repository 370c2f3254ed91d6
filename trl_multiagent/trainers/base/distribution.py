"""Training in several processes: what is refused, and how all of them end when one fails."""

import contextlib
import os
import socket
from collections.abc import Iterator

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, gather_object
from trl import GRPOConfig

from trl_multiagent.environments.task_errors import describe


class OtherProcessError(RuntimeError):
    """Another process failed; the message says which one and why."""


@contextlib.contextmanager
def fail_together(accelerator: Accelerator) -> Iterator[None]:
    """
    When one process raises an error inside, all end: that one with its error, the others with [`OtherProcessError`].

    The end of the block is an [`error_barrier`], and there may be others within it. A process that fails goes to the next
    barrier with its error, so no other collective operation may lie between code that can fail and that barrier. With one
    process this costs nothing.

    Args:
        accelerator ([`~accelerate.Accelerator`]): The trainer's.
    """
    try:
        yield
    except OtherProcessError:
        raise  # raised by a barrier, which all processes have left
    except BaseException as error:  # an exit or an interrupt too, or the others would wait
        error_barrier(accelerator, error)
        raise
    error_barrier(accelerator)


def error_barrier(accelerator: Accelerator, error: BaseException | None = None) -> None:
    """
    Waits for all processes, and raises [`OtherProcessError`] if another one arrives with an error.

    Args:
        accelerator ([`~accelerate.Accelerator`]): The trainer's.
        error (`BaseException`, *optional*): What this process failed with.
    """
    if accelerator.num_processes == 1:
        return
    failures = torch.tensor(float(error is not None), device=accelerator.device)
    if accelerator.reduce(failures, "sum").item() == 0:
        return
    report = None
    if error is not None:
        index, host = accelerator.process_index, socket.gethostname()
        report = f"Process {index} on {host} failed: {describe(error)}"
    reports = [report for report in gather_object([report]) if report is not None]
    if error is None:
        raise OtherProcessError("\n".join([*reports, "Where it failed stands in that process's own traceback."]))


def check_distribution(accelerator: Accelerator) -> None:
    """
    Refuses ways to distribute a run that cannot work, or that accelerate would silently replace by another one.

    Args:
        accelerator ([`~accelerate.Accelerator`]): The trainer's.

    Raises:
        ValueError: says what is refused, why, and what to use.
    """
    # What accelerate's launcher or the arguments asked for; on the CPU, accelerate may not do it and say nothing
    if os.environ.get("ACCELERATE_USE_FSDP") == "true":
        raise ValueError(
            "FSDP cannot train a team: it gathers weights at every forward, also while generating, so processes whose "
            "rollout trees differ would wait for each other for ever. ZeRO-3 shards the same state: use "
            "accelerate_configs/zero3.yaml."
        )
    if os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true" and not _uses_deepspeed(accelerator):
        raise ValueError(
            f"DeepSpeed was asked for, but accelerate runs {accelerator.distributed_type.value} instead. If "
            "ACCELERATE_USE_CPU is set, unset it: DeepSpeed finds the CPU by itself."
        )
    if _uses_deepspeed(accelerator):
        zero = accelerator.state.deepspeed_plugin.deepspeed_config["zero_optimization"]
        if zero["stage"] == 3 and not zero.get("stage3_gather_16bit_weights_on_model_save", False):
            raise ValueError(
                "DeepSpeed's `stage3_gather_16bit_weights_on_model_save` (accelerate: `zero3_save_16bit_model`) is not "
                "true: without it, a saved team would have no weights."
            )
    if accelerator.num_processes == 1:
        return
    if not accelerator.even_batches:
        raise ValueError(
            "`accelerator_config` has `even_batches: false`: processes with fewer batches to evaluate on would keep the "
            "others waiting for ever. Leave it true."
        )
    if accelerator.split_batches:
        raise ValueError(
            "`accelerator_config` has `split_batches: true`, but `items_per_device` counts the items of one process. "
            "Leave it false."
        )


def check_generation(accelerator: Accelerator, args: GRPOConfig) -> None:
    """
    Refuses settings with which processes whose rollout trees differ would wait for each other for ever.

    Args:
        accelerator ([`~accelerate.Accelerator`]): The trainer's.
        args ([`~trl.GRPOConfig`]): The trainer's arguments.
    """
    if accelerator.num_processes == 1 or args.ds3_gather_for_generation or not _uses_deepspeed(accelerator):
        return
    if accelerator.state.deepspeed_plugin.zero_stage == 3:
        raise ValueError(
            "`ds3_gather_for_generation=False` makes every forward of the generation a collective operation, but "
            "the processes' rollout trees differ, so they would wait for each other for ever. Leave it True: the "
            "team's weights are then gathered on every device for as long as it generates."
        )


def _uses_deepspeed(accelerator: Accelerator) -> bool:
    return accelerator.distributed_type == DistributedType.DEEPSPEED
