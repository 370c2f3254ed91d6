"""
Trains two agents to write, with MAGRPO.

    accelerate launch recipes/writing/train_magrpo.py --config recipes/writing/configs/magrpo_tldr_config.yaml

`--dry_run` checks the settings and prints the plan, `--help` lists them.
"""

from collections.abc import Sequence

from trl_multiagent.configs.recipes.writing.demo import TASK
from trl_multiagent.runs.run import run_recipe


def main(argv: Sequence[str] | None = None) -> None:
    run_recipe("magrpo", TASK, argv)


if __name__ == "__main__":
    main()
