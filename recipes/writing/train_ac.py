"""
Trains one agent to write both texts, with AC: IAC with a team of one.

    accelerate launch recipes/writing/train_ac.py --config recipes/writing/configs/ac_tldr_config.yaml

`--dry_run` checks the settings and prints the plan, `--help` lists them.
"""

from collections.abc import Sequence

from trl_multiagent.configs.recipes.writing.demo import TASK
from trl_multiagent.runs.run import run_recipe


def main(argv: Sequence[str] | None = None) -> None:
    run_recipe("ac", TASK, argv)


if __name__ == "__main__":
    main()
