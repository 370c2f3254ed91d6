"""Every benchmark runs from start to end, if only for seconds."""

import json
from pathlib import Path

import pytest

from forked import FORKED_CHILDREN, FORKING


ROOT = Path(__file__).resolve().parents[1]
# A line of each one's table
TABLES = {
    "code.class_completion": "reference, 3 agents",
    "code.sandbox": "sandbox, tier seccomp",
    "comlrl.plain": "plain PyTorch",
    "comlrl.steps": "generate calls",
    "engine.ahead": "ahead, over the sum",
    "engine.gpu": "lora, transformers' loop, T = 2",
    "engine.grouped": "sampling  ",
    "engine.launches": "trl_multiagent, lora, 2 agents",
    "engine.packed": "T = 1 ",
    "engine.parts": "sampling, ",
    "engine.policies": "workflow, tree of 4 turns: ",
    "learning.actor_critic": "demo, ",
    "learning.classes": "| `team` |",
    "learning.coder": "| `untrained` |",
    "learning.evaluation": "team minus control",
    "learning.families": "bug_fixing, ",
    "learning.needed": "rule  ",
    "learning.preference": "madpo_iter",
    "learning.real": "| `hidden`, reward |",
    "memory.plan": "full, one process",
    "memory.scaling": "DDP x 2",
    "memory.team": "held: target 60 %",
    "models.composite": "| Qwen3_5 | Qwen3_5ForConditionalGeneration | yes | yes | yes | yes |",
}


def test_every_benchmark_is_run():
    scripts = [path for path in (ROOT / "benchmarks").rglob("*.py") if "ArgumentParser(" in path.read_text()]
    names = {f"{path.parent.name}.{path.stem}" for path in scripts}
    assert names - {"code.hostile"} == TABLES.keys()  # which test_hostile.py runs


@pytest.mark.parametrize("name", TABLES)
def test_smoke(name, forked, tmp_path):
    output = tmp_path / "numbers.json"
    environment = {"PYTHONPATH": str(ROOT), "TRL_MULTIAGENT_CACHE": str(tmp_path / "cache")} | FORKING
    command = [FORKED_CHILDREN, "-m", f"benchmarks.{name}", "--smoke", "--output", output]
    done = forked.run(*command, cwd=ROOT, environment=environment)
    assert done.codes == [0], done.stdout[-2000:] + done.stderr[-4000:]
    assert any(line.startswith(TABLES[name]) for line in done.stdout.splitlines()), done.stdout
    numbers = json.loads(output.read_text())
    assert numbers
    if name == "engine.gpu":
        assert numbers["parts"]["tests"]["returncode"] == 0
        assert not [record for record in numbers["parts"]["tiny-lora"].values() if "failed" in record]
    if name == "comlrl.steps":  # the peer's environment is made by a full run only
        assert "these are this project's steps alone" in done.stdout and not (tmp_path / "cache").exists()
