"""What an installed package has, without the repository around it."""

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from trl_multiagent.settings.read import ACCELERATE, CONFIGS, RECIPES


ROOT = Path(__file__).resolve().parents[1]
# `trl-multiagent` of the package in a folder with each of the other arguments, which runs what it would launch in its
# own process. The process has imported the checkout, and forgets it
COMMANDS = """
import sys
from accelerate.commands import launch
for name in [name for name in sys.modules if name.partition(".")[0] == "trl_multiagent"]:
    del sys.modules[name]
sys.meta_path = [finder for finder in sys.meta_path if "editable" not in getattr(finder, "__module__", "")]
sys.path = [sys.argv.pop(1), *(path for path in sys.path if "site-packages" in path or "/lib/python" in path)]
from trl_multiagent import cli
assert cli.__file__.startswith(sys.path[0])
launch.launch_command = lambda options: cli.main(options.training_script_args)
for config in sys.argv[1:]:
    cli.main(["train", "magrpo", "--config", config, "--accelerate_config", "single", "--dry_run"])
"""


def test_a_wheel_has_the_configurations_and_can_train_without_a_checkout(forked, tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in ("trl_multiagent", "recipes", "accelerate_configs"):
        shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    copied = re.findall(r"^COPY (.+) \S+$", (ROOT / "Dockerfile").read_text(), flags=re.MULTILINE)
    assert {*" ".join(copied).split()} == {*os.listdir(source), "constraints.txt"}
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", "--quiet"]
    build = [*pip, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", tmp_path, source]
    subprocess.run(build, check=True, capture_output=True, timeout=300)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "installed")
        (metadata,) = (archive.read(name).decode() for name in archive.namelist() if name.endswith("METADATA"))
    installed = tmp_path / "installed" / "trl_multiagent"
    for pattern in (ACCELERATE, RECIPES):
        files = {path.name for path in CONFIGS.glob(pattern)}
        assert files and {path.name for path in (installed / "configs").glob(pattern)} == files
    assert (installed / "py.typed").is_file()
    tasks = {path.parent.name for path in (installed / "configs").rglob("*.py")}
    # Which configurations or `--task` name
    assert tasks == {"code_generation", "demo", "games", "real", "workflows"}
    targets = re.findall(r"\]\(([^)\s]+)", metadata)
    assert targets and all(target.startswith(("https://", "#")) for target in targets)
    assert "Project-URL: Repository, https://" in metadata

    (tmp_path / "commands.py").write_text(COMMANDS)
    command = [tmp_path / "commands.py", tmp_path / "installed", "magrpo_demo", "writer_editor"]
    done = forked.run(*command, cwd=tmp_path)
    assert done.codes == [0], done.stderr
    for agents in ("aux: demo, main: demo", "writer: demo, editor: demo"):
        assert agents in done.stdout
