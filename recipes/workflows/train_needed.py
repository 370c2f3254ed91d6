"""
Trains a team on items that it can only solve with messages, with MAGRPO.

    accelerate launch recipes/workflows/train_needed.py --config recipes/workflows/configs/needed_rule.yaml

`--dry_run` checks the settings and prints the plan, `--help` lists them.
"""

from collections.abc import Sequence

from trl_multiagent.configs.recipes.workflows.needed import TASK
from trl_multiagent.runs.run import run_recipe


def main(argv: Sequence[str] | None = None) -> None:
    run_recipe("magrpo", TASK, argv)


if __name__ == "__main__":
    main()
