"""
A run on two hosts equals the same run on one, and an error on one host ends both.

The hosts are two network namespaces that are joined by a virtual cable and by nothing else.
"""

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from forked import FORKING


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


def test_two_hosts_do_what_one_does(forked, hosts, tmp_path):
    # The names of the addresses are asked for, but nobody answers here
    network = {"GLOO_SOCKET_IFNAME": "cable", "RES_OPTIONS": "timeout:1 attempts:1"}
    arguments = (",".join(hosts), SCRIPT, tmp_path / "two")
    two = forked.run(SCRIPT.with_name("on_two_hosts.py"), *arguments, processes=2, environment=network | FORKING)
    assert two.codes == [0, 0], two.stderr[-4000:]
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
