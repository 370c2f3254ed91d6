"""
`accelerate launch` on two hosts, as a script that `forked.Forked` runs in two processes: `on_two_hosts.py HOST,HOST
SCRIPT ARGUMENTS`.

A host is the name of a network namespace. The k-th process enters the k-th one and launches the script there.
"""

import ctypes
import faulthandler
import os
import sys

from accelerate.commands.launch import main

from forked import ACCELERATE_CONFIGS


if __name__ == "__main__":
    faulthandler.cancel_dump_traceback_later()  # as in `launcher.py`
    rank = int(os.environ["RANK"])
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        del os.environ[name]
    with open(f"/run/netns/{sys.argv[1].split(',')[rank]}") as namespace:
        if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), 0) != 0:
            raise OSError(ctypes.get_errno(), "cannot enter the network namespace")
    options = ["--config_file", str(ACCELERATE_CONFIGS / "multi_node_ddp.yaml"), "--num_processes", "2"]
    options += f"--mixed_precision no --dynamo_backend no --num_machines 2 --machine_rank {rank}".split()
    options += ["--main_process_ip", "10.0.0.1", "--main_process_port", "29500"]
    sys.argv[1:] = [*options, *sys.argv[2:]]
    main()
