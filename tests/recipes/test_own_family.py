"""A task family that the package does not know: two files, and no other line."""

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from trl_multiagent import AgentTeam


ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "tests" / "family" / "train_magrpo.py"
COMMAND = ROOT / "trl_multiagent" / "cli.py"


@pytest.fixture
def arguments(tiny_model, tmp_path):
    sections = {
        "agent_model": {"name": tiny_model},
        "poem": {"letters": "aeo", "style": "ornate"},
        "magrpo": {"output_dir": str(tmp_path / "run"), "max_steps": 1, "max_completion_length": 8},
    }
    (tmp_path / "poem.yaml").write_text(yaml.safe_dump(sections))
    return ["--config", str(tmp_path / "poem.yaml"), "--save_strategy", "no", "--logging_steps", "1"]


def test_it_trains(forked, arguments, tmp_path):
    done = forked.run(SCRIPT, *arguments, cwd=tmp_path)
    assert done.codes == [0], done.stderr[-3000:]
    assert "rewards/shared_letters" in (tmp_path / "run" / "log.jsonl").read_text()
    assert f"Saved team       {tmp_path}/run" in done.stdout
    assert AgentTeam.from_pretrained(str(tmp_path / "run")).roles == ("poet", "critic")
    poem = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())["poem"]
    assert poem == {"letters": "aeo", "style": "ornate"}


@pytest.mark.parametrize(
    ("override", "answer"),
    [
        ("poem.leters=x", "`poem.leters` is not a known setting; did you mean `poem.letters`?"),
        ("poem.style=loud", "`poem.style` is 'loud'; it must be 'plain' or 'ornate'."),
        ("poem.letters=''", "error: `poem.letters` is ''; it must not be blank: give it a value, or leave it out."),
        ("external.mode=plain", "`external` is not a known setting"),
    ],
)
def test_wrong_settings_are_one_line(arguments, monkeypatch, capsys, override, answer):
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *arguments, "--override", override])
    with pytest.raises(SystemExit) as exit_info:
        runpy.run_path(str(SCRIPT), run_name="__main__")
    sys.modules.pop("task")
    (line,) = capsys.readouterr().err.splitlines()
    assert exit_info.value.code == 2 and answer in line


# Calls programs one after the other, and prints what each of them wrote, how it ended, and the slow libraries that are
# imported by then
CALLS = """
import contextlib, io, json, runpy, sys

SLOW = ("torch", "transformers", "trl", "peft", "datasets", "accelerate", "matplotlib", "numpy")
for sys.argv in json.loads(sys.argv[1]):
    sys.path.insert(0, sys.argv[0].rpartition("/")[0])
    with contextlib.redirect_stdout(io.StringIO()) as text, contextlib.redirect_stderr(text):
        try:
            runpy.run_path(sys.argv[0], run_name="__main__")
        except SystemExit as exit:
            code = exit.code
    print(json.dumps([code, text.getvalue(), [name for name in SLOW if name in sys.modules]]))
"""


def is_script(path):
    return "__main__" in path.read_text()


# Their configurations name a task in a module of their own
WORKFLOWS = [path.stem for path in (ROOT / "recipes" / "workflows" / "configs").glob("*.yaml")]


def test_help_and_commands_answer_without_the_libraries(tmp_path):
    calls = [
        (COMMAND, ["train", "maremax", "--help"], 0, "usage: trl-multiagent train maremax"),
        (COMMAND, ["collect", "--help"], 0, "usage: trl-multiagent collect"),
        (COMMAND, ["evaluate", "--help"], 0, "usage: trl-multiagent evaluate"),
        (COMMAND, ["push", "nowhere", "user/team"], 2, "nowhere holds no team.json"),
        (SCRIPT, ["--help"], 0, "  poem:\n    letters: Letters that earn a reward.\n"),
        *((script, ["--help"], 0, "usage: ") for script in (ROOT / "recipes").glob("*/*.py") if is_script(script)),
        *((COMMAND, ["train", "magrpo", "--config", name, "--help"], 0, "usage: ") for name in WORKFLOWS),
    ]
    programs = json.dumps([[str(script), *argv] for script, argv, *_ in calls])
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-c", CALLS, programs]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600)
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(answers) == len(calls) > 10, done.stderr[-2000:]
    for (script, _, code, answer), (found_code, text, imported) in zip(calls, answers, strict=True):
        assert (found_code, imported) == (code, []) and answer in text, (script, text)
