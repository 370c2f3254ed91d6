r"""
Trains agents that each write some methods of a class, with a critic for each of them.

    accelerate launch recipes/class_completion/train_iac.py \
        --config recipes/class_completion/configs/iac_classeval_config.yaml

`--dry_run` checks the settings and prints the plan, `--help` lists them.
"""

from collections.abc import Sequence

from trl_multiagent.configs.recipes.class_completion.demo import TASK
from trl_multiagent.runs.run import run_recipe


def main(argv: Sequence[str] | None = None) -> None:
    run_recipe("iac", TASK, argv)


if __name__ == "__main__":
    main()
