r"""
Trains agents that each write some methods of a class, with one central critic.

    accelerate launch recipes/class_completion/train_maac.py \
        --config recipes/class_completion/configs/maac_classeval_config.yaml

`--dry_run` checks the settings and prints the plan, `--help` lists them.
"""

from collections.abc import Sequence

from trl_multiagent.configs.recipes.class_completion.demo import TASK
from trl_multiagent.runs.run import run_recipe


def main(argv: Sequence[str] | None = None) -> None:
    run_recipe("maac", TASK, argv)


if __name__ == "__main__":
    main()
