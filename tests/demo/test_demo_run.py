import re

import pytest
from transformers import AutoModelForCausalLM

from trl_multiagent import AgentTeam
from trl_multiagent.configs.recipes.demo.model import demo_model
from trl_multiagent.models.imitation import ImitationModel


def test_the_guard_refuses_and_records_the_network(run_without_network):
    process, network = run_without_network(
        "-c", "import socket; socket.create_connection(('192.0.2.1', 9), timeout=1)"
    )
    assert process.returncode == 1 and "no network here" in process.stderr
    assert "socket.getaddrinfo 192.0.2.1" in network
    process, network = run_without_network("-c", "import socket; socket.socket().connect(('192.0.2.1', 9))")
    assert process.returncode == 1 and network == "socket.connect 192.0.2.1\n"


def test_the_demo_runs_without_a_network(demo_run):
    process, network, _ = demo_run
    assert process.codes == [0], process.stderr[-3000:]
    assert network == "" and "socket." not in process.stderr  # nor when it imports


def test_the_demo_shows_progress_result_and_paths(demo_run):
    process, _, outputs = demo_run
    for phase in ("Building the base model", "Held-out problems, before", "Held-out problems, after"):
        assert f"{phase}: 100%" in process.stderr
    assert re.search(r"^step (\d+) of \1: reward ", process.stdout, flags=re.MULTILINE)  # a line per log, as in a pipe
    assert "Warning" not in process.stderr
    rows = dict(re.findall(r"^(\S.*?) {2,}(\S+ +\S+)$", process.stdout, flags=re.MULTILINE))
    assert {"joint reward (0 to 4)", "tests passed", "both agents follow the same convention"} <= set(rows)
    assert process.stdout.count("Sample answer:") == 1
    lines = process.stdout.replace(str(outputs), "outputs").splitlines()
    assert max(map(len, lines)) <= 100

    team_folder = re.search(r"Saved team +(\S+)", process.stdout).group(1)
    assert team_folder.startswith(str(outputs))
    assert AgentTeam.from_pretrained(team_folder).roles == ("aux", "main")


def test_the_base_model_is_mediocre_as_it_should_be(demo_run, demo_cache, monkeypatch):
    rewards = re.search(r"^joint reward \(0 to 4\) +(\S+) +(\S+)$", demo_run[0].stdout, flags=re.MULTILINE)
    assert 1.4 < float(rewards[1]) < 2.1
    monkeypatch.setenv("TRL_MULTIAGENT_CACHE", str(demo_cache))
    monkeypatch.setattr(ImitationModel, "build", lambda *args, **kwargs: pytest.fail("not cached"))
    assert AutoModelForCausalLM.from_pretrained(demo_model()).config.hidden_size == 128
