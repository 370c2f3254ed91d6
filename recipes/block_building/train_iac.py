r"""
Trains two agents that build a wall or a house together, with a critic for each of them.

    accelerate launch recipes/block_building/train_iac.py \
        --config recipes/block_building/configs/str_build_iac_config.yaml

`--dry_run` checks the settings and prints the plan, `--help` lists them.
"""

from collections.abc import Sequence

from trl_multiagent.configs.recipes.block_building.demo import TASK
from trl_multiagent.runs.run import run_recipe


def main(argv: Sequence[str] | None = None) -> None:
    run_recipe("iac", TASK, argv)


if __name__ == "__main__":
    main()
