"""A task family that the package does not know: two files, and no other line."""

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


def run(command, arguments, cwd):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(
        [sys.executable, *command, *arguments], cwd=cwd, env=environment, capture_output=True, text=True, timeout=600
    )


def test_it_trains(forked, arguments, tmp_path):
    done = forked.run(SCRIPT, *arguments, cwd=tmp_path)
    assert done.codes == [0], done.stderr[-3000:]
    assert "rewards/shared_letters" in done.stdout and f"Saved team       {tmp_path}/run" in done.stdout
    assert AgentTeam.from_pretrained(str(tmp_path / "run")).roles == ("poet", "critic")
    poem = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())["poem"]
    assert poem == {"letters": "aeo", "style": "ornate"}


@pytest.mark.parametrize(
    ("override", "answer"),
    [
        ("poem.leters=x", "`poem.leters` is not a known setting; did you mean `poem.letters`?"),
        ("poem.style=loud", "`poem.style` is 'loud', it must be 'plain' or 'ornate'."),
        ("poem.letters=''", "error: `poem.letters` is '', it must not be blank: give it a value, or leave it out."),
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


# Runs a script and prints which of the libraries that take long to import it has imported
LISTING = """
import atexit, runpy, sys

SLOW = ("torch", "transformers", "trl", "peft", "datasets", "accelerate", "matplotlib", "numpy")
atexit.register(lambda: print("imported:", [name for name in SLOW if name in sys.modules]))
sys.argv = sys.argv[1:]
sys.path.insert(0, sys.argv[0].rpartition("/")[0])
runpy.run_path(sys.argv[0], run_name="__main__")
"""


# Calls scripts for help in one process, and prints the exit status and the libraries that were imported
CALLS = """
import pathlib, runpy, sys

SLOW = ("torch", "transformers", "trl", "peft", "datasets", "accelerate", "matplotlib", "numpy")
for script in sys.argv[1:]:
    sys.argv = [script, "--help"]
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as exit:
        print("called:", pathlib.Path(script).stem, exit.code, [name for name in SLOW if name in sys.modules])
"""


def test_help_of_every_script_is_printed_without_the_libraries(tmp_path):
    scripts = sorted((ROOT / "recipes").glob("*/*.py"))
    done = run(["-c", CALLS, *map(str, scripts)], [], tmp_path)
    answers = [line for line in done.stdout.splitlines() if line.startswith("called: ")]
    assert answers == [f"called: {path.stem} 0 []" for path in scripts], done.stderr[-2000:]


@pytest.mark.parametrize(
    ("script", "argv", "code", "answer"),
    [
        (COMMAND, ["train", "maremax", "--help"], 0, "usage: trl-multiagent train maremax"),
        (COMMAND, ["collect", "--help"], 0, "usage: trl-multiagent collect"),
        (COMMAND, ["push", "nowhere", "user/team"], 2, "nowhere holds no team.json"),
        (SCRIPT, ["--help"], 0, "  poem:\n    letters: Letters that earn a reward.\n"),
    ],
)
def test_help_and_commands_answer_without_the_libraries(tmp_path, script, argv, code, answer):
    done = run(["-c", LISTING, str(script)], argv, tmp_path)
    assert done.returncode == code and answer in done.stdout + done.stderr, done.stderr
    assert "imported: []" in done.stdout
