"""How scripts that run in several processes communicate, and how they end."""

import contextlib
import importlib.util
import sys

import torch


def import_deepspeed() -> None:
    """
    Imports DeepSpeed, if it is installed, and has it communicate through gloo alone. Its own operator for processes on
    one machine would first be compiled, which takes longer than all runs under DeepSpeed together.
    """
    if importlib.util.find_spec("deepspeed") is None:
        return
    with contextlib.redirect_stdout(sys.stderr):
        import deepspeed
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def end_process_group() -> None:
    """
    Waits for all processes, then ends the process group. Call it last in a script. A process that exits earlier closes
    its connections, and the first one also ends the store; the others may still be using them and would be aborted.
    """
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()
