"""
Trains two agents that write code together: one writes a helper `aux`, the other the function that may call it.
The baseline of a completion is the mean return of its siblings.

    accelerate launch recipes/code_generation/train_marloo.py \
        --config recipes/code_generation/configs/marloo_he_config.yaml

`--dry_run` checks the settings and prints the plan, `--help` lists them.
"""

from collections.abc import Sequence

from trl_multiagent.configs.recipes.demo.task import TASK  # code generation, with the demo under the name `demo`
from trl_multiagent.runs.run import run_recipe


def main(argv: Sequence[str] | None = None) -> None:
    run_recipe("marloo", TASK, argv)


if __name__ == "__main__":
    main()
