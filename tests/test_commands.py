"""Every command that a file of the repository shows is run, as a dry run where it would train."""

import dataclasses
import importlib
import inspect
import io
import re
import runpy
import shlex
import shutil
import sys
import tokenize
from pathlib import Path

import pytest
import yaml
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import launch_command_parser
from pairs import pairs

from trl_multiagent import cli
from trl_multiagent.models.imitation import ImitationModel
from trl_multiagent.preferences.config import PreferenceConfig
from trl_multiagent.runs.evaluation_settings import make_evaluation_parser
from trl_multiagent.runs.run import make_parser
from trl_multiagent.settings.read import RECIPES, config_file

from tiny import write_problems


ROOT = Path(__file__).resolve().parents[1]
PROGRAMS = ("accelerate", "trl-multiagent", "python", ".venv/bin/python", "make", "sbatch")
# What a reader replaces by a name of their own
PLACEHOLDERS = {
    "CONFIG.yaml": "recipes/code_generation/configs/magrpo_he_config.yaml",
    "ADDRESS_OF_NODE_0": "127.0.0.1",
    "--machine_rank k": "--machine_rank 0",
    "$JOB_COMPLETION_INDEX": "0",
}


def shown_text(path: Path) -> str:
    """The text of a file in which commands are shown to readers: code blocks, docstrings, comments."""
    text = path.read_text()
    if path.suffix == ".md":
        blocks = re.findall(r"^```(\w*)\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)
        return "\n".join(block for language, block in blocks if language in ("", "bash", "text"))
    if path.suffix == ".py":
        tokens = tokenize.generate_tokens(io.StringIO(text).readline)
        strings = [token.string for token in tokens if token.type == tokenize.STRING and token.string[:3] == '"""']
        lines = [line for string in strings for line in inspect.cleandoc(string.strip('"')).splitlines()]
        return "\n".join(line for line in lines if line.startswith("    "))
    if path.name == "kubernetes.yaml":
        return "\n".join(yaml.safe_load(text.split("---")[1])["spec"]["template"]["spec"]["containers"][0]["args"])
    return "\n".join(re.findall(r"^# ?(.*)$", text, flags=re.MULTILINE))


def commands_in(path: Path) -> list[str]:
    """The commands that a file shows, each on one line."""
    text = re.sub(r"\\\n\s*", "", shown_text(path))
    found = []
    for line in text.splitlines():
        line = re.sub(r"^(\$ )?([A-Z_]+=\S+ )*", "", line.strip())
        if line.split(" ")[0] in PROGRAMS and " ... " not in line:
            for placeholder, value in PLACEHOLDERS.items():
                line = line.replace(placeholder, value)
            found.append(line.partition("  #")[0].strip())
    return found


def files() -> list[Path]:
    folders = ["docs", "recipes", "accelerate_configs", "benchmarks", "trl_multiagent"]
    paths = [path for folder in folders for path in (ROOT / folder).rglob("*")]
    paths = [*ROOT.glob("*.md"), ROOT / "kubernetes.yaml", *paths]
    return sorted(path for path in paths if path.suffix in (".md", ".py", ".yaml", ".sbatch") and path.is_file())


COMMANDS = {command: path.relative_to(ROOT) for path in files() for command in commands_in(path)}


def by_program(*programs: str) -> list[str]:
    return [command for command in COMMANDS if command.startswith(programs)]


@pytest.fixture(scope="module")
def files_of_readers(tmp_path_factory):
    """The files that the commands read, as a reader would have them."""
    folder = tmp_path_factory.mktemp("reader")
    for name in ("recipes", "accelerate_configs"):
        (folder / name).symlink_to(ROOT / name)
    for name in ("humaneval.jsonl", "mbpp_sanitized.jsonl"):
        write_problems(folder / name, 200)
    (folder / "topics.jsonl").write_text('{"topic": "rain"}\n{"topic": "snow"}\n')
    (folder / "words.jsonl").write_text('{"words": "rain roof night"}\n' * 8)
    (folder / "rewards.py").write_text("def short_and_complete(completions, **columns):\n    return [0.0]\n")
    for page in ("workflows", "task_settings"):
        text = (ROOT / "docs" / f"{page}.md").read_text()
        for block in re.findall(r"```\w+\n(# [\w.]+\n.*?)```", text, flags=re.DOTALL):
            (folder / block.split()[1]).write_text(block)
    pairs().save_to_disk(folder / "outputs" / "demo_madpo" / "preferences")  # what an earlier command collects
    cli.main(["init", str(folder / "my_task")])
    (folder / "config.yaml").write_text((folder / "my_task" / "config.yaml").read_text())
    return folder


@pytest.fixture
def readers_folder(files_of_readers, tmp_path, monkeypatch):
    """A working directory with these files."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    shutil.copytree(files_of_readers, tmp_path, symlinks=True, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("trl_multiagent.trainers.base.vllm.is_vllm_available", lambda: True, raising=False)
    monkeypatch.setattr(ImitationModel, "build", None)  # a dry run trains no base model
    return tmp_path


def test_there_are_commands():
    assert len(COMMANDS) > 30 and len(by_program("accelerate launch recipes/code_generation/train_")) > 10
    names = {path.name for path in COMMANDS.values()}
    assert names >= {"README.md", "workflows.md", "train_marloo.py", "slurm.sbatch", "kubernetes.yaml"}


@pytest.mark.parametrize("command", by_program("accelerate", "sbatch", "python recipes", "trl-multiagent train"))
def test_commands_that_train(readers_folder, monkeypatch, capsys, command):
    words = shlex.split(re.sub(r" --(seeds|jobs) \S+", "", command))  # which start this command once per seed
    if "--resume_from_checkpoint auto" in command:
        monkeypatch.setenv("RUN_ID", "run-1")  # as kubernetes.yaml does
    if words[0] == "sbatch":
        script = next(word for word in words if word.endswith(".sbatch"))
        assert (ROOT / script).is_file()
        words = ["accelerate", "launch", "--config_file", *words[words.index(script) + 1 :]]
    if words[0] == "python":
        words = ["accelerate", "launch", *words[1:]]
    if words[0] == "trl-multiagent":
        if "task:TASK" in (readers_folder / "config.yaml").read_text() and {"config.yaml", "my_task/config.yaml"} & {
            *words
        }:
            (readers_folder / "task.py").write_text((readers_folder / "my_task" / "task.py").read_text())
        launched = []
        monkeypatch.setattr("accelerate.commands.launch.launch_command", launched.append)
        cli.main(words[1:])
        cli.main([*launched[0].training_script_args, "--dry_run"])
    else:
        arguments = launch_command_parser().parse_args(words[2:])
        assert arguments.config_file is None or load_config_from_file(arguments.config_file)
        monkeypatch.syspath_prepend(readers_folder)
        runpy.run_path(arguments.training_script)["main"]([*arguments.training_script_args, "--dry_run"])
    assert "Dry run: no model was loaded" in capsys.readouterr().out


@pytest.mark.parametrize("command", [c for c in by_program("trl-multiagent") if "trl-multiagent train" not in c])
def test_other_commands_of_the_package_are_understood(command):
    arguments, rest = cli.make_parsers()[0].parse_known_args(shlex.split(command)[1:])
    if arguments.command in ("evaluate", "cross-play"):
        parser = make_evaluation_parser("evaluate", arguments.command == "cross-play")
        teams, rest = parser.parse_known_args(rest)
        assert teams.teams
    if arguments.command == "play":
        _, rest = make_evaluation_parser("play", False).parse_known_args([arguments.team, *rest])
    if arguments.command == "plan":
        assert config_file("--config", arguments.config, RECIPES)
        _, rest = make_parser("magrpo").parse_known_args(rest)
    if arguments.command == "collect":
        _, rest = make_parser("madpo").parse_known_args(rest)
        names = {f"--{field.name}" for field in dataclasses.fields(PreferenceConfig)}
        assert {word for word in rest if word.startswith("--")} <= names
        rest = []
    known = ("collect", "env", "init", "push", "evaluate", "cross-play", "plan", "play", "report", "reproduce")
    assert arguments.command in known and rest == []


def test_benchmarks_have_the_flags_that_are_shown(monkeypatch, capsys):
    assert len(by_program("python -m benchmarks")) > 5
    for command in by_program("python -m benchmarks"):
        _, _, module, *arguments = shlex.split(command)
        monkeypatch.setattr(sys, "argv", [module, "--help"])
        with pytest.raises(SystemExit):
            importlib.import_module(module).main()
        flags = re.findall(r"--\w+", capsys.readouterr().out)
        assert {word for word in arguments if word.startswith("--")} <= {*flags}, command


def test_targets_of_make_and_tests_exist():
    makefile = (ROOT / "Makefile").read_text()
    for command in by_program("make"):
        assert re.search(rf"^{shlex.split(command)[1]}:", makefile, flags=re.MULTILINE), command
    for command in by_program(".venv/bin/python -m pytest"):
        path, _, name = shlex.split(command)[3].partition("::")
        assert f"def {name}" in (ROOT / path).read_text(), command
