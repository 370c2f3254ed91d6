"""
Trains two agents that write code together, with one central critic, which reads the prompts of both.

    accelerate launch recipes/code_generation/train_maac.py \
        --config recipes/code_generation/configs/maac_he_config.yaml

`--dry_run` checks the settings and prints the plan, `--help` lists them.
"""

from collections.abc import Sequence

from trl_multiagent.configs.recipes.demo.task import TASK  # code generation, with the demo under the name `demo`
from trl_multiagent.runs.run import run_recipe


def main(argv: Sequence[str] | None = None) -> None:
    run_recipe("maac", TASK, argv)


if __name__ == "__main__":
    main()
