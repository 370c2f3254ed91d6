import subprocess
import sys

import pytest

from trl_multiagent import __version__, cli


def test_env(capsys):
    cli.main(["env"])
    out = capsys.readouterr().out
    assert f"trl-multiagent {__version__}" in out
    assert "PyTorch version" in out


def test_help_of_the_command_and_of_a_recipe(capsys):
    with pytest.raises(SystemExit) as exit_info:
        cli.main(["--help"])
    assert exit_info.value.code == 0
    assert "train" in capsys.readouterr().out
    cli.main(["train", "--help"])
    out = capsys.readouterr().out
    assert "ALGORITHM" in out and "--accelerate_config" in out
    with pytest.raises(SystemExit) as exit_info:
        cli.main(["train", "maremax", "--help"])
    assert exit_info.value.code == 0
    out = capsys.readouterr().out
    assert "usage: trl-multiagent train maremax" in out and "--num_turns" in out and "flags from MAReMaxConfig" in out


@pytest.mark.parametrize("argv", [[], ["train"], ["train", "ppo"], ["trian", "magrpo"]])
def test_wrong_commands(argv, capsys):
    with pytest.raises(SystemExit) as exit_info:
        cli.main(argv)
    assert exit_info.value.code == 2
    assert "error" in capsys.readouterr().err


def test_train_launches_every_algorithm_with_the_arguments_in_order(monkeypatch):
    launched = []
    monkeypatch.setattr("accelerate.commands.launch.launch_command", launched.append)
    recipe_arguments = ["--config", "c.yaml", "--override", "a.b=1", "c.d=2", "--num_turns", "2", "--bf16"]
    cli.main(["train", "marloo", "--num_processes", "2", "--accelerate_config", "ddp.yaml", *recipe_arguments])
    (arguments,) = launched
    assert arguments.num_processes == 2
    assert arguments.config_file == "ddp.yaml"
    assert arguments.module and arguments.training_script == "trl_multiagent.cli"
    assert arguments.training_script_args == ["run", "marloo", *recipe_arguments]


@pytest.mark.parametrize("algorithm", cli.ALGORITHMS)
def test_run_is_the_recipe_of_the_algorithm(algorithm, capsys):
    cli.main(["run", algorithm, "--dry_run", "--model_name", "demo", "--override", "dataset.name=demo"])
    out = capsys.readouterr().out
    modes = {"grpo": "mean", "magrpo": "mean", "marloo": "rloo", "maremax": "max", "mareinforce": "raw"}
    assert f"{algorithm}, advantage_mode {modes[algorithm]}" in out
    assert ("aux: demo" in out) == (algorithm != "grpo")


def test_a_failed_run_is_one_message(monkeypatch):
    def fail(arguments):
        raise subprocess.CalledProcessError(3, "python")

    monkeypatch.setattr("accelerate.commands.launch.launch_command", fail)
    with pytest.raises(SystemExit) as exit_info:
        cli.main(["train", "magrpo"])
    assert exit_info.value.code == 3


def test_train_from_the_shell(tmp_path):
    command = [sys.executable, "-m", "trl_multiagent.cli", "train", "magrpo", "--dry_run", "--model_name", "demo"]
    result = subprocess.run(
        [*command, "--override", "dataset.name=demo"], cwd=tmp_path, capture_output=True, text=True, timeout=600
    )
    assert result.returncode == 0, result.stderr
    assert "Dry run" in result.stdout
