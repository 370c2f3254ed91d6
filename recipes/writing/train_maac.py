"""
Trains two agents to write, with MAAC: one critic for both.

    accelerate launch recipes/writing/train_maac.py --config recipes/writing/configs/maac_tldr_config.yaml

`--dry_run` checks the settings and prints the plan, `--help` lists them.
"""

from collections.abc import Sequence

from trl_multiagent.configs.recipes.writing.demo import TASK
from trl_multiagent.runs.run import run_recipe


def main(argv: Sequence[str] | None = None) -> None:
    run_recipe("maac", TASK, argv)


if __name__ == "__main__":
    main()
