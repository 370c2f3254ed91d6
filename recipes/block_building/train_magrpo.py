r"""
Trains two agents that build a wall or a house together, each with blocks of its own.

    accelerate launch recipes/block_building/train_magrpo.py \
        --config recipes/block_building/configs/str_build_magrpo_config.yaml

`--dry_run` checks the settings and prints the plan, `--help` lists them.
"""

from collections.abc import Sequence

from trl_multiagent.configs.recipes.block_building.demo import TASK
from trl_multiagent.runs.run import run_recipe


def main(argv: Sequence[str] | None = None) -> None:
    run_recipe("magrpo", TASK, argv)


if __name__ == "__main__":
    main()
