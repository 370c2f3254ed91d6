"""Uses the installed package as a new user would, and pushes to the Hub of the tests; release_check.sh calls it."""

import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path


sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "helpers"))

from hub_server import HubServer


PROGRAM = Path(sys.executable).with_name("trl-multiagent")
folder, wanted = Path(sys.argv[1]), sys.argv[2]


def call(*arguments: str, environment: dict[str, str]) -> None:
    done = subprocess.run([PROGRAM, *arguments], cwd=folder, env=environment, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"trl-multiagent {' '.join(arguments)} failed:\n{done.stdout}\n{done.stderr}")


if version("trl-multiagent") != wanted:
    sys.exit(f"The installed version is {version('trl-multiagent')}, not {wanted}.")
offline = {**os.environ, "HF_HUB_OFFLINE": "1"}
config = ("--config", "config.yaml")
call("init", ".", environment=offline)
call("train", "magrpo", *config, "--max_steps", "2", "--output_dir", "run", environment=offline)
call("evaluate", "run", *config, "--num_episodes", "1", environment=offline)
with HubServer() as hub:
    call("push", "run", "user/team", environment=hub.environment(folder / "home"))
    if "team.json" not in hub.repos["user/team"].files():
        sys.exit("The team was not pushed.")
