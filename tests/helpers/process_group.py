"""How scripts that run in several processes communicate, and how they end."""

import contextlib
import functools
import importlib.util
import inspect
import sys
import types

import torch


def import_deepspeed() -> None:
    """
    Imports DeepSpeed, if it is installed, and has it communicate through gloo alone. Its own operator for processes on
    one machine would first be compiled, which takes longer than all runs under DeepSpeed together.
    """
    if importlib.util.find_spec("deepspeed") is None:
        return
    # DeepSpeed's functions would tell a profiler of GPUs of each of their calls
    sys.modules["deepspeed.utils.nvtx"] = types.ModuleType("nvtx")
    sys.modules["deepspeed.utils.nvtx"].instrument_w_nvtx = lambda function: function
    with contextlib.redirect_stdout(sys.stderr):
        import deepspeed
    # torch reads the signature of each of its functions with gradients at every call
    torch.autograd.function.inspect = types.SimpleNamespace(signature=functools.cache(inspect.signature))
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def end_process_group() -> None:
    """
    Waits for all processes, then ends the process group. Call it last in a script. A process that exits earlier closes
    its connections, and the first one also ends the store; the others may still be using them and would be aborted.
    """
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()
