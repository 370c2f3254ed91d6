"""Every benchmark runs from start to end, if only for seconds."""

import json
from pathlib import Path

import pytest

from forked import FORKING


BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"
FORKED_CHILDREN = Path(__file__).parent / "helpers" / "forked_children.py"
# A line of each one's table
TABLES = {
    "actor_critic": "demo, ",
    "class_completion": "reference, 3 agents",
    "composite": "| Qwen3_5 | Qwen3_5ForConditionalGeneration | yes | yes | yes | yes |",
    "engine": "sampling, ",
    "evaluation": "team minus control",
    "families": "bug_fixing, ",
    "grouped": "sampling  ",
    "gpu": "lora, transformers' loop, T = 2",
    "memory_plan": "full, one process",
    "needed": "rule  ",
    "packed": "T = 1 ",
    "preference": "madpo_iter",
    "real": "| `hidden`, reward |",
    "sandbox": "sandbox, tier seccomp",
    "scaling": "DDP x 2",
    "team_memory": "held: target 60 %",
    "vs_comlrl": "generate calls",
    "vs_comlrl_plain": "plain PyTorch",
}


def test_every_benchmark_is_run():
    commands = {path.stem for path in BENCHMARKS.glob("*.py") if "ArgumentParser(" in path.read_text()}
    assert commands == TABLES.keys()


@pytest.mark.parametrize("name", TABLES)
def test_smoke(name, forked, tmp_path):
    output = tmp_path / "numbers.json"
    environment = {"PYTHONPATH": str(BENCHMARKS.parent), "TRL_MULTIAGENT_CACHE": str(tmp_path / "cache")}
    environment |= FORKING
    script = BENCHMARKS / f"{name}.py"
    done = forked.run(FORKED_CHILDREN, script, "--smoke", "--output", output, cwd=tmp_path, environment=environment)
    assert done.codes == [0], done.stdout[-2000:] + done.stderr[-4000:]
    assert any(line.startswith(TABLES[name]) for line in done.stdout.splitlines()), done.stdout
    assert json.loads(output.read_text())
    if name == "vs_comlrl":  # the peer's environment is made by a full run only
        assert "these are this project's steps alone" in done.stdout and not (tmp_path / "cache").exists()
