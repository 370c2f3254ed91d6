"""Training in several processes: makes all of them end when one fails, and rejects settings that cannot work."""

import contextlib
import os
import socket
from collections.abc import Iterator
from typing import Any

import torch
from accelerate import Accelerator, PartialState
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType, gather, gather_object, reduce
from trl import GRPOConfig

from trl_multiagent.environments.task_errors import UnavailableError, describe
from trl_multiagent.stopping import REQUEST
from trl_multiagent.trainers.base.run_settings import differences, format_value


class OtherProcessError(RuntimeError):
    """Another process failed. The message says which one and why."""


class OtherProcessUnavailable(OtherProcessError):
    """Other processes failed, and all of them with an `UnavailableError`, which needs no traceback."""


def start_processes() -> PartialState:
    """
    Connects the processes of this run, unless that was done before.

    Raises:
        ValueError: accelerate found only one of several processes.
    """
    # Under DeepSpeed, accelerate connects processes without a GPU only if it is told that there is none
    state = PartialState(cpu=not torch.accelerator.is_available())
    launched = int(os.environ.get("WORLD_SIZE", "1"))
    if launched > 1 and state.num_processes == 1:
        raise ValueError(
            f"{launched} processes were launched, but they are not connected: check the accelerate config."
        )
    return state


@contextlib.contextmanager
def fail_together(accelerator: Accelerator | PartialState) -> Iterator[None]:
    """
    Ends all processes if one of them raises an error within the block: that one with its error, the others with
    [`OtherProcessError`].

    The block ends with an [`error_barrier`] and may contain more of them. A process that fails proceeds to the next
    barrier and reports its error there. Therefore no other collective operation may lie between code that can fail and
    the next barrier. With a single process, nothing is synchronized.

    Args:
        accelerator ([`~accelerate.Accelerator`] or [`~accelerate.PartialState`]): The trainer's, or the connected processes.

    Raises:
        OtherProcessError: Another process failed within the block.
    """
    try:
        yield
    except OtherProcessError:
        raise  # a barrier raised it, so all processes have left that barrier
    except BaseException as error:  # exits and interrupts too, or the other processes would wait forever
        error_barrier(accelerator, error)
        raise
    error_barrier(accelerator)


def error_barrier(accelerator: Accelerator | PartialState, error: BaseException | None = None) -> None:
    """
    Waits until all processes have arrived, and raises an error if one of the others reports one.

    Args:
        accelerator ([`~accelerate.Accelerator`] or [`~accelerate.PartialState`]): The trainer's, or the connected processes.
        error (`BaseException`, *optional*): The error of this process.

    Raises:
        OtherProcessError: Another process reported an error, and this one did not.
    """
    if accelerator.num_processes == 1:
        return
    failures = torch.tensor(float(error is not None), device=accelerator.device)
    if reduce(failures, "sum").item() == 0:
        return
    report: tuple[str, bool] | None = None
    if error is not None:
        index, host = accelerator.process_index, socket.gethostname()
        report = f"Process {index} on {host} failed: {describe(error)}", isinstance(error, UnavailableError)
    gathered: list[tuple[str, bool]] = [other for other in gather_object([report]) if other is not None]
    reports = [text for text, _ in gathered]
    if error is None and all(is_unavailable for _, is_unavailable in gathered):
        raise OtherProcessUnavailable("\n".join(reports))
    if error is None:
        raise OtherProcessError("\n".join([*reports, "See the traceback of that process."]))


def check_agreement(accelerator: Accelerator | PartialState, settings: dict[str, Any]) -> None:
    """
    Raises an error on all processes if one of them has other settings than the first one. Such processes would wait for each other
    forever, or average gradients of different losses.

    Args:
        accelerator ([`~accelerate.Accelerator`] or [`~accelerate.PartialState`]): The trainer's, or the connected processes.
        settings (`dict`): What must be the same on all processes, as plain values by name.

    Raises:
        ValueError: The message has one line and names every difference, with the value of process 0 and another one.
    """
    if accelerator.num_processes == 1:
        return
    first, *others = gather_object([settings])
    differing: dict[str, str] = {}
    for process, other in enumerate(others, start=1):
        for name, (left, right) in differences(first, other).items():
            text = f"{name}: {format_value(left)} on process 0, {format_value(right)} on process {process}"
            differing.setdefault(name, text)
    if differing:
        raise ValueError(
            f"The processes of this run differ: {'; '.join(differing.values())}. Start all of them with the same settings, data and "
            "models."
        )


def is_asked_to_stop(accelerator: Accelerator | PartialState) -> bool:
    """
    Whether a signal has asked one of the processes to end. Then all of them count as asked. All processes must call this function.

    Args:
        accelerator ([`~accelerate.Accelerator`] or [`~accelerate.PartialState`]): The trainer's, or the connected processes.
    """
    if not REQUEST.is_expected:
        return False
    if accelerator.num_processes > 1:
        signals = gather(torch.tensor([REQUEST.signal or 0], device=accelerator.device))
        REQUEST.signal = REQUEST.signal or int(signals.max()) or None
        return bool(signals.max())  # a signal that came since then counts next time, on all processes
    return REQUEST.signal is not None


def without_repeated(accelerator: Accelerator, rows: list[Any], copies: int = 1) -> list[Any]:
    """
    Leaves out the rows of an evaluation batch that another process has, too: accelerate repeats rows of a dataset until the last
    batches of all processes are full.

    Args:
        accelerator ([`~accelerate.Accelerator`]): The trainer's accelerator, which prepared the data loader.
        rows (`list`): This process's part of the batch.
        copies (`int`, *optional*, defaults to `1`): How often the sampler returns each row of the dataset.

    Returns:
        `list`: The rows that count, possibly none.
    """
    if accelerator.num_processes == 1:
        return rows
    number = copies * len(accelerator.gradient_state.active_dataloader.dataset)
    return rows[: num_own_rows(accelerator, len(rows), number)]


def num_own_rows(accelerator: Accelerator, num_rows: int, length: int) -> int:
    """
    The number of first rows in this process's latest batch that no process has had before in this pass through the dataset, see
    [`without_repeated`].

    Args:
        accelerator ([`~accelerate.Accelerator`]): The trainer's accelerator, whose data loader made the batch.
        num_rows (`int`): Rows of the batch.
        length (`int`): Rows of the dataset, with the copies that the sampler makes.
    """
    remainder = length % (num_rows * accelerator.num_processes)
    if accelerator.num_processes == 1 or not accelerator.gradient_state.end_of_dataloader or remainder == 0:
        return num_rows
    # Of the last batches, one process after the other, the first rows count
    return min(num_rows, max(0, remainder - accelerator.process_index * num_rows))


def forget_engine() -> None:
    """
    Makes the next trainer of this process set up its own engine. Call it between two trainers: under DeepSpeed, accelerate keeps the
    configuration of the first one, and refuses a second one. The processes stay connected.
    """
    AcceleratorState._reset_state()


def check_distribution(accelerator: Accelerator) -> None:
    """
    Raises an error if the run is distributed in a way that cannot work, or that accelerate has silently replaced.

    Args:
        accelerator ([`~accelerate.Accelerator`]): The trainer's accelerator.

    Raises:
        ValueError: The message says what is not supported, why, and what to use instead.
    """
    # These variables hold the engine that was requested. On the CPU, accelerate may silently use another one
    if os.environ.get("ACCELERATE_USE_FSDP") == "true":
        raise ValueError(
            "FSDP cannot train a team: it gathers weights at every forward pass, also during generation, so processes "
            "whose rollout trees differ would wait for each other forever. Use ZeRO-3, which shards the same state: "
            "accelerate_configs/zero3.yaml."
        )
    if os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true" and not _uses_deepspeed(accelerator):
        raise ValueError(
            f"DeepSpeed was requested, but accelerate runs {accelerator.distributed_type.value} instead. If "
            "ACCELERATE_USE_CPU is set, unset it: DeepSpeed detects the CPU by itself."
        )
    if _uses_deepspeed(accelerator):
        zero = accelerator.state.deepspeed_plugin.deepspeed_config["zero_optimization"]
        if zero["stage"] == 3 and not zero.get("stage3_gather_16bit_weights_on_model_save", False):
            raise ValueError(
                "DeepSpeed's `stage3_gather_16bit_weights_on_model_save` (accelerate: `zero3_save_16bit_model`) is "
                "not true. Set it to true: without it, a saved team would have no weights."
            )
    if accelerator.num_processes == 1:
        return
    if not accelerator.even_batches:
        raise ValueError(
            "`accelerator_config` has `even_batches: false`: in an evaluation, processes with more batches would wait "
            "forever for those with fewer. Leave it true."
        )
    if accelerator.split_batches:
        raise ValueError(
            "`accelerator_config` has `split_batches: true`, but `items_per_device` counts the items of one process. "
            "Leave it false."
        )


def check_generation(accelerator: Accelerator, args: GRPOConfig) -> None:
    """
    Raises an error if processes whose rollout trees differ would wait for each other forever during generation.

    Args:
        accelerator ([`~accelerate.Accelerator`]): The trainer's accelerator.
        args ([`~trl.GRPOConfig`]): The trainer's arguments.

    Raises:
        ValueError: `ds3_gather_for_generation` is False under ZeRO-3 with several processes.
    """
    if accelerator.num_processes == 1 or args.ds3_gather_for_generation or not _uses_deepspeed(accelerator):
        return
    if accelerator.state.deepspeed_plugin.zero_stage == 3:
        raise ValueError(
            "`ds3_gather_for_generation=False` makes every forward pass of the generation a collective operation, but "
            "the rollout trees differ between processes, so these would wait for each other forever. Leave it True: "
            "every device then holds the weights of the whole team while it generates."
        )


def _uses_deepspeed(accelerator: Accelerator) -> bool:
    return accelerator.distributed_type == DistributedType.DEEPSPEED
