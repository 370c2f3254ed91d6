"""The scripts of `recipes/`, run as users run them, but in this process."""

import runpy
from pathlib import Path

import yaml

from trl_multiagent.settings.algorithms import ALGORITHMS


RECIPES = Path(__file__).resolve().parents[2] / "recipes"


def run_script(family, algorithm, *argv):
    runpy.run_path(str(RECIPES / family / f"train_{algorithm}.py"))["main"]([*map(str, argv)])


def algorithm_of(config: Path) -> str:
    sections = yaml.safe_load(config.read_text())
    return next(name for name in ALGORITHMS if name in sections)
