"""
A run on two hosts equals the same run on one, and an error on one host ends both.

The hosts are two network namespaces that are joined by a virtual cable and by nothing else.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from forked import FORKING


ROOT = Path(__file__).resolve().parents[1]
SCRIPT = Path(__file__).parent / "helpers" / "two_hosts.py"
ROLES = ("aux", "main")


@pytest.fixture(scope="module")
def hosts():
    """Names of the namespaces; the k-th one has the address 10.0.0.{k + 1} on the interface `cable`."""
    if shutil.which("ip") is None:
        pytest.skip("no `ip` (iproute2) to make network namespaces with")
    if os.geteuid() != 0:
        pytest.skip("only root can make network namespaces")
    names = [f"trl_multiagent_{os.getpid()}_{k}" for k in range(2)]
    made = []
    try:
        for name in names:
            done = ip("netns", "add", name)
            if done.returncode != 0:
                pytest.skip(f"no network namespaces here: {done.stderr.strip()}")
            made.append(name)
        cable = ("link", "add", "cable", "type", "veth", "peer", "name", "cable", "netns", names[1])
        done = ip("-n", names[0], *cable)
        if done.returncode != 0:
            pytest.skip(f"no virtual cables here: {done.stderr.strip()}")
        for k, name in enumerate(names):
            for setting in (("address", "add", f"10.0.0.{k + 1}/24", "dev", "cable"), ("link", "set", "cable", "up")):
                assert ip("-n", name, *setting).returncode == 0
            assert ip("-n", name, "link", "set", "lo", "up").returncode == 0
        yield names
    finally:
        for name in made:
            ip("netns", "delete", name)  # and with it the cable


def ip(*arguments):
    return subprocess.run(["ip", *arguments], capture_output=True, text=True)


def launch(hosts, folder):
    """Starts a process on each host; gives each launcher's exit status and error output."""
    launchers = []
    for k, host in enumerate(hosts):
        command = ["ip", "netns", "exec", host, sys.executable, "-m", "accelerate.commands.launch"]
        command += ["--config_file", "accelerate_configs/multi_node_ddp.yaml", "--num_processes", "2"]
        command += ["--mixed_precision", "no", "--dynamo_backend", "no"]
        command += ["--num_machines", "2", "--machine_rank", str(k)]
        command += ["--main_process_ip", "10.0.0.1", "--main_process_port", "29500", str(SCRIPT), str(folder)]
        # The names of the addresses are asked for, but nobody answers here
        network = {"GLOO_SOCKET_IFNAME": "cable", "RES_OPTIONS": "timeout:1 attempts:1"}
        environment = {**os.environ, "PYTHONPATH": str(SCRIPT.parent), "OMP_NUM_THREADS": "1", **network, **FORKING}
        launchers.append(subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True))
    try:
        outputs = [launcher.communicate(timeout=640)[1] for launcher in launchers]
    finally:
        for launcher in launchers:
            launcher.terminate()  # it then ends its processes
    return [(launcher.returncode, output) for launcher, output in zip(launchers, outputs, strict=True)]


def test_two_hosts_do_what_one_does(forked, hosts, tmp_path):
    for code, stderr in launch(hosts, tmp_path / "two"):
        assert code == 0, stderr[-4000:]
    one = forked.run(SCRIPT, tmp_path / "one", processes=2)
    assert one.codes == [0, 0], one.stderr[-4000:]
    seen = {x: [json.loads((tmp_path / x / f"process{k}.json").read_text()) for k in range(2)] for x in ("one", "two")}
    assert [x["processes"] for x in seen["one"] + seen["two"]] == [2] * 4
    assert [x["on_this_host"] for x in seen["one"] + seen["two"]] == [2, 2, 1, 1]
    assert len({x["network"] for x in seen["two"]}) == 2
    assert [x["reward"] for x in seen["two"]] == [x["reward"] for x in seen["one"]]
    for first, second in seen.values():
        assert second["error"] == "TaskError: The reward function `broken_reward` raised ValueError: the judge is ill"
        assert first["error"].startswith("OtherProcessError: Process 1 on ")
        assert f"failed: {second['error']}" in first["error"]
    for role in ROLES:
        one, two = (load_file(tmp_path / name / "agents" / role / "model.safetensors") for name in ("one", "two"))
        assert one.keys() == two.keys()
        for name, x in one.items():
            assert torch.allclose(x, two[name], rtol=1e-5, atol=1e-7), name
