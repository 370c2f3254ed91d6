import os
import subprocess
import sys
from pathlib import Path

import pytest


REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def run_without_network(tmp_path_factory):
    """Runs Python in a process that has no network; gives the finished process and what it tried to reach."""

    def run(*arguments: str, **environment: str) -> tuple[subprocess.CompletedProcess, str]:
        log = tmp_path_factory.mktemp("network") / "log"
        guard = str(Path(__file__).parent / "no_network")
        variables = {"PYTHONPATH": os.pathsep.join([guard, str(REPOSITORY)]), "NETWORK_LOG": str(log)}
        variables |= {"OMP_NUM_THREADS": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
        variables = {**os.environ, **variables, **environment}
        options = {"cwd": REPOSITORY, "env": variables, "capture_output": True, "text": True, "timeout": 600}
        process = subprocess.run([sys.executable, *arguments], **options)
        return process, log.read_text() if log.exists() else ""

    return run


@pytest.fixture(scope="session")
def demo_cache(tmp_path_factory) -> Path:
    """The cache folder of the tests, empty at first."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="session")
def demo_run(forked, demo_cache, tmp_path_factory):
    """
    One training step of the demo's recipe, with an empty cache, no network and one answer to each held-out problem:
    process, log of the network, folder.
    """
    outputs, log = tmp_path_factory.mktemp("outputs"), tmp_path_factory.mktemp("network") / "log"
    process = forked.run(
        *(Path(__file__).parent / "one_answer" / "train_magrpo.py", "--config"),
        *("recipes/code_generation/configs/magrpo_demo.yaml", "--override", "magrpo.max_steps=1"),
        f"output.base_dir={outputs}",
        cwd=REPOSITORY,
        environment={"TRL_MULTIAGENT_CACHE": str(demo_cache), "NETWORK_LOG": str(log)},
    )
    return process, log.read_text() if log.exists() else "", outputs
