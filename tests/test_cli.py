import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from trl_multiagent import __version__, cli
from trl_multiagent.environments.imports import import_object


ROOT = Path(__file__).resolve().parents[1]


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
    assert "usage: trl-multiagent train maremax" in out and "--num_turns" in out and "--help all" in out


@pytest.mark.parametrize("argv", [[], ["train"], ["train", "ppo"], ["trian", "magrpo"]])
def test_wrong_commands(argv, capsys):
    with pytest.raises(SystemExit) as exit_info:
        cli.main(argv)
    assert exit_info.value.code == 2
    assert "error" in capsys.readouterr().err


@pytest.fixture
def launched(monkeypatch):
    """The arguments of every launch, none of which starts a process."""
    launched = []
    monkeypatch.setattr("accelerate.commands.launch.launch_command", launched.append)
    monkeypatch.setenv(*cli.SAFE_PATH)  # is restored after the test
    return launched


@pytest.mark.parametrize("config", ["ddp", str(ROOT / "accelerate_configs" / "ddp.yaml")])
def test_train_launches_every_algorithm_with_the_arguments_in_order(launched, config):
    recipe_arguments = ["--config", "marloo_he", "--override", "seed=1", "wandb.name=x", "--num_turns", "2", "--bf16"]
    cli.main(["train", "marloo", "--num_processes", "2", "--accelerate_config", config, *recipe_arguments])
    (arguments,) = launched
    assert arguments.num_processes == 2
    assert Path(arguments.config_file).resolve() == ROOT / "accelerate_configs" / "ddp.yaml"
    assert arguments.module and arguments.training_script == "trl_multiagent.cli"
    assert arguments.training_script_args == ["run", "marloo", *recipe_arguments]


def test_launched_processes_take_no_modules_from_the_working_directory(launched, tmp_path, monkeypatch):
    cli.main(["train", "magrpo", "--config", "magrpo_he"])
    assert len(launched) == 1
    monkeypatch.chdir(tmp_path)
    Path("argparse.py").write_text("raise SystemExit(3)")
    Path("trl_multiagent").mkdir()
    Path("trl_multiagent/__init__.py").write_text("raise SystemExit(4)")
    assert subprocess.run([sys.executable, "-m", "trl_multiagent.cli", "--version"]).returncode == 0
    assert import_object("task", "trl_multiagent.configs.recipes.demo.task:TASK") and str(tmp_path) not in sys.path


@pytest.mark.parametrize(
    ("number", "configured", "file"), [("2", False, "ddp.yaml"), ("2", True, None), ("1", False, None)]
)
def test_several_processes_without_a_configuration(launched, monkeypatch, tmp_path, number, configured, file):
    """Without one, accelerate would start a single process on a machine without a GPU."""
    default = tmp_path / "default_config.yaml"
    if configured:
        default.write_text("distributed_type: 'NO'\n")
    monkeypatch.setattr("accelerate.commands.config.config_args.default_config_file", str(default))
    cli.main(["train", "marloo", "--num_processes", number, "--config", "marloo_he"])
    chosen = launched[0].config_file
    assert (chosen and Path(chosen).name) == file


DEMO = ["--model_name", "demo", "--override", "dataset.name=demo"]
WRONG = {
    "a name": (["--accelerate_config", "zero4", *DEMO], ["_config 'zero4'", "zero3"]),
    "a path": (["--accelerate_config", "no/zero3.yaml", *DEMO], ["'no/zero3.yaml': there is no such file"]),
    "processes": (["--num_processes", "0", *DEMO], ["--num_processes", "'0' is not a number of at least 1"]),
    "a configuration": (["--config", "magrpo_hee"], ["'magrpo_hee'", "such as magrpo_he,"]),
    "a folder": (["--config", "task"], ["--config 'task' is a folder; did you mean `task/config.yaml`?"]),
    "TRL's name": (["--max_new_token", "8", *DEMO], ["did you mean `magrpo.max_new_tokens`?"]),
    "a short name": (["--lr", "1e-5", *DEMO], ["did you mean `magrpo.learning_rate`?"]),
    "the name of a section": (["--dataset", "x.jsonl", *DEMO], ["did you mean `dataset.name`?"]),
    "a flag of another section": (["--use_lora", *DEMO], ["did you mean `agent_model.use_peft`?"]),
    "no value": (["--output_dir", *DEMO], ["`magrpo.output_dir` is True (as a flag without a value)"]),
    "no word for true": (["--bf16", "yes", *DEMO], ["`magrpo.bf16` is 'yes'; it must be true or false."]),
    "a file": (["--config", "magrpo_hee.yaml"], ["--config 'magrpo_hee.yaml': there is no such file"]),
    "a key": ([*DEMO, "magrpo.num_turn=2"], ["`magrpo.num_turn` is not a known setting"]),
    "a section": (["--config", "grpo_he"], ["`grpo`", "this run reads `magrpo`"]),
}


@pytest.mark.parametrize("kind", WRONG)
def test_wrong_settings_are_reported_before_a_process_is_launched(launched, tmp_path, monkeypatch, refused, kind):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "task").mkdir()
    (tmp_path / "task" / "config.yaml").write_text("")
    argv, parts = WRONG[kind]
    message = refused(cli.main, ["train", "magrpo", *argv])
    assert launched == [] and all(part in message for part in parts), message


def test_a_name_of_nothing_is_told_before_slow_libraries_load():
    code = """
import contextlib, sys
from trl_multiagent import cli
for command in ["play", "report", "reproduce", "evaluate", "cross-play"]:
    with contextlib.suppress(SystemExit):
        cli.main([command, "nope"])
print("torch" in sys.modules)"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "False\n" and len(done.stderr.splitlines()) == 5, done.stderr


def test_names_are_read_as_people_type_them(launched, tmp_path, monkeypatch, refused):
    monkeypatch.chdir(tmp_path)
    assert "`magrpo.num_turn`" in refused(
        cli.main, ["train", "MAGRPO", "--config", "magrpo_he_config", "--num_turn", "2"]
    )
    monkeypatch.setattr("sys.argv", ["trl-multiagent", "plan", "--model_name", "m"])
    with pytest.raises(SystemExit):
        runpy.run_module("trl_multiagent", run_name="__main__")


def test_a_file_wins_over_a_name_of_the_package(launched, tmp_path, monkeypatch, refused):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "magrpo_he").write_text("magrpo: {num_turn: 2}")
    assert "`magrpo.num_turn`" in refused(cli.main, ["train", "magrpo", "--config", "magrpo_he"])


@pytest.mark.parametrize("algorithm", [name for name in cli.ALGORITHMS if name != "reward_model"])  # it needs data
def test_run_is_the_recipe_of_the_algorithm(algorithm, capsys):
    cli.main(["run", algorithm, "--dry_run", "--model_name", "demo", "--override", "dataset.name=demo"])
    out = capsys.readouterr().out
    modes = {"grpo": "mean", "magrpo": "mean", "marloo": "rloo", "maremax": "max", "mareinforce": "raw"}
    assert algorithm in out
    assert algorithm not in modes or f"{algorithm}, advantage_mode {modes[algorithm]}" in out
    assert ("aux: demo" in out) == (algorithm not in ("grpo", "ac"))


def test_ctrl_c_is_one_line_even_while_libraries_load(monkeypatch, capsys):
    def load():
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "env", load)
    with pytest.raises(SystemExit) as exit_info:
        cli.main(["env"])
    assert exit_info.value.code == 130 and capsys.readouterr().err == "trl-multiagent: ended by Ctrl-C.\n"


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (subprocess.CalledProcessError(3, "python"), 3, ""),
        (subprocess.CalledProcessError(-15, "python"), 143, "trl-multiagent train magrpo: ended by SIGTERM.\n"),
    ],
)
def test_a_run_that_fails_or_is_ended_is_one_message(error, code, line, monkeypatch, capsys):
    def fail(arguments):
        raise error

    monkeypatch.setattr("accelerate.commands.launch.launch_command", fail)
    monkeypatch.setenv(*cli.SAFE_PATH)
    with pytest.raises(SystemExit) as exit_info:
        cli.main(["train", "magrpo", *DEMO])
    assert exit_info.value.code == code
    assert capsys.readouterr().err == line
