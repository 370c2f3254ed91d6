"""Helpers for distributed runs: shared failures, settings and shutdown."""

import contextlib
import os
import socket
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
from accelerate import Accelerator, PartialState
from accelerate.utils import gather, gather_object, reduce

from trl_multiagent.environments.task_errors import UnavailableError, describe
from trl_multiagent.jobs.fingerprint import differences, format_value
from trl_multiagent.jobs.signals import REQUEST, Overdue


class OtherProcessError(RuntimeError):
    """Another process failed. The message says which one and why."""


class OverdueElsewhere(OtherProcessError):
    """The code of a task on another process has not ended in time after a signal."""


def start_processes() -> PartialState:
    """
    Connects the processes of this run if they are not yet connected. Raises `ValueError` if accelerate found only one
    of several.
    """
    with connecting():
        # A process without work waits for the others, for as long as they need: if one ends, its launcher ends all.
        # Under DeepSpeed, accelerate connects processes without a GPU only if it is told that there is none
        state = PartialState(cpu=not torch.accelerator.is_available(), timeout=timedelta(days=1))
    launched = int(os.environ.get("WORLD_SIZE", "1"))
    if launched > 1 and state.num_processes == 1:
        raise ValueError(f"{launched} processes were launched, but are not connected: check the accelerate config.")
    return state


@contextlib.contextmanager
def connecting() -> Iterator[None]:
    """Names the network interfaces in the error if the processes cannot be connected within the block."""
    try:
        yield
    except (RuntimeError, TimeoutError) as error:  # of torch.distributed
        raise UnavailableError(
            f"The processes of this run cannot be connected: {describe(error)}. If a host has several networks, name "
            "the interface that the hosts share in GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME, such as eth0."
        ) from error


def is_lost_process(error: BaseException) -> bool:
    """Returns whether an error of torch.distributed means that another process has ended, or cannot be reached."""
    return isinstance(error, torch.distributed.DistError) or "gloo/transport" in str(error)


@contextlib.contextmanager
def fail_together(accelerator: Accelerator | PartialState) -> Iterator[None]:
    """
    Ends all processes if one of them raises an error within the block. The failed process ends with its error, the
    others with [`OtherProcessError`].

    The block ends with an [`error_barrier`] and may contain more of them. A process that fails proceeds to the next
    barrier and reports its error there. Therefore no other collective operation may lie between code that can fail and
    the next barrier. With a single process, nothing is synchronized.
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
    Waits for all processes. Raises [`OtherProcessError`] if another process reports an error and this process has no
    `error`.
    """
    if accelerator.num_processes == 1:
        return
    failures = torch.tensor(float(error is not None), device=accelerator.device)
    if reduce(failures, "sum").item() == 0:
        return
    place = f"Process {accelerator.process_index} on {socket.gethostname()}"
    reports = gather_object([] if error is None else [f"{place} failed: {describe(error)}"])
    failed = [report for report in reports if not report.endswith(f" failed: {Overdue.__name__}")]
    if failed and (error is None or isinstance(error, Overdue)):
        raise OtherProcessError("\n".join(failed))
    if error is None:
        raise OverdueElsewhere("\n".join(reports))


def check_agreement(settings: dict[str, Any]) -> None:
    """
    Raises a `ValueError` on all processes if the `settings` of one, plain values by name, differ from the first
    one's. Such processes would wait for each other forever, or average gradients of different losses. The message
    names every difference.
    """
    first, *others = gather_object([settings])
    differing: dict[str, str] = {}
    for process, other in enumerate(others, start=1):
        for name, (left, right) in differences(first, other).items():
            text = f"{name}: {format_value(left)} on process 0, {format_value(right)} on process {process}"
            differing.setdefault(name, text)
    if differing:
        raise ValueError(
            f"The processes of this run differ: {'; '.join(differing.values())}. Start all of them with the same "
            "settings, data and models."
        )


def is_asked_to_stop(accelerator: Accelerator | PartialState) -> bool:
    """
    Returns whether one of the processes got a signal to end, with the same result on all of them. All processes must
    call this.
    """
    if not REQUEST.is_expected:
        return False
    if accelerator.num_processes == 1:  # on a GPU, a tensor would have the host wait
        return REQUEST.signal is not None
    first = int(gather(torch.tensor([REQUEST.signal or 0], device=accelerator.device)).max())
    REQUEST.signal = REQUEST.signal or first or None
    return first > 0  # a signal after the gather counts at the next call, on all processes
